"""The phases of a round as its leader goes through them: what each waits for, and what comes next.

One phase at a time (`attempt.Phase`); `running` has those of an attempt that has its promises.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from coordinator.rounds import policy
from coordinator.rounds.attempt import Attempt, Phase
from coordinator.rounds.events import (
    Close,
    Effect,
    Ended,
    Instant,
    Opened,
    Persist,
    Say,
    Tell,
)
from coordinator.rounds.members import named
from coordinator.rounds.running import LEADER_SLACK, Attempts, because
from protos.messages import (
    Goodbye,
    Leave,
    MemberState,
    PeerId,
    Prepare,
    Promise,
    Signed,
)


class Phases(Attempts):
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

    def _without_quorum(self, absent: Collection[PeerId], now: Instant) -> list[Effect] | None:
        """Wait for voters; when they stay away for good, the coordinator opens an epoch, never without a holder."""
        if self._quorum_lost_at is None:
            self._quorum_lost_at = now
        if now < self._epoch_opens_at(self._quorum_lost_at) or self.me != self._coordinator:
            return self._wait(f"voters for a quorum: {named(absent)}")
        if not self._roll(now).seatable():
            return self._wait(f"voters for a quorum: {named(absent)}, or a member that holds the state")
        self.ledger = self.ledger.in_epoch(self.ledger.epoch + 1, self._coordinator)
        self._next_number, self._left, self._bodies = self._first_number, {}, {}
        told = f"no quorum for {self.spec.deadlines.minority_wait_s:g} s without {named(absent)}"
        return [Say(f"{told}: epoch {self.ledger.epoch} is opened"), *(self._train(now) or [])]

    def _begin_epoch(self, now: Instant) -> list[Effect] | None:
        """The first commit of an opened epoch is an empty one, by the coordinator alone: it seats who is here."""
        if not self._roll(now).seatable():
            return self._wait("a member that holds the state")
        return self._open_attempt(f"epoch {self.ledger.epoch} was opened: a quorum was lost", now)

    def _epoch_opens_at(self, lost_at: Instant) -> Instant:
        return Instant(lost_at + self.spec.deadlines.minority_wait_s)

    def _start_needs(self) -> int:
        membership = self.spec.membership
        return membership.start_contributors if self.ledger.n_committed == 0 else membership.min_contributors

    # PREPARE: a number is free of earlier proposals once a quorum has promised it. Number 0 is the coordinator's.

    def _open_attempt(self, empty: str, now: Instant) -> list[Effect]:
        """Use the next number; `empty` is why the round is to be empty, if it is."""
        number = self._next_number
        self._next_number += 1
        deadline = Instant(now + self.spec.deadlines.vote_s * LEADER_SLACK)
        attempt = self._attempt = Attempt(number, deadline, empty)
        opened: list[Effect] = [Persist(Opened(self.ledger.epoch, self.ledger.round + 1, number))]
        if number == 0:
            return opened + self._form(now)
        self._enter(Phase.PREPARE)
        prepare = Prepare(self.ledger.epoch, self.ledger.round + 1, number, self.me)
        own = self._voter.prepared(prepare, self.ledger)
        if isinstance(own, Promise):
            opened.append(Persist(own))
            attempt.promises[self.me] = own
        else:
            self._pass_number(own.attempt)
        return [*opened, Tell(self._voters_here(), Signed(self._sealer.seal(prepare)))]

    def _prepare(self, now: Instant) -> list[Effect] | None:
        attempt = self._running()
        left = self._left_for(attempt)
        if policy.is_quorum(attempt.promises, self.ledger.voters, self._coordinator, left):
            known: list[Promise | Leave] = [*attempt.promises.values(), *(leave for leave, _ in self._left.values())]
            voted = [(item.voted_attempt, item.proposal) for item in known if item.proposal is not None]
            if not voted:
                return self._form(now)
            proposal = max(voted, key=lambda each: (each[0], each[1].body))[1]
            return self._propose(proposal, self._bodies[proposal.body], now)
        silent = [peer for peer in self.ledger.voters if peer not in attempt.promises and peer != self.me]
        coming = [peer for peer in silent if self.members.expected(peer, now)]
        if now >= attempt.deadline_at or not self._can_reach_quorum(attempt, [*attempt.promises, *coming]):
            return self._fail("no quorum of promises" + because(attempt.refused), now)
        return self._wait(f"promises of {named(silent)}")

    def _can_reach_quorum(self, attempt: Attempt, able: Collection[PeerId]) -> bool:
        """Whether those of the able who have neither refused nor left would make one."""
        able = [peer for peer in able if peer not in attempt.refused and peer not in self._left]
        return policy.is_quorum(able, self.ledger.voters, self._coordinator, self._left_for(attempt))

    # ENDED: everyone is told once it has the last state.

    def _end(self, now: Instant) -> list[Effect] | None:
        done = [m for m in self.members if m.connected and m.head == self.ledger.head and not m.observer]
        effects: list[Effect] = []
        for member in done:
            if member.state is not MemberState.APPLYING:
                effects.append(Close(member.peer, Goodbye("ended", self._ended)))
                self.members.disconnected(member.peer, now)
        return effects or None
