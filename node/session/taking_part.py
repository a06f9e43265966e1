"""A member's part in an attempt: its commitment to a plan, and its side of the exchange of a deal."""

from __future__ import annotations

from aggregation.exchange import ExchangeEffect
from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.proposing import Evidence, deal_faults, lines_of
from node.session import events as ev
from node.session.chain import Chain
from node.session.events import Effect
from node.session.part import Lines, Part, exchange_for
from protos.bounds import as_reason
from protos.messages import (
    Commitment,
    Refusal,
    Signed,
)


class TakingPart(Chain):
    """What a member does about a plan and a deal."""

    def _planned(self, event: ev.Planned, now: Instant) -> list[Effect]:
        plan, ledger = event.plan, self.ledger
        if ledger is None or self._left or self._commit is not None:
            return []
        here = (ledger.run, ledger.epoch, ledger.round + 1, ledger.head)
        mine = next((member for member in plan.members if member.peer == self.me), None)
        if (plan.run, plan.epoch, plan.round, plan.previous) != here or mine is None:
            return []
        self._reachable = mine.reducer
        if self._part is not None and self._part.planned.plan_hash == event.plan_hash:
            return self._commit_to_plan()
        if refusal := self._voter.bound(plan, ledger):
            return [ev.TellLeader(refusal)]  # it would be in vain: the leader must pass that number first
        if self._part is not None and plan.attempt <= self._part.number:
            reason = f"takes part in attempt {self._part.number} already"
            return [ev.TellLeader(Refusal(plan.epoch, plan.round, self._part.number, reason))]
        effects = self._drop_part()
        self._proposed = None
        self._part = Part(event, now)
        return effects + self._commit_to_plan()

    def _commit_to_plan(self) -> list[Effect]:
        """Commit to Δ for the current plan, or have it encoded first."""
        part, training = self._part, self._training
        if part is None or training is None or not part.is_sender(self.me):
            return []
        encoded = training.encoded
        if encoded is None:
            if training.encoding:
                return []
            if not training.started or training.step == 0:  # it came back, or its trainer did: there is no Δ yet
                return self._decline("has made no step yet")
            training.encoding = True
            return [ev.Encode(training.round)]
        commitment = Commitment(
            part.planned.plan_hash,
            encoded.root,
            encoded.norms,
            encoded.steps,
            encoded.tokens,
            encoded.used,
            encoded.sum_lr,
            encoded.inner_loss,
        )
        return [ev.TellLeader(Signed(self._sealer.seal(commitment)))]

    def _encoded(self, event: ev.Encoded) -> list[Effect]:
        training = self._training
        if training is None or training.round != event.round or not training.encoding:
            return []
        training.encoding, training.encoded = False, event
        training.step, training.tokens = event.steps, event.tokens
        return self._commit_to_plan()

    def _encode_failed(self, round_: int, reason: str) -> list[Effect]:
        """There is nothing to contribute: the leader need not wait for it."""
        training = self._training
        if training is None or training.round != round_ or not training.encoding:
            return []
        training.encoding = False
        told: list[Effect] = [ev.Say(f"no contribution in round {round_}: {reason}")]
        return told + self._decline(reason)

    def _decline(self, reason: str) -> list[Effect]:
        """Tell the leader that this member can't do its part in the current attempt."""
        if self._part is None:
            return []
        plan = self._part.planned.plan
        return [ev.TellLeader(Refusal(plan.epoch, plan.round, plan.attempt, as_reason(reason)))]

    def _dealt(self, event: ev.Dealt, now: Instant) -> list[Effect]:
        part, ledger = self._part, self.ledger
        if part is None or ledger is None or event.deal.plan != part.planned.plan_hash:
            return []
        if part.exchange is not None:
            return self._in_exchange(part, part.exchange.report_again())
        evidence = part.evidence(event)
        if faults := self._deal_faults(evidence, ledger):
            reason = "; ".join(faults[:3])
            return [ev.Say(f"refused the deal of attempt {part.number}: {reason}"), *self._decline(reason)]
        plan = part.planned.plan
        part.dealt, part.lines = event, self._lines(evidence)
        part.set_hash = evidence.set_hash()
        part.exchange = exchange_for(self.me, evidence, part.lines, self.spec)
        part.exchange_ends_at = Instant(now + plan.exchange_s)
        begin = ev.BeginExchange(plan, part.planned.plan_hash, event.deal, event.envelope, event.commitments)
        return [begin, *self._in_exchange(part, part.exchange.begin())]

    def _in_exchange(self, part: Part, effects: list[ExchangeEffect]) -> list[Effect]:
        return [ev.InExchange(part.planned.plan_hash, effect) for effect in effects]

    def _attempt_over(self, epoch: int, round_: int, attempt: int, reason: str) -> list[Effect]:
        ledger, part = self.ledger, self._part
        if ledger is None or (epoch, round_) != (ledger.epoch, ledger.round + 1):
            return []
        effects: list[Effect] = [ev.Say(f"attempt {attempt} of round {round_} failed: {reason}")]
        if part is not None and part.number <= attempt:
            effects += self._drop_part()
        if self._proposed is not None and self._proposed.propose.attempt <= attempt:
            self._proposed = None
        return effects

    def _deal_faults(self, evidence: Evidence, ledger: Ledger) -> list[str]:
        return deal_faults(evidence, ledger, self.spec)

    def _lines(self, evidence: Evidence) -> Lines:
        return lines_of(evidence, self.spec)
