"""What has changed in an exchange since its deal, as its leader keeps it, and what it has been told of missing rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from coordinator.rounds.blame import blame, least_words
from coordinator.rounds.events import Instant
from protos.limits import LACKS
from protos.messages import Excluded, Lack, Moved, PeerId, Redeal

TURNS_MOST = 8
"""Whom so many in line have lacked one after the other is out whatever f is: a line's order is nobody's choice, and the
redeals of an attempt are few."""

Word = tuple[bytes, float]
"""A reducer's word on a chunk: the hash of its result, and its ‖·‖²."""


@dataclass(slots=True)
class Change:
    """What the next redeal is to add."""

    excluded: dict[PeerId, str] = field(default_factory=dict)
    lost: set[PeerId] = field(default_factory=set)
    moved: set[tuple[int, PeerId]] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.excluded or self.lost or self.moved)


@dataclass(slots=True)
class Moves:
    """All changes since the deal, and the words that may lead to the next one. `added` takes a change in."""

    number: int = 0
    set_number: int = 0
    n_shrinks: int = 0
    excluded: dict[PeerId, str] = field(default_factory=dict)
    lost: set[PeerId] = field(default_factory=set)
    moved: set[tuple[int, PeerId]] = field(default_factory=set)
    unable: set[PeerId] = field(default_factory=set)
    """Reducers that can't take rows in or combine them."""
    claims: dict[PeerId, dict[PeerId, set[int]]] = field(default_factory=dict)
    """By reducer and sender, the chunks that have not come."""
    claimed_at: Instant | None = None
    """When the first of these claims came."""
    turns: dict[tuple[int, PeerId], set[PeerId]] = field(default_factory=dict)
    """By chunk and sender, the reducers that lacked it and lost the chunk for that."""
    asked: tuple[PeerId, ...] = ()
    """The senders, gone, of whom reducers are asked what they lack."""
    answers: dict[PeerId, set[PeerId]] = field(default_factory=dict)
    """By reducer, those of the asked whose rows are not all there."""
    answered_at: Instant | None = None
    """Since when enough reducers of each chunk have answered."""
    kept: set[PeerId] = field(default_factory=set)
    """Senders that are gone and whose rows are where they must be."""
    words: dict[int, dict[Word, set[PeerId]]] = field(default_factory=dict)
    """Of chunks on which replicas differed: who said what before others were asked."""

    def claim(self, reducer: PeerId, lacks: Iterable[Lack], now: Instant) -> None:
        for lack in lacks:
            self.claims.setdefault(reducer, {}).setdefault(lack.sender, set()).add(lack.chunk)
        if reducer in self.claims and self.claimed_at is None:
            self.claimed_at = now

    def answer(self, reducer: PeerId, asked: Collection[PeerId], lacks: Iterable[Lack]) -> None:
        if self.asked and set(self.asked) <= set(asked):
            self.answers[reducer] = {lack.sender for lack in lacks}

    def added(self, change: Change) -> None:
        """Take a change in: what was claimed and asked before it has had its turn."""
        self.number += 1
        if change.excluded:
            self.set_number = self.number
            self.n_shrinks += 1
        self.excluded |= change.excluded
        self.lost |= change.lost
        self.moved |= change.moved
        self.claims, self.claimed_at = {}, None
        self.asked, self.answers, self.answered_at = (), {}, None
        self.kept -= change.excluded.keys()

    def redeal(self, plan: bytes, exchange_s: float) -> Redeal:
        return Redeal(
            plan=plan,
            number=self.number,
            excluded=tuple(Excluded(peer, self.excluded[peer]) for peer in sorted(self.excluded)),
            lost=tuple(sorted(self.lost)),
            moved=tuple(Moved(chunk, peer) for chunk, peer in sorted(self.moved) if peer not in self.lost),
            set_number=self.set_number,
            exchange_s=exchange_s,
        )


def by_claims(
    moves: Moves,
    claims: dict[PeerId, dict[PeerId, set[int]]],
    n_dealt: dict[PeerId, int],
    f: int,
    able: Collection[PeerId],
) -> Change:
    """What claims about living senders lead to.

    A sender goes on no less than the word of f + 1 reducers, nor of two: fewer may all lie. With that, one whose row
    several reducers of a chunk have lacked in turn is out, and so is whom more reducers name than any of them names
    senders (`blame`); else the reducer loses the chunk, and all of them where it names so many that its word can't hold
    them.

    `n_dealt` are the reducers' chunks now. `able` are the reducers that have combined their rows, or could say what
    they lack: where they are fewer than f + 1, a sender goes on the word of all of them.
    """
    change, others = Change(), set(able)
    lacking: dict[PeerId, set[PeerId]] = {}
    for reducer, lacks in claims.items():
        for sender in lacks:
            lacking.setdefault(sender, set()).add(reducer)
    for (_, sender), before in moves.turns.items():
        if sender in lacking:
            lacking[sender] |= before
    suspects = {
        sender
        for sender, words in lacking.items()
        if len(words) >= least_words(f, len(others | words) - (sender in others))
    }
    for reducer, lacks in sorted(claims.items()):
        for sender, chunks in sorted(lacks.items()):
            turns = [moves.turns.get((chunk, sender), set()) - {reducer} for chunk in chunks]
            before = {peer for turn in turns for peer in turn}
            if before and (sender in suspects or max(map(len, turns)) + 1 >= TURNS_MOST):
                change.excluded[sender] = f"its rows have not come to {_named({reducer, *before})}"
    left = {reducer: {sender for sender in lacks if sender not in change.excluded} for reducer, lacks in claims.items()}
    senders, reducers = blame(left, suspects)
    for sender in sorted(senders):
        change.excluded[sender] = f"its rows have not come to {_named(lacking[sender])}"
    for reducer in sorted(reducers):
        chunks = {
            chunk for sender, some in claims[reducer].items() if sender in left[reducer] - senders for chunk in some
        }
        for sender, some in claims[reducer].items():
            for chunk in some:
                moves.turns.setdefault((chunk, sender), set()).add(reducer)
        n_lacks = sum(len(some) for some in claims[reducer].values())
        if len(chunks) >= n_dealt.get(reducer, 0) or n_lacks >= LACKS:
            change.lost.add(reducer)
        else:
            change.moved |= {(chunk, reducer) for chunk in chunks}
        change.reasons.append(f"{reducer[-6:]} lacks rows of {_named(left[reducer] - senders)}")
    if len(moves.moved | change.moved) > LACKS:  # more than one redeal may name
        change.lost |= {peer for _, peer in change.moved}
        change.moved.clear()
    return change


def _named(peers: Collection[PeerId]) -> str:
    some = sorted(peers)[:3]
    rest = len(peers) - len(some)
    return ", ".join(peer[-6:] for peer in some) + (f" and {rest} more" if rest else "")
