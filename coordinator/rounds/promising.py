"""Promises for an attempt's number, and what a leader does where no quorum can be had: wait, or open an epoch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TypeVar

from coordinator.rounds import policy
from coordinator.rounds.attempt import Attempt, Phase
from coordinator.rounds.carried import Carried, carried_fault
from coordinator.rounds.dealing import Dealing
from coordinator.rounds.events import (
    Effect,
    Heard,
    Instant,
    Opened,
    Persist,
    Say,
    Seek,
    Tell,
)
from coordinator.rounds.members import named
from coordinator.rounds.voter import ATTEMPTS_MAX
from coordinator.rounds.voting import LEADER_SLACK, PROBE_EVERY_S, because
from protos.messages import (
    Leave,
    Outcome,
    PeerId,
    Prepare,
    Promise,
    Signed,
)
from protos.orders import OpenedOrder

R = TypeVar("R", Promise, Leave)

JUDGED_KEPT = 4
"""Reports of a round whose judgement is kept: honest voters bring few different ones to an attempt."""
SEEK_S = 20.0
"""Before an epoch is opened, those who are known are asked for newer commits, at most for so long."""


class Promising(Dealing):
    """The moves of a leader before a plan."""

    def _without_quorum(self, absent: Collection[PeerId], now: Instant) -> list[Effect] | None:
        """Wait for voters; when they stay away for good, the coordinator opens an epoch, never without a holder."""
        if self._quorum_lost_at is None:
            self._quorum_lost_at, self._seeking_since, self._sought = now, None, False
        if probes := self._probe_again(now, PROBE_EVERY_S):
            return probes  # too few may be reachable only because a probe failed by accident
        voters = self._said_lacking(absent)
        if now < self._epoch_opens_at(self._quorum_lost_at) or self.me != self._coordinator:
            return self._wait(f"voters for a quorum: {voters}")
        if (abstains := self._voter is not None and self._voter.abstains) and not self._fresh_epoch:
            return self._wait(f"voters for a quorum: {voters}; it opens no epoch, which it may have done already")
        if not self._sought:
            if self._seeking_since is not None and now < self._seeking_since + SEEK_S:
                return self._wait(f"word whether {voters} or others have newer commits")
            if self._seeking_since is None:
                self._seeking_since = now
                return [Seek(tuple(member.peer for member in self.members))]
            # Nobody has answered in all that time: nothing newer is to be found.
        if not self._roll(now).seatable():
            return self._wait(f"voters for a quorum: {voters}, or a member that holds the state")
        # Above all that were ever opened: one on a branch that was given up may have seen a round of this number. And
        # by a step of its own at each start: in a time that it has lost, known or not, it may have opened others from
        # the same one on, and signed in them. In this one it can't have.
        epoch = max([self.ledger.epoch, *(epoch for epoch, _ in self._used)]) + (self._fresh_epoch or 1)
        if abstains and self._voter is not None:
            self._voter.moved()
        self.ledger = self.ledger.in_epoch(epoch, self._coordinator)
        self._epoch_opened, self._epoch_known_at = True, now
        self._next_number, self._bodies = self._unused_number(), {}
        self._left, self._weightless = {}, set()
        told = f"no quorum for {self.spec.deadlines.minority_wait_s:g} s without {voters}"
        return [Say(f"{told}: epoch {self.ledger.epoch} is opened")]

    def _said_lacking(self, lacking: Collection[PeerId]) -> str:
        """For people: the voters that are missing, and why this leader is one of them, if it is."""
        others = [peer for peer in lacking if not self._is_mine(peer)]
        told = [named(others)] if others else []
        if len(others) < len(lacking):
            lost = self._voter is not None and self._voter.abstains
            why = "has lost what it signed in this round" if lost else "has no observer to compute the digest"
            told.append(f"this leader, which {why}")
        return " and ".join(told)

    def _begin_epoch(self, now: Instant) -> list[Effect] | None:
        """The first commit of an opened epoch is an empty one, by the coordinator alone: it seats who is here."""
        if not self._roll(now).seatable():
            return self._wait("a member that holds the state")
        return self._open_attempt(f"epoch {self.ledger.epoch} was opened: a quorum was lost", now)

    def _epoch_opens_at(self, lost_at: Instant) -> Instant:
        return Instant(lost_at + self.spec.deadlines.minority_wait_s)

    # PREPARE: a number is free of earlier proposals once a quorum has promised it. Number 0 is the coordinator's.

    def _open_attempt(self, empty: str, now: Instant) -> list[Effect]:
        """Use the next number; `empty` is why the round is to be empty, if it is."""
        number = self._next_number
        self._next_number += 1
        self._used[self.ledger.epoch, self.ledger.round + 1] = number
        deadline = Instant(now + self.spec.deadlines.vote_s * LEADER_SLACK)
        attempt = self._attempt = Attempt(number, deadline, empty)
        opened: list[Effect] = [Persist(Opened(self.ledger.epoch, self.ledger.round + 1, number))]
        if number == 0:
            return opened + self._form(now)
        self._enter(Phase.PREPARE)
        prepare = Prepare(self.ledger.epoch, self.ledger.round + 1, number, self.me)
        own = self._voter.prepared(prepare, self.ledger) if self._voter is not None else None
        if own is None:
            pass
        elif isinstance(own, Promise):
            opened.append(Persist(own))
            attempt.promises[self.me] = own
        else:
            self._pass_number(own.attempt, ATTEMPTS_MAX)
        return [*opened, Tell(self._voters_here(), Signed(self._sealer.seal(prepare)))]

    def _prepare(self, now: Instant) -> list[Effect] | None:
        attempt = self._running()
        left = self._left_for(attempt)
        # Any quorum will do. One of voters that report no doubtful proposal goes before one with such voters: one that
        # can't be committed would be proposed again for ever, and one that was made up would take the round.
        doubtful = self._doubtful(attempt)
        free = {peer: promise for peer, promise in attempt.promises.items() if peer not in doubtful}
        promises = free if policy.is_quorum(free, self.ledger.voters, self._coordinator, left) else attempt.promises
        if promises is not free and now < attempt.deadline_at and self._can_free_come(attempt, free, now):
            return self._wait(f"promises beside {named(doubtful)}")
        if policy.is_quorum(promises, self.ledger.voters, self._coordinator, left):
            known: list[Promise | Leave] = [*promises.values(), *(leave for leave, _ in self._left.values())]
            voted = [(item.voted_attempt, item.proposal) for item in known if item.proposal is not None]
            if not voted:
                return self._form(now)
            proposal = max(voted, key=lambda each: (each[0], each[1].body))[1]
            orders = self._body_orders.get(proposal.body, ())
            return self._propose(proposal, self._bodies[proposal.body], orders, now)
        silent = [peer for peer in self.ledger.voters if peer not in attempt.promises and not self._is_mine(peer)]
        coming = [peer for peer in silent if self.members.expected(peer, now)]
        if now >= attempt.deadline_at or not self._can_reach_quorum(attempt, [*attempt.promises, *coming]):
            self._pass_bounds(attempt, [] if now >= attempt.deadline_at else coming, now)
            return self._fail("no quorum of promises" + because(attempt.refused), now)
        return self._wait(f"promises of {named(silent)}")

    def _heard_bound(self, attempt: Attempt, peer: PeerId, number: int) -> None:
        """A voter names the higher number that it is bound to. Who has named a lower one may well have lied then."""
        if peer not in attempt.bound and attempt.number > self._named.get(peer, ATTEMPTS_MAX):
            self._n_untrue[peer] = self._n_untrue.get(peer, 0) + 1
        self._named[peer] = attempt.bound[peer] = number

    def _pass_bounds(self, attempt: Attempt, coming: Collection[PeerId], now: Instant) -> None:
        """Pass what voters are bound to without whom there is no quorum, as far as voters follow a stand-in.

        Fewest words that did not hold first, then the lowest number: so a liar that can be done without moves nobody.
        A coordinator that comes back can't know for how long the round has lasted.
        """
        left = self._left_for(attempt)
        able = [peer for peer in (*attempt.promises, *coming) if peer not in attempt.refused and peer not in self._left]
        number = -1
        for peer in sorted(attempt.bound, key=lambda each: (self._n_untrue.get(each, 0), attempt.bound[each], each)):
            if policy.is_quorum(able, self.ledger.voters, self._coordinator, left):
                break
            able.append(peer)
            number = max(number, attempt.bound[peer])
        if policy.is_quorum(able, self.ledger.voters, self._coordinator, left):
            mine = self.me == self._coordinator
            lasted_s = max(now - self._head_since, self.spec.deadlines.max_absence_s if mine else 0.0)
            self._pass_number(number, 2 * policy.numbers_most(lasted_s))

    def _taken(self, event: Heard, report: R) -> tuple[R, list[Effect]]:
        """A promise or leave as it counts: without what it reports, where no honest voter can have signed that."""
        if report.proposal is None or event.body is None:
            return report, []
        if not (fault := self._judged_fault(Carried(report, event.body, event.evidence, event.fault), event.orders)):
            self._know(report.proposal, event.body, event.orders)
            return report, []
        told: list[Effect] = []
        if event.peer not in self._told_of:
            self._told_of.add(event.peer)
            what = f"reports a proposal for round {report.round} that no voter can have signed: {fault}"
            told = [Say(f"{event.peer[-6:]} {what}")]
            if member := self.members.get(event.peer):
                member.story.append(what)
        return replace(report, voted_attempt=-1, proposal=None), told

    def _judged_fault(self, carried: Carried, given: tuple[OpenedOrder, ...]) -> str:
        """`carried_fault`, which builds a round's body again, once for all voters that report the same."""
        report = carried.report
        key = (type(report), report.attempt, report.voted_attempt, report.proposal)
        if (fault := self._judged.get(key)) is None:
            orders = self._with_needs(given)
            fault = self._judged[key] = carried_fault(carried, self.ledger, self.spec, self._coordinator, orders)
            while len(self._judged) > JUDGED_KEPT:
                del self._judged[next(iter(self._judged))]
        return fault

    def _doubtful(self, attempt: Attempt) -> set[PeerId]:
        """Who reports a proposal that is better not made again, if a quorum can be had beside it.

        One that failed because of what is in it; an empty round, for which there is no evidence but that voter's word,
        unless it carries orders; and one that only the leader which first made it reports to have voted for.
        """
        carriers: dict[bytes, list[PeerId]] = {}
        for peer, promise in attempt.promises.items():
            if promise.proposal is not None:
                carriers.setdefault(promise.proposal.body, []).append(peer)
        doubtful: set[PeerId] = set()
        for raw, peers in carriers.items():
            body = self._bodies[raw]
            mine = raw in self._proposed_here or self.me in peers
            groundless = body.outcome is Outcome.EMPTY and not body.orders
            if raw in self._unhad or (not mine and (groundless or peers == [body.leader])):
                doubtful.update(peers)
        return doubtful

    def _can_free_come(self, attempt: Attempt, free: Collection[PeerId], now: Instant) -> bool:
        """Whether some are bound to what can't be had, and the others that may still promise make a quorum."""
        if len(free) == len(attempt.promises):
            return False
        silent = [peer for peer in self.ledger.voters if peer not in attempt.promises and not self._is_mine(peer)]
        return self._can_reach_quorum(attempt, [*free, *(p for p in silent if self.members.expected(p, now))])

    def _can_reach_quorum(self, attempt: Attempt, able: Collection[PeerId]) -> bool:
        """Whether those of the able who have neither refused nor left would make one."""
        able = [peer for peer in able if peer not in attempt.refused and peer not in self._left]
        return policy.is_quorum(able, self.ledger.voters, self._coordinator, self._left_for(attempt))
