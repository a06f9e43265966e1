"""A quorum that is lost for good: the coordinator opens an epoch with who is left, and who comes back follows it."""

from __future__ import annotations

import pytest

from protos.messages import Outcome
from protos.runspec import DeadlineSpec
from tests.sim.options import SHORT, Options
from tests.sim.watching import ROUND_S, SILENCE_S, commits, counts_again, story
from tests.sim.world import World

MINORITY_S = 40.0


def begun(n: int) -> World:
    deadlines = replace_deadlines()
    world = World(Options(n_members=n, h=3, step_s=(0.4, 0.5), deadlines=deadlines))
    world.start()
    assert world.run_until(lambda: world.n_committed >= 2, 60.0)
    return world


def replace_deadlines() -> DeadlineSpec:
    return SHORT.model_copy(update={"minority_wait_s": MINORITY_S})


def without_quorum(world: World, n_left: int) -> float:
    """Kill all members but so many; when that was."""
    for victim in list(world.members.values())[n_left:]:
        if not victim.observer:
            victim.crash()
    return world.now


@pytest.mark.parametrize(("n", "n_left"), [(3, 1), (5, 1), (6, 2)])
def test_who_is_left_goes_on_in_a_new_epoch(n: int, n_left: int) -> None:
    world = begun(n)
    killed_at = without_quorum(world, n_left)
    round_ = world.round
    world.run_for(MINORITY_S - 1.0)
    assert world.round <= round_ + 1, "nothing is committed without a quorum while the others may come back"
    commits(world, 2, 2 * SILENCE_S + 3 * ROUND_S)
    _, first, _ = next(item for item in world.chain.commits if item[1].epoch == 1)
    assert first.outcome is Outcome.EMPTY
    assert "quorum" in first.reason
    assert world.now - killed_at > MINORITY_S
    back = list(world.members.values())[n_left]
    back.start()
    counts_again(world, back.name, 3 * ROUND_S)


def test_nobody_is_left_and_the_coordinator_never_goes_on_alone() -> None:
    world = begun(3)
    without_quorum(world, 0)
    world.run_for(3 * MINORITY_S)
    assert all(body.epoch == 0 for _, body, _ in world.chain.commits)
    back = next(iter(world.members.values()))
    back.start()
    commits(world, 1, MINORITY_S + 3 * ROUND_S)


def test_a_quorum_that_comes_back_in_time_opens_no_epoch() -> None:
    world = begun(3)
    without_quorum(world, 1)
    world.run_for(MINORITY_S / 2)
    for member in world.members.values():
        if not member.alive:
            member.start()
    commits(world, 2, SILENCE_S + 4 * ROUND_S)
    assert all(body.epoch == 0 for _, body, _ in world.chain.commits)


@pytest.mark.parametrize("n_effects", range(5))
def test_a_coordinator_that_dies_while_it_opens_an_epoch_goes_on_with_it(n_effects: int) -> None:
    world = begun(3)
    without_quorum(world, 1)
    leader = world.leader
    assert world.run_until(lambda: leader.rounds._quorum_lost_at is not None, SILENCE_S + ROUND_S), story(world)
    world.run_for(MINORITY_S - 3.0)
    leader.crash_after = n_effects
    world.run_for(6.0)
    leader.crash_after = None
    if not leader.alive:
        leader.start()
    commits(world, 2, MINORITY_S + 2 * SILENCE_S + 4 * ROUND_S)
    epochs = [body.epoch for _, body, _ in world.chain.commits]
    assert epochs == sorted(epochs)
    assert epochs[-1] == 1, "the epoch that was opened is the one that goes on"
