"""A member's session by scripts: its training, its side of an attempt, its line, and how it leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aggregation import exchange as ex
from coordinator.rounds import proposing
from coordinator.rounds.voter import Voter
from node.session import effects as fx
from node.session import events as ev
from protos.limits import TEXT
from protos.messages import (
    Commitment,
    Goodbye,
    Heartbeat,
    Leave,
    MemberState,
    Outcome,
    PeerId,
    Prepare,
    Refusal,
)
from protos.runspec import WorkSpec
from tests.coordinator.rounds.cases import (
    COORDINATOR,
    NO_HASH,
    PEERS,
    SPEC,
    empty_body,
    evidence_of,
)
from tests.node.session.member_script import (
    BODY,
    EVIDENCE,
    LEDGER,
    ME,
    Script,
    committed,
    events_of,
    follow,
)
from tests.sim.options import sim_spec

# -- training --------------------------------------------------------------------------------------------------------


def test_a_seated_member_fetches_its_data_and_trains() -> None:
    script = Script()
    assert script.state() is MemberState.WAITING
    script.handle(ev.TrainerUp())
    assert script.effects(fx.LoadAnchor) == []  # whether its state is the head's nobody has said yet
    script.line_up()
    seat = LEDGER.seat_of(ME)
    assert seat is not None
    assert script.effects(fx.FetchData) == [fx.FetchData(2, seat.ranges)]
    assert script.effects(fx.LoadAnchor) == [fx.LoadAnchor(2, 0, False)]
    assert script.state() is MemberState.TRAINING
    (span,) = seat.ranges
    assert script.session.view().waiting_for == (
        f"training data: batches {span.start} to {span.start + span.count - 1}"
    )
    assert script.handle(ev.DataReady(2)) == [fx.StartTraining(2, seat.ranges, 4)]
    script.handle(ev.Progressed(2, 3, 24, 1.5, 8.0, 1.0))
    assert (script.session.view().step, script.session.view().inner_loss) == (3, 1.5)
    script.handle(ev.Progressed(2, 4, 32, 1.5, 8.0, 0.0))
    assert script.state() is MemberState.READY
    assert [beat.state for beat in script.told(Heartbeat)] == [MemberState.READY]  # said at once


def test_without_a_seat_it_waits_for_one() -> None:
    script = Script(me=PEERS[9])
    script.handle(ev.TrainerUp())
    script.line_up()
    assert script.effects(fx.FetchData) == []
    assert script.state() is MemberState.WAITING
    assert script.session.view().waiting_for == "a seat in the next round"


def test_a_dead_trainer_starts_the_round_again() -> None:
    script = Script()
    script.train(2)
    script.handle(ev.TrainerDown("killed"))
    assert [beat.step for beat in script.told(Heartbeat, script.wait(1.0))] == [0]
    script.handle(ev.TrainerUp())
    assert [type(effect) for effect in script.now_did] == [fx.LoadAnchor, fx.StartTraining]


def test_what_is_encoded_outlives_the_trainer() -> None:
    script = Script()
    script.train()
    script.commit(EVIDENCE)
    script.handle(ev.TrainerDown("killed"))
    assert script.session.view().step == 4
    assert script.handle(ev.TrainerUp()) == []
    later = evidence_of(LEDGER, 3, attempt=1)
    script.handle(events_of(later)[0])
    assert [item.root for item in script.told(Commitment)] == [EVIDENCE.commitments[ME].root]


def test_reports_of_another_round_change_nothing() -> None:
    script = Script()
    script.train(1)
    for event in (
        ev.Progressed(1, 4, 32, 1.0, 1.0, 0.0), ev.DataReady(7), ev.EncodeFailed(1, "?"),
        ev.Encoded(1, 4, 32, (), 0.0, 0.0, NO_HASH, ()), ev.Applied(NO_HASH), ev.Exchanged(NO_HASH, ex.Expired()),
    ):  # fmt: skip
        assert script.handle(event) == []
    assert script.session.view().step == 1


@pytest.mark.parametrize("n_reasons", [1, 2])
def test_pauses_are_counted_by_their_reason(n_reasons: int) -> None:
    script = Script()
    script.train(1)
    assert script.effects(fx.PauseTraining, script.handle(ev.PauseAsked("user", True))) == [fx.PauseTraining(True)]
    assert script.state() is MemberState.PAUSED
    if n_reasons == 2:
        assert script.effects(fx.PauseTraining, script.handle(ev.PauseAsked("battery", True))) == []
        assert script.effects(fx.PauseTraining, script.handle(ev.PauseAsked("user", False))) == []
        assert script.session.view().paused_by == ("battery",)
    last = "battery" if n_reasons == 2 else "user"
    assert script.effects(fx.PauseTraining, script.handle(ev.PauseAsked(last, False))) == [fx.PauseTraining(False)]
    assert script.state() is MemberState.TRAINING


def test_a_pause_holds_the_start() -> None:
    script = Script()
    script.handle(ev.PauseAsked("user", True))
    script.train(0)
    assert script.effects(fx.StartTraining, script.did) == []
    assert script.effects(fx.FetchData, script.did) == []
    script.handle(ev.PauseAsked("user", False))
    assert len(script.effects(fx.StartTraining)) == 1
    assert len(script.effects(fx.FetchData)) == 1


def test_a_pause_in_training_asks_for_no_data_again() -> None:
    script = Script()
    script.train(1)
    for paused in (True, False):
        script.handle(ev.PauseAsked("user", paused))
        assert script.effects(fx.FetchData) == []


# -- an attempt ------------------------------------------------------------------------------------------------------


def test_a_plan_has_delta_encoded_once_and_committed_to() -> None:
    script = Script()
    script.train(2)
    planned, _ = events_of(EVIDENCE)
    assert script.handle(planned)[0] == fx.Encode(2)
    assert script.state() is MemberState.READY
    assert script.handle(planned) == []
    script.encode(EVIDENCE)
    assert script.told(Commitment) == [EVIDENCE.commitments[ME]]
    script.handle(planned)  # told again on a new line
    assert script.told(Commitment) == [EVIDENCE.commitments[ME]]
    assert script.session.view().reachable is True


@pytest.mark.parametrize(
    "changes", [{"round": 3}, {"epoch": 1}, {"previous": NO_HASH}, {"run": PEERS[9]}, {"members": ()}]
)
def test_plans_of_something_else_are_ignored(changes: dict[str, Any]) -> None:
    script = Script()
    script.train()
    plan = replace(EVIDENCE.plan, **changes)
    assert script.handle(ev.Planned(plan, NO_HASH, b"")) == []


def test_who_has_no_step_says_so() -> None:
    script = Script()
    script.train(0)
    script.handle(events_of(EVIDENCE)[0])
    assert script.told(Refusal) == [Refusal(0, 2, 0, "has made no step yet")]


def test_who_can_not_encode_says_so() -> None:
    script = Script()
    script.train()
    script.handle(events_of(EVIDENCE)[0])
    script.handle(ev.EncodeFailed(2, "Δ is not finite " + "x" * 2000))
    (refusal,) = script.told(Refusal)
    assert refusal.reason.startswith("Δ is not finite")
    assert len(refusal.reason) <= TEXT
    script.handle(events_of(evidence_of(LEDGER, 3, attempt=1))[0])
    assert script.effects(fx.Encode) == [fx.Encode(2)]  # another attempt, another try


def test_a_plan_against_a_promise_is_declined_with_the_number_to_pass() -> None:
    script = Script()
    script.train()
    script.leaders_fall_silent()
    script.handle(ev.Prepared(Prepare(0, 2, 5, PEERS[20])))
    script.handle(events_of(EVIDENCE)[0])
    assert script.told(Refusal)[0].attempt == 5
    assert script.effects(fx.Encode) == []


def test_a_lower_attempt_is_declined_while_a_higher_one_runs() -> None:
    script = Script(me=PEERS[1], voter=Voter(PEERS[1], None))
    script.train()
    script.handle(events_of(evidence_of(LEDGER, 3, attempt=4))[0])
    script.handle(events_of(evidence_of(LEDGER, 3, attempt=2))[0])
    assert script.told(Refusal) == [Refusal(0, 2, 4, "takes part in attempt 4 already")]


def test_a_deal_begins_the_exchange_and_its_effects_are_the_drivers() -> None:
    script = Script()
    script.train()
    script.commit(EVIDENCE)
    _, dealt = events_of(EVIDENCE)
    began = script.handle(dealt)
    assert isinstance(began[0], fx.BeginExchange)
    assert began[0].plan_hash == EVIDENCE.plan_hash
    sends = [effect.effect for effect in script.effects(fx.InExchange)]
    assert sends
    assert all(isinstance(send, ex.SendRows) for send in sends)
    assert script.state() is MemberState.EXCHANGING
    mine = [chunk for chunk, line in enumerate(proposing.lines_of(EVIDENCE, SPEC)) if line[0] == ME]
    for chunk in mine:
        for sender in PEERS[:3]:
            assert script.session.admit_row(EVIDENCE.plan_hash, sender, chunk, 10**9) != ""
    assert script.session.admit_row(NO_HASH, PEERS[1], 0, 1) == "not of the current attempt"
    assert script.handle(dealt) == []  # told again, nothing to report yet


def test_when_time_is_over_what_is_missing_is_said_once() -> None:
    script = Script()
    script.train()
    script.commit(EVIDENCE)
    script.handle(events_of(EVIDENCE)[1])
    did = script.wait(EVIDENCE.plan.exchange_s - 0.5)
    assert script.effects(fx.InExchange, did) == []
    did = script.wait(1.0)
    lines = proposing.lines_of(EVIDENCE, SPEC)
    mine = [chunk for chunk, line in enumerate(lines) if ME in line[: EVIDENCE.plan.replicas]]
    missing = [effect.effect for effect in script.effects(fx.InExchange, did)]
    lacks = tuple((chunk, sender) for chunk in mine for sender in PEERS[:3])
    assert missing == ([ex.ReportMissing(lacks)] if mine else [])
    assert script.effects(fx.InExchange, script.wait(20.0)) == []


def test_a_deal_that_the_policy_does_not_give_is_declined() -> None:
    script = Script()
    script.train()
    script.commit(EVIDENCE)
    _, dealt = events_of(EVIDENCE)
    script.handle(replace(dealt, deal=replace(dealt.deal, bandwidths=())))
    (refusal,) = script.told(Refusal)
    assert "not planned ones" in refusal.reason
    assert script.effects(fx.BeginExchange) == []


def test_a_failed_attempt_ends_its_exchange_and_keeps_delta() -> None:
    script = Script()
    script.train()
    script.commit(EVIDENCE)
    script.handle(events_of(EVIDENCE)[1])
    script.handle(ev.AttemptOver(0, 2, 0, "lost somebody"))
    assert script.effects(fx.EndExchange) == [fx.EndExchange(EVIDENCE.plan_hash)]
    assert script.state() is MemberState.READY
    assert script.session.ledger == LEDGER
    assert script.handle(ev.AttemptOver(0, 1, 0, "old")) == []
    script.handle(events_of(evidence_of(LEDGER, 3, attempt=1))[0])
    assert script.effects(fx.Encode) == []
    assert len(script.told(Commitment)) == 1


def test_an_attempt_of_another_leader_that_fails_ends_no_exchange() -> None:
    script = Script()
    script.train()
    script.commit(EVIDENCE)
    script.handle(events_of(EVIDENCE)[1])
    script.handle(ev.AttemptOver(0, 2, 5, "no quorum of promises", PEERS[2]))
    assert script.effects(fx.EndExchange) == []
    assert script.state() is MemberState.EXCHANGING


def test_a_newer_plan_ends_the_older_exchange() -> None:
    script = Script()
    script.train()
    script.commit(EVIDENCE)
    script.handle(events_of(EVIDENCE)[1])
    script.handle(events_of(evidence_of(LEDGER, 3, attempt=1))[0])
    assert script.effects(fx.EndExchange) == [fx.EndExchange(EVIDENCE.plan_hash)]


# -- the line, leaving -----------------------------------------------------------------------------------------------


def test_heartbeats_go_out_on_time_while_the_line_is_up() -> None:
    script = Script()
    assert script.told(Heartbeat, script.wait(3.5)) == []
    script.line_up()
    assert len(script.told(Heartbeat)) == 1
    beats = script.told(Heartbeat, script.wait(5.1))
    assert len(beats) == 5
    assert (beats[0].round, beats[0].head, beats[0].state) == (2, LEDGER.head, MemberState.TRAINING)
    script.handle(ev.LineDown("reset"))
    assert script.told(Heartbeat, script.wait(3.0)) == []
    assert script.session.view().waiting_for == "the leader: reset"
    assert script.session.view().state == "offline"


def test_a_leave_is_a_last_promise() -> None:
    script = Script()
    script.train()
    script.leaders_fall_silent()
    script.handle(ev.Prepared(Prepare(0, 2, 3, PEERS[20])))
    script.handle(ev.LeaderHeard(COORDINATOR))
    effects = script.handle(ev.LeaveAsked("SIGTERM"))
    leave = Leave(0, 2, 3, PEERS[20], LEDGER.head, -1, None)
    # What it has promised to have proposed again may name it a voter of the next round.
    after = Leave(0, 3, -1, PeerId(""), b"", -1, None)
    assert effects[:2] == [fx.Persist(after), fx.Persist(leave)]
    assert [type(effect) for effect in effects[2:]] == [fx.TellLeader, fx.TellLeader, fx.Stop]
    assert script.told(Leave) == [leave, after]
    assert effects[-1] == fx.Stop(0, "SIGTERM")
    assert script.handle(ev.LeaveAsked("again")) == []
    script.leaders_fall_silent()
    script.handle(ev.Prepared(Prepare(0, 2, 9, PEERS[20])))
    assert "has left" in script.told(Refusal)[0].reason


def test_leaving_while_a_commit_is_applied_leaves_the_round_after_it() -> None:
    script = Script()
    script.train()
    script.handle(committed(BODY, LEDGER))
    script.handle(ev.LeaveAsked("SIGTERM"))
    assert script.told(Leave)[0].round == 3


def test_who_lost_its_record_goes_without_a_word() -> None:
    script = Script(voter=Voter(ME, None, lost=True))
    script.train()
    assert script.handle(ev.LeaveAsked("SIGTERM")) == [fx.Stop(0, "SIGTERM")]


def test_a_leave_is_said_again_on_a_new_line() -> None:
    leave = Leave(0, 2, -1, PeerId(""), LEDGER.head, -1, None)
    script = Script(voter=Voter(ME, leave))
    script.handle(ev.TrainerUp())
    script.line_up()
    assert script.told(Leave) == [leave]
    assert script.effects(fx.FetchData) == []  # its seat in this round is returned
    assert script.state() is MemberState.WAITING


def test_it_leaves_after_as_many_rounds_as_it_was_asked_for() -> None:
    script = Script(rounds=1)
    script.train()
    follow(script, committed(BODY, LEDGER))
    assert script.effects(fx.Stop) == [fx.Stop(0, "done: 1 rounds")]
    assert script.told(Leave)[0].round == 3


@pytest.mark.parametrize(
    ("code", "stop"),
    [("ended", 0), ("left", 0), ("refused", 5), ("superseded", 6), ("shutdown", None), ("protocol", None)],
)
def test_goodbyes(code: str, stop: int | None) -> None:
    script = Script()
    script.train()
    script.handle(ev.SaidGoodbye(Goodbye(code, "because")))
    assert script.effects(fx.Stop) == ([] if stop is None else [fx.Stop(stop, "because")])
    observer = Script(me=PEERS[30], observer=True)
    observer.line_up()
    assert observer.effects(fx.Stop, observer.handle(ev.SaidGoodbye(Goodbye("ended", "x")))) == []


def test_after_the_end_nobody_trains() -> None:
    script = Script(spec=sim_spec(n_chunks=3, work=WorkSpec(batch_tokens=8, h=4, end_rounds=1)))
    script.train()
    follow(script, committed(BODY, LEDGER))
    assert script.effects(fx.FetchData) == []
    assert script.state() is MemberState.WAITING


def test_an_empty_round_keeps_the_digest() -> None:
    script = Script()
    script.train()
    body = empty_body(LEDGER, PEERS[:3])
    follow(script, committed(body, LEDGER))
    assert body.outcome is Outcome.EMPTY
    assert script.session.ledger is not None
    assert script.session.ledger.digest == LEDGER.digest
    assert script.session.view().rejected == {}
