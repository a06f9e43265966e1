"""An exchange that goes wrong and is mended within its attempt: chunks move, and the set shrinks, on all or on none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.rounds import exchanging as exchanging_of
from coordinator.rounds import proposing, redealing
from coordinator.rounds.attempt import Phase
from coordinator.rounds.events import Disconnected, Reached, Say
from coordinator.rounds.proposing import Evidence, evidence_faults
from coordinator.rounds.voter import body_faults
from coordinator.rounds.voting import LEADER_SLACK
from protos.hashes import plan_hash
from protos.messages import (
    AttemptFailed,
    Body,
    Deal,
    Excluded,
    Inquiry,
    Lack,
    MemberState,
    Missing,
    Moved,
    PeerId,
    Plan,
    Propose,
    Redeal,
)
from protos.runspec import MembershipSpec, RuleSpec
from tests.coordinator.rounds.cases import COORDINATOR, NO_HASH, PEERS, SPEC, body_of, evidence_of, results_of, seated
from tests.coordinator.rounds.leader_script import OBSERVER, Script, exchanging, training
from tests.sim.options import sim_spec

ONCE = sim_spec(n_chunks=5, rule=RuleSpec(replicas=1))
TWICE = sim_spec(n_chunks=4, rule=RuleSpec(replicas=2))


def missing(script: Script, *lacks: tuple[int, PeerId], asked: tuple[PeerId, ...] = ()) -> Missing:
    plan = plan_hash(script.registry.encode(script.last(Plan)))
    return Missing(plan, tuple(Lack(chunk, sender) for chunk, sender in lacks), asked)


def dies(script: Script, *peers: PeerId) -> None:
    for peer in peers:
        script.handle(Disconnected(peer, "reset"))
    script.wait(script.spec.deadlines.gone_grace_s + 0.1)


def dealt(script: Script) -> dict[PeerId, list[int]]:
    attempt = script.rounds._attempt
    assert attempt is not None
    return attempt.dealt


def proposed(script: Script) -> Body:
    """The body that is proposed; its evidence is what a voter takes."""
    attempt = script.rounds._attempt
    assert attempt is not None
    assert script.phase() is Phase.VOTE
    evidence = attempt.evidence()
    assert evidence is not None
    propose = script.last(Propose)
    body: Body = script.registry.decode(Body, propose.proposal.body)
    hashes = propose.proposal.result_hashes
    assert body_faults(body, evidence, hashes, script.rounds.ledger, script.spec, COORDINATOR) == []
    assert bool(propose.proposal.redeal) == (evidence.redeal is not None)
    assert script.told(AttemptFailed, script.did) == []
    return body


def counted(body: Body) -> set[PeerId]:
    return {entry.peer for entry in body.members if entry.counted}


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


# -- claims about the living ------------------------------------------------------------------------------------------


def claimed(script: Script, reducer: PeerId, sender: PeerId) -> int:
    """A reducer says that a sender's row of its first chunk has not come."""
    chunk = dealt(script)[reducer][0]
    script.say(reducer, missing(script, (chunk, sender)))
    return chunk


def all_but(script: Script, *reducers: PeerId) -> None:
    for peer, results in script.results().items():
        if peer not in reducers:
            script.say(peer, results)


def test_a_claim_takes_the_chunk_from_the_reducer_and_the_sender_stays() -> None:
    script = exchanging(4, spec=ONCE)
    reducer = next(peer for peer, chunks in dealt(script).items() if len(chunks) > 1)
    all_but(script, reducer)
    sender = next(peer for peer in PEERS[:4] if peer != reducer)
    chunk = claimed(script, reducer, sender)
    redeal = script.last(Redeal)
    assert redeal.moved == (Moved(chunk, reducer),)
    assert (redeal.excluded, redeal.lost) == ((), ())
    assert chunk not in dealt(script)[reducer]
    assert script.rounds._out_reducers == {reducer}
    script.reduce()
    assert counted(proposed(script)) == set(PEERS[:4])


def test_whom_two_reducers_lack_in_turn_is_out() -> None:
    script = exchanging(4, spec=ONCE)
    first = next(peer for peer, chunks in dealt(script).items() if len(chunks) > 1)
    sender = next(peer for peer in PEERS[:4] if peer != first)
    all_but(script, first)
    chunk = claimed(script, first, sender)
    second = script.rounds._attempt.reducing[chunk][0]  # type: ignore[union-attr]
    all_but(script, second)
    script.say(second, missing(script, (chunk, sender)))
    redeal = script.last(Redeal)
    assert [(entry.peer, "have not come to" in entry.reason) for entry in redeal.excluded] == [(sender, True)]
    assert script.rounds._out_reducers == set()  # the first one has said the truth
    assert script.rounds._out_senders == {sender}
    script.reduce()
    assert counted(proposed(script)) == set(PEERS[:4]) - {sender}


