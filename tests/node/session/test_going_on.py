"""What a member keeps of its training over empty rounds, and what it tells of its work."""

from __future__ import annotations

import pytest

from coordinator.rounds import leases, proposing
from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.work import NO_SEAT, Work
from node.session import effects as fx
from node.session import events as ev
from node.session.idle import Idle, IdleClock
from protos.messages import Body, Heartbeat, MemberState, PeerId, Range
from tests.coordinator.rounds.cases import COORDINATOR, PEERS, SPEC, after, body_of, empty_body, evidence_of
from tests.node.session.member_script import EVIDENCE, LEDGER, ME, Script, committed, events_of, follow


def empty_of(ledger: Ledger, works: dict[PeerId, Work]) -> Body:
    return proposing.build_body(
        ledger, SPEC, COORDINATOR, attempt=0, leader=COORDINATOR, evidence=None, reason="nobody could combine",
        seated=works, left=(),
    )  # fmt: skip


def over_an_empty_round(script: Script, works: dict[PeerId, Work]) -> list[fx.Effect]:
    """The round ends empty; what the session asks for."""
    ledger = script.session.ledger
    assert ledger is not None
    script.did.clear()
    follow(script, committed(empty_of(ledger, works), ledger))
    return list(script.did)


GROWN = {PEERS[0]: Work(7), PEERS[1]: Work(4), PEERS[2]: Work(4)}
MINE = (Range(0, 4), Range(12, 3))


def test_after_an_empty_round_it_trains_on_from_its_local_parameters() -> None:
    script = Script()
    script.train(3)
    did = over_an_empty_round(script, GROWN)
    assert script.effects(fx.LoadAnchor, did) == []
    assert script.effects(fx.FetchData, did) == [fx.FetchData(3, MINE)]
    assert script.handle(ev.DataReady(3)) == [fx.StartTraining(3, MINE, 4)]
    view = script.session.view()
    assert (view.step, view.h, view.round) == (3, 7, 3)
    script.handle(ev.Progressed(3, 7, 56, 1.0, 8.0, 0.0))
    assert script.state() is MemberState.READY


def test_what_it_has_made_may_be_encoded_before_it_goes_on() -> None:
    script = Script()
    script.train(3)
    over_an_empty_round(script, GROWN)
    ledger = script.session.ledger
    assert ledger is not None
    planned, _ = events_of(evidence_of(ledger, 3))
    assert script.effects(fx.Encode, script.handle(planned)) == [fx.Encode(3)]
    assert script.handle(ev.DataReady(3)) == []  # its turn is over


def test_a_contribution_is_encoded_anew_in_the_next_round() -> None:
    script = Script()
    script.train()
    script.commit(EVIDENCE)
    assert script.state() is MemberState.READY
    over_an_empty_round(script, GROWN)
    assert script.handle(ev.DataReady(3)) == [fx.StartTraining(3, MINE, 4)]
    script.handle(ev.Progressed(3, 7, 56, 1.0, 8.0, 0.0))
    ledger = script.session.ledger
    assert ledger is not None
    planned, _ = events_of(evidence_of(ledger, 3))
    assert script.effects(fx.Encode, script.handle(planned)) == [fx.Encode(3)]


def test_a_committed_round_starts_from_the_new_anchor() -> None:
    script = Script()
    script.train()
    script.commit(EVIDENCE)
    script.did.clear()
    follow(script, committed(body_of(LEDGER, EVIDENCE), LEDGER))
    assert script.effects(fx.LoadAnchor, script.did) == [fx.LoadAnchor(3, 4, False)]
    assert script.session.view().step == 0


def test_who_is_left_out_of_a_committed_round_drops_its_progress() -> None:
    script = Script()
    script.train(2)
    evidence = evidence_of(LEDGER, 3, peer11=None)
    script.did.clear()
    follow(script, committed(body_of(LEDGER, evidence), LEDGER))
    assert script.effects(fx.LoadAnchor, script.did) == [fx.LoadAnchor(3, 4, False)]
    assert script.session.view().step == 0


@pytest.mark.parametrize("taken", [True, False])
def test_who_has_no_seat_for_a_round_goes_on_only_on_the_same_batches(taken: bool) -> None:
    script = Script()
    script.train(3)
    over_an_empty_round(script, {PEERS[1]: Work(4), PEERS[3 if taken else 2]: Work(4)})
    assert script.state() is MemberState.WAITING
    did = over_an_empty_round(script, {PEERS[0]: Work(4), PEERS[3 if taken else 1]: Work(4)})
    assert len(script.effects(fx.LoadAnchor, did)) == int(taken)
    assert script.session.view().step == (0 if taken else 3)


def test_a_trainer_that_died_makes_the_whole_lease_again() -> None:
    script = Script()
    script.train(3)
    script.handle(ev.TrainerDown("killed"))
    did = over_an_empty_round(script, GROWN)
    script.handle(ev.TrainerUp())
    assert [type(effect) for effect in script.now_did] == [fx.LoadAnchor]
    assert script.effects(fx.StartTraining, did) == []
    assert script.handle(ev.DataReady(3)) == [fx.StartTraining(3, MINE, 4)]
    assert script.session.view().step == 0


def test_several_empty_rounds_add_up_and_at_4_h_it_waits() -> None:
    script = Script()
    script.train()
    n_steps = 4
    ranges: tuple[Range, ...] = (Range(0, 4),)
    for round_ in range(3, 8):
        n_steps = min(n_steps + 4, 16)
        over_an_empty_round(script, {PEERS[0]: Work(n_steps)})
        (started,) = script.effects(fx.StartTraining, script.handle(ev.DataReady(round_)))
        assert leases.begins_with(started.ranges, ranges)
        ranges = started.ranges
        script.handle(ev.Progressed(round_, n_steps, 8 * n_steps, 1.0, 8.0, 0.0))
        assert script.state() is MemberState.READY
    assert leases.count(ranges) == 16


