"""The leader's machine by scripts: attempts that fail and are tried again, and members that contribute nothing."""

from __future__ import annotations

import pytest

from coordinator.rounds.attempt import Phase
from coordinator.rounds.events import Disconnected, Instant, Opened, Persist, Reached, Woke
from coordinator.rounds.voting import LEADER_SLACK, RETRY_FIRST_S, RETRY_MAX_S
from protos.hashes import plan_hash
from protos.messages import (
    AttemptFailed,
    Body,
    Deal,
    Inquiry,
    Lack,
    MemberState,
    Missing,
    Outcome,
    Plan,
    Prepare,
    Promise,
    Propose,
    Redeal,
    Refusal,
    Welcome,
)
from protos.runspec import MembershipSpec, RuleSpec
from tests.coordinator.rounds.cases import COORDINATOR, PEERS
from tests.coordinator.rounds.leader_script import OBSERVER, exchanging, training, voting
from tests.coordinator.rounds.mishaps import answer, unable
from tests.sim.options import sim_spec

ONCE = sim_spec(n_chunks=3, rule=RuleSpec(replicas=1))
"""A run in which each chunk has one reducer."""


# -- failing and trying again ----------------------------------------------------------------------------------------


def test_an_attempt_that_can_not_be_mended_fails_and_the_next_asks_for_promises() -> None:
    script = exchanging(3, spec=sim_spec(n_chunks=3, membership=MembershipSpec(min_contributors=3)))
    script.handle(Disconnected(PEERS[2], "reset"))
    did = script.wait(3.1)
    for peer in (*PEERS[:2], OBSERVER):
        did += script.say(peer, answer(script, PEERS[2]))
    ((told, failed),) = script.told(AttemptFailed, did)
    assert told == (*PEERS[:2], OBSERVER)
    assert failed == AttemptFailed(0, 2, 0, "lost peer13; 2 contributions, and this run needs 3")
    script.spec = script.rounds.spec = sim_spec(n_chunks=3)
    did += script.wait(RETRY_FIRST_S)
    assert script.phase() is Phase.PREPARE
    entries = [effect.entry for effect in script.effects(Persist, did)]
    assert entries[0] == Opened(0, 2, 1)
    assert isinstance(entries[1], Promise)  # the coordinator's own
    assert script.told(Prepare, did) == [((PEERS[0], PEERS[1]), Prepare(0, 2, 1, COORDINATOR))]
    script.promise(PEERS[0])
    assert script.phase() is Phase.PREPARE
    script.promise(PEERS[1])
    assert script.phase() is Phase.COMMITMENT
    assert [member.peer for member in script.last(Plan).members if member.sender] == PEERS[:2]


def test_a_dead_sender_only_misses_its_commitment() -> None:
    script = training(3)
    script.ready(*PEERS[:3])
    script.commit_to_plan(*PEERS[:2])
    script.handle(Disconnected(PEERS[2], "reset"))
    script.wait(3.1)
    assert script.phase() is Phase.EXCHANGE
    script.reduce()
    body = script.registry.decode(Body, script.last(Propose).proposal.body)
    assert [(entry.counted, entry.reason) for entry in body.members] == [
        (True, ""), (True, ""), (False, "no commitment in time"),
    ]  # fmt: skip


def test_who_died_after_its_commitment_is_not_dealt_in() -> None:
    script = training(3)
    script.ready(*PEERS[:3])
    script.commit_to_plan(PEERS[2])
    script.handle(Disconnected(PEERS[2], "reset"))
    script.wait(3.1)
    script.commit_to_plan(*PEERS[:2])
    assert script.phase() is Phase.EXCHANGE
    assert len(script.last(Deal).commitments) == 2


def test_who_came_back_without_its_contribution_is_lost_at_once() -> None:
    script = exchanging(3)
    script.handle(Disconnected(PEERS[1], "reset"))
    script.connect(PEERS[1])
    script.beat(PEERS[1], MemberState.TRAINING, 0)
    assert [(told, asked.senders) for told, asked in script.told(Inquiry)] == [((PEERS[0], PEERS[2]), (PEERS[1],))]


def test_who_comes_back_is_told_where_the_attempt_is() -> None:
    script = exchanging(3)
    before = len(script.did)
    script.handle(Disconnected(PEERS[1], "reset"))
    script.connect(PEERS[1])
    again = [message for _, message in script.told(object, script.did[before:])]
    assert [type(message) for message in again] == [Welcome, Plan, Deal]
    before = len(script.did)
    script.connect(PEERS[5])  # not of this plan
    assert [type(message) for _, message in script.told(object, script.did[before:])] == [Welcome]