def test_a_claim_waits_a_little_for_others_to_say_the_same() -> None:
    script = exchanging(4, spec=ONCE)
    sender, *others = PEERS[:4]
    for peer in others[:2]:
        script.say(peer, missing(script, *((chunk, sender) for chunk in dealt(script)[peer])))
    assert script.told(Redeal, script.did) == []
    assert f"lacks chunk {dealt(script)[others[0]][0]} of {sender[-6:]}" in script.waiting_for or (
        len(dealt(script)[others[0]]) > 1
    )
    script.wait(script.spec.deadlines.gone_grace_s + 0.1)
    assert [entry.peer for entry in script.last(Redeal).excluded] == [sender]
    assert script.last(Redeal).lost == ()


def test_who_lacks_everything_reduces_no_more() -> None:
    script = exchanging(4, spec=ONCE)
    deaf = PEERS[2]
    all_but(script, deaf)
    senders = [peer for peer in PEERS[:4] if peer != deaf]
    script.say(deaf, missing(script, *((c, s) for c in dealt(script)[deaf] for s in senders)))
    assert (script.last(Redeal).lost, script.last(Redeal).excluded) == ((deaf,), ())
    script.reduce()
    assert counted(proposed(script)) == set(PEERS[:4])


# -- replicas that differ ----------------------------------------------------------------------------------------------


def lying(script: Script, peer: PeerId) -> None:
    results = script.results()[peer]
    first, *rest = results.results
    script.say(peer, replace(results, results=(replace(first, hash=NO_HASH), *rest)))


def test_where_two_replicas_differ_the_next_in_line_decide() -> None:
    script = exchanging(6, spec=TWICE)
    liar = next(peer for peer, chunks in dealt(script).items() if chunks)
    chunk = dealt(script)[liar][0]
    honest = next(p for p in script.rounds._attempt.reducing[chunk] if p != liar)  # type: ignore[union-attr]
    lying(script, liar)
    all_but(script, liar)
    redeal = script.last(Redeal)
    assert redeal.moved == tuple(sorted([Moved(chunk, liar), Moved(chunk, honest)], key=lambda m: m.reducer))
    assert redeal.lost == ()
    script.reduce()
    assert script.last(Redeal).lost == (liar,)
    assert script.rounds._out_reducers == {liar}
    script.reduce()
    body = proposed(script)
    assert liar not in {entry.peer for entry in body.reducers}
    assert counted(body) == set(PEERS[:6])


def test_replicas_that_differ_on_more_chunks_than_a_redeal_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanging_of, "LACKS", 2)
    script = exchanging(6, spec=TWICE)
    liar = max(dealt(script), key=lambda peer: len(dealt(script)[peer]))
    assert len(dealt(script)[liar]) > 1

    def report() -> None:
        for peer, results in sorted(script.results().items(), key=lambda item: item[0] == liar):
            lies = tuple(replace(each, hash=NO_HASH) for each in results.results)
            script.say(peer, replace(results, results=lies) if peer == liar else results)

    report()
    assert len(script.last(Redeal).moved) == 2
    for _ in range(4):
        if script.phase() is Phase.EXCHANGE:
            report()
    assert script.rounds._out_reducers == {liar}
    assert liar not in {entry.peer for entry in proposed(script).reducers}


def test_results_that_are_longer_than_any_contribution_are_not_proposed() -> None:
    script = exchanging(4, spec=ONCE)
    liar = next(iter(dealt(script)))
    results = script.results()
    too_long = tuple(replace(result, norm_sq=1e9) for result in results[liar].results)
    for peer in results:
        script.say(peer, replace(results[peer], results=too_long) if peer == liar else results[peer])
    assert script.last(Redeal).lost == (liar,)
    script.reduce()
    assert liar not in {entry.peer for entry in proposed(script).reducers}


# -- what a voter takes ------------------------------------------------------------------------------------------------


def after_redeal(**changes: Any) -> Evidence:
    """What a round of 5 has left that lost its last sender, which reduced as well."""
    ledger = seated(5, ONCE)
    evidence = evidence_of(ledger, 5, ONCE)
    lost = Excluded(PEERS[4], "lost in the exchange: gone")
    redeal = replace(Redeal(evidence.plan_hash, 1, (lost,), (PEERS[4],), (), 1, 10.0), **changes)
    changed = replace(evidence, redeal=redeal, results={})
    try:
        return replace(changed, results=results_of(changed, ONCE))
    except IndexError:
        return changed