def test_larger_batches_are_asked_of_the_trainer() -> None:
    spec = SPEC
    before = after(LEDGER, empty_body(LEDGER, PEERS[1:3]))
    ledger = after(before, empty_of(before, {PEERS[0]: Work(4, 3), PEERS[1]: Work(4)}))
    script = Script(ledger, spec=spec)
    script.handle(ev.TrainerUp())
    script.line_up(ledger, empty_body(before, PEERS[:2]))
    (started,) = script.effects(fx.StartTraining, script.handle(ev.DataReady(ledger.round + 1)))
    assert (started.batch_scale, leases.count(started.ranges), started.h) == (3, 12, 4)
    assert script.session.view().h == 4


def test_a_skipped_step_is_no_step_lost() -> None:
    script = Script()
    script.train(4)
    script.handle(events_of(EVIDENCE)[0])
    mine = EVIDENCE.commitments[ME]
    script.handle(
        ev.Encoded(2, 3, mine.tokens, mine.used, mine.sum_lr, mine.inner_loss, mine.root, mine.norms)
    )  # fmt: skip
    assert script.session.view().step == 4


def test_it_says_why_it_has_no_seat() -> None:
    ledger = after(LEDGER, empty_body(LEDGER, PEERS[1:3]))
    script = Script(ledger)
    script.line_up(ledger, empty_body(LEDGER, PEERS[1:3]))
    told = ev.AttemptOver(0, ledger.round + 1, 0, f"{NO_SEAT}until round 9, for failed in 3 rounds")
    assert script.effects(fx.Say, script.handle(told)) == [fx.Say("no seat: until round 9, for failed in 3 rounds")]
    assert script.handle(told) == []
    assert script.session.view().waiting_for == "a seat: until round 9, for failed in 3 rounds"


def test_the_measured_speed_is_in_heartbeats_until_there_is_a_better_figure() -> None:
    script = Script()
    script.handle(ev.TrainerUp(0, 123.0))
    script.line_up()
    assert script.told(Heartbeat, script.did)[-1].tokens_per_s == 123.0
    script.handle(ev.DataReady(2))
    script.handle(ev.Progressed(2, 1, 8, 1.0, 99.0, 3.0))
    script.wait(1.0)
    assert script.told(Heartbeat, script.did)[-1].tokens_per_s == 99.0


# -- idle -------------------------------------------------------------------------------------------------------------


def test_idle_is_what_is_not_worked_of_the_last_rounds() -> None:
    clock = IdleClock(Instant(0.0))
    assert clock.share is None
    clock.note(True, 1, Instant(0.0))
    clock.note(False, 1, Instant(9.0))
    clock.note(True, 2, Instant(10.0))
    assert clock.share == pytest.approx(0.1)
    clock.note(None, 2, Instant(20.0))
    clock.note(False, 2, Instant(120.0))  # its owner's pause counts for nothing
    clock.note(False, 2, Instant(122.0))
    assert clock.share == pytest.approx(3.0 / 22.0)
    for round_ in range(3, 40):
        clock.note(True, round_, Instant(122.0 + round_))
    assert clock.share == pytest.approx(0.0, abs=1e-9)  # long ago


def test_idle_share_in_a_round() -> None:
    script = Script()
    script.train(0)
    script.wait(3.0)
    script.handle(ev.Progressed(2, 4, 32, 1.0, 8.0, 0.0))
    script.wait(1.0)
    script.handle(ev.Woke())
    assert script.session.view().idle_share == pytest.approx(0.25, abs=0.01)


def test_a_rounds_idle_seconds_and_worked_ones_are_told_apart() -> None:
    clock = IdleClock(Instant(0.0))
    clock.note(None, 1, Instant(2.0))  # no trainer yet
    clock.note(False, 1, Instant(5.0))
    clock.note(True, 1, Instant(6.0))
    assert clock.in_round(1, Instant(6.0)) == Idle(1.0, 0.0)
    assert clock.in_round(1, Instant(9.0)) == Idle(1.0, 3.0)  # up to now, not to the last note
    assert clock.in_round(1, Instant(9.0)).share == pytest.approx(0.25)
    assert clock.in_round(2, Instant(9.0)) == clock.in_round(0, Instant(9.0)) == Idle()
    clock.note(True, 2, Instant(10.0))
    assert clock.in_round(1, Instant(12.0)) == Idle()
    assert clock.in_round(2, Instant(12.0)) == Idle(0.0, 2.0)
    assert Idle().share is None


def test_a_round_is_measured_from_commit_to_commit_without_pauses() -> None:
    script = Script()
    script.train(0)
    script.wait(3.0)
    script.handle(ev.PauseAsked("user", True))
    script.wait(50.0)
    script.handle(ev.PauseAsked("user", False))
    script.handle(ev.Progressed(2, 4, 32, 1.0, 8.0, 0.0))
    script.wait(1.0)
    heard = committed(body_of(LEDGER, EVIDENCE), LEDGER)
    script.handle(heard)
    script.verify(heard)
    (apply,) = script.effects(fx.Apply)
    assert apply.body.round == 2
    spent = script.session.idle_in(2, Instant(script.at))
    assert spent.idle_s == pytest.approx(1.0)
    assert spent.worked_s == pytest.approx(3.0)
    script.handle(ev.Applied(heard.commit_hash))
    assert script.session.idle_in(2, Instant(script.at)) == Idle()
    script.at += 0.5
    assert script.session.idle_in(3, Instant(script.at)) == Idle(0.5, 0.0)  # its next data are not here yet
