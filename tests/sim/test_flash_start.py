"""Several nodes that start in the same moment come to one view and one chain."""

from __future__ import annotations

from random import Random

import pytest

from protos.messages import Outcome
from tests.sim.invariants import Watch
from tests.sim.options import SHORT, Options
from tests.sim.watching import ROUND_S, story
from tests.sim.world import World, heads

WITHIN_S = 0.2


def flash_start(seed: int) -> World:
    """4 to 8 nodes, and sometimes the coordinator too, start within 200 ms; who may begin alone may, or has to wait."""
    rng = Random(seed)
    n = rng.randint(4, 8)
    options = Options(
        seed=seed,
        n_members=n,
        n_newcomers=rng.choice([0, 0, n - 1]),
        start_contributors=rng.choice([1, n]),
        unreachable=tuple(number for number in range(1, n) if rng.random() < 0.3),
        stand_ins=True,
        h=3,
        step_s=tuple(rng.uniform(0.3, 0.6) for _ in range(n)),
        delay_s=rng.choice([(0.001, 0.005), (0.01, 0.3)]),
        spikes=rng.choice([0.0, 0.1]),
        spike_s=1.0,
        deadlines=SHORT,
    )
    world = World(options)
    Watch(world)
    for process in (*world.leaders, *world.members.values()):
        late = process is not world.leader or rng.random() < 0.5
        world.at(WITHIN_S * rng.random() if late else 0.0, process.start)
    return world


@pytest.mark.parametrize("seed", range(30))
def test_nodes_that_start_together_make_one_chain(seed: int) -> None:
    world = flash_start(seed)
    names = {name for name in world.members if name != "observer"}

    def all_counted() -> bool:
        _, body, _ = world.chain.commits[-1] if world.chain.commits else (None, None, None)
        return body is not None and {entry.peer for entry in body.members if entry.counted} == names

    assert world.run_until(all_counted, 5 * ROUND_S), story(world)
    wanted = world.n_committed + 2
    assert world.run_until(lambda: world.n_committed >= wanted, 3 * ROUND_S), story(world)
    head = world.leader.rounds.ledger.head
    assert world.run_until(lambda: set(heads(world.members).values()) == {world.leader.rounds.ledger.head}, ROUND_S)
    bodies = [body for _, body, _ in world.chain.commits]
    assert [body.round for body in bodies] == list(range(1, len(bodies) + 1))
    assert {(body.epoch, body.leader) for body in bodies} == {(0, world.coordinator)}
    assert [body.outcome for body in bodies][1:] == [Outcome.COMMITTED] * (len(bodies) - 1)
    assert not any(stand_in.n_terms for stand_in in world.stand_ins.values())
    assert {member.peer for member in world.leader.rounds.members} == {*names, "observer"}
    assert head in world.chain.ledgers
