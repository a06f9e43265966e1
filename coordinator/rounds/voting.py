"""A proposal as its leader takes it to the votes: a quorum on one pair of body and digest commits it, or it fails."""

from __future__ import annotations

from collections.abc import Collection

from coordinator.rounds import policy, proposing, work
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
from coordinator.rounds.ordering import Ordering
from coordinator.rounds.state import FAILED_KEPT, LEAVES_BYTES, InvariantBroken
from protos import limits
from protos.hashes import body_hash, commit_hash
from protos.messages import (
    AttemptFailed,
    Body,
    Commit,
    Head,
    Outcome,
    PeerId,
    Proposal,
    Propose,
    Refusal,
    Signed,
)
from protos.orders import OpenedOrder

LEADER_SLACK = 1.25
"""The leader waits this much longer than members do, so that their word on what is missing comes first."""
UNHAD = "results: "
"""What the reason begins with by which a voter says that the results of a proposal could not be had."""
RETRY_FIRST_S = 0.25
RETRY_MAX_S = 10.0
PROBE_EVERY_S = 30.0
"""While rounds fail since nobody can be reached, all are tried again so often: longer than a try takes."""
UNSIGNED_S = 24 * 3600.0
FIELD_BYTES = 8
"""What stands around one item of a list, at most."""
COMMIT_EXTRA_BYTES = 4096
"""What else a commit holds."""
REASON_MOST = 1000
"""Characters of a reason, below the wire's limit."""