def test_who_caught_up_is_told_where_the_attempt_is() -> None:
    script = training(3)
    script.connect(PEERS[4], holds=False)
    script.ready(*PEERS[:3])
    script.commit_to_plan(*PEERS[:3])
    script.reduce()
    script.beat(PEERS[4], MemberState.WAITING)
    assert [type(message) for _, message in script.told(object)] == [Propose]


def test_at_the_deadline_claims_decide_who_is_left_out() -> None:
    script = exchanging(3, spec=ONCE)
    plan = plan_hash(script.registry.encode(script.last(Plan)))
    results = script.results()
    for reducer in results:
        if reducer != PEERS[2]:
            lacks = tuple(Lack(item.chunk, PEERS[2]) for item in results[reducer].results)
            script.say(reducer, Missing(plan, lacks))
    if PEERS[2] in results:
        script.say(PEERS[2], results[PEERS[2]])
    assert script.phase() is Phase.EXCHANGE
    redeal = script.last(Redeal)
    others = [peer for peer in results if peer != PEERS[2]]
    if len(others) > 1:
        assert [(out.peer, out.reason[:39]) for out in redeal.excluded] == [
            (PEERS[2], "lost in the exchange: its rows have not")
        ]
    else:
        assert redeal.lost == tuple(others)


def test_who_can_not_combine_is_left_out_as_a_reducer() -> None:
    script = exchanging(3, spec=ONCE)
    one, *others = script.results()
    unable(script, one)
    assert script.last(Redeal).lost == (one,)
    for peer in others:
        script.say(peer, script.results()[peer])
    assert script.rounds._out_reducers == {one}
    assert script.rounds._out_senders == set()


def test_a_reducer_that_dies_is_missed_only_where_it_reduces_alone() -> None:
    for spec, moves in ((sim_spec(n_chunks=3), False), (ONCE, True)):
        script = exchanging(2, spec=spec)
        script.handle(Disconnected(OBSERVER, "reset"))
        for _ in range(4):
            script.wait(1.0)
            script.keep_alive(*PEERS[:2])
        assert OBSERVER in script.last(Deal).bandwidths[-1].peer
        assert [redeal.lost for _, redeal in script.told(Redeal, script.did)] == [(OBSERVER,)] * moves
        assert OBSERVER not in script.results() or not moves
        script.reduce()
        assert script.phase() is Phase.VOTE


def test_who_has_promised_a_higher_number_is_asked_again_in_one() -> None:
    script = exchanging(4)
    script.say(PEERS[1], Refusal(0, 2, 5, "promised number 5 to another"))
    assert script.last(AttemptFailed).reason.startswith("lost peer12")
    assert (script.rounds._out_senders, script.rounds._out_reducers) == (set(), set())


@pytest.mark.parametrize("why", ["has another norm than was signed", "is not to be had: it is gone"])
def test_a_reducer_whose_results_are_not_what_it_signed_is_not_asked_again(why: str) -> None:
    script = voting(3, spec=ONCE)
    first = min(script.results())
    for peer in PEERS[:3]:
        script.say(peer, Refusal(0, 2, 0, f"results: the result of chunk 0 by {first} {why}"))
    assert script.last(AttemptFailed).reason.startswith("no quorum of votes; ")
    assert script.rounds._out_reducers == {first}


def test_a_plan_for_more_than_any_rule_takes_serves_those_who_are_left() -> None:
    """With half of them liable to lie no rule takes 4; with one of them out for its norm, 3 are taken."""
    spec = sim_spec(n_chunks=3, rule=RuleSpec(name="median", fraction=0.5))
    script = training(4, spec=spec)
    script.ready(*PEERS[:4])
    script.commit_to_plan(*PEERS[:3])
    script.commit_to_plan(PEERS[3], norms=(1e6,) * 3)
    assert [entry.peer for entry in script.last(Deal).excluded] == [PEERS[3]]
    script.reduce()
    body = script.registry.decode(Body, script.last(Propose).proposal.body)
    assert (body.outcome, body.rule, body.f) == (Outcome.COMMITTED, "median", 1)


def test_when_nobody_can_combine_the_round_is_empty() -> None:
    script = exchanging(3)
    assert [member.peer for member in script.last(Plan).members if member.reserve] == [OBSERVER]
    unable(script, *PEERS[:3])
    assert script.last(Redeal).lost == tuple(PEERS[:3])
    assert set(script.results()) == {OBSERVER}
    unable(script, OBSERVER)
    body = script.registry.decode(Body, script.last(Propose).proposal.body)
    assert body.outcome is Outcome.EMPTY
    assert body.reason.startswith("nobody who could reduce is able to combine the contributions: peer11")
    script.vote(*PEERS[:3], digest=script.rounds.ledger.digest)
    assert script.rounds.ledger.round == 2
    assert script.rounds._unable == set()


