"""A member's promises and votes: which proposals it takes for right, and what it signs."""

from __future__ import annotations

from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.orders import order_faults
from coordinator.rounds.voter import body_faults
from node.session import effects as fx
from node.session import events as ev
from node.session.effects import Effect
from node.session.part import evidence_of, verify_of
from node.session.taking_part import TakingPart
from protos import hashes
from protos.bounds import as_reason
from protos.messages import (
    Prepare,
    Promise,
    Refusal,
    Signed,
    StateDigest,
)


class Voting(TakingPart):
    """What a member does about a leader's numbers and proposals."""

    def _prepared(self, prepare: Prepare, now: Instant) -> list[Effect]:
        ledger = self.ledger
        if ledger is None or self._observer:
            return []
        self._note_attempt(prepare, ledger, now)
        if reason := self._succession.why_not(prepare.leader, ledger, now) or self._too_far(prepare, now):
            refusal = Refusal(prepare.epoch, prepare.round, prepare.attempt, reason)
            return [fx.TellLeader(refusal, prepare.leader)]
        answer = self._voter.prepared(prepare, ledger)
        if isinstance(answer, Promise):
            return [fx.Persist(answer), fx.TellLeader(Signed(self._sealer.seal(answer)))]
        return [fx.TellLeader(answer, prepare.leader)]

    def _proposal(self, event: ev.Proposed, now: Instant) -> list[Effect]:
        ledger, propose = self.ledger, event.propose
        if ledger is None or self._commit is not None or self._left or propose.round > ledger.round + 1:
            return []  # it is told again once the state has caught up
        self._note_attempt(propose, ledger, now)
        if not order_faults(event.orders, ledger, self.specs) and (needs := self._restore_for(event)) is not None:
            return needs
        refusal = self._why_not(event, ledger, now)
        if refusal is not None:
            told: list[Effect] = [fx.Say(f"refused to vote on round {propose.round}: {refusal.reason}")]
            return [*told, fx.TellLeader(refusal, propose.leader)] if self._is_voter(ledger) or self._observer else told
        self._proposed = event
        if self._candidate is not None and self._candidate[0] == event.body_hash:
            return self._cast()
        if self._verifying == event.body_hash:
            return []
        self._verifying = event.body_hash
        evidence, part = evidence_of(event, event.plan_hash), self._part
        same_plan = part is not None and part.dealt is not None and part.planned.plan_hash == event.plan_hash
        lines = part.lines if part is not None and same_plan else self._lines(evidence) if evidence else ()
        return [verify_of(event, evidence, lines, self.spec)]

    def _was_restored(self, event: ev.Restored, now: Instant) -> list[Effect]:
        self._restored(event)
        asked = self._restoring
        return self._proposal(asked, now) if asked is not None and asked.body_hash == event.body_hash else []

    def _restore_failed(self, body_hash: bytes, reason: str) -> list[Effect]:
        asked = self._restoring
        if asked is None or asked.body_hash != body_hash:
            return []
        self._restoring = None
        propose = asked.propose
        why = as_reason(f"the state to go back to: {reason}")
        refusal = Refusal(propose.epoch, propose.round, propose.attempt, why)
        is_asked = self.ledger is not None and (self._is_voter(self.ledger) or self._observer)
        return [fx.TellLeader(refusal, propose.leader)] if is_asked else []

    def _why_not(self, event: ev.Proposed, ledger: Ledger, now: Instant) -> Refusal | None:
        propose = event.propose
        if self._succession.is_superseded(propose.leader, now) and not self._has_promised(propose, ledger):
            return Refusal(propose.epoch, propose.round, propose.attempt, "hears the coordinator")
        if reason := self._too_far(propose, now):
            return Refusal(propose.epoch, propose.round, propose.attempt, reason)
        if self._is_voter(ledger) and (refusal := self._voter.would_vote(propose, ledger)):
            return refusal
        if reason := self._left_out(event):
            return Refusal(propose.epoch, propose.round, propose.attempt, reason)
        if faults := self._body_faults(event, ledger) or self._combined.faults(evidence_of(event, event.plan_hash)):
            return Refusal(propose.epoch, propose.round, propose.attempt, as_reason("; ".join(faults[:3])))
        return None

    def _body_faults(self, event: ev.Proposed, ledger: Ledger) -> list[str]:
        evidence = evidence_of(event, event.plan_hash)
        result_hashes = event.propose.proposal.result_hashes
        if self._lacks_spec():
            return [f"revision {ledger.spec_revision} of the RunSpec is not known here"]
        orders = self._orders_of(event)
        coordinator, attempt = self._coordinator, event.propose.attempt
        return body_faults(event.body, evidence, result_hashes, ledger, self.spec, coordinator, orders, attempt=attempt)

    def _is_voter(self, ledger: Ledger) -> bool:
        return self.me in ledger.voters and not self._observer

    def _was_verified(self, body_hash: bytes, digest: bytes) -> list[Effect]:
        if self._verifying == body_hash:
            self._verifying = None
        self._candidate = (body_hash, digest)
        return self._apply_or_verify() if self._commit is not None else self._cast()

    def _cast(self) -> list[Effect]:
        """Vote on the current proposal, whose results and next state are on disk."""
        proposed, ledger = self._proposed, self.ledger
        if proposed is None or ledger is None or self._candidate is None or self._candidate[0] != proposed.body_hash:
            return []
        if faults := self._combined.faults(evidence_of(proposed, proposed.plan_hash)):  # of what came since
            return self._verify_failed(proposed.body_hash, faults[0])
        digest = self._candidate[1]
        if self._observer:
            return [fx.TellLeader(StateDigest(proposed.body_hash, proposed.propose.attempt, digest))]
        if not self._is_voter(ledger):
            return []
        answer = self._voter.voted(proposed.propose, proposed.body_hash, digest, ledger)
        if isinstance(answer, Refusal):
            return [fx.TellLeader(answer, proposed.propose.leader)]
        vote, record = answer
        return [fx.Persist(record), fx.TellLeader(Signed(self._sealer.seal(vote)))]

    def _verify_failed(self, body_hash: bytes, reason: str) -> list[Effect]:
        if self._verifying == body_hash:
            self._verifying = None
        heard, proposed = self._commit, self._proposed
        if heard is not None and not self._applying and hashes.body_hash(heard.commit.body) == body_hash:
            told = f"could not follow round {heard.body.round} by its results ({reason}): fetching the state"
            return [fx.Say(told), *self._fetch(heard)]
        if proposed is not None and proposed.body_hash == body_hash:
            self._proposed = None
            propose = proposed.propose
            refusal = Refusal(propose.epoch, propose.round, propose.attempt, as_reason(f"results: {reason}"))
            is_asked = self.ledger is not None and (self._is_voter(self.ledger) or self._observer)
            return [fx.TellLeader(refusal, propose.leader)] if is_asked else []
        return []
