"""Reducers that say of honest senders' rows that they have not come, and senders of whom it is true."""

from __future__ import annotations

import pytest

from coordinator.rounds.attempt import Phase
from protos.messages import AttemptFailed, PeerId, Redeal
from protos.runspec import RuleSpec
from tests.coordinator.rounds.cases import PEERS
from tests.coordinator.rounds.leader_script import OBSERVER, Script, exchanging
from tests.coordinator.rounds.mishaps import counted, dealt, missing, proposed
from tests.sim.options import sim_spec

N = 10
ONCE = sim_spec(n_chunks=24, rule=RuleSpec(replicas=1))
"""Of ten two may lie."""


def play(script: Script, lacks: dict[PeerId, set[PeerId]]) -> None:
    """To the end of the exchange: who lacks a sender's rows says so of all its chunks, others report what they have."""
    while script.phase() is Phase.EXCHANGE:
        attempt = script.rounds._attempt
        assert attempt is not None
        for peer, results in script.results().items():
            missed = lacks.get(peer, set()) & set(attempt.included)
            if peer in attempt.results or script.phase() is not Phase.EXCHANGE:
                continue
            if missed and peer in dealt(script):
                script.say(peer, missing(script, *((chunk, s) for chunk in dealt(script)[peer] for s in missed)))
            else:
                script.say(peer, results)
        script.wait(script.spec.deadlines.gone_grace_s + 0.1)
        script.keep_alive(*(seat.peer for seat in script.rounds.ledger.seats), OBSERVER)


@pytest.mark.parametrize("victim", [PEERS[0], PEERS[5]])
def test_two_liars_of_ten_put_no_honest_sender_out(victim: PeerId) -> None:
    script = exchanging(N, spec=ONCE)
    liars = [peer for peer in PEERS[:N] if peer != victim][:2]
    play(script, {liar: {victim} for liar in liars})
    body = proposed(script)
    assert counted(body) == set(PEERS[:N])
    assert {entry.peer for entry in body.reducers} == set(PEERS[:N]) - set(liars)
    assert script.rounds._out_senders == set()
    assert script.rounds._out_reducers == set(liars)


@pytest.mark.parametrize("n_reached", [0, 1, 6])
def test_who_reaches_too_few_is_out_and_costs_nobody_else_anything(n_reached: int) -> None:
    script = exchanging(N, spec=ONCE)
    sender, *others = PEERS[:N]
    play(script, {peer: {sender} for peer in others[n_reached:]})
    body = proposed(script)
    assert counted(body) == set(others)
    assert {entry.peer for entry in body.reducers} == set(PEERS[:N])
    assert script.told(AttemptFailed, script.did) == []
    assert len(script.told(Redeal, script.did)) == 1


def test_who_does_not_reach_two_moves_their_chunks_and_counts() -> None:
    script = exchanging(N, spec=ONCE)
    sender, *others = PEERS[:N]
    play(script, {peer: {sender} for peer in others[:2]})
    assert counted(proposed(script)) == set(PEERS[:N])


@pytest.mark.parametrize("n", [2, 3, 4, N])
@pytest.mark.parametrize("replicas", [1, 2, "auto"])
def test_one_broken_path_ends_no_attempt(n: int, replicas: int | str) -> None:
    script = exchanging(n, spec=sim_spec(n_chunks=24, rule=RuleSpec.model_validate({"replicas": replicas})))
    play(script, {PEERS[1]: {PEERS[0]}})
    assert counted(proposed(script)) == set(PEERS[:n])
