"""One member's side of one attempt's exchange: which chunks go where, what is checked, and when a chunk is combined.

Sans-IO and without a clock: it decides; moving, checking, combining and hashing bytes are effects whose outcomes come
back as events. As a sender it offers every chunk of its contribution to the chunk's reducers until it has a receipt; as
a reducer it holds every included sender's row of the chunks dealt to it, and combines a chunk when all its rows are
there. A redeal moves chunks between reducers and takes senders out; rows that still count stay, and what was combined
of another set is never reported. A member deals with itself like with anyone, so its own row passes the same checks.
Peers are opaque names here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from aggregation.digest import tagged_hash
from aggregation.events import (
    CheckRow,
    CombineChunk,
    Combined,
    CombineFailed,
    DropRow,
    ExchangeEffect,
    ExchangeEvent,
    Expired,
    GiveReceipt,
    Inquired,
    Receipted,
    Redealt,
    RefuseRow,
    ReportMissing,
    ReportResults,
    RowArrived,
    RowBroken,
    RowChecked,
    SendRows,
    Stalled,
    StopRows,
    Unable,
)

__all__ = [
    "LACKS_MOST",
    "CheckRow",
    "CombineChunk",
    "CombineFailed",
    "Combined",
    "DropRow",
    "Exchange",
    "ExchangeEffect",
    "ExchangeEvent",
    "Expired",
    "GiveReceipt",
    "Inquired",
    "Receipted",
    "Redealt",
    "RefuseRow",
    "ReportMissing",
    "ReportResults",
    "RowArrived",
    "RowBroken",
    "RowChecked",
    "SendRows",
    "Stalled",
    "StopRows",
    "Unable",
    "deal_seed",
    "reducers_of",
    "set_hash",
]

NAMED_MOST = 8
LACKS_MOST = 4096
"""Rows that one claim names; of every sender that is missing at least one as long as that fits."""


def set_hash(plan: bytes, number: int, roots: Mapping[str, bytes]) -> bytes:
    """The name of an included set: its plan, its number and its senders' roots in peer order."""
    named = b"".join(peer.encode() + roots[peer] for peer in sorted(roots))
    return tagged_hash("set", plan, number.to_bytes(4, "little"), named)


def deal_seed(plan: bytes, roots: Mapping[str, bytes]) -> bytes:
    """The seed of the deal: nobody knows it before every commitment is made, so nobody can aim at a reducer."""
    return tagged_hash("deal", plan, *(roots[peer] for peer in sorted(roots)))


def reducers_of(
    lines: Sequence[Sequence[str]],
    replicas: int,
    enough: int,
    lost: Collection[str] = (),
    moved: Collection[tuple[int, str]] = (),
) -> tuple[tuple[str, ...], ...]:
    """Who reduces each chunk: of the first `replicas` in its line those that are left, and where they are fewer than
    `enough`, the next in line.

    `enough` replicas that say the same settle a chunk, so where that many are left nobody has to receive it anew.
    `lost` are out of every line, `moved` out of one chunk's. Whoever isn't out stays: nobody loses a chunk otherwise.
    """
    dealt: list[tuple[str, ...]] = []
    for chunk, line in enumerate(lines):
        here = [peer for peer in line[:replicas] if peer not in lost and (chunk, peer) not in moved]
        for peer in line[replicas:]:
            if len(here) >= enough:
                break
            if peer not in lost and (chunk, peer) not in moved:
                here.append(peer)
        dealt.append(tuple(here))
    return tuple(dealt)


