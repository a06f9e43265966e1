"""A member's session: what it does about what the leader, its trainer and its own work report.

Mutated only by `handle`; owns no clock, socket, file or source of chance.
"""

from __future__ import annotations

from typing import assert_never

from aggregation.exchange import Combined, Expired, Stalled
from coordinator.rounds import policy, work
from coordinator.rounds.events import Instant
from node.session import effects as fx
from node.session import events as ev
from node.session.effects import Effect
from node.session.events import Event
from node.session.idle import Idle
from node.session.view import View
from node.session.voting import Voting
from protos.messages import (
    Heartbeat,
    MemberState,
    PeerId,
)


class Session(Voting):
    """One member of a run; with `observer`, one without a seat or a vote that follows it. Arguments: `SessionState`."""

    # -- the ways in ------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: Instant) -> list[Effect]:
        """Take in an event; what should happen, in order."""
        effects = [*self._handle(event, now), *self._ask_for_specs(), *self._stand_in(now)]
        state = self.state()
        self._idle.note(self._works(), self.ledger.round + 1 if self.ledger else 0, now)
        if state != self._said_state:
            self._said_state, self._state_since = state, now
            self._heartbeat_at = now  # the leader waits for changes, so it hears of them at once
        if (enough := self._has_enough()) != self._said_enough:
            self._said_enough = enough
            self._heartbeat_at = now if enough else self._heartbeat_at  # who begins late would be left out every time
        if now >= self._heartbeat_at:
            self._heartbeat_at = Instant(now + self.spec.deadlines.heartbeat_s)
            if self._line and not self._left:
                effects.append(fx.TellLeader(self._heartbeat(state)))
        return effects

    def next_wake(self, now: Instant) -> Instant:
        """When something is due by itself: at the latest the next heartbeat."""
        due = self._heartbeat_at
        if self._stands_in and (at := self._succession.next_at(self.ledger, self._promised(), now)) is not None:
            due = min(due, at)
        if self._part and self._part.exchange_ends_at is not None:
            due = min(due, self._part.exchange_ends_at)
        if self._refetch_at is not None:
            due = min(due, self._refetch_at)
        return max(due, now)

    @property
    def head_since(self) -> Instant:
        """When the head that is held came to this member, as far as it knows."""
        return self._succession.head_since

    @property
    def abstains(self) -> bool:
        """Whether what it signed in this round may be lost, so that it signs nothing until the next commit."""
        return self._voter.abstains

    def state(self) -> MemberState:
        """What this member does now, as heartbeats say it."""
        training = self._training
        if self.ledger is None or self._fetching or self._refetch_at is not None or self._behind():
            return MemberState.JOINING
        if self._lacks_spec():
            return MemberState.JOINING
        if self._commit or self._applying:
            return MemberState.APPLYING
        if self._proposed is not None:
            return MemberState.VOTING
        if self._part and self._part.exchange:
            return MemberState.EXCHANGING
        if self.ledger.paused:
            return MemberState.PAUSED
        if training is not None and (training.encoded or training.encoding or training.step >= training.steps):
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

    def idle_in(self, round_: int, now: Instant) -> Idle:
        """How its trainer has spent this round until now, for the round's report; nothing of any other round."""
        return self._idle.in_round(round_, now)

    def view(self) -> View:
        training = self._training
        return View(
            state=self.state() if self._line else "offline",
            round=self.ledger.round + 1 if self.ledger else 0,
            epoch=self.ledger.epoch if self.ledger else 0,
            step=training.step if training else 0,
            h=training.steps if training else self.spec.work.h,
            tokens_per_s=training.tokens_per_s if training else 0.0,
            inner_loss=training.inner_loss if training else 0.0,
            digest=self.ledger.digest if self.ledger else b"",
            accepted=self._accepted,
            rejected=self._rejected.counts(),
            waiting_for=self._waiting_for(),
            since=self._state_since if self._line else self._line_changed_at,
            role="observer" if self._observer else ("member" if training else "waiting"),
            paused_by=tuple(self._paused_by),
            reachable=self._reachable,
            leader=self._leader_now or "",
            idle_share=self._idle.share,
        )

    def _handle(self, event: Event, now: Instant) -> list[Effect]:
        match event:
            case ev.LineUp():
                self._heartbeat_at = now
                self._succession.line_up(event.welcome.leader, now)
                return self._line_up(event, now)
            case ev.LineDown(reason, leader):
                self._succession.line_down(leader or self._coordinator)
                return self._line_lost(reason, now)
            case ev.LeaderHeard(leader):
                self._succession.heard(leader, now)
                return []
            case ev.HeadSigned():
                return self._signed(event)
            case ev.Led(leads):
                self._succession.led(leads, now)
                return []
            case ev.Planned():
                return self._planned(event, now)
            case ev.Dealt():
                return self._dealt(event, now)
            case ev.Redealt():
                return self._redealt(event, now)
            case ev.Inquired(inquiry):
                return self._inquired(inquiry)
            case ev.Proposed():
                return self._proposal(event, now)
            case ev.Prepared(prepare):
                return self._prepared(prepare, now)
            case ev.CommitHeard():
                return self._heard_commit(event, now)
            case ev.AttemptOver():
                return self._attempt_over(event)
            case ev.SaidGoodbye(goodbye, leader):
                return self._goodbye(goodbye.code, goodbye.reason, leader or self._coordinator, now)
            case ev.TrainerUp(moments_round, tokens_per_s):
                return self._trainer_came(moments_round, tokens_per_s)
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
            case ev.CommitsFetched():
                return self._commits_fetched(event, now)
            case ev.CommitsFetchFailed():
                return self._commits_lacking(event, now)
            case ev.Verified(body_hash, digest):
                return self._was_verified(body_hash, digest)
            case ev.VerifyFailed(body_hash, reason):
                return self._verify_failed(body_hash, reason)
            case ev.Restored():
                return self._was_restored(event, now)
            case ev.RestoreFailed(body_hash, reason):
                return self._restore_failed(body_hash, reason)
            case ev.SpecKnown(spec):
                return self._spec_known(spec)
            case ev.Applied(hash_):
                return self._applied(hash_, now)
            case ev.Exchanged(plan_hash, inner):
                part = self._part
                if part is None or part.exchange is None or part.planned.plan_hash != plan_hash:
                    return []
                if isinstance(inner, Stalled) and part.stalls_at is not None and now < part.stalls_at:
                    return []
                if isinstance(inner, Combined) and inner.set_number == part.exchange.set_number:
                    self._combined.note(part.set_hash, inner)
                return self._in_exchange(part, part.exchange.handle(inner))
            case ev.LeaveAsked(reason, keeps_seat):
                return self._leave(reason, now, keeps_seat)
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

    # -- saying -----------------------------------------------------------------------------------------------

    def _stand_in(self, now: Instant) -> list[Effect]:
        """Whom to have lines to while the coordinator is silent, and whether to lead in its place."""
        self._leader_now = self._succession.leader(now)
        if self._observer or self._left:
            return []
        if now >= self._succession.absent_since + self.spec.deadlines.max_absence_s:
            self._left = True
            days = self.spec.deadlines.max_absence_s / 86400
            return [fx.Stop(4, f"the coordinator has been away for {days:g} days: the state is kept for its return")]
        return self._succession.advance(self.ledger, self._can_lead(), self._promised(), now, ready=self._has_trained())

    def _can_lead(self) -> bool:
        """Whether this member may stand in: it holds a head to go on from, and all that a round after it is made by."""
        ledger = self.ledger
        if ledger is None or not self._stands_in or self._reachable is False or self._voter.abstains:
            return False
        if self._fetching or self._asking or self._commit:
            return False
        if self._lacks_spec() or self._unknown_revisions():
            return False
        return not policy.has_ended(ledger, self.spec)

    def _promised(self) -> int:
        return self._voter.promised(self.ledger) if self.ledger is not None else -1

    def _line_lost(self, reason: str, now: Instant) -> list[Effect]:
        if not self._succession.any_line:
            self._line, self._line_problem, self._line_changed_at = False, reason, now
        return []

    def _goodbye(self, code: str, reason: str, leader: PeerId, now: Instant) -> list[Effect]:
        self._succession.said_goodbye(leader)
        self._line_lost(reason, now)
        if leader != self._coordinator:  # a stand-in has no say in who takes part, or whether the run goes on
            return []
        if self._observer and code in ("ended", "shutdown"):
            return []
        match code:
            case "ended" | "left":
                return [fx.Stop(0, reason)]
            case "refused":
                return [fx.Stop(5, reason)]
            case "superseded":
                return [fx.Stop(6, reason)]
            case _:
                return [fx.Say(f"the leader closed the line: {reason}")]

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
            tokens_per_s=training.tokens_per_s if training and training.tokens_per_s else self._speed,
            inner_loss=training.inner_loss if training else 0.0,
            time_left_s=training.time_left_s if training else 0.0,
            bytes_sent=0,
            bytes_received=0,
        )

    def _has_trained(self) -> bool:
        """Whether it has made all the steps that it was asked for in this round."""
        training = self._training
        return training is not None and (training.encoded is not None or 0 < training.steps <= training.step)

    def _has_enough(self) -> bool:
        """Whether it has made steps enough to contribute, be it fewer than it was asked for."""
        return self._training is not None and self._training.step >= work.steps_min(self.spec)

    def _waiting_for(self) -> str:
        if not self._line:
            return f"the leader: {self._line_problem}"
        match self.state():
            case MemberState.JOINING if self._lacks_spec() and not self._fetching:
                return "the run's settings that are in force, from the coordinator"
            case MemberState.JOINING:
                why = f" (the last try failed: {self._fetch_problem})" if self._fetch_problem else ""
                if self.ledger is not None and not self._fetching and self._newest is not None:
                    return f"results of rounds {self.ledger.round + 1} to {self._newest.body.round}{why}"
                return f"the state from a donor{why}"
            case MemberState.PAUSED if self.ledger is not None and self.ledger.paused:
                return "the operator, who has paused the run"
            case MemberState.WAITING:
                return f"a seat: {self._no_seat}" if self._no_seat else "a seat in the next round"
            case MemberState.READY:
                return "the others, and the leader's plan"
            case MemberState.EXCHANGING:
                return self._part.waiting_for() if self._part else "the leader's proposal"
            case MemberState.VOTING:
                return "results, and a quorum of votes"
            case MemberState.TRAINING if self._training is not None and not self._training.started:
                return self._training.waiting_for()
            case _:
                return ""
