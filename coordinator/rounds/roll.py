"""The roll call of a round at one moment: who trains, who can contribute, who waits for a seat, who is missing."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from coordinator.rounds import deadline, policy, work
from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.members import Member, Members, named
from protos.messages import MemberState, PeerId, Seat
from protos.runspec import RunSpec

TRAINED = (MemberState.READY, MemberState.EXCHANGING, MemberState.VOTING)
"""States in which a member's Δ of the round is made, or stands in an attempt that it does not know to have failed."""
IDLE = (MemberState.JOINING, MemberState.PAUSED)
"""States in which a member makes no step."""


@dataclass(frozen=True, slots=True)
class Roll:
    """What the leader knows when it is asked.

    Args:
        seats: the round's seats, by peer.
        left: who signed a LEAVE in this round.
        out: senders that are blamed for an earlier attempt's failure.
        enough: steps that make a contribution.
        began_at: when the round did.
    """

    members: Members
    ledger: Ledger
    seats: Mapping[PeerId, Seat]
    left: Collection[PeerId]
    out: Collection[PeerId]
    enough: int
    began_at: Instant
    now: Instant

    def contributors(self) -> list[Member]:
        """Who is here with steps of this round to contribute, in peer order."""
        return [
            member
            for member in self.members
            if self._may_contribute(member)
            and member.round == self.ledger.round + 1
            and (member.step > 0 or member.state in TRAINED)
            and self.members.holds(member.peer, self.ledger, self.now)
        ]

    def n_enough(self, contributors: Collection[Member]) -> int:
        """How many of them count towards the minimum: not who has made too few steps yet, nor who lost its progress
        and has not caught up."""
        return sum(
            1 for member in contributors if self._is_done(member) or (not member.behind and member.step >= self.enough)
        )

    def ends_after_s(self, spec: RunSpec) -> float:
        """When training ends without waiting for the slowest, in seconds since the round began: infinite while half of
        those who are here and train have not shown when they will have made their steps.

        A leader that has just started also gives those whom it has not heard yet the time to find it.
        """
        if self.members.are_new(self.now) and any(self._is_unheard(peer) and self.trains(peer) for peer in self.seats):
            return math.inf
        finishes_s = [
            self._finish_at(member, spec) - self.began_at
            for peer in self.seats
            if (member := self.members.get(peer)) is not None and self._takes_part(member)
        ]
        return deadline.ends_after_s(finishes_s, spec.deadlines.deadline_k)

    def _is_unheard(self, peer: PeerId) -> bool:
        member = self.members.get(peer)
        return member is None or member.round == 0

    def _takes_part(self, member: Member) -> bool:
        """Whether its finish time says something about the others': it is here, and works or has done so."""
        if not self._may_contribute(member) or not self.members.fresh(member.peer, self.now):
            return False
        return self._is_done(member) or not (member.behind or member.state in IDLE)

    def _finish_at(self, member: Member, spec: RunSpec) -> float:
        """As it announced; before it has made a step what its speed lets expect, until that has passed."""
        if member.finish_at is not None:
            return member.finish_at
        if self._is_done(member):
            return self.began_at
        if member.step == 0 and member.speed > 0:
            seat = self.seats[member.peer]
            n_tokens = work.asked(seat) * seat.batch_scale * spec.work.batch_tokens
            expected_at = self.began_at + n_tokens / member.speed
            if expected_at > self.now:
                return expected_at
        return math.inf

    def hopefuls(self) -> list[Member]:
        """Who is here and can still come to contribute in this round."""
        return [
            member
            for member in self.members
            if self._may_contribute(member) and member.state not in IDLE and self.members.fresh(member.peer, self.now)
        ]

    def holders(self) -> list[Member]:
        return self.members.holders(self.ledger, self.now)

    def seatless(self) -> list[Member]:
        """Who holds the state and waits for a seat in the next round."""
        return [member for member in self.holders() if member.peer not in self.seats or member.peer in self.left]

    def seatable(self) -> list[PeerId]:
        """Who gets a seat in the next round. Who left and came back waits for the one after."""
        return [member.peer for member in self.holders() if member.peer not in self.left]

    def trains(self, peer: PeerId) -> bool:
        """Whether the round still waits for a seated member: it is here and trains, or may come back."""
        if peer in self.left or peer in self.out:
            return False
        member = self.members.get(peer)
        if member is None or not self.members.fresh(peer, self.now):
            return self.members.may_return(peer, self.now)
        return not (member.behind or member.state in IDLE or self._is_done(member))

    def training(self) -> list[PeerId]:
        return [peer for peer in self.seats if self.trains(peer)]

    def first_training(self, hint: PeerId | None) -> PeerId | None:
        """Someone whom the round still waits for; the one found before if it still is."""
        if hint is not None and hint in self.seats and self.trains(hint):
            return hint
        return next((peer for peer in self.seats if self.trains(peer)), None)

    def lacking_voters(
        self, me: PeerId | None, coordinator: PeerId, unable: Collection[PeerId], weightless: Collection[PeerId]
    ) -> list[PeerId]:
        """The voters without whom nothing can be committed: they are not here, or can't vote. None when enough can.

        Args:
            me: the leader, if it gives a vote itself and can.
            unable: voters that have said that they sign nothing in this round.
            weightless: who has left, and whose weight is out of the quorum.
        """
        voters = [peer for peer in self.ledger.voters if peer not in weightless]
        able = {p for p in voters if p == me or (p not in unable and p not in self.left and self._is_here(p))}
        reachable = [p for p in able if (member := self.members.get(p)) is not None and member.reachable]
        if policy.is_quorum(able, voters, coordinator) and policy.spread_enough(able, voters, coordinator, reachable):
            return []
        return [peer for peer in voters if peer not in able]

    def _is_here(self, peer: PeerId) -> bool:
        return self.members.fresh(peer, self.now)

    def waits_for_training(self) -> str:
        """For people: for whom the round waits, and how far they are."""
        peers = self.training()
        steps = [member.step for peer in peers if (member := self.members.get(peer)) is not None]
        most = max((work.asked(self.seats[peer]) for peer in peers), default=0)
        slowest = f", the slowest at step {min(steps)} of {most}" if steps else ""
        return f"training: {named(peers)}{slowest}"

    def _is_done(self, member: Member) -> bool:
        return member.round == self.ledger.round + 1 and (
            member.state in TRAINED or member.step >= max(work.asked(self.seats.get(member.peer)), 1)
        )

    def _may_contribute(self, member: Member) -> bool:
        peer = member.peer
        return peer in self.seats and peer not in self.left and peer not in self.out and not member.observer