def test_a_redeal_that_holds() -> None:
    ledger, evidence = seated(5, ONCE), after_redeal()
    assert evidence_faults(evidence, ledger, ONCE) == []
    body = body_of(ledger, evidence, ONCE)
    hashes = proposing.result_hashes(evidence, ONCE)
    assert body_faults(body, evidence, hashes, ledger, ONCE, COORDINATOR) == []
    assert {entry.peer for entry in body.members if entry.counted} == set(PEERS[:4])
    assert evidence.set_hash() != replace(evidence, redeal=None).set_hash()
    assert evidence_faults(replace(evidence, redeal=None), ledger, ONCE) != []
    without = body_of(ledger, evidence_of(ledger, 5, ONCE), ONCE)
    assert body_faults(without, evidence, hashes, ledger, ONCE, COORDINATOR) != []


LOST = Excluded(PEERS[4], "lost in the exchange: gone")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"plan": NO_HASH}, "another plan"),
        ({"number": 0}, "no redeal's number"),
        ({"number": redealing.REDEALS_MOST + 1}, "no redeal's number"),
        ({"excluded": (Excluded(PEERS[9], "?"),)}, "not included senders"),
        ({"excluded": (LOST, LOST)}, "not included senders"),
        ({"excluded": tuple(Excluded(peer, "?") for peer in PEERS[:5])}, "with some left"),
        ({"excluded": (Excluded(PEERS[4], ""),)}, "without a reason"),
        ({"lost": (PEERS[9],)}, "calls lost"),
        ({"lost": (PEERS[4], PEERS[3])}, "calls lost"),
        ({"lost": tuple(PEERS[:5])}, "without a reducer"),
        ({"moved": (Moved(9, PEERS[0]),)}, "moves are not the deal's"),
        ({"moved": (Moved(0, PEERS[9]),)}, "moves are not the deal's"),
        ({"moved": (Moved(1, PEERS[0]), Moved(0, PEERS[0]))}, "in order"),
        ({"moved": tuple(Moved(0, peer) for peer in PEERS[:5])}, "without a reducer"),
        ({"set_number": 0}, "a number that it can't have"),
        ({"set_number": 2}, "a number that it can't have"),
        ({"excluded": ()}, "a number that it can't have"),
    ],
)
def test_a_redeal_that_is_none(changes: dict[str, Any], why: str) -> None:
    (fault, *_) = evidence_faults(after_redeal(**changes), seated(5, ONCE), ONCE)
    assert why in fault


def test_results_of_another_set_or_of_other_chunks_are_no_evidence() -> None:
    ledger, evidence = seated(5, ONCE), after_redeal()
    old = evidence_of(ledger, 5, ONCE)
    faults = evidence_faults(replace(evidence, results=old.results), ledger, ONCE)
    assert any("another set" in fault for fault in faults)
    other = replace(evidence, redeal=replace(evidence.redeal, lost=(PEERS[3], PEERS[4])))  # type: ignore[type-var]
    assert any("not for the chunks dealt" in fault for fault in evidence_faults(other, ledger, ONCE))


def test_a_redeal_only_adds_to_the_one_before() -> None:
    first = Redeal(NO_HASH, 1, (), (PEERS[0],), (), 0, 10.0)
    second = replace(first, number=2, excluded=(LOST,), set_number=2)
    assert redealing.follows(second, first)
    assert redealing.follows(replace(second, number=3, moved=(Moved(0, PEERS[1]),)), second)
    for wrong in (
        replace(second, number=1),
        replace(second, lost=()),
        replace(second, set_number=1),
        replace(second, number=3, set_number=3),
        replace(second, excluded=(), set_number=0, number=1),
    ):
        assert not redealing.follows(wrong, second if wrong.number > 2 else first)


def test_the_rule_and_weights_are_those_of_the_smaller_set() -> None:
    ledger, evidence = seated(5, ONCE), after_redeal()
    body = body_of(ledger, evidence, ONCE)
    alone = body_of(seated(4, ONCE), evidence_of(seated(4, ONCE), 4, ONCE), ONCE)
    assert (body.rule, body.f, body.fallback) == (alone.rule, alone.f, alone.fallback)
    assert SPEC.rule.name == body.rule
    assert isinstance(evidence.deal, Deal)


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
