"""The phases of a round as its leader goes through them: from one to the next, what TRAIN waits for, and the end.

One phase at a time (`attempt.Phase`); the other phases stand in the modules that this one builds on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from coordinator.rounds import policy, work
from coordinator.rounds.attempt import Phase
from coordinator.rounds.events import (
    Close,
    Effect,
    Ended,
    Instant,
    Say,
    Tell,
)
from coordinator.rounds.members import Member
from coordinator.rounds.promising import Promising
from coordinator.rounds.roll import Roll
from coordinator.rounds.voting import PROBE_EVERY_S, REASON_MOST
from protos.messages import (
    AttemptFailed,
    Goodbye,
    Heartbeat,
    MemberState,
)

RECKON_S = 0.5
"""The end of training is reckoned anew at most so often, however many members announce something."""


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

    def _deadline(self, now: Instant) -> Instant | None:
        """When what is waited for now is waited for no longer; None if nothing but its coming ends that."""
        if self._attempt is not None:
            return self._attempt.deadline_at
        if self.phase is not Phase.TRAIN or (self.ledger.paused and not self._pending):
            return None
        if now < self._retry_at:
            return self._retry_at
        limit_at = self._train_ends_at()
        due: list[Instant] = []
        if self._quorum_lost_at is not None:
            due = [self._epoch_opens_at(self._quorum_lost_at)] if self.me == self._coordinator else []
        elif self.ledger.seats:
            passed = self._reckoned_at is not None and self._cut_at <= self._reckoned_at
            due = [limit_at if passed else min(limit_at, self._cut_at)]
        return next((at for at in due if at >= now), None)

    def _wakes(self, now: Instant) -> Iterator[Instant]:
        if (at := self.members.next_change(now)) is not None:
            yield at
        if self._news:
            yield self._relay_at
        if self.phase is Phase.TRAIN:
            if self._quorum_lost_at is not None:
                yield self._epoch_opens_at(self._quorum_lost_at)
                yield Instant(self._probed_at + PROBE_EVERY_S)
            yield self._retry_at
            yield self._train_ends_at()
            if math.isfinite(self._cut_at):
                yield self._cut_at
            if self._announced and self._reckoned_at is not None:
                yield Instant(self._reckoned_at + RECKON_S)
        elif self._attempt is not None:
            yield self._attempt.deadline_at
            moves = self._attempt.moves
            for at in (self._attempt.enough_at, moves.claimed_at, moves.answered_at):
                if at is not None:
                    yield Instant(at + self.spec.deadlines.gone_grace_s)

    # TRAIN: members train on their seats; without seats, enough holders of the state are awaited.

    def _train(self, now: Instant) -> list[Effect] | None:
        if told := self._tell_seatless(now):
            return told
        if not self._pending and (ended := policy.has_ended(self.ledger, self.spec)):
            self._ended = ended
            self._enter(Phase.ENDED)
            return [Say(ended), Ended(ended)]
        if lacks := self._lacks_spec():
            return self._wait(lacks)
        if self.ledger.paused and not self._pending:
            return self._wait("the operator, who has paused the run")
        if now < self._retry_at:
            what = "a failed attempt" if self._n_retries else f"{self._n_empty} empty rounds"
            return self._wait(f"a moment to pass after {what}")
        roll = self._roll(now)
        due, begins = self._due(), self.ledger.seats and self.ledger.voters == (self._coordinator,)
        lacking = self._lacking_voters(now, empty=False)
        if not lacking and not (self._abstained and self._lacking_without(self._abstained, now, empty=False)):
            self._quorum_lost_at = None  # else a line that breaks again and again would put an epoch off
        empty = due or begins or not self.ledger.seats
        if lacking and (not empty or self._lacking_voters(now, empty=True)):
            return self._without_quorum(lacking, now)
        if begins:
            return self._begin_epoch(now)
        if due:
            return self._open_attempt(due, now)
        if not self.ledger.seats:
            wanted = self._start_needs()
            if self._pending and roll.seatable():
                return self._open_attempt("seats for who holds the state, and the operator's orders", now)
            if len(self.members) < wanted or len(roll.holders()) < wanted:
                self._waiting = lambda later: (
                    f"members that hold the state: {len(self._roll(later).holders())} of {wanted}"
                )
                return None
            return self._open_attempt("seats for who holds the state", now)
        timed_out = now >= self._train_ends_at()
        self._awaited = roll.first_training(self._awaited)
        wanted = self.spec.membership.min_contributors
        n_here: int | None = None
        if self._awaited is not None and not timed_out and not self._cut:
            if now >= self._cut_time(roll):
                n_here = roll.n_enough(roll.contributors())
            if n_here is None or n_here < wanted:
                self._waiting = lambda later: self._roll(later).waits_for_training()
                return None
            self._cut = True
        if n_here is None:
            n_here = roll.n_enough(roll.contributors())
        if n_here >= wanted:
            return self._open_attempt("", now)
        if roll.seatless() and (timed_out or len(roll.hopefuls()) < wanted):
            return self._open_attempt(f"{n_here} of {wanted} contributors: seats for who came since", now)
        if self._out_senders:
            self._out_senders = set()  # blamed or not, without them there is no round
            return self._train(now)
        if self._pending:
            return self._open_attempt("the operator's orders, while contributors are waited for", now)
        return self._wait(f"contributors: {n_here} of {wanted}")

    def _cut_time(self, roll: Roll) -> Instant:
        """When training ends without waiting for the slowest."""
        now, before = roll.now, self._reckoned_at
        if before is None or now >= self._cut_at or now >= before + RECKON_S:
            self._cut_at = Instant(self._round_began_at + roll.ends_after_s(self.spec))
            self._reckoned_at, self._announced = now, False
        return self._cut_at

    def _announce(self, member: Member, heartbeat: Heartbeat, now: Instant) -> bool:
        """Take in when a member will have made its steps; whether the end of training is to be reckoned anew now."""
        seat = self._seats.get(member.peer)
        if seat is None or heartbeat.round != self.ledger.round + 1 or heartbeat.head != self.ledger.head:
            return False
        step_tokens = max(seat.batch_scale, 1) * self.spec.work.batch_tokens
        if not member.announce(heartbeat, work.asked(seat), step_tokens, now):
            return False
        self._announced = True
        return self.phase is Phase.TRAIN and (self._reckoned_at is None or now >= self._reckoned_at + RECKON_S)

    def _tell_seatless(self, now: Instant) -> list[Effect]:
        """Tell who has no seat in this round why, once; and note since when they wait."""
        if self._seats_told_in == (self.ledger.epoch, self.ledger.round):
            return []
        self._seats_told_in = (self.ledger.epoch, self.ledger.round)
        self._seating.queue(self.members, self._seats, now)
        effects: list[Effect] = []
        for member in self.members:
            why = self._why_not.get(member.peer, "") if member.peer not in self._seats else ""
            if why and member.connected and why != member.told_no_seat:
                member.story.append(work.NO_SEAT + why)
                reason = (work.NO_SEAT + why)[:REASON_MOST]
                effects.append(Tell((member.peer,), AttemptFailed(self.ledger.epoch, self.ledger.round + 1, 0, reason)))
            member.told_no_seat = why
        return effects

    def _start_needs(self) -> int:
        membership = self.spec.membership
        return membership.start_contributors if self.ledger.n_committed == 0 else membership.min_contributors

    # ENDED: everyone is told once it has the last state.

    def _end(self, now: Instant) -> list[Effect] | None:
        if self._pending:
            self._ended = ""
            self._enter(Phase.TRAIN)
            return []
        done = [m for m in self.members if m.connected and m.head == self.ledger.head and not m.observer]
        effects: list[Effect] = []
        for member in done:
            if member.state is not MemberState.APPLYING:
                effects.append(Close(member.peer, Goodbye("ended", self._ended)))
                self.members.disconnected(member.peer, now)
        return effects or None
