"""An exchange that goes wrong and is mended within its attempt: chunks move, and the set shrinks, on all or on none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.rounds.events import Disconnected, Reached, Say
from coordinator.rounds.voting import LEADER_SLACK
from protos.messages import AttemptFailed, Inquiry, MemberState, PeerId, Plan, Redeal
from protos.runspec import MembershipSpec, RuleSpec
from tests.coordinator.rounds.cases import PEERS
from tests.coordinator.rounds.leader_script import OBSERVER, Script, exchanging, training
from tests.coordinator.rounds.mishaps import ONCE, TWICE, counted, dealt, dies, missing, proposed
from tests.sim.options import sim_spec

# -- reducers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reported", [False, True], ids=["before", "after"])
def test_a_dead_reducers_chunks_go_to_the_next_in_line_and_its_own_rows_are_out(reported: bool) -> None:
    """It alone had its own rows of them. What it had combined nobody else has."""
    script = exchanging(4, spec=ONCE)
    victim = PEERS[1]
    lines = script.rounds._attempt.lines  # type: ignore[union-attr]
    if reported:
        script.say(victim, script.results()[victim])
    dies(script, victim)
    redeal = script.last(Redeal)
    assert (redeal.number, redeal.set_number, redeal.lost) == (1, 1, (victim,))
    assert [entry.peer for entry in redeal.excluded] == [victim]
    for chunk, line in enumerate(lines):
        assert chunk in dealt(script)[next(peer for peer in line if peer != victim)]
    script.reduce()
    assert counted(proposed(script)) == {PEERS[0], *PEERS[2:4]}


def test_a_dead_observer_that_reduced_costs_nobody_its_contribution() -> None:
    script = exchanging(2, spec=ONCE)
    dies(script, OBSERVER)
    assert script.last(Redeal).excluded == ()
    assert script.last(Redeal).set_number == 0
    script.reduce()
    assert counted(proposed(script)) == set(PEERS[:2])


def test_results_of_chunks_that_did_not_move_stay() -> None:
    script = exchanging(2, spec=ONCE)
    results = script.results()
    before = {peer: list(chunks) for peer, chunks in dealt(script).items()}
    script.say(PEERS[0], results[PEERS[0]])
    dies(script, OBSERVER)
    now = dealt(script)
    for peer in PEERS[:2]:
        grown = now[peer] != before[peer]
        stays = peer in script.rounds._attempt.results  # type: ignore[union-attr]
        assert stays == (peer == PEERS[0] and not grown)
    script.say(PEERS[0], results[PEERS[0]])  # an old word, on the way when the deal changed: no fault
    script.reduce()
    assert counted(proposed(script)) == set(PEERS[:2])


def test_the_reserve_comes_last_and_only_where_others_are_too_few() -> None:
    script = exchanging(3, spec=ONCE)
    assert OBSERVER not in dealt(script)
    assert all(line[-1] == OBSERVER for line in script.rounds._attempt.lines)  # type: ignore[union-attr]
    dies(script, PEERS[0])
    assert OBSERVER not in dealt(script)
    for peer in PEERS[1:3]:
        script.say(peer, replace(missing(script), unable=True))
    assert set(dealt(script)) == {OBSERVER}
    script.reduce()
    assert counted(proposed(script)) == set(PEERS[1:3])


def test_replicas_that_are_enough_need_nobody_in_the_place_of_a_dead_one() -> None:
    script = exchanging(5)
    dies(script, PEERS[4])
    assert script.told(Redeal, script.did) == []
    assert script.last(Inquiry).senders == (PEERS[4],)
    for peer in PEERS[:4]:
        script.say(peer, missing(script, asked=(PEERS[4],)))
    assert script.told(Redeal, script.did) == []
    for peer in PEERS[:4]:
        script.say(peer, script.results()[peer])
    assert counted(proposed(script)) == set(PEERS[:5])  # all its rows were there


def test_two_replicas_and_a_dead_one_ask_the_next_in_line() -> None:
    script = exchanging(5, spec=TWICE)
    victim = next(iter(dealt(script)))
    dies(script, victim)
    assert script.last(Redeal).lost == (victim,)
    assert all(len(line) == 2 for line in script.rounds._attempt.reducing)  # type: ignore[union-attr]
    script.reduce()
    assert counted(proposed(script)) == set(PEERS[:5]) - {victim}


def test_death_after_death_until_nobody_is_left() -> None:
    script = exchanging(4, spec=ONCE)
    for peer in PEERS[:2]:
        dies(script, peer)
        script.keep_alive(*[p for p in (*PEERS[2:4], OBSERVER)])
    assert script.last(Redeal).number == 2
    assert script.last(Redeal).set_number == 2
    script.handle(Disconnected(PEERS[2], "reset"))
    script.handle(Disconnected(PEERS[3], "reset"))
    script.handle(Disconnected(OBSERVER, "reset"))
    script.wait(3.1)
    reason = script.last(AttemptFailed).reason
    assert "nobody is left to reduce chunks 0, 1, 2, 3, 4" in reason
    assert "lost peer13, peer14" in reason


def test_a_frozen_reducer_is_found_by_its_heartbeat() -> None:
    script = exchanging(3, spec=ONCE)
    others = (*PEERS[1:3], OBSERVER)
    timeout_s = script.spec.deadlines.heartbeat_timeout_s
    while not script.told(Redeal, script.did):
        script.wait(1.0)
        script.keep_alive(*others)
        assert script.at < timeout_s + 2.0 < script.spec.deadlines.exchange_s
    assert script.last(Redeal).lost == (PEERS[0],)
    script.reduce()
    proposed(script)


def test_silence_at_the_deadline_moves_the_chunks_once_more() -> None:
    script = exchanging(3, spec=ONCE)
    results = script.results()
    silent, *others = sorted(results)
    for peer in others:
        script.say(peer, results[peer])
    limit_s = script.spec.deadlines.exchange_s * LEADER_SLACK
    while not script.told(Redeal, script.did):
        script.wait(1.0)
        script.keep_alive(*PEERS[:3], OBSERVER)
        assert script.at < limit_s + 2.0
    assert script.last(Redeal).lost == (silent,)
    assert script.last(Redeal).excluded == ()  # it is here: its rows may still come
    assert script.rounds._out_reducers == {silent}
    script.reduce()
    assert counted(proposed(script)) == set(PEERS[:3])


def test_where_no_member_can_be_reached_the_observer_reduces_and_it_is_said_once() -> None:
    script = training(2)
    for peer in PEERS[:2]:
        script.handle(Reached(peer, False))
    script.ready(*PEERS[:2])
    assert [(m.peer, m.reserve) for m in script.last(Plan).members if m.reducer] == [(OBSERVER, False)]
    script.commit_to_plan(*PEERS[:2])
    script.reduce()
    assert [entry.peer for entry in proposed(script).reducers] == [OBSERVER]
    said = [say.text for say in script.effects(Say, script.did) if "the observer reduces every chunk" in say.text]
    assert len(said) == 1


# -- senders ----------------------------------------------------------------------------------------------------------


def only_a_sender(n: int = 4) -> tuple[Script, PeerId]:
    """An exchange with a sender that reduces nothing."""
    script = exchanging(n, spec=sim_spec(n_chunks=2, rule=RuleSpec(replicas=1)))
    return script, next(peer for peer in PEERS[:n] if peer not in dealt(script))


def test_a_dead_sender_whose_rows_are_all_there_stays_in() -> None:
    script, sender = only_a_sender()
    dies(script, sender)
    for peer in dealt(script):
        script.say(peer, missing(script, asked=(sender,)))
    assert script.told(Redeal, script.did) == []
    script.reduce()
    assert sender in counted(proposed(script))


def test_a_dead_sender_is_in_on_all_chunks_or_on_none() -> None:
    script, sender = only_a_sender()
    one, other = dealt(script)
    script.say(one, script.results()[one])  # it had the row of its chunk, and has combined it
    dies(script, sender)
    assert script.last(Inquiry).senders == (sender,)
    script.say(other, missing(script, (dealt(script)[other][0], sender), asked=(sender,)))
    assert [entry.peer for entry in script.last(Redeal).excluded] == [sender]
    assert script.rounds._attempt.results == {}  # type: ignore[union-attr]
    script.reduce()
    body = proposed(script)
    assert sender not in counted(body)
    (entry,) = [entry for entry in body.members if entry.peer == sender]
    assert entry.reason.startswith("lost in the exchange: gone before all its rows were with")
    assert sender in body.voters  # it signed


def test_who_comes_back_in_time_is_not_asked_about() -> None:
    script, sender = only_a_sender()
    script.handle(Disconnected(sender, "reset"))
    script.wait(script.spec.deadlines.gone_grace_s / 2)
    script.connect(sender)
    script.beat(sender, MemberState.EXCHANGING, 4)
    script.wait(script.spec.deadlines.gone_grace_s)
    assert script.told(Inquiry, script.did) == []


def test_the_set_shrinks_three_times_and_no_more() -> None:
    script = exchanging(9, spec=sim_spec(n_chunks=1, rule=RuleSpec(replicas=1)))
    (reducer,) = dealt(script)
    senders = [peer for peer in PEERS[:9] if peer != reducer]
    for sender in senders[:4]:
        dies(script, sender)
        script.keep_alive(*[p for p in (*PEERS[:9], OBSERVER) if p not in senders[:4]])
        script.say(reducer, missing(script, (0, sender), asked=(sender,)))
    assert [redeal.set_number for _, redeal in script.told(Redeal, script.did)] == [1, 2, 3]
    assert "the set has shrunk 3 times" in script.last(AttemptFailed).reason


def test_too_few_that_are_left_fail_the_attempt_and_no_empty_round() -> None:
    few = MembershipSpec(min_contributors=3)
    script = exchanging(3, spec=sim_spec(n_chunks=5, rule=RuleSpec(replicas=1), membership=few))
    dies(script, PEERS[1])
    assert script.last(AttemptFailed).reason == "lost peer12; 2 contributions, and this run needs 3"
