"""A member's work on its seat: data, anchor, inner steps, pauses, and leaving."""

from __future__ import annotations

from coordinator.rounds import policy, work
from coordinator.rounds.events import Instant
from node.session import effects as fx
from node.session import events as ev
from node.session.effects import Effect
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
        if ledger.spec_revision != self.spec.revision:
            return []
        seat = ledger.seat_of(self.me)
        round_ = ledger.round + 1
        if seat is None or policy.has_ended(ledger, self.spec):
            return []
        lease = (seat.ranges, seat.batch_scale, work.asked(seat))
        training = Training(round_, ledger.digest, ledger.spec_revision, *lease)
        if self._before is not None and self._before.goes_on_in(training):
            self._trained_round = round_
        self._training, self._before, self._no_seat = training, None, ""
        return [*self._fetch_data(), *self._train()]

    def _fetch_data(self) -> list[Effect]:
        """What its seat needs, once; nothing travels for training while it is paused."""
        training = self._training
        if training is None or training.data_asked or self._paused_by:
            return []
        training.data_asked = True
        return [fx.FetchData(training.round, training.ranges)]

    def _train(self) -> list[Effect]:
        """What the trainer can do next: load the anchor, then train on the seat once its data are here."""
        training, ledger = self._training, self.ledger
        if training is None or ledger is None or not self._trainer_up or training.encoded or training.encoding:
            return []
        if self._applying:  # the round is over, and the state on disk may be the next one already
            return []
        effects: list[Effect] = []
        if not training.loaded:
            training.loaded = True
            last = self._trained_round
            fresh = last is not None and training.round - last > MOMENTS_LAST_ROUNDS
            self._trained_round = training.round
            effects.append(fx.LoadAnchor(training.round, ledger.nominal_step, fresh))
        seat = ledger.seat_of(self.me)
        if training.data_ready and not training.started and seat is not None and not self._paused_by:
            training.started = True
            effects.append(fx.StartTraining(training.round, seat.ranges, self.spec.work.h, seat.batch_scale))
        return effects

    def _trainer_came(self, moments_round: int, tokens_per_s: float) -> list[Effect]:
        self._trainer_up, self._trained_round = True, moments_round or None
        self._speed = tokens_per_s or self._speed
        self._before = None
        if self._training:
            self._training.lost()
        return self._train()

    def _trainer_went(self, reason: str) -> list[Effect]:
        self._trainer_up, self._before = False, None
        if self._training:
            self._training.lost()
        return [fx.Say(f"the trainer stopped: {reason}")]

    def _progressed(self, event: ev.Progressed) -> list[Effect]:
        training = self._training
        if training is not None and training.round == event.round and training.started and not training.encoded:
            training.step, training.tokens = event.step, event.tokens
            training.inner_loss, training.tokens_per_s = event.inner_loss, event.tokens_per_s
            training.time_left_s = event.time_left_s
        return []

    def _works(self) -> bool | None:
        """Whether the trainer has steps to make now; None while its owner keeps it from that, or it is not up."""
        training = self._training
        if self._paused_by or not self._trainer_up or self._observer:
            return None
        if training is None or training.encoded or training.encoding or not training.loaded:
            return False
        return training.step < training.steps and (training.started or training.step > 0)

    def _told_no_seat(self, reason: str) -> list[Effect]:
        """The leader says why this member has no seat in the round."""
        if reason == self._no_seat:
            return []
        self._no_seat = reason
        return [fx.Say(f"{work.NO_SEAT}{reason}")]

    def _pause(self, who: str, paused: bool) -> list[Effect]:
        before = bool(self._paused_by)
        if paused:
            self._paused_by[who] = None
        else:
            self._paused_by.pop(who, None)
        if bool(self._paused_by) == before:
            return []
        return [fx.PauseTraining(bool(self._paused_by)), *self._fetch_data(), *self._train()]

    # -- leaving ----------------------------------------------------------------------------------------------

    def may_give_its_seat_back(self, now: Instant) -> bool:
        """Whether the coordinator would hear this member leave; without that it keeps its seat."""
        return self._line and self._succession.hears_coordinator(now)

    def _leave(self, reason: str, now: Instant, keeps_seat: bool = False) -> list[Effect]:
        """Say so as a last promise in the round after the newest commit that extends the held state, and stop.

        Who takes part in an attempt may be a voter of the round after that one, too: what is proposed by now says so,
        and only this member can tell that it will not be there. Where many go at once, the others would wait for a
        quorum. So its last promise covers both.

        While the coordinator isn't heard nothing is signed: the node keeps its seat and goes on in it when it is
        started again. Where nobody leads there is nobody to say it to. Under a stand-in a last promise can't be taken
        back before the round is over, and no member knows who else gives one: once too many have, nobody could end
        that round before the coordinator is back. Its silence costs the others a heartbeat timeout.
        """
        if self._left:
            return []
        self._left = True
        held = self.ledger
        takes_part = held is not None and (self._part is not None or self._voter.promised(held) >= 0)
        effects: list[Effect] = self._drop_part()
        if self._observer:
            return [*effects, fx.Stop(0, reason)]
        if keeps_seat or not self.may_give_its_seat_back(now):
            why = "no leader could be told, so " if not self._line else "the coordinator is away, so "
            return [*effects, fx.Stop(0, f"{reason}; {'' if keeps_seat else why}the seat is kept for a restart")]
        ledger = self._after or held
        leave = self._voter.leave(ledger) if ledger is not None else None
        if leave is not None and ledger is not None:
            leaves = [leave, *([self._voter.leave_next(ledger)] if takes_part and ledger is held else [])]
            effects += [fx.Persist(each) for each in reversed(leaves)]  # the first one stays the record
            effects += [fx.TellLeader(Signed(self._sealer.seal(each))) for each in leaves]
        return [*effects, fx.Stop(0, reason)]
