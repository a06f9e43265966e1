"""The phases of a round as its leader goes through them: from one to the next, what TRAIN waits for, and the end.

One phase at a time (`attempt.Phase`); the other phases stand in the modules that this one builds on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from coordinator.rounds import policy
from coordinator.rounds.attempt import Phase
from coordinator.rounds.events import (
    Close,
    Effect,
    Ended,
    Instant,
    Say,
)
from coordinator.rounds.promising import Promising
from protos.messages import (
    Goodbye,
    MemberState,
)


class Phases(Promising):
    """The moves of a leader from one phase to the next."""

    # -- moving on --------------------------------------------------------------------------------------------

    def _advance(self, now: Instant) -> list[Effect]:
        effects: list[Effect] = []
        steps: dict[Phase, Callable[[Instant], list[Effect] | None]] = {
            Phase.TRAIN: self._train,
            Phase.PREPARE: self._prepare,
            Phase.COMMITMENT: self._commitment,
            Phase.EXCHANGE: self._exchange,
            Phase.VOTE: self._vote,
            Phase.ENDED: self._end,
        }
        while (moved := steps[self.phase](now)) is not None:
            effects += moved
        return effects

    def _deadline(self) -> Instant | None:
        if self._attempt is not None:
            return self._attempt.deadline_at
        if self.phase is Phase.TRAIN and self.ledger.seats:
            return self._train_ends_at()
        return None

    def _wakes(self, now: Instant) -> Iterator[Instant]:
        if (at := self.members.next_change(now)) is not None:
            yield at
        if self._news:
            yield self._relay_at
        if self.phase is Phase.TRAIN:
            if self._quorum_lost_at is not None:
                yield self._epoch_opens_at(self._quorum_lost_at)
            yield self._retry_at
            yield self._train_ends_at()
        elif self._attempt is not None:
            yield self._attempt.deadline_at
            if (enough_at := self._attempt.enough_at) is not None:
                yield Instant(enough_at + self.spec.deadlines.gone_grace_s)

    # TRAIN: members train on their seats; without seats, enough holders of the state are awaited.

    def _train(self, now: Instant) -> list[Effect] | None:
        if ended := policy.has_ended(self.ledger, self.spec):
            self._ended = ended
            self._enter(Phase.ENDED)
            return [Say(ended), Ended(ended)]
        if self._paused:
            return self._wait("the operator, who has paused the run")
        if now < self._retry_at:
            return self._wait("a moment to pass after a failed attempt")
        roll = self._roll(now)
        if absent := roll.absent_voters(self.me, self._coordinator):
            return self._without_quorum(absent, now)
        self._quorum_lost_at = None
        if self.ledger.seats and self.ledger.voters == (self._coordinator,):
            return self._begin_epoch(now)
        if not self.ledger.seats:
            wanted = self._start_needs()
            if len(self.members) < wanted or len(roll.holders()) < wanted:
                self._waiting = lambda later: (
                    f"members that hold the state: {len(self._roll(later).holders())} of {wanted}"
                )
                return None
            return self._open_attempt("seats for who holds the state", now)
        timed_out = now >= self._train_ends_at()
        self._awaited = roll.first_training(self._awaited)
        if self._awaited is not None and not timed_out:
            self._waiting = lambda later: self._roll(later).waits_for_training()
            return None
        wanted = self.spec.membership.min_contributors
        n_here = roll.n_enough(roll.contributors())
        if n_here >= wanted:
            return self._open_attempt("", now)
        if roll.seatless() and (timed_out or len(roll.hopefuls()) < wanted):
            return self._open_attempt(f"{n_here} of {wanted} contributors: seats for who came since", now)
        if self._out_senders:
            self._out_senders = set()  # blamed or not, without them there is no round
            return self._train(now)
        return self._wait(f"contributors: {n_here} of {wanted}")

    def _start_needs(self) -> int:
        membership = self.spec.membership
        return membership.start_contributors if self.ledger.n_committed == 0 else membership.min_contributors

    # ENDED: everyone is told once it has the last state.

    def _end(self, now: Instant) -> list[Effect] | None:
        done = [m for m in self.members if m.connected and m.head == self.ledger.head and not m.observer]
        effects: list[Effect] = []
        for member in done:
            if member.state is not MemberState.APPLYING:
                effects.append(Close(member.peer, Goodbye("ended", self._ended)))
                self.members.disconnected(member.peer, now)
        return effects or None
