"""One member's side of one attempt's exchange: which chunks go where, what is checked, and when a chunk is combined.

Sans-IO and without a clock: it decides; moving, checking, combining and hashing bytes are effects whose outcomes come
back as events. As a sender it offers every chunk of its contribution to the chunk's reducer until it has a receipt; as
a reducer it holds every included sender's row of the chunks dealt to it, and combines a chunk when all its rows are
there. A member deals with itself like with anyone, so its own row passes the same checks. Peers are opaque names here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aggregation.digest import tagged_hash

NAMED_MOST = 8
LACKS_MOST = 4096
"""Rows that one claim names; of every sender that is missing at least one as long as that fits."""

# -- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowArrived:
    """A chunk of a sender is in the work area, whole, after `admit` let it in."""

    sender: str
    chunk: int


@dataclass(frozen=True, slots=True)
class RowBroken:
    """A chunk that was let in did not come whole; it may come again."""

    sender: str
    chunk: int


@dataclass(frozen=True, slots=True)
class RowChecked:
    """Hash against the commitment, canonical form and norm: `fault` is empty when all hold."""

    sender: str
    chunk: int
    fault: str


@dataclass(frozen=True, slots=True)
class Receipted:
    """A reducer's signed receipt for chunks of mine has come."""

    reducer: str
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Combined:
    chunk: int
    hash: bytes
    norm_sq: float


@dataclass(frozen=True, slots=True)
class CombineFailed:
    chunk: int
    reason: str


@dataclass(frozen=True, slots=True)
class Unable:
    """This member can't take rows in, as a reducer must: it has no room for them."""


@dataclass(frozen=True, slots=True)
class Expired:
    """The time for the exchange is over: say what is missing."""


ExchangeEvent = RowArrived | RowBroken | RowChecked | Receipted | Combined | CombineFailed | Unable | Expired

# -- effects -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendRows:
    """Stream these chunks of my contribution to a reducer; the driver tries again until receipted or expired."""

    reducer: str
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CheckRow:
    sender: str
    chunk: int


@dataclass(frozen=True, slots=True)
class GiveReceipt:
    sender: str
    chunk: int


@dataclass(frozen=True, slots=True)
class RefuseRow:
    """The row is wrong: tell its sender why, and count it against it."""

    sender: str
    chunk: int
    reason: str