def test_silence_is_not_inability() -> None:
    script = exchanging(2, observer=False)
    unable(script, PEERS[0])
    limit_s = script.spec.deadlines.exchange_s * LEADER_SLACK
    while script.at < limit_s:
        script.wait(1.0)
        script.keep_alive(*PEERS[:2])
    assert "no word from peer12 in time" in script.last(AttemptFailed).reason
    assert script.rounds._unable == {PEERS[0]}


def test_when_nobody_can_combine_and_there_is_no_observer_the_round_is_empty_at_once() -> None:
    script = exchanging(2, observer=False)
    unable(script, *PEERS[:2])
    assert script.registry.decode(Body, script.last(Propose).proposal.body).outcome is Outcome.EMPTY


def test_silence_until_the_deadline_is_the_reducers_fault() -> None:
    script = exchanging(2)
    limit_s = script.spec.deadlines.exchange_s * LEADER_SLACK
    while script.at < limit_s:
        script.wait(1.0)
        script.keep_alive(*PEERS[:2], OBSERVER)
    assert "no word from peer11, peer12, peer44 in time" in script.last(AttemptFailed).reason
    assert script.rounds._out_reducers


def test_blame_ends_when_there_would_be_nobody_left() -> None:
    script = exchanging(1, observer=False)
    limit_s = script.spec.deadlines.exchange_s * LEADER_SLACK + 2.0
    while script.at < limit_s:
        script.wait(1.0)
        script.keep_alive(PEERS[0])
    for _ in range(3):
        if script.phase() is Phase.PREPARE:
            script.promise(PEERS[0])
        script.wait(2.0)
        script.keep_alive(PEERS[0])
    if script.phase() is Phase.PREPARE:
        script.promise(PEERS[0])
    assert script.phase() is Phase.COMMITMENT


def test_pauses_between_attempts_double_up_to_a_limit() -> None:
    script = training(1, observer=False)
    script.handle(Reached(PEERS[0], False))
    script.ready(PEERS[0])
    gaps, last = [], script.at
    for _ in range(12):
        while script.phase() is Phase.TRAIN:
            wake = script.rounds.next_wake(Instant(script.at))
            assert wake is not None
            script.at = wake
            script.handle(Woke())
            script.keep_alive(PEERS[0])
        gaps.append(script.at - last)
        script.promise(PEERS[0])
        assert script.last(AttemptFailed).reason == "nobody who could reduce can be reached"
        last = script.at
    assert gaps[0] == pytest.approx(RETRY_FIRST_S)
    assert gaps[3] == pytest.approx(8 * RETRY_FIRST_S)
    assert max(gaps) == pytest.approx(RETRY_MAX_S, abs=1.0)


# -- who has nothing to contribute -----------------------------------------------------------------------------------


def test_who_declines_is_not_waited_for_and_may_reduce() -> None:
    script = training(2)
    script.ready(*PEERS[:2])
    script.commit_to_plan(PEERS[1])
    script.say(PEERS[0], Refusal(0, 2, 0, "Δ is not finite"))
    assert script.phase() is Phase.EXCHANGE
    assert {entry.peer for entry in script.last(Deal).bandwidths} == {*PEERS[:2], OBSERVER}


def test_when_all_decline_the_round_is_empty() -> None:
    script = training(2)
    script.ready(*PEERS[:2])
    for peer in PEERS[:2]:
        script.say(peer, Refusal(0, 2, 0, "Δ is not finite"))
    body = script.registry.decode(Body, script.last(Propose).proposal.body)
    assert body.outcome is Outcome.EMPTY
    assert body.reason.startswith("no commitment came from peer11, peer12; peer11: Δ is not finite")


def test_absurd_contributions_are_left_out_and_named() -> None:
    script = training(4)
    script.ready(*PEERS[:4])
    script.commit_to_plan(*PEERS[:3])
    script.commit_to_plan(PEERS[3], norms=(1e6,) * 3)
    (excluded,) = script.last(Deal).excluded
    assert (excluded.peer, "times the median" in excluded.reason) == (PEERS[3], True)
    assert script.phase() is Phase.EXCHANGE


def test_when_nothing_can_be_included_the_round_is_empty() -> None:
    script = training(1)
    script.ready(PEERS[0])
    script.commit_to_plan(PEERS[0], tokens=1)
    body = script.registry.decode(Body, script.last(Propose).proposal.body)
    assert body.reason == "no contributions (peer11: 1 tokens claimed for 4 batches)"
    script.vote(PEERS[0], digest=script.rounds.ledger.digest)
    assert script.rounds.ledger.round == 2
