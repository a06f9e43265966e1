"""The phases of a running attempt as its leader goes through them: from the plan over results to a commit or a failure.

What each waits for, and what comes next. `_enter` is the one place where the phase changes.
"""

from __future__ import annotations

from collections.abc import Collection

from coordinator.rounds import policy, proposing
from coordinator.rounds.attempt import Attempt, Phase, deal_for, plan_for
from coordinator.rounds.events import (
    Committed,
    Effect,
    Instant,
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
    Outcome,
    PeerId,
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


class Attempts(RoundState):
    """The moves of a leader within an attempt."""

    # COMMITMENT: the plan is out; each sender signs what it will send.

    def _form(self, now: Instant) -> list[Effect]:
        attempt, roll = self._running(), self._roll(now)
        if attempt.empty:
            return self._propose_new(None, attempt.empty, now)
        senders = roll.contributors()
        if len(senders) < self.spec.membership.min_contributors:
            return self._fail(f"only {len(senders)} contributors are left", now)
        able = self._could_reduce(now)
        reducers = [m for m in able if not m.observer and m.peer not in self._out_reducers]
        if len(reducers) < policy.REACHABLE_ENOUGH:
            reducers += [m for m in able if m.observer and m.peer not in self._out_reducers]
        if not reducers:
            if self._none_is_able(able):
                return self._propose_new(None, self._why_unable(), now)
            self._out_reducers = set(self._unable)  # blamed or not, there is nobody else
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

    def _could_reduce(self, now: Instant) -> list[Member]:
        """Contributors and observers that can be reached and hold the state, blamed or not."""
        observers = [m for m in self.members if m.observer and self.members.holds(m.peer, self.ledger, now)]
        return [m for m in (*self._roll(now).contributors(), *observers) if m.reachable]

    def _none_is_able(self, reducers: Collection[Member]) -> bool:
        """Whether all of those who could reduce have said that they can't: another attempt would end like this one."""
        return bool(reducers) and all(member.peer in self._unable for member in reducers)

    def _why_unable(self) -> str:
        return f"nobody who could reduce is able to combine the contributions: {named(self._unable)}"

    def _commitment(self, now: Instant) -> list[Effect] | None:
        attempt = self._running()
        if attempt.outbid > attempt.number:
            return self._fail(f"number {attempt.outbid} has been promised{because(attempt.declined)}", now)
        missing = [peer for peer in attempt.losses if peer not in attempt.commitments]
        if now < attempt.deadline_at and any(not self._is_lost(attempt, peer, now) for peer in missing):
            return self._wait(f"commitments of {named(missing)}")
        for peer in [peer for peer in attempt.commitments if self._is_lost(attempt, peer, now)]:
            del attempt.commitments[peer]
        if not attempt.commitments:
            reason = f"no commitment came from {named(attempt.losses)}{because(attempt.declined)}"
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
        included = {peer: attempt.commitments[peer][0] for peer in attempt.included}
        if reason := policy.refused(self.spec, included, attempt.deal.excluded):
            whose = listed([f"{entry.peer[-6:]}: {entry.reason}" for entry in attempt.deal.excluded], "; ")
            reason = f"{reason} ({whose})" if attempt.deal.excluded else reason
            return self._propose_new(None, reason[:REASON_MOST], now)
        attempt.declined.clear()
        attempt.deal_envelope = self._sealer.seal(attempt.deal)
        attempt.deadline_at = Instant(now + self.spec.deadlines.exchange_s * LEADER_SLACK)
        self._enter(Phase.EXCHANGE)
        everyone = tuple(sorted({*attempt.commitments, *reducers}))
        return [Tell(everyone, Signed(attempt.deal_envelope))]

    # EXCHANGE: senders stream, reducers combine and sign results. Of a chunk's replicas only one need be left; where a
    # sender dies before enough of them have its rows, the attempt fails.

    def _exchange(self, now: Instant) -> list[Effect] | None:
        attempt = self._running()
        awaited = [peer for peer in attempt.reducers if peer not in attempt.results]
        lost = {peer for peer in (*attempt.included, *attempt.reducers) if self._is_lost(attempt, peer, now)}
        silent = [peer for peer in awaited if peer not in lost and peer not in attempt.claims]
        if lost and attempt.is_stuck(lost | (attempt.claims.keys() - attempt.results.keys())):
            return self._lost(attempt, lost, now)
        # A sender that gives its rows to one reducer alone has that one decide: not before enough of them agree.
        disputed = not attempt.is_agreed() and any(attempt.claims.get(peer) for peer in awaited)
        covered = attempt.is_covered() and not disputed
        if not awaited or (covered and not silent) or self._need_no_more(attempt, silent, now):
            return self._reduced(attempt, now)
        if lost & set(attempt.included):
            return self._lost(attempt, lost, now)
        if silent and now < attempt.deadline_at:
            return self._wait(f"results of {named(awaited)}")
        if covered:
            return self._reduced(attempt, now)
        self._unable |= {peer for peer in awaited if attempt.claims.get(peer) == set()}
        if self._none_is_able(self._could_reduce(now)):
            return self._propose_new(None, self._why_unable(), now)
        senders, reducers = policy.blame({peer: attempt.claims.get(peer, set()) for peer in awaited})
        # Who neither has results nor says whose rows are missing is itself at fault.
        reducers |= {peer for peer in awaited if not attempt.claims.get(peer)}
        self._out_senders |= senders
        self._out_reducers |= reducers
        return self._fail(f"rows or results did not come in time; without {named(senders | reducers)} next", now)

    def _lost(self, attempt: Attempt, lost: Collection[PeerId], now: Instant) -> list[Effect]:
        """Go on without whom the exchange has lost; who is here and refuses the deal would refuse the next one too."""
        outbid = attempt.outbid > attempt.number  # by another leader: it would do its part in a higher number
        unwilling = set() if outbid else {peer for peer in lost if peer in attempt.declined}
        self._out_senders |= unwilling
        self._out_reducers |= unwilling
        return self._fail(f"lost {named(lost)}{because(attempt.declined)}", now)

    def _need_no_more(self, attempt: Attempt, silent: Collection[PeerId], now: Instant) -> bool:
        """Whether enough replicas agree, and the others are not here or have had a little longer."""
        if not attempt.is_agreed():
            return False
        if attempt.enough_at is None:
            attempt.enough_at = now
        late = now >= attempt.enough_at + self.spec.deadlines.gone_grace_s
        return late or not any(self.members.fresh(peer, now) for peer in silent)

    def _reduced(self, attempt: Attempt, now: Instant) -> list[Effect]:
        evidence = attempt.evidence()
        if evidence is None:
            raise InvariantBroken("an exchange without a deal")
        if faults := proposing.evidence_faults(evidence, self.ledger, self.spec):
            accused = {peer for peer in attempt.results if any(peer in fault for fault in faults)}
            self._out_reducers |= proposing.dissenters(evidence) & accused or accused or set(attempt.results)
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
            # A reducer whose results are not what it signed, or not to be had, is not asked again in this round.
            reasons = attempt.refused.values()
            self._out_reducers |= {peer for peer in attempt.results if any(peer in reason for reason in reasons)}
            return effects + self._fail("no quorum of votes" + because(attempt.refused), now)
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


def because(refused: dict[PeerId, str]) -> str:
    """The reasons of those who refused, for people."""
    if not refused:
        return ""
    return "; " + listed([f"{peer[-6:]}: {reason[:100]}" for peer, reason in sorted(refused.items())], "; ")
