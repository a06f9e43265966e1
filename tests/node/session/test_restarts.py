"""What a session makes of a trainer that comes back with a checkpoint, and of an end that nobody can be told of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.rounds.voter import Voter
from node.session import effects as fx
from node.session import events as ev
from protos.messages import Commit, Leave, Prepare, Promise, Welcome
from tests.coordinator.rounds.cases import PEERS, REGISTRY, beginning, empty_body
from tests.node.session.member_script import LEDGER, ME, Script

EMPTY_BODY = empty_body(beginning(), PEERS[:3])
EMPTY = Commit(REGISTRY.encode(EMPTY_BODY), LEDGER.digest, 0, (), ())


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


def test_told_to_stop_while_only_a_stand_in_leads_it_keeps_its_seat() -> None:
    script = Script(voter=Voter(ME, None))
    script.train(2)
    script.handle(ev.LineDown("closed"))
    script.leaders_fall_silent()
    script.handle(ev.LineUp(Welcome(PEERS[1], EMPTY, LEDGER.to_bytes(), (), 0.0, 1.0), EMPTY_BODY, LEDGER, ()))
    script.handle(ev.Prepared(Prepare(0, 2, 3, PEERS[1])))
    assert script.told(Promise)
    did = script.handle(ev.LeaveAsked("left on a signal"))
    assert did == [fx.Stop(0, "left on a signal; the coordinator is away, so the seat is kept for a restart")]
    again = Script(voter=Voter(ME, script.session._voter.record))
    again.leaders_fall_silent()
    again.handle(ev.Prepared(Prepare(0, 2, 4, PEERS[1])))
    assert again.told(Promise), "it has left nothing, so it goes on where it was"


@pytest.mark.parametrize("frozen", [False, True])
def test_a_line_to_a_coordinator_that_is_silent_is_as_good_as_none(frozen: bool) -> None:
    script = Script(voter=Voter(ME, None))
    script.train(2)
    if frozen:
        script.leaders_fall_silent()
    script.handle(ev.LeaveAsked("left on a signal"))
    assert bool(script.told(Leave)) is not frozen
    assert [stop.code for stop in script.effects(fx.Stop)] == [0]


def test_one_that_lost_its_support_keeps_its_seat_though_somebody_leads() -> None:
    script = Script(voter=Voter(ME, None))
    script.train(2)
    did = script.handle(ev.LeaveAsked("orphaned", keeps_seat=True))
    assert [stop.code for stop in script.effects(fx.Stop)] == [0]
    assert script.effects(fx.Persist, did) == []
    assert script.told(Leave, did) == []


def test_nobody_stands_in_for_a_run_that_is_over() -> None:
    over = replace(LEDGER, ends_after=LEDGER.round)
    script = Script(over)
    script.line_up(over)
    script.handle(ev.LineDown("gone"))
    script.wait(20 * script.spec.deadlines.stand_in_s)
    assert script.effects(fx.Lead, script.did) == []


def test_one_whose_leading_ends_at_once_does_not_begin_again_at_the_same_instant() -> None:
    script = Script()
    script.line_up()
    script.handle(ev.LineDown("gone"))
    script.wait(5 * script.spec.deadlines.stand_in_s)
    assert script.effects(fx.Lead, script.did)
    for _ in range(5):
        script.handle(ev.Led(True))
        script.handle(ev.Led(False))
        assert script.effects(fx.Lead) == []
        assert len(script.effects(fx.Lead, script.wait(script.spec.deadlines.stand_in_s))) == 1
