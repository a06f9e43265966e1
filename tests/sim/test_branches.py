"""A run that was parted and went on on both sides: afterwards all follow the larger branch."""

from __future__ import annotations

import pytest

from tests.sim.options import SHORT, Options
from tests.sim.watching import ROUND_S, SILENCE_S, commits, story
from tests.sim.world import OBSERVER, World, heads

HASTY = SHORT.model_copy(update={"minority_wait_s": 2.0, "stand_in_s": 8.0})


def parted(seed: int) -> World:
    """The coordinator with one member and the observer in an epoch of their own, two members with a stand-in."""
    world = World(Options(n_members=3, h=3, step_s=(0.3, 0.5, 0.5), deadlines=HASTY, seed=seed, stand_ins=True))
    world.start()
    assert world.run_until(lambda: world.n_committed >= 2, 60.0)
    here = {world.coordinator, world.member(0).name, OBSERVER}
    world.divide([here, {world.member(1).name, world.member(2).name}], 45.0)
    world.run_for(44.0)
    ours, theirs = world.leader.rounds.ledger, world.member(1).session.ledger
    assert theirs is not None
    assert ours.epoch == 1, story(world)
    assert theirs.tokens > ours.tokens, story(world)
    assert theirs.round < ours.round, "what it commits next is no news by its number"
    return world


@pytest.mark.parametrize("seed", [1, 2])
def test_who_was_on_the_smaller_branch_follows_though_a_voter_of_the_larger_one_dies(seed: int) -> None:
    """The observer is one of them, and without its digest the coordinator has no vote."""
    world = parted(seed)
    leader = world.leader
    assert world.run_until(lambda: leader.rounds.ledger.epoch == 0, SILENCE_S), story(world)
    world.member(2).crash()
    commits(world, 3, 2 * SILENCE_S + 4 * ROUND_S)
    held = heads({name: member for name, member in world.members.items() if member.alive})
    assert len(held) == 3
    for member in world.members.values():
        if member.alive:
            assert member.disk.ledger is not None
            assert member.disk.ledger.epoch == 0
            assert leader.rounds.ledger.round - member.disk.ledger.round <= 1, story(world)
