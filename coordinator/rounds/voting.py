"""A proposal as its leader takes it to the votes: a quorum on one pair of body and digest commits it, or it fails."""

from __future__ import annotations

from collections.abc import Collection

from coordinator.rounds import policy, proposing
from coordinator.rounds.attempt import Attempt, Phase
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
from coordinator.rounds.members import listed, named
from coordinator.rounds.state import FAILED_KEPT, InvariantBroken, RoundState
from protos.hashes import body_hash, commit_hash
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


class Voting(RoundState):
    """The moves of a leader around a proposal, and how an attempt ends."""

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
