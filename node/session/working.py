"""A member's work on its seat: data, anchor, inner steps, pauses, and leaving."""

from __future__ import annotations

from coordinator.rounds import policy
from node.session import events as ev
from node.session.events import Effect
from node.session.part import Training
from node.session.state import SessionState
from protos.messages import Signed

MOMENTS_LAST_ROUNDS = 8
"""Inner moments older than this many rounds are started again: they belong to another place."""


class Working(SessionState):
    """What a member does with its trainer."""

    def _begin_round(self) -> list[Effect]:
        """The held state is the head's: take the seat, if there is one."""
        ledger = self.ledger
        if ledger is None or self._observer or self._left or self._voter.has_left(ledger):
            return []
        seat = ledger.seat_of(self.me)
        round_ = ledger.round + 1
        if seat is None or policy.has_ended(ledger, self.spec):
            return []
        self._training = Training(round_)
        return [ev.FetchData(round_, seat.ranges), *self._train()]

    def _train(self) -> list[Effect]:
        """What the trainer can do next: load the anchor, then train on the seat once its data are here."""
        training, ledger = self._training, self.ledger
        if training is None or ledger is None or not self._trainer_up or training.encoded or training.encoding:
            return []
        effects: list[Effect] = []
        if not training.loaded:
            training.loaded = True
            last = self._trained_round
            fresh = last is not None and training.round - last > MOMENTS_LAST_ROUNDS
            self._trained_round = training.round
            effects.append(ev.LoadAnchor(training.round, ledger.nominal_step, fresh))
        seat = ledger.seat_of(self.me)
        if training.data_ready and not training.started and seat is not None and not self._paused_by:
            training.started = True
            effects.append(ev.StartTraining(training.round, seat.ranges, self.spec.work.h))
        return effects

    def _trainer_came(self) -> list[Effect]:
        self._trainer_up, self._trained_round = True, None
        if self._training:
            self._training.lost()
        return self._train()

    def _trainer_went(self, reason: str) -> list[Effect]:
        self._trainer_up = False
        if self._training:
            self._training.lost()
        return [ev.Say(f"the trainer stopped: {reason}")]

    def _progressed(self, event: ev.Progressed) -> list[Effect]:
        training = self._training
        if training is not None and training.round == event.round and training.started and not training.encoded:
            training.step, training.tokens = event.step, event.tokens
            training.inner_loss, training.tokens_per_s = event.inner_loss, event.tokens_per_s
            training.time_left_s = event.time_left_s
        return []

    def _pause(self, who: str, paused: bool) -> list[Effect]:
        before = bool(self._paused_by)
        if paused:
            self._paused_by[who] = None
        else:
            self._paused_by.pop(who, None)
        if bool(self._paused_by) == before:
            return []
        return [ev.PauseTraining(bool(self._paused_by)), *self._train()]

    # -- leaving ----------------------------------------------------------------------------------------------

    def _leave(self, reason: str) -> list[Effect]:
        """Say so as a last promise in the round after the newest commit that extends the held state, and stop."""
        if self._left:
            return []
        self._left = True
        effects: list[Effect] = self._drop_part()
        ledger = self._after or self.ledger
        leave = self._voter.leave(ledger) if ledger is not None and not self._observer else None
        if leave is not None:
            effects += [ev.Persist(leave), ev.TellLeader(Signed(self._sealer.seal(leave)))]
        return [*effects, ev.Stop(0, reason)]
