"""What a member does about the orders that commits carry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.rounds.ledger import Ledger, fold
from coordinator.rounds.orders import Orders
from coordinator.rounds.proposing import Evidence, build_body
from node.session import effects as fx
from node.session import events as ev
from node.session.standing_in import order as order_of
from protos.hashes import body_hash
from protos.messages import Body, MemberState, PeerId, Prepare, Refusal, Standing, StandingChange, StateDigest, Vote
from protos.orders import Kind, OpenedOrder
from protos.runspec import RunSpec
from tests.coordinator.rounds.cases import COORDINATOR, NO_HASH, PEERS, REGISTRY, SPEC, evidence_of
from tests.coordinator.rounds.ordered import amended, ordered
from tests.node.session.member_script import BODY, LEDGER, ME, Script, committed, follow, proposed

PAUSE = ordered(1, Kind.PAUSE)
SPEC2 = amended(work={"h": 2})
AMEND = ordered(1, Kind.AMEND, spec=SPEC2)


def carrying(ledger: Ledger, *given: OpenedOrder, target: Ledger | None = None, spec: RunSpec = SPEC) -> Body:
    orders = Orders(given, target, {SPEC.revision: SPEC})
    return build_body(
        ledger, spec, COORDINATOR, attempt=0, leader=COORDINATOR, evidence=None, reason="by order", seated=PEERS[:3],
        left=(), orders=orders,
    )  # fmt: skip


def heard(ledger: Ledger, *given: OpenedOrder, digest: bytes = b"", **more: Any) -> ev.CommitHeard:
    return replace(committed(carrying(ledger, *given, **more), ledger, digest=digest), orders=given)


def after(ledger: Ledger, commit: ev.CommitHeard, target: Ledger | None = None) -> Ledger:
    return fold(ledger, commit.body, commit.orders, target).at(commit.commit_hash, commit.commit.digest)


def asked(body: Body, *given: OpenedOrder) -> ev.Proposed:
    return replace(proposed(body, None), orders=given)


def test_a_member_pauses_with_the_run_and_keeps_what_it_has() -> None:
    script = Script()
    script.train(3)
    pause = heard(LEDGER, PAUSE)
    follow(script, pause)
    assert fx.PauseTraining(True) in script.did
    assert script.state() is MemberState.PAUSED
    assert script.session.view().paused_by == ("operator",)
    paused = after(LEDGER, pause)
    assert script.session.ledger == paused
    assert not script.effects(fx.StartTraining)
    resume = heard(paused, ordered(2, Kind.RESUME))
    follow(script, resume)
    assert fx.PauseTraining(False) in script.did
    assert script.session.view().paused_by == ()
    script.handle(ev.DataReady(paused.round + 2))
    assert script.state() is MemberState.TRAINING
    assert script.session.view().step == 3
    assert len(script.effects(fx.LoadAnchor, script.did)) == 1  # it goes on from where it was
    assert len(script.effects(fx.StartTraining, script.did)) == 2


def test_who_has_made_all_its_steps_pauses_too_and_is_ready_again_afterwards() -> None:
    script = Script()
    script.train(SPEC.work.h)
    assert script.state() is MemberState.READY
    pause = heard(LEDGER, PAUSE)
    follow(script, pause)
    assert script.state() is MemberState.PAUSED
    assert script.session.view().waiting_for == "the operator, who has paused the run"
    follow(script, heard(after(LEDGER, pause), ordered(2, Kind.RESUME)))
    assert script.state() is MemberState.READY


def test_the_members_own_pause_outlives_the_operators() -> None:
    script = Script()
    script.train(3)
    script.handle(ev.PauseAsked("user", True))
    pause = heard(LEDGER, PAUSE)
    follow(script, pause)
    follow(script, heard(after(LEDGER, pause), ordered(2, Kind.RESUME)))
    assert script.session.view().paused_by == ("user",)
    assert fx.PauseTraining(False) not in script.did


def test_a_node_that_starts_in_a_paused_run_does_not_train() -> None:
    paused = after(LEDGER, heard(LEDGER, PAUSE))
    script = Script(paused)
    script.handle(ev.TrainerUp())
    script.line_up(paused)
    script.handle(ev.DataReady(paused.round + 1))
    assert script.state() is MemberState.PAUSED
    assert not script.effects(fx.StartTraining, script.did)


def test_orders_that_were_not_opened_stop_nobody() -> None:
    script = Script()
    script.train(1)
    script.handle(replace(heard(LEDGER, PAUSE), orders=()))
    assert not script.session.view().paused_by
    assert script.session.ledger == LEDGER


def test_an_amendment_is_kept_and_worked_by_from_its_round() -> None:
    script = Script()
    script.train(1)
    follow(script, heard(LEDGER, AMEND))
    assert script.effects(fx.KeepSpec, script.did) == [fx.KeepSpec(AMEND.order.spec, 2)]
    assert script.effects(fx.Amended, script.did) == [fx.Amended(SPEC2)]
    assert script.session.spec is SPEC2
    script.did.clear()
    assert script.session.ledger is not None
    script.handle(ev.DataReady(script.session.ledger.round + 1))
    (started,) = script.effects(fx.StartTraining, script.did)
    assert sum(r.count for r in started.ranges) == 2


def test_one_that_is_to_come_changes_nothing_yet() -> None:
    script = Script()
    script.train(1)
    follow(script, heard(LEDGER, ordered(1, Kind.AMEND, round_=9, spec=SPEC2)))
    assert script.session.spec is SPEC
    assert script.session.specs[2] is SPEC2
    assert not script.effects(fx.Amended, script.did)


def test_settings_that_are_not_known_are_fetched_before_anything_is_done_by_them() -> None:
    now = after(LEDGER, heard(LEDGER, AMEND))
    script = Script(now)
    script.handle(ev.TrainerUp())
    script.line_up(now)
    script.handle(ev.StateFetched(now))
    assert script.effects(fx.FetchSpec, script.did) == [fx.FetchSpec(2)]
    assert script.state() is MemberState.JOINING
    body = carrying(now, spec=SPEC2)
    script.handle(asked(body))
    assert "revision 2 of the RunSpec is not known" in script.told(Refusal)[0].reason
    script.handle(ev.SpecKnown(SPEC2))
    assert script.effects(fx.Amended) == [fx.Amended(SPEC2)]
    assert script.effects(fx.FetchData)
    assert script.state() is MemberState.TRAINING


COMING = replace(LEDGER, next_revision=2, next_from=LEDGER.round + 2)
"""The books after a commit that ordered settings for later: who gets them as a state has not heard which."""


def round_before_the_change(specs: dict[int, RunSpec]) -> tuple[Evidence, Body]:
    evidence = evidence_of(COMING, 3)
    return evidence, build_body(
        COMING, SPEC, COORDINATOR, attempt=0, leader=COORDINATOR, evidence=evidence, reason="", seated=PEERS[:3],
        left=(), orders=Orders((), None, specs),
    )  # fmt: skip


def test_settings_to_come_are_fetched_by_who_has_not_heard_of_them() -> None:
    evidence, body = round_before_the_change({1: SPEC, 2: SPEC2})
    script = Script(COMING)
    script.handle(ev.Woke())
    assert script.effects(fx.FetchSpec) == [fx.FetchSpec(2)]
    script.handle(ev.TrainerUp())
    script.line_up(COMING)
    script.handle(ev.DataReady(COMING.round + 1))
    script.handle(ev.Progressed(COMING.round + 1, 4, 32, 1.0, 8.0, 0.0))
    assert script.state() is MemberState.READY, "this round is by what is known"
    script.commit(evidence)
    script.handle(proposed(body, evidence))
    assert "revision 2" in script.told(Refusal)[0].reason
    assert script.effects(fx.FetchSpec, script.wait(60.0)) == [], "it is asked for once"
    script.handle(ev.SpecKnown(SPEC2))
    assert not script.effects(fx.Amended)
    script.handle(proposed(body, evidence))
    assert script.effects(fx.Verify)
    assert script.told(Refusal) == []


def test_settings_that_came_while_others_are_still_to_come_are_not_the_last_that_is_asked_for() -> None:
    now = replace(COMING, spec_revision=2, next_revision=3)
    script = Script(now)
    script.line_up(now)
    assert script.effects(fx.FetchSpec, script.did) == [fx.FetchSpec(2), fx.FetchSpec(3)]
    script.handle(ev.SpecKnown(SPEC2))
    assert script.session.spec is SPEC2
    assert script.effects(fx.FetchSpec) == []
    script.handle(ev.StateFetched(replace(now, next_revision=4)))
    assert script.effects(fx.FetchSpec) == [fx.FetchSpec(4)]


@pytest.mark.parametrize("known", [True, False])
def test_nobody_stands_in_without_the_settings_that_it_would_lead_by(known: bool) -> None:
    script = Script(COMING, specs={2: SPEC2} if known else {})
    script.line_up(COMING)
    script.handle(ev.LineDown("gone"))
    script.wait(5 * SPEC.deadlines.stand_in_s)
    assert bool(script.effects(fx.Lead, script.did)) is known
    if not known:
        script.handle(ev.SpecKnown(SPEC2))
        assert script.effects(fx.Lead)


def test_amended_deadlines_are_those_that_turns_are_judged_by() -> None:
    spec = amended(deadlines={"stand_in_s": 200.0, "exchange_s": 3600.0})
    order = ordered(1, Kind.AMEND, spec=spec)
    changes, starts = Script(), Script(after(LEDGER, heard(LEDGER, order)), specs={2: spec})
    changes.train(1)
    follow(changes, heard(LEDGER, order))
    for script in (changes, starts):
        held = script.session.ledger
        assert held is not None
        assert held.spec_revision == 2
        script.line_up(held)
        script.handle(ev.LineDown("gone"))
        first = next(peer for peer in order_of(held, COORDINATOR) if peer != ME)
        script.wait(199.0)
        assert not script.effects(fx.Lead, script.did)
        script.wait(4 * 200.0)
        assert script.effects(fx.Lead, script.did)
        script.handle(ev.LeaderHeard(first))
        script.handle(ev.Prepared(Prepare(held.epoch, held.round + 1, 3, first)))
        for _ in range(50):  # it is heard, and its exchange takes as long as it may
            script.wait(60.0)
            script.handle(ev.LeaderHeard(first))
        assert not any("commits nothing" in said.text for said in script.effects(fx.Say, script.did))


def test_the_settings_known_from_the_disk_are_those_of_the_held_state() -> None:
    now = after(LEDGER, heard(LEDGER, AMEND))
    assert Script(now, specs={2: SPEC2}).session.spec is SPEC2


# -- going back --------------------------------------------------------------------------------------------------

TARGET = replace(LEDGER, head=b"t" * 32, digest=b"d" * 32)
NOW = after(TARGET, heard(TARGET))
BACK = ordered(1, Kind.ROLLBACK, round_=TARGET.round, head=TARGET.head)


def voting() -> Script:
    script = Script(NOW)
    script.handle(ev.TrainerUp())
    script.line_up(NOW)
    return script


def test_a_voter_has_the_old_state_beside_its_own_before_it_votes() -> None:
    script = voting()
    body = carrying(NOW, BACK, target=TARGET)
    hash_ = body_hash(REGISTRY.encode(body))
    script.handle(asked(body, BACK))
    assert script.effects(fx.Restore) == [fx.Restore(TARGET.head, TARGET.round, hash_)]
    assert not script.told(Vote)
    script.handle(asked(body, BACK))  # told again
    assert not script.effects(fx.Restore)
    script.handle(ev.Restored(hash_, TARGET))
    (vote,) = script.told(Vote)
    assert (vote.body_hash, vote.digest) == (hash_, TARGET.digest)
    commit = heard(NOW, BACK, target=TARGET, digest=TARGET.digest)
    script.handle(commit)
    (apply,) = script.effects(fx.Apply)
    assert apply.ledger == after(NOW, commit, TARGET)
    script.handle(ev.Applied(commit.commit_hash))
    held = script.session.ledger
    assert held is not None
    assert (held.digest, held.rollbacks, held.round) == (TARGET.digest, 1, NOW.round + 1)


def test_the_observer_tells_the_digest_of_a_state_that_it_has_restored() -> None:
    script = Script(NOW, observer=True)
    script.line_up(NOW)
    body = carrying(NOW, BACK, target=TARGET)
    hash_ = body_hash(REGISTRY.encode(body))
    script.handle(asked(body, BACK))
    script.handle(ev.Restored(hash_, TARGET))
    assert script.told(StateDigest) == [StateDigest(hash_, 0, TARGET.digest)]


def test_who_does_not_hold_the_old_state_says_so_and_fetches_it_once_it_is_committed() -> None:
    script = voting()
    body = carrying(NOW, BACK, target=TARGET)
    hash_ = body_hash(REGISTRY.encode(body))
    script.handle(asked(body, BACK))
    script.handle(ev.RestoreFailed(hash_, "it is not kept here"))
    assert "the state to go back to: it is not kept here" in script.told(Refusal)[0].reason
    script.handle(heard(NOW, BACK, target=TARGET, digest=TARGET.digest))
    assert script.effects(fx.FetchState)
    assert script.session.ledger == NOW


@pytest.mark.parametrize(
    ("order", "why"),
    [
        (ordered(0, Kind.ROLLBACK, round_=TARGET.round, head=TARGET.head), "old one"),
        (ordered(1, Kind.ROLLBACK, round_=NOW.round + 5, head=NO_HASH), "still to come"),
        (ordered(1, Kind.EVICT, peer=PeerId("coordinator")), "can't be evicted"),
    ],
)
def test_an_order_that_can_not_be_obeyed_is_refused_before_anything_is_restored(order: OpenedOrder, why: str) -> None:
    script = voting()
    body = replace(carrying(NOW, BACK, target=TARGET), orders=(order.envelope,))
    script.handle(asked(body, order))
    assert not script.effects(fx.Restore)
    assert why in script.told(Refusal)[0].reason


def test_who_is_evicted_ends_with_the_reason_whatever_becomes_of_its_line() -> None:
    body = replace(
        BODY,
        standing=(StandingChange(ME, Standing.BANNED, "it lies"),),
        seats=tuple(seat for seat in BODY.seats if seat.peer != ME),
        voters=tuple(peer for peer in BODY.voters if peer != ME),
    )
    script = Script()
    script.train()
    body = replace(body, ledger_hash=fold(LEDGER, body).hash())
    heard = committed(body, LEDGER)
    script.handle(heard)
    script.verify(heard)
    script.handle(ev.Applied(heard.commit_hash))
    (stop,) = script.effects(fx.Stop)
    assert (stop.code, stop.reason) == (5, "this peer has been evicted from the run: it lies")
