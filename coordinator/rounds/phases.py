"""The phases of a round as its leader goes through them: what each waits for, and what comes next.

One phase at a time (`attempt.Phase`); `_enter` is the one place where it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from coordinator.rounds import policy, proposing
from coordinator.rounds.attempt import Attempt, Phase, deal_for, plan_for
from coordinator.rounds.events import (
    Close,
    Committed,
    Effect,
    Ended,
    Instant,
    Opened,
    Persist,
    Probe,
    Say,
    Tell,
)
from coordinator.rounds.ledger import fold
from coordinator.rounds.members import Member, listed, named
from coordinator.rounds.state import FAILED_KEPT, InvariantBroken, RoundState
from protos.hashes import body_hash, commit_hash, plan_hash
from protos.messages import (
    AttemptFailed,
    Body,
    Commit,
    Goodbye,
    Leave,
    MemberState,
    Outcome,
    PeerId,
    Prepare,
    Promise,
    Proposal,
    Propose,
    Refusal,
    Signed,
)

LEADER_SLACK = 1.25
"""The leader waits this much longer than members do, so that their word on what is missing comes first."""
RETRY_FIRST_S = 0.25
RETRY_MAX_S = 10.0
REASON_MOST = 1000
"""Characters of a reason, below the wire's limit."""