@dataclass(frozen=True, slots=True)
class CombineChunk:
    """Combine the rows of these senders, in this order, with these weights."""

    chunk: int
    senders: tuple[str, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ReportResults:
    set_hash: bytes
    results: tuple[Combined, ...]


@dataclass(frozen=True, slots=True)
class ReportMissing:
    """These rows have not come. None: this reducer can't take them in or combine them, and no sender is to blame."""

    lacks: tuple[tuple[int, str], ...]  # (chunk, sender)


ExchangeEffect = SendRows | CheckRow | GiveReceipt | RefuseRow | CombineChunk | ReportResults | ReportMissing


def set_hash(plan: bytes, number: int, roots: Mapping[str, bytes]) -> bytes:
    """The name of an included set: its plan, its number and its senders' roots in peer order."""
    named = b"".join(peer.encode() + roots[peer] for peer in sorted(roots))
    return tagged_hash("set", plan, number.to_bytes(4, "little"), named)


def deal_seed(plan: bytes, roots: Mapping[str, bytes]) -> bytes:
    """The seed of the deal: nobody knows it before every commitment is made, so nobody can aim at a reducer."""
    return tagged_hash("deal", plan, *(roots[peer] for peer in sorted(roots)))


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
        self._senders = tuple(sorted(roots))
        self._weights = tuple(weights[peer] for peer in self._senders)
        self._set_hash = set_hash(plan, number, roots)
        self._row_bytes = tuple(row_bytes)
        self._reducers = tuple(tuple(chunk_line[:replicas]) for chunk_line in line)
        self._mine = tuple(chunk for chunk, peers in enumerate(self._reducers) if me in peers)
        # For each chunk of mine: what is known of each sender's row. Absent, "arriving", "checking" or "held".
        self._rows: dict[int, dict[str, str]] = {chunk: {} for chunk in self._mine}
        self._n_held = dict.fromkeys(self._mine, 0)
        self._results: dict[int, Combined] = {}
        self._combining: set[int] = set()
        self._unreceipted: dict[str, dict[int, None]] = {}
        self._reported = False
        self._expired = False
        self._unable = False

    def begin(self) -> list[ExchangeEffect]:
        """What to send, if this member is an included sender."""
        effects: list[ExchangeEffect] = []
        if self.me in self._senders:
            for chunk, peers in enumerate(self._reducers):
                for peer in peers:
                    self._unreceipted.setdefault(peer, {})[chunk] = None
            effects += [SendRows(peer, tuple(chunks)) for peer, chunks in sorted(self._unreceipted.items())]
        return effects

    def report_again(self) -> list[ExchangeEffect]:
        """What was reported, for a leader whose line is new."""
        if self._reported:
            return self._report()
        return self._claim() if self._expired or self._unable else []

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
                waiting = self._unreceipted.get(reducer, {})
                for chunk in chunks:
                    waiting.pop(chunk, None)
                if not waiting:
                    self._unreceipted.pop(reducer, None)
            case Combined(chunk):
                if chunk in self._combining and chunk not in self._results:
                    self._results[chunk] = event
                    if len(self._results) == len(self._mine):
                        self._reported = True
                        return self._report()
            case CombineFailed(chunk):
                if chunk in self._combining and chunk not in self._results:
                    self._unable = True
                    return [ReportMissing(())]
            case Unable():
                if not self._unable and not self._reported:
                    self._unable = True
                    return [ReportMissing(())]
            case Expired():
                self._expired = True
                return self._claim()
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

    def waiting_for(self) -> str:
        """Whom this member waits for, for people."""
        lacks = self.lacks()
        senders = sorted({sender for _, sender in lacks})
        if senders:
            return f"{len(lacks)} chunks from {_named(senders)}"
        return f"receipts from {_named(sorted(self._unreceipted))}" if self._unreceipted else ""

    def _row_state(self, sender: str, chunk: int) -> str:
        return self._rows.get(chunk, {}).get(sender, "")

    def _checked(self, sender: str, chunk: int, fault: str) -> list[ExchangeEffect]:
        if self._row_state(sender, chunk) != "checking":
            return []
        if fault:
            del self._rows[chunk][sender]
            return [RefuseRow(sender, chunk, fault)]
        self._rows[chunk][sender] = "held"
        self._n_held[chunk] += 1
        effects: list[ExchangeEffect] = [GiveReceipt(sender, chunk)]
        if self._n_held[chunk] == len(self._senders):
            self._combining.add(chunk)
            effects.append(CombineChunk(chunk, self._senders, self._weights))
        return effects

    def _report(self) -> list[ExchangeEffect]:
        return [ReportResults(self._set_hash, tuple(self._results[chunk] for chunk in self._mine))]

    def _claim(self) -> list[ExchangeEffect]:
        """What stands in the way of the results. Nothing is said while all rows are here and being combined."""
        if self._unable:
            return [ReportMissing(())]
        lacks = self.lacks()
        if not lacks:
            return []
        first = {lack[1]: lack for lack in reversed(lacks)}
        named = set(first.values())
        most = sorted(named)[:LACKS_MOST]
        rest = [lack for lack in lacks if lack not in named][: LACKS_MOST - len(most)]
        return [ReportMissing((*most, *rest))]


def _named(peers: Sequence[str]) -> str:
    more = [f"and {len(peers) - NAMED_MOST} more"] if len(peers) > NAMED_MOST else []
    return ", ".join([*(peer[-6:] for peer in peers[:NAMED_MOST]), *more])
