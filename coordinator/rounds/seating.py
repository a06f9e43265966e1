"""Whom a leader seats in the next round and what it asks of each: speeds, cool-downs after failures, and the queue.

All of it is this leader's memory and its choice: voters check bounds only. Nobody is shut out for ever.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.rounds import work
from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.members import PLACE_KEPT_S, Member
from coordinator.rounds.work import Work
from protos.messages import PeerId
from protos.runspec import RunSpec

COOL_ROUNDS = (0, 1, 2, 4, 8, 16)
"""Rounds without a seat after the n-th failure: the first costs nothing but its round. A round that counts takes one
failure back."""


@dataclass(slots=True)
class _Record:
    """What is remembered of one member that failed."""

    n_failures: int = 0
    until_round: int = 0  # the first round in which it may have a seat again
    why: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """Seats of the next round, and why the others who hold the state have none."""

    works: dict[PeerId, Work]
    why_not: dict[PeerId, str]


class Seating:
    """A leader's memory of who failed, and of who waits for a seat since when."""

    def __init__(self) -> None:
        self._records: dict[PeerId, _Record] = {}
        self._waits_since: dict[PeerId, Instant] = {}

    def amend(self, spec: RunSpec) -> None:
        """Another revision of the RunSpec is in force."""
        self._spec = spec

    def round_over(self, round_: int, failures: Mapping[PeerId, str], counted: Collection[PeerId]) -> list[str]:
        """A round has ended: who failed in it and why, and who counted. What an operator would want to read of it."""
        told: list[str] = []
        for peer, why in sorted(failures.items()):
            record = self._failed(peer, round_, why)
            self._records[peer] = record
            if record.until_round > round_ + 1:
                told.append(f"{peer} has no seat before round {record.until_round}: {_times(record)}, at last: {why}")
        for peer in counted:
            record = self._records.get(peer, _Record())
            record.n_failures -= 1
            if record.n_failures <= 0:
                self._records.pop(peer, None)
        return told

    def choose(
        self,
        holders: Sequence[Member],
        ledger: Ledger,
        failures: Mapping[PeerId, str],
        spec: RunSpec,
        now: Instant,
        *,
        empty: bool,
    ) -> Choice:
        """Whom to seat in the round after the one that runs now.

        Args:
            holders: who is here and holds the state.
            failures: who has failed in the round that runs now.
            empty: whether it ends empty, and leases go on.
        """
        round_ = ledger.round + 1
        held = {seat.peer: seat for seat in ledger.seats} if empty else {}
        why_not: dict[PeerId, str] = {}
        fit: list[Member] = []
        for member in holders:
            record = self._failed(member.peer, round_, failures[member.peer]) if member.peer in failures else None
            if why := self._cools_down(member.peer, round_ + 1, record) or work.too_slow(member.speed, spec):
                why_not[member.peer] = why
            else:
                fit.append(member)
        if len(fit) < min(spec.membership.min_contributors, len(holders)):
            fit, why_not = list(holders), {}  # without them there is no round
        fit.sort(key=lambda m: (ledger.since.get(m.peer, round_), self._waits_since.get(m.peer, now), m.peer))
        most = spec.membership.max_members
        for place, member in enumerate(fit[most:], 1):
            why_not[member.peer] = f"all {most} seats are taken; place {place} in the queue"
        works: dict[PeerId, Work] = {}
        for member in fit[:most]:
            asks = work.work_for(member.speed, spec) or Work(work.steps_min(spec))
            works[member.peer] = asks
            if (seat := held.get(member.peer)) is not None:
                done = member.step if member.round == round_ else 0
                works[member.peer] = work.going_on(seat, asks, done, spec)
        return Choice(works, why_not)

    def queue(self, members: Iterable[Member], seated: Collection[PeerId], now: Instant) -> None:
        """Note since when those wait who hold the state and have no seat."""
        by_peer = {member.peer: member for member in members}
        for peer, member in by_peer.items():
            if member.connected and member.head and not member.observer and peer not in seated:
                self._waits_since.setdefault(peer, now)
        for peer in list(self._waits_since):
            known = by_peer.get(peer)
            if peer in seated or known is None or (not known.connected and now > known.seen_at + PLACE_KEPT_S):
                del self._waits_since[peer]

    def cools_down(self, peer: PeerId, round_: int) -> str:
        """Why a peer has no seat in this round and until when, as far as it is for failures; else an empty string."""
        return self._cools_down(peer, round_, None)

    def _cools_down(self, peer: PeerId, round_: int, record: _Record | None) -> str:
        record = record or self._records.get(peer)
        if record is None or record.until_round <= round_:
            return ""
        return f"until round {record.until_round}, for {_times(record)}, at last: {record.why}"

    def _failed(self, peer: PeerId, round_: int, why: str) -> _Record:
        """The record of a peer with one more failure, in this round."""
        known = self._records.get(peer, _Record())
        n_failures = min(known.n_failures + 1, len(COOL_ROUNDS))
        return _Record(n_failures, round_ + 1 + COOL_ROUNDS[n_failures - 1], why)


def _times(record: _Record) -> str:
    return f"failed in {record.n_failures} round{'s' if record.n_failures > 1 else ''}"
