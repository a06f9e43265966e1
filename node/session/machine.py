"""A member's session: what it does about what the leader, its trainer and its own work report.

Mutated only by `handle`; owns no clock, socket, file or source of chance.
"""

from __future__ import annotations

from typing import assert_never

from aggregation.exchange import Combined, ExchangeEffect, Expired
from coordinator.rounds.events import Instant, Sealer
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.proposing import Evidence, deal_faults, lines_of
from coordinator.rounds.voter import Voter, body_faults
from node.session import events as ev
from node.session.events import Effect, Event
from node.session.following import Following
from node.session.part import Lines, Part, evidence_of, exchange_for, verify_of
from protos import hashes
from protos.bounds import as_reason
from protos.messages import (
    Commitment,
    Heartbeat,
    MemberState,
    PeerId,
    Prepare,
    Promise,
    Refusal,
    Signed,
    StateDigest,
)
from protos.runspec import RunSpec


class Session(Following):
    """One member of a run; with `observer`, one without a seat or a vote that follows it. Arguments: `Following`."""

    def __init__(
        self,
        me: PeerId,
        spec: RunSpec,
        sealer: Sealer,
        *,
        coordinator: PeerId,
        voter: Voter,
        ledger: Ledger | None,
        now: Instant,
        observer: bool = False,
        rounds: int | None = None,
    ) -> None:
        super().__init__(
            me, spec, sealer, coordinator=coordinator, voter=voter, ledger=ledger, now=now, observer=observer,
            rounds=rounds,
        )  # fmt: skip
        self._reachable: bool | None = None
        self._heartbeat_at = now
        self._said_state = ""
        self._state_since = now

    # -- the ways in ------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: Instant) -> list[Effect]:
        """Take in an event; what should happen, in order."""
        effects = self._handle(event, now)
        state = self.state()
        if state != self._said_state:
            self._said_state, self._state_since = state, now
            self._heartbeat_at = now  # the leader waits for changes, so it hears of them at once
        if now >= self._heartbeat_at:
            self._heartbeat_at = Instant(now + self.spec.deadlines.heartbeat_s)
            if self._line and not self._left:
                effects.append(ev.TellLeader(self._heartbeat(state)))
        return effects

    def next_wake(self, now: Instant) -> Instant:
        """When something is due by itself: at the latest the next heartbeat."""
        due = self._heartbeat_at
        if self._part and self._part.exchange_ends_at is not None:
            due = min(due, self._part.exchange_ends_at)
        if self._refetch_at is not None:
            due = min(due, self._refetch_at)
        return max(due, now)

    def state(self) -> MemberState:
        """What this member does now, as heartbeats say it."""
        training = self._training
        if self.ledger is None or self._fetching or self._refetch_at is not None:
            return MemberState.JOINING
        if self._commit or self._applying:
            return MemberState.APPLYING
        if self._proposed is not None:
            return MemberState.VOTING
        if self._part and self._part.exchange:
            return MemberState.EXCHANGING
        if training is not None and (training.encoded or training.encoding or training.step >= self.spec.work.h):
            return MemberState.READY
        if self._paused_by:
            return MemberState.PAUSED
        return MemberState.WAITING if training is None else MemberState.TRAINING

    def admit_row(self, plan_hash: bytes, sender: str, chunk: int, n_bytes: int) -> str:
        """Whether a row of the running exchange may come, before a byte of it is taken: the reason why not."""
        part = self._part
        if part is None or part.exchange is None or part.planned.plan_hash != plan_hash:
            return "not of the current attempt"
        return part.exchange.admit(sender, chunk, n_bytes)

    def view(self) -> ev.View:
        training = self._training
        return ev.View(
            state=self.state() if self._line else "offline",
            round=self.ledger.round + 1 if self.ledger else 0,
            epoch=self.ledger.epoch if self.ledger else 0,
            step=training.step if training else 0,
            h=self.spec.work.h,
            tokens_per_s=training.tokens_per_s if training else 0.0,
            inner_loss=training.inner_loss if training else 0.0,
            digest=self.ledger.digest if self.ledger else b"",
            accepted=self._accepted,
            rejected=dict(self._rejected),
            waiting_for=self._waiting_for(),
            since=self._state_since if self._line else self._line_changed_at,
            role="observer" if self._observer else ("member" if training else "waiting"),
            paused_by=tuple(self._paused_by),
            reachable=self._reachable,
        )

    def _handle(self, event: Event, now: Instant) -> list[Effect]:
        match event:
            case ev.LineUp():
                self._heartbeat_at = now
                return self._line_up(event, now)
            case ev.LineDown(reason):
                self._line, self._line_problem, self._line_changed_at = False, reason, now
                return []
            case ev.Planned():
                return self._planned(event, now)
            case ev.Dealt():
                return self._dealt(event, now)
            case ev.Proposed():
                return self._proposal(event)
            case ev.Prepared(prepare):
                return self._prepared(prepare)
            case ev.CommitHeard():
                return self._heard_commit(event, now)
            case ev.AttemptOver(epoch, round_, attempt, reason):
                return self._attempt_over(epoch, round_, attempt, reason)
            case ev.SaidGoodbye(goodbye):
                return self._goodbye(goodbye.code, goodbye.reason, now)
            case ev.TrainerUp():
                return self._trainer_came()
            case ev.TrainerDown(reason):
                return self._trainer_went(reason)
            case ev.Progressed():
                return self._progressed(event)
            case ev.Encoded():
                return self._encoded(event)
            case ev.EncodeFailed(round_, reason):
                return self._encode_failed(round_, reason)
            case ev.DataReady(round_):
                if self._training and self._training.round == round_:
                    self._training.data_ready = True
                return self._train()
            case ev.StateFetched(ledger):
                return self._fetched(ledger, now)
            case ev.StateFetchFailed(reason):
                return self._fetch_failed(reason, now)
            case ev.Verified(body_hash, digest):
                return self._was_verified(body_hash, digest)
            case ev.VerifyFailed(body_hash, reason):
                return self._verify_failed(body_hash, reason)
            case ev.Applied(hash_):
                return self._applied(hash_, now)
            case ev.Exchanged(plan_hash, inner):
                part = self._part
                if part is None or part.exchange is None or part.planned.plan_hash != plan_hash:
                    return []
                if isinstance(inner, Combined):
                    self._combined.note(part.set_hash, inner)
                return self._in_exchange(part, part.exchange.handle(inner))
            case ev.LeaveAsked(reason):
                return self._leave(reason)
            case ev.PauseAsked(who, paused):
                return self._pause(who, paused)
            case ev.Woke():
                return self._woke(now)
            case _:
                assert_never(event)

    def _woke(self, now: Instant) -> list[Effect]:
        effects: list[Effect] = []
        if self._refetch_at is not None and now >= self._refetch_at:
            self._refetch_at = None
            effects += self._follow(now)
        part = self._part
        if part and part.exchange and part.exchange_ends_at is not None and now >= part.exchange_ends_at:
            part.exchange_ends_at = None
            effects += self._in_exchange(part, part.exchange.handle(Expired()))
        return effects

    # -- an attempt -------------------------------------------------------------------------------------------

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

    # -- votes ------------------------------------------------------------------------------------------------

    def _prepared(self, prepare: Prepare) -> list[Effect]:
        ledger = self.ledger
        if ledger is None or self._observer:
            return []
        answer = self._voter.prepared(prepare, ledger)
        if isinstance(answer, Promise):
            return [ev.Persist(answer), ev.TellLeader(Signed(self._sealer.seal(answer)))]
        return [ev.TellLeader(answer)]

    def _proposal(self, event: ev.Proposed) -> list[Effect]:
        ledger, propose = self.ledger, event.propose
        if ledger is None or self._commit is not None or self._left or propose.round > ledger.round + 1:
            return []  # it is told again once the state has caught up
        refusal = self._why_not(event, ledger)
        if refusal is not None:
            told: list[Effect] = [ev.Say(f"refused to vote on round {propose.round}: {refusal.reason}")]
            return [*told, ev.TellLeader(refusal)] if self._is_voter(ledger) or self._observer else told
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

    def _why_not(self, event: ev.Proposed, ledger: Ledger) -> Refusal | None:
        propose = event.propose
        if self._is_voter(ledger) and (refusal := self._voter.would_vote(propose, ledger)):
            return refusal
        if faults := self._body_faults(event, ledger) or self._combined.faults(evidence_of(event, event.plan_hash)):
            return Refusal(propose.epoch, propose.round, propose.attempt, as_reason("; ".join(faults[:3])))
        return None

    def _body_faults(self, event: ev.Proposed, ledger: Ledger) -> list[str]:
        evidence = evidence_of(event, event.plan_hash)
        result_hashes = event.propose.proposal.result_hashes
        return body_faults(event.body, evidence, result_hashes, ledger, self.spec, self._coordinator)

    def _deal_faults(self, evidence: Evidence, ledger: Ledger) -> list[str]:
        return deal_faults(evidence, ledger, self.spec)

    def _lines(self, evidence: Evidence) -> Lines:
        return lines_of(evidence, self.spec)

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
            return [ev.TellLeader(StateDigest(proposed.body_hash, proposed.propose.attempt, digest))]
        if not self._is_voter(ledger):
            return []
        answer = self._voter.voted(proposed.propose, proposed.body_hash, digest, ledger)
        if isinstance(answer, Refusal):
            return [ev.TellLeader(answer)]
        vote, record = answer
        return [ev.Persist(record), ev.TellLeader(Signed(self._sealer.seal(vote)))]

    def _verify_failed(self, body_hash: bytes, reason: str) -> list[Effect]:
        if self._verifying == body_hash:
            self._verifying = None
        heard, proposed = self._commit, self._proposed
        if heard is not None and not self._applying and hashes.body_hash(heard.commit.body) == body_hash:
            told = f"could not follow round {heard.body.round} by its results ({reason}): fetching the state"
            return [ev.Say(told), *self._fetch(heard)]
        if proposed is not None and proposed.body_hash == body_hash:
            self._proposed = None
            propose = proposed.propose
            refusal = Refusal(propose.epoch, propose.round, propose.attempt, as_reason(f"results: {reason}"))
            is_asked = self.ledger is not None and (self._is_voter(self.ledger) or self._observer)
            return [ev.TellLeader(refusal)] if is_asked else []
        return []

    # -- saying -----------------------------------------------------------------------------------------------

    def _goodbye(self, code: str, reason: str, now: Instant) -> list[Effect]:
        self._line, self._line_problem, self._line_changed_at = False, reason, now
        if self._observer and code in ("ended", "shutdown"):
            return []
        match code:
            case "ended" | "left":
                return [ev.Stop(0, reason)]
            case "refused":
                return [ev.Stop(5, reason)]
            case "superseded":
                return [ev.Stop(6, reason)]
            case _:
                return [ev.Say(f"the leader closed the line: {reason}")]

    def _heartbeat(self, state: MemberState) -> Heartbeat:
        ledger, training = self.ledger, self._training
        return Heartbeat(
            epoch=ledger.epoch if ledger else 0,
            round=ledger.round + 1 if ledger else 0,
            head=ledger.head if ledger else b"",
            digest=ledger.digest if ledger else b"",
            state=state,
            step=training.step if training else 0,
            tokens=training.tokens if training else 0,
            tokens_per_s=training.tokens_per_s if training else 0.0,
            inner_loss=training.inner_loss if training else 0.0,
            time_left_s=training.time_left_s if training else 0.0,
            bytes_sent=0,
            bytes_received=0,
        )

    def _waiting_for(self) -> str:
        if not self._line:
            return f"the leader: {self._line_problem}"
        match self.state():
            case MemberState.JOINING:
                why = f" (the last try failed: {self._fetch_problem})" if self._fetch_problem else ""
                return f"the state from a donor{why}"
            case MemberState.WAITING:
                return "a seat in the next round"
            case MemberState.READY:
                return "the others, and the leader's plan"
            case MemberState.EXCHANGING:
                exchange = self._part.exchange if self._part else None
                return (exchange.waiting_for() if exchange else "") or "the leader's proposal"
            case MemberState.VOTING:
                return "results, and a quorum of votes"
            case MemberState.TRAINING if self._training is not None and not self._training.started:
                return "the trainer" if self._training.data_ready else "training data"
            case _:
                return ""
