"""What a session makes of a trainer that comes back with a checkpoint, and of an end that nobody can be told of."""

from __future__ import annotations

import pytest

from coordinator.rounds.voter import Voter
from node.session import effects as fx
from node.session import events as ev
from protos.messages import Leave
from tests.node.session.member_script import ME, Script


@pytest.mark.parametrize("moments_round", [0, 1, 2])
def test_moments_of_a_checkpoint_are_kept(moments_round: int) -> None:
    script = Script()
    script.line_up()
    script.handle(ev.TrainerUp(moments_round))
    assert script.effects(fx.LoadAnchor) == [fx.LoadAnchor(2, 0, False)]


def test_moments_of_long_ago_begin_anew() -> None:
    script = Script()
    script.line_up()
    script.handle(ev.TrainerUp(1))
    training = script.session._training
    assert training is not None
    for behind, fresh in ((8, False), (9, True)):
        training.round = 20
        script.handle(ev.TrainerUp(20 - behind))
        assert [load.fresh_moments for load in script.effects(fx.LoadAnchor)] == [fresh]


def test_what_a_restarted_trainer_has_done_already_is_taken_over() -> None:
    script = Script()
    script.train(2)
    script.handle(ev.TrainerDown("killed"))
    script.handle(ev.TrainerUp(2))
    assert [type(effect) for effect in script.now_did] == [fx.LoadAnchor, fx.StartTraining]
    script.handle(ev.Progressed(2, 3, 24, 1.0, 0.0, 0.0))
    assert script.session.view().step == 3


def test_told_to_stop_while_nobody_leads_it_keeps_its_seat() -> None:
    script = Script(voter=Voter(ME, None))
    script.train(2)
    script.handle(ev.LineDown("closed"))
    did = script.handle(ev.LeaveAsked("left on a signal"))
    (stop,) = script.effects(fx.Stop)
    assert stop.code == 0
    assert "the seat is kept" in stop.reason
    assert script.effects(fx.Persist, did) == []
    assert script.told(Leave, did) == []
    assert script.handle(ev.LeaveAsked("again")) == []


def test_one_that_lost_its_support_keeps_its_seat_though_somebody_leads() -> None:
    script = Script(voter=Voter(ME, None))
    script.train(2)
    did = script.handle(ev.LeaveAsked("orphaned", keeps_seat=True))
    assert [stop.code for stop in script.effects(fx.Stop)] == [0]
    assert script.effects(fx.Persist, did) == []
    assert script.told(Leave, did) == []