class Phases(RoundState):
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
            return self._fail("no quorum of promises" + _because(attempt.refused), now)
        return self._wait(f"promises of {named(silent)}")

    def _can_reach_quorum(self, attempt: Attempt, able: Collection[PeerId]) -> bool:
        """Whether those of the able who have neither refused nor left would make one."""
        able = [peer for peer in able if peer not in attempt.refused and peer not in self._left]
        return policy.is_quorum(able, self.ledger.voters, self._coordinator, self._left_for(attempt))

    # COMMITMENT: the plan is out; each sender signs what it will send.

    def _form(self, now: Instant) -> list[Effect]:
        attempt, roll = self._running(), self._roll(now)
        if attempt.empty:
            return self._propose_new(None, attempt.empty, now)
        senders = roll.contributors()
        if len(senders) < self.spec.membership.min_contributors:
            return self._fail(f"only {len(senders)} contributors are left", now)
        reducers = [m for m in senders if m.reachable and m.peer not in self._out_reducers]
        if len(reducers) < policy.REACHABLE_ENOUGH:
            reducers += [m for m in self.members if m.observer and self._can_reduce(m, now)]
        if not reducers:
            self._out_reducers = set()  # blamed or not, there is nobody else
            return self._fail("nobody who could reduce can be reached", now)
        attempt.plan = plan_for(
            self.ledger,
            self.spec,
            attempt=attempt.number,
            leader=self.me,
            senders={m.peer: m.record.sequence for m in senders},
            reducers={m.peer: m.record.sequence for m in reducers},
        )
        attempt.losses = {member.peer: member.n_lost for member in senders}
        attempt.outbid = -1
        attempt.plan_hash = plan_hash(self._sealer.encode(attempt.plan))
        attempt.plan_envelope = self._sealer.seal(attempt.plan)
        attempt.deadline_at = Instant(now + self.spec.deadlines.commitment_s * LEADER_SLACK)
        self._enter(Phase.COMMITMENT)
        return [*self._relay_news(now), Tell(attempt.members(), Signed(attempt.plan_envelope))]

    def _can_reduce(self, member: Member, now: Instant) -> bool:
        holds = self.members.holds(member.peer, self.ledger, now)
        return holds and bool(member.reachable) and member.peer not in self._out_reducers

    def _commitment(self, now: Instant) -> list[Effect] | None:
        attempt = self._running()
        if attempt.outbid > attempt.number:
            return self._fail(f"number {attempt.outbid} has been promised{_because(attempt.declined)}", now)
        missing = [peer for peer in attempt.losses if peer not in attempt.commitments]
        if now < attempt.deadline_at and any(not self._is_lost(attempt, peer, now) for peer in missing):
            return self._wait(f"commitments of {named(missing)}")
        for peer in [peer for peer in attempt.commitments if self._is_lost(attempt, peer, now)]:
            del attempt.commitments[peer]
        if not attempt.commitments:
            reason = f"no commitment came from {named(attempt.losses)}{_because(attempt.declined)}"
            if all(peer in attempt.declined and not self._lost_progress(attempt, peer) for peer in attempt.losses):
                return self._propose_new(None, reason[:REASON_MOST], now)  # they start again from the anchor
            return self._fail(reason, now)
        # Who has nothing to contribute may still reduce.
        planned = [member.peer for member in (attempt.plan.members if attempt.plan else ()) if member.reducer]
        reducers = [peer for peer in planned if peer not in self._left and self.members.expected(peer, now)]
        if not reducers:
            return self._fail("nobody who could reduce is left", now)
        deal_for(attempt, self.ledger, self.spec, reducers)
        if attempt.deal is None:
            raise InvariantBroken("nothing was dealt")
        if reason := policy.refused(self.spec, len(attempt.included)):
            whose = listed([f"{entry.peer[-6:]}: {entry.reason}" for entry in attempt.deal.excluded], "; ")
            reason = f"{reason} ({whose})" if attempt.deal.excluded else reason
            return self._propose_new(None, reason[:REASON_MOST], now)
        attempt.declined.clear()
        attempt.deal_envelope = self._sealer.seal(attempt.deal)
        attempt.deadline_at = Instant(now + self.spec.deadlines.exchange_s * LEADER_SLACK)
        self._enter(Phase.EXCHANGE)
        everyone = tuple(sorted({*attempt.commitments, *reducers}))
        return [Tell(everyone, Signed(attempt.deal_envelope))]

    # EXCHANGE: senders stream, reducers combine and sign results. A death here fails the attempt.

    def _exchange(self, now: Instant) -> list[Effect] | None:
        attempt = self._running()
        awaited = [peer for peer in attempt.reducers if peer not in attempt.results]
        if not awaited:
            return self._reduced(attempt, now)
        lost = {peer for peer in (*attempt.included, *attempt.reducers) if self._is_lost(attempt, peer, now)}
        if lost:
            return self._fail(f"lost {named(lost)}{_because(attempt.declined)}", now)
        silent = [peer for peer in awaited if peer not in attempt.claims]
        if now >= attempt.deadline_at or not silent:
            senders, reducers = policy.blame({peer: attempt.claims.get(peer, set()) for peer in awaited})
            # Who neither has results nor says whose rows are missing is itself at fault.
            reducers |= {peer for peer in awaited if not attempt.claims.get(peer)}
            self._out_senders |= senders
            self._out_reducers |= reducers
            return self._fail(f"rows or results did not come in time; without {named(senders | reducers)} next", now)
        return self._wait(f"results of {named(awaited)}")

    def _reduced(self, attempt: Attempt, now: Instant) -> list[Effect]:
        evidence = attempt.evidence()
        if evidence is None:
            raise InvariantBroken("an exchange without a deal")
        if faults := proposing.evidence_faults(evidence, self.ledger, self.spec):
            culprits = [peer for peer in attempt.results if any(peer in fault for fault in faults)]
            self._out_reducers |= set(culprits or attempt.results)
            return self._fail(listed(faults, "; "), now)
        return self._propose_new(evidence, "", now)

    # VOTE: a proposal is out; a quorum on one pair of body and digest commits it.

    def _propose_new(self, evidence: proposing.Evidence | None, reason: str, now: Instant) -> list[Effect]:
        attempt = self._running()
        body = proposing.build_body(
            self.ledger,
            self.spec,
            self._coordinator,
            attempt=attempt.number,
            leader=self.me,
            evidence=evidence,
            reason=reason,
            seated=self._roll(now).seatable(),
            left=list(self._left),
        )
        proposal = Proposal(
            body=self._sealer.encode(body),
            plan=attempt.plan_envelope if evidence else b"",
            deal=attempt.deal_envelope if evidence else b"",
            results=tuple(attempt.results[peer][1] for peer in sorted(attempt.results)) if evidence else (),
            result_hashes=proposing.result_hashes(evidence, self.spec) if evidence else (),
        )
        return [Persist(proposal), *self._propose(proposal, body, now)]

    def _propose(self, proposal: Proposal, body: Body, now: Instant) -> list[Effect]:
        attempt = self._running()
        self._know(proposal, body)
        attempt.proposal, attempt.body, attempt.body_hash = proposal, body, body_hash(proposal.body)
        attempt.deadline_at = Instant(now + self.spec.deadlines.vote_s * LEADER_SLACK)
        attempt.propose_envelope = self._sealer.seal(self._propose_message(attempt))
        attempt.refused.clear()
        self._enter(Phase.VOTE)
        return [Tell(self._members_here(), Signed(attempt.propose_envelope))]

    def _propose_message(self, attempt: Attempt) -> Propose:
        if attempt.proposal is None:
            raise InvariantBroken("nothing to propose")
        holders = tuple(member.peer for member in self.members if member.connected and member.reachable)
        here = (self.ledger.epoch, self.ledger.round + 1, attempt.number, self.me)
        return Propose(*here, self.spec.deadlines.vote_s, attempt.proposal, holders)

    def _vote(self, now: Instant) -> list[Effect] | None:
        attempt = self._running()
        effects = self._own_vote(attempt)
        for digest in dict.fromkeys(vote.digest for vote, _ in attempt.votes.values()):
            signers = [peer for peer, (vote, _) in sorted(attempt.votes.items()) if vote.digest == digest]
            left = self._left_for(attempt) - set(signers)  # who voted and left afterwards has voted
            if not policy.is_quorum(signers, self.ledger.voters, self._coordinator, left):
                continue
            reachable = [member.peer for member in self.members if member.reachable]
            voters = [voter for voter in self.ledger.voters if voter not in left]
            if policy.spread_enough(signers, voters, self._coordinator, reachable):
                return effects + self._committed(attempt, digest, signers, left, now)
        if now >= attempt.deadline_at or (not self._can_commit(attempt, now) and self._could_open(now)):
            return effects + self._fail("no quorum of votes" + _because(attempt.refused), now)
        missing = set(self.ledger.voters) - set(attempt.votes) - {self._coordinator}
        self._wait(f"votes of {named(missing)}")
        return effects or None

    def _can_commit(self, attempt: Attempt, now: Instant) -> bool:
        """Whether the votes that have come and those that may still come would make a quorum."""
        able = [
            peer
            for peer in self.ledger.voters
            if peer not in attempt.refused
            and peer not in self._left
            and (self._can_vote(now) if peer == self.me else self.members.expected(peer, now))
        ]
        left = self._left_for(attempt) - set(attempt.votes)
        return policy.is_quorum({*attempt.votes, *able}, self.ledger.voters, self._coordinator, left)

    def _can_vote(self, now: Instant) -> bool:
        """Whether this leader's own vote may still come: an observer is there to compute the digest."""
        return any(member.observer and self.members.expected(member.peer, now) for member in self.members)

    def _could_open(self, now: Instant) -> bool:
        """Whether another attempt could be opened now. If not, giving this one up would gain nothing."""
        return not self._roll(now).absent_voters(self.me, self._coordinator)

    def _own_vote(self, attempt: Attempt) -> list[Effect]:
        """This leader's own vote, once the digest is known: the head's for an empty round, else the observer's word."""
        if attempt.body is None or self.me in attempt.votes or self.me not in self.ledger.voters:
            return []
        empty = attempt.body.outcome is Outcome.EMPTY
        digest = self.ledger.digest if empty else self._digests.get(attempt.body_hash)
        if digest is None:
            return []
        voted = self._voter.voted(self._propose_message(attempt), attempt.body_hash, digest, self.ledger)
        if isinstance(voted, Refusal):
            attempt.refused[self.me] = voted.reason
            return []
        vote, record = voted
        attempt.votes[self.me] = (vote, self._sealer.seal(vote))
        return [Persist(record)]

    def _committed(
        self, attempt: Attempt, digest: bytes, signers: list[PeerId], left: Collection[PeerId], now: Instant
    ) -> list[Effect]:
        if attempt.body is None or attempt.proposal is None:
            raise InvariantBroken("nothing to commit")
        votes = [attempt.votes[peer][1] for peer in signers]
        votes += [self._left[peer][1] for peer in sorted(left) if peer in self.ledger.voters]
        raw = attempt.proposal.body
        self.commit = Commit(raw, digest, attempt.number, tuple(votes), attempt.proposal.result_hashes)
        hash_ = commit_hash(raw, digest)
        self.ledger = fold(self.ledger, attempt.body).at(hash_, digest)
        committed = Committed(self.commit, attempt.body, hash_, tuple(self._failed))
        self._begin_round(now)
        here = self._members_here()
        for member in self.members:
            if member.connected:
                member.told_head_at = now
        # Who could not be reached, or was blamed for it, is tried again.
        probes = [
            Probe(m.peer, m.record.grpc) for m in self.members if m.connected and m.record.grpc and not m.reachable
        ]
        return [committed, Tell(here, self.commit), *probes]

    def _fail(self, reason: str, now: Instant) -> list[Effect]:
        """Give the attempt up; the next number follows after a pause that doubles."""
        attempt = self._running()
        failed = AttemptFailed(self.ledger.epoch, self.ledger.round + 1, attempt.number, reason[:REASON_MOST])
        self._failed = [*self._failed, failed][-FAILED_KEPT:]
        pause_s = min(RETRY_FIRST_S * 2.0 ** min(self._n_retries, 10), RETRY_MAX_S)
        self._n_retries += 1
        self._retry_at = Instant(now + pause_s)
        self._attempt = None
        self._enter(Phase.TRAIN)
        told = f"attempt {attempt.number} of round {failed.round} failed: {reason}"
        return [Say(told), Tell(self._members_here(), failed)]

    # ENDED: everyone is told once it has the last state.

    def _end(self, now: Instant) -> list[Effect] | None:
        done = [m for m in self.members if m.connected and m.head == self.ledger.head and not m.observer]
        effects: list[Effect] = []
        for member in done:
            if member.state is not MemberState.APPLYING:
                effects.append(Close(member.peer, Goodbye("ended", self._ended)))
                self.members.disconnected(member.peer, now)
        return effects or None


def _because(refused: dict[PeerId, str]) -> str:
    """The reasons of those who refused, for people."""
    if not refused:
        return ""
    return "; " + listed([f"{peer[-6:]}: {reason[:100]}" for peer, reason in sorted(refused.items())], "; ")