class Voting(Ordering):
    """The moves of a leader around a proposal, and how an attempt ends."""

    # VOTE: a proposal is out; a quorum on one pair of body and digest commits it.

    def _propose_new(self, evidence: proposing.Evidence | None, reason: str, now: Instant) -> list[Effect]:
        attempt = self._running()
        orders = self._carried(empty=evidence is None)
        chosen: work.Works | list[PeerId]
        if orders.keeps_leases(self.ledger):
            chosen = self._choose_seats(now, evidence.included() if evidence and not reason else ())
        else:
            chosen = self._roll(now).seatable()  # each begins anew
        body = proposing.build_body(
            self.ledger,
            self.spec,
            self._coordinator,
            attempt=attempt.number,
            leader=self.me,
            evidence=evidence,
            reason=reason,
            seated=chosen,
            left=list(self._left),
            orders=orders,
        )
        try:
            raw = self._sealer.encode(body)
        except ValueError as error:
            return self._fail(f"what it comes to can't be proposed: {error}", now)
        proposal = Proposal(
            body=raw,
            plan=attempt.plan_envelope if evidence else b"",
            deal=attempt.deal_envelope if evidence else b"",
            results=tuple(attempt.results[peer][1] for peer in sorted(attempt.results)) if evidence else (),
            result_hashes=proposing.result_hashes(evidence, self.spec) if evidence else (),
            redeal=attempt.redeal_envelope if evidence else b"",
        )
        proposed = self._propose(proposal, body, orders.given, now)
        return [Persist(proposal), *proposed] if self._attempt is attempt else proposed

    def _propose(self, proposal: Proposal, body: Body, orders: tuple[OpenedOrder, ...], now: Instant) -> list[Effect]:
        attempt = self._running()
        self._know(proposal, body, orders)
        self._proposed_here.add(proposal.body)
        rollback = self._orders_of(proposal).rollback
        if rollback is not None and self._orders_of(proposal).target is None:
            return self._fail(f"the books after round {rollback.order.round}, to go back to, are not here", now)
        attempt.proposal, attempt.body, attempt.body_hash = proposal, body, body_hash(proposal.body)
        attempt.deadline_at = Instant(now + self.spec.deadlines.vote_s * LEADER_SLACK)
        if (n_bytes := _commit_bytes(proposal)) > limits.MESSAGE_BYTES:
            return self._fail(f"its commit could take {n_bytes} bytes, at most {limits.MESSAGE_BYTES} can be", now)
        try:
            attempt.propose_envelope = self._sealer.seal(self._propose_message(attempt))
        except ValueError as error:
            return self._fail(f"what it comes to can't be proposed: {error}", now)
        attempt.refused.clear()
        attempt.rejected.clear()
        self._enter(Phase.VOTE)
        return [Tell(self._members_here(), Signed(attempt.propose_envelope))]

    def _propose_message(self, attempt: Attempt) -> Propose:
        if attempt.proposal is None:
            raise InvariantBroken("nothing to propose")
        holders = tuple(member.peer for member in self.members if member.connected and member.reachable)
        holders = holders[: limits.MEMBERS]
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
        hopeless = not self._can_commit(attempt, now) and (self._could_open(now) or self._is_rejected(attempt))
        if now >= attempt.deadline_at or hopeless:
            # A reducer whose results are not what it signed, or not to be had, is not asked again in this round.
            reasons = attempt.refused.values()
            unhad = any(UNHAD in reason for reason in reasons)
            if attempt.proposal is not None and (unhad or self._is_rejected(attempt)):
                self._unhad.add(attempt.proposal.body)
            self._out_reducers |= {peer for peer in attempt.results if any(peer in reason for reason in reasons)}
            return effects + self._fail("no quorum of votes" + because(attempt.refused), now)
        self._wait(self._awaited_votes(attempt))
        return effects or None

    def _awaited_votes(self, attempt: Attempt) -> str:
        """For people: whose votes may still come."""
        silent = [peer for peer in self.ledger.voters if peer not in attempt.votes and peer not in attempt.refused]
        others = [peer for peer in silent if peer not in (self._coordinator, *self._left)]
        told = [f"votes of {named(others)}"] if others else []
        if any(self._is_mine(peer) for peer in silent):
            told.append("the observer's digest, for this leader's own vote")
        return " and ".join(told) or f"other votes than those of {named(attempt.votes)}"

    def _can_commit(self, attempt: Attempt, now: Instant) -> bool:
        """Whether the votes that have come and those that may still come would make a quorum."""
        able = [
            peer
            for peer in self.ledger.voters
            if peer not in attempt.refused
            and peer not in self._left
            and (self._can_vote(now) if self._is_mine(peer) else self.members.expected(peer, now))
        ]
        left = self._left_for(attempt) - set(attempt.votes)
        return policy.is_quorum({*attempt.votes, *able}, self.ledger.voters, self._coordinator, left)

    def _is_rejected(self, attempt: Attempt) -> bool:
        """Whether so many won't have the proposal that nobody else's vote can commit it."""
        able = [peer for peer in self.ledger.voters if peer not in attempt.rejected]
        left = self._left_for(attempt) - set(attempt.votes)
        return not policy.is_quorum(able, self.ledger.voters, self._coordinator, left)

    def _could_open(self, now: Instant) -> bool:
        """Whether another attempt could be opened now. If not, giving this one up would gain nothing."""
        body = self._running().body
        return not self._lacking_voters(now, empty=body is not None and body.outcome is Outcome.EMPTY)

    def _own_vote(self, attempt: Attempt) -> list[Effect]:
        """This leader's own vote, once the digest is known: the head's for an empty round, else the observer's word."""
        if self._voter is None or attempt.body is None or self.me in attempt.votes or self.me not in self.ledger.voters:
            return []
        same = attempt.body.outcome is Outcome.EMPTY and attempt.body.anchor_digest == self.ledger.digest
        digest = self.ledger.digest if same else self._digests.get(attempt.body_hash)
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
        orders = self._orders_of(attempt.proposal)
        self.ledger = fold(self.ledger, attempt.body, orders.given, orders.target).at(hash_, digest)
        committed = Committed(self.commit, attempt.body, hash_, tuple(self._failed), orders.given, orders.target)
        self._learn_orders(orders.given)
        counted = [entry.peer for entry in attempt.body.members if entry.counted]
        told = self._seating.round_over(attempt.body.round, self._failures(now, counted), counted)
        empty = attempt.body.outcome is Outcome.EMPTY
        self._begin_round(now)
        if not orders.given:  # the operator's orders make no round that failed
            self._n_empty = self._n_empty + 1 if empty else 0
        if (n_more := self._n_empty - work.LEASE_ROUNDS_MOST) >= 0:  # leases are full: nothing else takes time any more
            self._retry_at = Instant(now + min(RETRY_FIRST_S * 2.0 ** min(n_more, 10), RETRY_MAX_S))
        here = self._members_here()
        for member in self.members:
            if member.connected:
                member.told_head_at = now
        evicted = self._put_out(attempt.body, now)
        probes = self._probe_again(now)
        return [committed, Tell(here, self.commit), *self._sign_head(now, here), *evicted, *probes, *map(Say, told)]

    def _probe_again(self, now: Instant, every_s: float = 0.0) -> list[Effect]:
        """Who could not be reached, or was blamed for it, is tried again, unless it was lately: a probe that runs
        gives way to a new one."""
        if now < self._probed_at + every_s:
            return []
        self._probed_at = now
        unreached = [m for m in self.members if m.connected and m.record.grpc and not m.reachable]
        return [Probe(member.peer, member.record.grpc) for member in unreached]

    def _sign_head(self, now: Instant, here: tuple[PeerId, ...]) -> list[Effect]:
        """The coordinator's word that this head is the run's: newcomers start from it, and nobody goes behind it.

        Where it has opened an epoch without a quorum, another branch may be larger: not before a day has passed.
        """
        ledger = self.ledger
        if self.me != self._coordinator or ledger.round == 0:
            return []
        if ledger.epoch > 0 and now < self._epoch_known_at + UNSIGNED_S:
            return []
        self._signed_head = self._sealer.seal(Head(ledger.epoch, ledger.round, ledger.head, ledger.digest))
        return [Tell(here, Signed(self._signed_head))] if here else []

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


def _commit_bytes(proposal: Proposal) -> int:
    """The most that a proposal's commit takes, whoever votes for it and leaves meanwhile."""
    votes = limits.VOTERS * (limits.VOTE_BYTES + limits.ENVELOPE_EXTRA_BYTES)
    hashes = sum(len(hash_) + FIELD_BYTES for hash_ in proposal.result_hashes)
    return len(proposal.body) + hashes + votes + LEAVES_BYTES + COMMIT_EXTRA_BYTES


def because(refused: dict[PeerId, str]) -> str:
    """The reasons of those who refused, for people."""
    if not refused:
        return ""
    return "; " + listed([f"{peer[-6:]}: {reason[:100]}" for peer, reason in sorted(refused.items())], "; ")
