"""A member's part in an attempt: its commitment to a plan, and its side of the exchange of a deal."""

from __future__ import annotations

from aggregation.exchange import ExchangeEffect, Inquired
from coordinator.rounds import policy, work
from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.proposing import Evidence, deal_faults, evidence_redeal_faults, lines_of
from coordinator.rounds.redealing import SHRINKS_MOST, Lines, follows
from node.session import effects as fx
from node.session import events as ev
from node.session.chain import Chain
from node.session.effects import Effect
from node.session.part import Part, exchange_for, redealt_for
from protos.bounds import as_reason
from protos.messages import (
    Commitment,
    Inquiry,
    Plan,
    Prepare,
    Propose,
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
        if (plan.run, plan.epoch, plan.round, plan.previous) != here:
            return []
        self._note_attempt(plan, ledger, now)
        if mine is None:
            return []
        if self._part is not None and self._part.planned.plan_hash == event.plan_hash:
            return self._commit_to_plan()
        if self._succession.is_superseded(plan.leader, now) and not self._has_promised(plan, ledger):
            reason = "hears the coordinator"
            return [fx.TellLeader(Refusal(plan.epoch, plan.round, plan.attempt, reason), plan.leader)]
        if reason := self._too_far(plan, now):
            return [fx.TellLeader(Refusal(plan.epoch, plan.round, plan.attempt, reason), plan.leader)]
        self._reachable = mine.reducer
        if refusal := self._voter.bound(plan, ledger):
            return [fx.TellLeader(refusal, plan.leader)]  # it would be in vain: the leader must pass that number first
        part = self._part
        returned = part is not None and plan.leader == self._coordinator != part.planned.plan.leader
        if part is not None and plan.attempt <= part.number and not returned:
            reason = f"takes part in attempt {part.number} already"
            return [fx.TellLeader(Refusal(plan.epoch, plan.round, part.number, reason), plan.leader)]
        effects = self._drop_part()
        self._proposed = None
        self._part = Part(event, now)
        return effects + self._commit_to_plan()

    def _too_far(self, asked: Plan | Prepare | Propose, now: Instant) -> str:
        """Why a stand-in may not bind this voter to a number that leaves others none: it would hold up the round."""
        if asked.leader == self._coordinator:
            return ""
        most = 2 * policy.numbers_most(now - self._succession.head_since)
        return f"number {asked.attempt} is too far ahead: up to {most} by now" if asked.attempt > most else ""

    def _note_attempt(self, asked: Plan | Prepare | Propose, ledger: Ledger, now: Instant) -> None:
        """Whoever stands in for the coordinator has begun to try this round's commit."""
        if (asked.epoch, asked.round) == (ledger.epoch, ledger.round + 1):
            self._succession.attempted(asked.leader, now)

    def _has_promised(self, asked: Plan | Propose, ledger: Ledger) -> bool:
        """Whether this voter has promised the number of an attempt to its leader, or has voted in it."""
        record = self._voter.record
        here = (ledger.epoch, ledger.round + 1, asked.attempt, asked.leader)
        return record is not None and (record.epoch, record.round, record.attempt, record.leader) == here

    def _commit_to_plan(self) -> list[Effect]:
        """Commit to Δ for the current plan, or have it encoded first."""
        part, training = self._part, self._training
        if part is None or training is None or not part.is_sender(self.me):
            return []
        encoded = training.encoded
        if encoded is None:
            if training.encoding:
                return []
            if not training.loaded or training.step == 0:  # it came back, or its trainer did: there is no Δ yet
                return self._decline("has made no step yet")
            training.encoding = True
            return [fx.Encode(training.round)]
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
        return [fx.TellLeader(Signed(self._sealer.seal(commitment)))]

    def _encoded(self, event: ev.Encoded) -> list[Effect]:
        training = self._training
        if training is None or training.round != event.round or not training.encoding:
            return []
        training.encoding, training.encoded = False, event
        # No fewer than were said: a step that was skipped is none that was lost.
        training.step, training.tokens = max(training.step, event.steps), event.tokens
        return self._commit_to_plan()

    def _encode_failed(self, round_: int, reason: str) -> list[Effect]:
        """There is nothing to contribute: the leader need not wait for it."""
        training = self._training
        if training is None or training.round != round_ or not training.encoding:
            return []
        training.encoding = False
        told: list[Effect] = [fx.Say(f"no contribution in round {round_}: {reason}")]
        return told + self._decline(reason)

    def _decline(self, reason: str) -> list[Effect]:
        """Tell the leader that this member can't do its part in the current attempt."""
        if self._part is None:
            return []
        plan = self._part.planned.plan
        return [fx.TellLeader(Refusal(plan.epoch, plan.round, plan.attempt, as_reason(reason)), plan.leader)]

    def _dealt(self, event: ev.Dealt, now: Instant) -> list[Effect]:
        part, ledger = self._part, self.ledger
        if part is None or ledger is None or event.deal.plan != part.planned.plan_hash:
            return []
        if part.exchange is not None:
            return self._in_exchange(part, part.exchange.report_again())
        evidence = part.evidence(event)
        if faults := self._deal_faults(evidence, ledger):
            reason = "; ".join(faults[:3])
            return [fx.Say(f"refused the deal of attempt {part.number}: {reason}"), *self._decline(reason)]
        plan = part.planned.plan
        part.dealt, part.lines = event, self._lines(evidence)
        part.set_hash = evidence.set_hash()
        part.exchange = exchange_for(self.me, evidence, part.lines, self.spec)
        part.exchange_ends_at = Instant(now + plan.exchange_s)
        part.stalls_at = Instant(now + self.spec.deadlines.no_progress_s)
        begin = fx.BeginExchange(plan, part.planned.plan_hash, event.deal, event.envelope, event.commitments)
        effects: list[Effect] = [begin]
        redealt, part.redealt = part.redealt, None
        if redealt is None:
            return [*effects, *self._in_exchange(part, part.exchange.begin())]
        changed = self._take_redeal(part, redealt, ledger, now)  # before anything goes to who is out already
        return [*effects, *changed]

    def _redealt(self, event: ev.Redealt, now: Instant) -> list[Effect]:
        """The leader has dealt some chunks again. It says so more than once, and an old word may come late."""
        part, ledger = self._part, self.ledger
        if part is None or ledger is None or event.redeal.plan != part.planned.plan_hash:
            return []
        if event.leader != part.planned.plan.leader:
            return []
        if part.redealt is not None and event.redeal.number <= part.redealt.redeal.number:
            return []
        if part.dealt is None:
            part.redealt = event
            return []
        return self._take_redeal(part, event, ledger, now)

    def _take_redeal(self, part: Part, event: ev.Redealt, ledger: Ledger, now: Instant) -> list[Effect]:
        if part.dealt is None or part.exchange is None:
            return []
        evidence, redeal = part.evidence(part.dealt, event), event.redeal
        faults = evidence_redeal_faults(evidence, part.lines)
        earlier = part.redealt.redeal if part.redealt is not None else None
        if earlier is not None and not follows(redeal, earlier):
            faults.append("the redeal takes back what an earlier one said")
        shrank = redeal.excluded != (earlier.excluded if earlier is not None else ())
        if part.n_shrinks + shrank > SHRINKS_MOST:
            faults.append(f"the set has shrunk {part.n_shrinks} times already")
        if faults:
            reason = "; ".join(faults[:3])
            return [fx.Say(f"refused a redeal of attempt {part.number}: {reason}"), *self._decline(reason)]
        part.redealt, part.n_shrinks = event, part.n_shrinks + shrank
        part.set_hash = evidence.set_hash()
        part.exchange_ends_at = Instant(now + redeal.exchange_s)
        part.stalls_at = Instant(now + self.spec.deadlines.no_progress_s)
        return self._in_exchange(part, part.exchange.handle(redealt_for(evidence, part.lines, self.spec)))

    def _left_out(self, event: ev.Proposed) -> str:
        """Why this member refuses to be left out: whoever reduces has acknowledged all of its rows."""
        part, redeal = self._part, event.redeal
        if redeal is None or part is None or part.exchange is None or part.planned.plan_hash != event.plan_hash:
            return ""
        if self.me not in {entry.peer for entry in redeal.excluded} or not part.exchange.is_receipted():
            return ""
        latest = part.redealt.redeal if part.redealt is not None else None
        return "left out, though every reducer has acknowledged all rows" if latest == redeal else ""

    def _inquired(self, inquiry: Inquiry) -> list[Effect]:
        part = self._part
        if part is None or part.exchange is None or inquiry.plan != part.planned.plan_hash:
            return []
        return self._in_exchange(part, part.exchange.handle(Inquired(tuple(str(peer) for peer in inquiry.senders))))

    def _in_exchange(self, part: Part, effects: list[ExchangeEffect]) -> list[Effect]:
        return [fx.InExchange(part.planned.plan_hash, effect) for effect in effects]

    def _attempt_over(self, event: ev.AttemptOver) -> list[Effect]:
        """A leader has given an attempt up: its own one, whatever others lead beside it."""
        ledger, part, proposed = self.ledger, self._part, self._proposed
        epoch, round_, attempt, reason = event.epoch, event.round, event.attempt, event.reason
        if reason.startswith(work.NO_SEAT):  # it may come before the commit that says so has been applied
            return self._told_no_seat(reason.removeprefix(work.NO_SEAT))
        if ledger is None or (epoch, round_) != (ledger.epoch, ledger.round + 1):
            return []
        effects: list[Effect] = [fx.Say(f"attempt {attempt} of round {round_} failed: {reason}")]
        leader = event.leader or self._coordinator
        if part is not None and part.number <= attempt and part.planned.plan.leader == leader:
            effects += self._drop_part()
        if proposed is not None and proposed.propose.attempt <= attempt and proposed.propose.leader == leader:
            self._proposed = None
        return effects

    def _deal_faults(self, evidence: Evidence, ledger: Ledger) -> list[str]:
        return deal_faults(evidence, ledger, self.spec)

    def _lines(self, evidence: Evidence) -> Lines:
        return lines_of(evidence, self.spec)