class Exchange:
    """The exchange of one attempt, seen by one member.

    Args:
        me: this member.
        plan: the plan hash.
        number: the included set's number.
        roots: the included senders' commitment roots.
        weights: the included senders' weights, as the commit will record them.
        line: per chunk the peers in line to reduce it; the first `replicas` do.
        row_bytes: per chunk, the exact size of its encoded frame.
        replicas: how many reducers a chunk has.
    """

    def __init__(
        self,
        me: str,
        plan: bytes,
        number: int,
        roots: Mapping[str, bytes],
        weights: Mapping[str, float],
        line: Sequence[tuple[str, ...]],
        row_bytes: Sequence[int],
        replicas: int = 1,
    ) -> None:
        self.me = me
        self._plan, self._number, self._set_number = plan, 0, number
        self._roots = dict(roots)
        self._row_bytes = tuple(row_bytes)
        self._reducers = tuple(tuple(chunk_line[:replicas]) for chunk_line in line)
        self._take_set(weights)
        self._mine = self._dealt_to_me()
        # For each chunk of mine: what is known of each sender's row. Absent, "arriving", "checking" or "held".
        self._rows: dict[int, dict[str, str]] = {chunk: {} for chunk in self._mine}
        self._n_held = dict.fromkeys(self._mine, 0)
        self._results: dict[int, Combined] = {}
        self._combining: set[int] = set()
        self._offered: set[tuple[str, int]] = set()
        self._receipted: set[tuple[str, int]] = set()
        self._unreceipted: dict[str, dict[int, None]] = {}
        self._reported = False
        self._expired = False
        self._stalled: set[str] = set()
        self._asked: tuple[str, ...] = ()
        self._unable = False

    @property
    def set_number(self) -> int:
        """The number of the included set."""
        return self._set_number

    def begin(self) -> list[ExchangeEffect]:
        """What to send, if this member is an included sender."""
        return self._offer()

    def report_again(self) -> list[ExchangeEffect]:
        """What was reported, for a leader whose line is new."""
        if self._reported:
            return self._report()
        return self._claim(self._senders if self._expired else self._stalled)

    def admit(self, sender: str, chunk: int, n_bytes: int) -> str:
        """Whether a row may come, before a byte of it is taken in: the reason why not, or an empty string."""
        if sender not in self._senders:
            return "not in the included set"
        if chunk not in self._rows:
            return f"chunk {chunk} is not dealt to this reducer"
        if n_bytes != self._row_bytes[chunk]:
            return f"chunk {chunk} has {self._row_bytes[chunk]} bytes, not {n_bytes}"
        if sender in self._rows[chunk]:
            return "duplicate" if self._rows[chunk][sender] == "held" else "already arriving"
        self._rows[chunk][sender] = "arriving"
        return ""

    def holds(self, sender: str, chunk: int) -> bool:
        """Whether a checked row of this sender is here: a sender that lost its receipt may be given another."""
        return self._rows.get(chunk, {}).get(sender) == "held"

    def handle(self, event: ExchangeEvent) -> list[ExchangeEffect]:
        """Take in what happened; what is unknown or late changes nothing."""
        match event:
            case RowArrived(sender, chunk):
                if self._row_state(sender, chunk) == "arriving":
                    self._rows[chunk][sender] = "checking"
                    return [CheckRow(sender, chunk)]
            case RowBroken(sender, chunk):
                if self._row_state(sender, chunk) == "arriving":
                    del self._rows[chunk][sender]
            case RowChecked(sender, chunk, fault):
                return self._checked(sender, chunk, fault)
            case Receipted(reducer, chunks):
                self._receipted_by(reducer, chunks)
            case Combined(chunk):
                if self._is_awaited(chunk, event.set_number):
                    self._results[chunk] = event
                    return self._report_once()
            case CombineFailed(chunk):
                if self._is_awaited(chunk, event.set_number):
                    return self._give_up()
            case Unable():
                if not self._unable and not self._reported:
                    return self._give_up()
            case Expired():
                self._expired = True
                return self._claim(self._senders)
            case Stalled(senders):
                new = set(senders) - self._stalled
                self._stalled |= new
                return self._claim(new) if not self._expired and not self._unable else []
            case Inquired(senders):
                self._asked = senders
                return self._answer()
            case Redealt():
                return self._redealt(event) if event.number > self._number else []
        return []

    def lacks(self) -> tuple[tuple[int, str], ...]:
        """The rows that have not come to this reducer."""
        return tuple(
            (chunk, sender)
            for chunk in self._mine
            for sender in self._senders
            if self._row_state(sender, chunk) != "held"
        )

    def unreceipted(self) -> Mapping[str, tuple[int, ...]]:
        """Chunks of mine that reducers have not yet acknowledged."""
        return {peer: tuple(chunks) for peer, chunks in self._unreceipted.items()}

    def is_receipted(self) -> bool:
        """Whether every reducer of every chunk has acknowledged this member's row, also if it is not included."""
        return all((peer, chunk) in self._receipted for chunk, peers in enumerate(self._reducers) for peer in peers)

    def waiting_for(self) -> str:
        """Whom this member waits for, for people."""
        lacks = self.lacks()
        senders = sorted({sender for _, sender in lacks})
        if senders:
            return f"{len(lacks)} chunks from {_named(senders)}"
        return f"receipts from {_named(sorted(self._unreceipted))}" if self._unreceipted else ""

    # -- rows -------------------------------------------------------------------------------------------------

    def _row_state(self, sender: str, chunk: int) -> str:
        return self._rows.get(chunk, {}).get(sender, "")

    def _checked(self, sender: str, chunk: int, fault: str) -> list[ExchangeEffect]:
        if self._row_state(sender, chunk) != "checking":
            return []
        if fault:
            del self._rows[chunk][sender]
            return [RefuseRow(sender, chunk, fault), *self._answer()]
        self._rows[chunk][sender] = "held"
        self._n_held[chunk] += 1
        return [GiveReceipt(sender, chunk), *self._combine([chunk]), *self._answer()]

    def _combine(self, chunks: Iterable[int]) -> list[ExchangeEffect]:
        """Combine those of these chunks that are all there and are not being combined of this set."""
        effects: list[ExchangeEffect] = []
        for chunk in chunks:
            if self._n_held[chunk] == len(self._senders) and chunk not in self._combining:
                self._combining.add(chunk)
                effects.append(CombineChunk(chunk, self._senders, self._weights, self._set_number))
        return effects

    def _is_awaited(self, chunk: int, set_number: int) -> bool:
        """Whether a chunk's result of this set is due. One of an older set may still come, and counts for nothing."""
        return set_number == self._set_number and chunk in self._combining and chunk not in self._results

    def _receipted_by(self, reducer: str, chunks: Iterable[int]) -> None:
        waiting = self._unreceipted.get(reducer, {})
        for chunk in chunks:
            if (reducer, chunk) in self._offered:
                self._receipted.add((reducer, chunk))
            waiting.pop(chunk, None)
        if not waiting:
            self._unreceipted.pop(reducer, None)

    # -- a redeal ---------------------------------------------------------------------------------------------

    def _redealt(self, event: Redealt) -> list[ExchangeEffect]:
        self._number = event.number
        old_set, old_mine = self._senders, self._mine
        self._reducers = event.reducers
        self._mine = self._dealt_to_me()
        self._expired, self._stalled, self._asked = False, set(), ()
        if event.set_number != self._set_number:
            self._set_number = event.set_number
            self._take_set(event.weights)
            self._results.clear()
            self._combining.clear()
        effects = self._drop(old_set, old_mine)
        effects += self._stop() + self._offer() + self._combine(self._mine)
        if (self._senders, self._mine) != (old_set, old_mine):
            self._reported = False
            effects += self._report_once()
        return effects

    def _take_set(self, weights: Mapping[str, float]) -> None:
        self._senders = tuple(sorted(weights))
        self._weights = tuple(weights[peer] for peer in self._senders)
        roots = {peer: self._roots[peer] for peer in self._senders}
        self._set_hash = set_hash(self._plan, self._set_number, roots)

    def _dealt_to_me(self) -> tuple[int, ...]:
        return tuple(chunk for chunk, peers in enumerate(self._reducers) if self.me in peers)

    def _drop(self, old_set: Sequence[str], old_mine: Sequence[int]) -> list[ExchangeEffect]:
        """Forget rows of senders that are out and of chunks that are not this reducer's any more."""
        effects: list[ExchangeEffect] = []
        out, mine = set(old_set) - set(self._senders), set(self._mine)
        for chunk in old_mine:
            rows = self._rows[chunk]
            effects += [DropRow(sender, chunk) for sender in sorted(rows) if chunk not in mine or sender in out]
            if chunk not in mine:
                del self._rows[chunk], self._n_held[chunk]
                self._results.pop(chunk, None)
                self._combining.discard(chunk)
                continue
            self._rows[chunk] = {sender: state for sender, state in rows.items() if sender not in out}
            self._n_held[chunk] = sum(state == "held" for state in self._rows[chunk].values())
        for chunk in self._mine:
            self._rows.setdefault(chunk, {})
            self._n_held.setdefault(chunk, 0)
        return effects

    def _stop(self) -> list[ExchangeEffect]:
        """Stop offering chunks to who doesn't reduce them any more; all of them, if this member is out."""
        effects: list[ExchangeEffect] = []
        for peer, chunks in sorted(self._unreceipted.items()):
            stopped = [chunk for chunk in chunks if self.me not in self._senders or peer not in self._reducers[chunk]]
            if stopped:
                effects.append(StopRows(peer, tuple(stopped)))
            for chunk in stopped:
                del chunks[chunk]
        self._unreceipted = {peer: chunks for peer, chunks in self._unreceipted.items() if chunks}
        return effects

    def _offer(self) -> list[ExchangeEffect]:
        """Offer each chunk to those of its reducers to whom it has not been offered."""
        new: dict[str, list[int]] = {}
        if self.me in self._senders:
            for chunk, peers in enumerate(self._reducers):
                for peer in peers:
                    if (peer, chunk) not in self._offered:
                        self._offered.add((peer, chunk))
                        self._unreceipted.setdefault(peer, {})[chunk] = None
                        new.setdefault(peer, []).append(chunk)
        return [SendRows(peer, tuple(chunks)) for peer, chunks in sorted(new.items())]

    # -- what the leader is told ------------------------------------------------------------------------------

    def _report_once(self) -> list[ExchangeEffect]:
        """The results, once those of all chunks that are dealt to this reducer now are there."""
        if self._reported or not self._mine or len(self._results) < len(self._mine):
            return []
        self._reported = True
        return self._report()

    def _report(self) -> list[ExchangeEffect]:
        return [ReportResults(self._set_hash, tuple(self._results[chunk] for chunk in self._mine))]

    def _give_up(self) -> list[ExchangeEffect]:
        self._unable = True
        return [ReportMissing((), unable=True)]

    def _claim(self, senders: Collection[str]) -> list[ExchangeEffect]:
        """What of these senders' stands in the way of the results; nothing, while it is here and being combined."""
        if self._unable:
            return [ReportMissing((), unable=True)]
        lacks = _some([lack for lack in self.lacks() if lack[1] in senders])
        return [ReportMissing(lacks)] if lacks else []

    def _answer(self) -> list[ExchangeEffect]:
        """The answer to an inquiry: at once where all rows of theirs are here, else when nothing else is lacking.

        Before that nothing could be combined without them either, and who goes meanwhile can go with them. It waits for
        a row of theirs that is being checked: what has come whole is not to be lost.
        """
        if not self._asked:
            return []
        asked = set(self._asked) & set(self._senders)
        n_theirs = n_checking = 0
        for chunk in self._mine:
            states = [self._rows[chunk].get(sender, "") for sender in asked]
            n_theirs += sum(state != "held" for state in states)
            n_checking += states.count("checking")
        n_lacking = len(self._mine) * len(self._senders) - sum(self._n_held.values())
        if n_checking or 0 < n_theirs < n_lacking:
            return []
        lacks = [lack for lack in self.lacks() if lack[1] in asked] if n_theirs else []
        answered, self._asked = self._asked, ()
        return [ReportMissing(_some(lacks), answered)]


def _some(lacks: Sequence[tuple[int, str]]) -> tuple[tuple[int, str], ...]:
    """As many as one claim may name; the first of each sender's among them as long as that fits."""
    first = {lack[1]: lack for lack in reversed(lacks)}
    named = set(first.values())
    most = sorted(named)[:LACKS_MOST]
    return (*most, *[lack for lack in lacks if lack not in named][: LACKS_MOST - len(most)])


def _named(peers: Sequence[str]) -> str:
    more = [f"and {len(peers) - NAMED_MOST} more"] if len(peers) > NAMED_MOST else []
    return ", ".join([*(peer[-6:] for peer in peers[:NAMED_MOST]), *more])
