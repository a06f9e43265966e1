"""Every phase of a round x every fault: the run goes on, states stay the commits', nothing waits past its deadline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.rounds.attempt import Phase
from coordinator.rounds.events import Effect, Instant
from coordinator.rounds.machine import Rounds
from tests.sim import matrix
from tests.sim.chain import Violated
from tests.sim.faulty import FAULTS
from tests.sim.invariants import Watch, check_state
from tests.sim.matrix import CASES, PHASES, Case
from tests.sim.watching import ROUND_S, begun


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fault(case: Case) -> None:
    matrix.run(case)


FOUND = [
    ("REDUCE", "not_dialled", 2525196860),  # results that nobody could have were proposed again for ever
    ("REDUCE", "rate_1mbit", 1302507649),  # who began late was never heard to have made a step before the deadline
    ("CATCHING_UP", "rate_1mbit", 3609923937),
]


@pytest.mark.parametrize(("phase", "fault", "seed"), FOUND)
def test_what_failed_once(phase: str, fault: str, seed: int) -> None:
    matrix.run(Case(phase, fault), seed)


@pytest.mark.sim
@pytest.mark.parametrize("n", [1, *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 6))])
@pytest.mark.parametrize("phase", PHASES)
def test_faults_with_other_seeds(phase: str, n: int) -> None:
    for case in CASES:
        if case.phase == phase:
            matrix.run(case, case.seed + n)


def test_the_matrix_is_whole() -> None:
    assert len(CASES) == len(PHASES) * len(FAULTS) >= 9 * 19


def test_a_case_has_the_same_history_again_and_names_the_command_that_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("EXCHANGE", "half_open")
    assert matrix.run(case).trace_hash == matrix.run(case).trace_hash
    assert matrix.run(case, 1).trace_hash != matrix.run(case, 2).trace_hash
    monkeypatch.setattr(matrix, "AFTER_S", 0.0)
    with pytest.raises(Violated, match="does not go on") as caught:
        matrix.run(case, 77)
    assert caught.value.__notes__[0] == "again: python -m tests.sim.matrix EXCHANGE half_open --seed 77"


# -- what the watch would find ---------------------------------------------------------------------------------------


class WaitsForAll(Rounds):
    """Nobody is ever given up."""

    def _commitment(self, now: Instant) -> list[Effect] | None:
        attempt = self._running()
        if len(attempt.commitments) < len(attempt.losses):
            return self._wait("all commitments, for ever")
        return super()._commitment(now)


class SaysNothing(Rounds):
    """Waits in silence."""

    def _train(self, now: Instant) -> list[Effect] | None:
        moved = super()._train(now)
        self._waiting = lambda _: ""
        return moved


def test_a_leader_that_waits_past_its_deadline_is_found() -> None:
    world = matrix.small(1, rounds_type=WaitsForAll)
    Watch(world)
    world.start()
    assert world.run_until(lambda: world.leader.rounds.phase is Phase.COMMITMENT, 60.0)
    world.member(1).crash()
    with pytest.raises(Violated, match="past its deadline"):
        world.run_for(60.0)


def test_a_leader_that_does_not_say_for_whom_it_waits_is_found() -> None:
    world = matrix.small(1, rounds_type=SaysNothing)
    Watch(world)
    world.start()
    with pytest.raises(Violated, match="doesn't say for whom"):
        world.run_for(60.0)


def test_a_state_that_no_commit_leads_to_is_found() -> None:
    world = begun(2)
    Watch(world)
    held = world.member(1).disk.ledger
    assert held is not None
    assert world.run_until(lambda: world.leader.rounds.phase is Phase.TRAIN and world.now > 3.0, ROUND_S)
    check_state(world, world.member(1))
    world.member(1).disk.ledger = replace(held, digest=b"another state")
    with pytest.raises(Violated, match="no commit leads to"):
        world.run_for(1.0)
