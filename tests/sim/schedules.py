"""Random schedules by their seed: contests of ballots, whole rounds under faults, and worlds that must recover.

    python -m tests.sim.schedules succession --seeds 100000

runs 10^5 of a family and prints those in which something happened that must never happen.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from protos.runspec import DeadlineSpec
from tests.sim.faults import Faults, inject
from tests.sim.liars import HOLDING_UP, LIES, PLAIN, hold_up, lying_voters
from tests.sim.options import Options
from tests.sim.world import World

HASTY = DeadlineSpec(
    train_limit_s=6.0,
    commitment_s=1.0,
    exchange_s=1.5,
    vote_s=1.5,
    heartbeat_s=1.0,
    heartbeat_timeout_s=3.0,
    gone_grace_s=0.5,
    no_progress_s=1.0,
)
CONTENDED = HASTY.model_copy(update={"stand_in_s": 0.05})
"""Several lead at once: who hears the first of them must heed the others all the same, or there would be no contest."""
CONTEST_S = 8.0
ROUNDS_S = 15.0
FAULTS_S = 20.0
QUIET_S = 35.0
SUCCESSION_S = 25.0


def ballots(seed: int, **types: Any) -> World:
    """Up to three leaders contend for round 1, in which all members vote and nothing is exchanged."""
    rng = Random(seed)
    n_leaders = rng.choice([1, 2, 2, 3])
    options = Options(
        seed=seed,
        n_members=rng.randint(1, 5),
        n_leaders=n_leaders,
        observer=False,
        all_vote=True,
        h=1,
        n_chunks=1,
        start_contributors=1,
        deadlines=CONTENDED,
        step_s=(100.0,),
        work_s=0.005,
        fetch_s=0.01,
        delay_s=rng.choice([(0.01, 0.05), (0.01, 0.3)]),
        spikes=rng.choice([0.0, 0.1, 0.2]),
        spike_s=2.0,
        fifo=rng.random() < 0.5,
        loss=rng.choice([0.0, 0.03, 0.15, 0.3]),
        duplication=rng.choice([0.0, 0.0, 0.1]),
        keepalive_s=1.5,
        learns=rng.random() < 0.5,
    )
    faults = Faults(
        until_s=6.0,
        n_crashes=rng.randint(0, 3),
        n_torn_crashes=rng.randint(0, 4),
        n_breaks=rng.randint(0, 2),
        n_freezes=rng.randint(0, 1),
        n_partitions=rng.randint(0, 1),
        n_leaves=rng.choice([0, 0, 1, 2, 3]),
        n_switches=rng.choice([0, 4, 12]) if n_leaders > 1 else 0,
        returns=0.8,
        down_s=(0.1, 2.0),
    )
    world = World(options, **types)
    inject(world, faults)
    return world


def run_ballots(world: World) -> None:
    """Until all leaders are past round 1, or for a while."""
    leaders = world.leaders
    world.start()
    world.run_until(lambda: all(leader.alive and leader.rounds.ledger.round >= 1 for leader in leaders), CONTEST_S)


def rounds(seed: int, **types: Any) -> World:
    """One to three whole rounds of a few nodes while everything happens to them."""
    rng = Random(seed)
    n_leaders = rng.choice([1, 1, 2, 3])
    options = Options(
        seed=seed,
        n_members=rng.randint(1, 4),
        n_leaders=n_leaders,
        observer=rng.random() < 0.8,
        unreachable=(0,) if rng.random() < 0.2 else (),
        h=1,
        n_chunks=rng.choice([1, 2]),
        deadlines=CONTENDED,
        step_s=(0.2, 0.3),
        work_s=0.005,
        fetch_s=0.01,
        delay_s=rng.choice([(0.01, 0.05), (0.01, 0.3)]),
        spikes=rng.choice([0.0, 0.05, 0.1, 0.2]),
        fifo=rng.random() < 0.5,
        loss=rng.choice([0.0, 0.03, 0.15, 0.3]),
        duplication=rng.choice([0.0, 0.0, 0.1]),
        row_break=rng.choice([0.0, 0.2]),
        keepalive_s=1.5,
    )
    faults = Faults(
        until_s=8.0,
        n_crashes=rng.randint(0, 3),
        n_torn_crashes=rng.randint(0, 4),
        n_breaks=rng.randint(0, 2),
        n_freezes=rng.randint(0, 1),
        n_partitions=rng.randint(0, 1),
        n_leaves=rng.choice([0, 0, 1, 2]),
        n_switches=rng.randint(0, 12) if n_leaders > 1 else 0,
        n_trainer_deaths=rng.choice([0, 0, 1]),
        returns=0.8,
        down_s=(0.1, 2.0),
    )
    world = World(options, **types)
    inject(world, faults)
    return world


def succession(seed: int, **types: Any) -> World:
    """A few rounds of members that stand in for a coordinator which dies, freezes, is cut off and comes back."""
    rng = Random(seed)
    n = rng.randint(1, 5)
    options = Options(
        seed=seed,
        n_members=n,
        observer=rng.random() < 0.5,
        unreachable=(0,) if n > 2 and rng.random() < 0.2 else (),
        stand_ins=True,
        h=rng.choice([1, 2]),
        n_chunks=rng.choice([1, 2]),
        replicas=rng.choice(["auto", 1]),
        rule=rng.choice(["mean", "default"]),
        deadlines=HASTY.model_copy(update={"stand_in_s": rng.choice([1.2, 2.0]), "minority_wait_s": 1000.0}),
        step_s=(0.1, 0.2),
        work_s=0.005,
        fetch_s=0.02,
        delay_s=rng.choice([(0.01, 0.05), (0.01, 0.2)]),
        spikes=rng.choice([0.0, 0.1]),
        spike_s=2.0,
        fifo=rng.random() < 0.6,
        loss=rng.choice([0.0, 0.03, 0.15]),
        duplication=rng.choice([0.0, 0.0, 0.1]),
        keepalive_s=1.5,
    )
    faults = Faults(
        until_s=12.0,
        n_crashes=rng.randint(0, 3),
        n_torn_crashes=rng.randint(0, 4),
        n_breaks=rng.randint(0, 2),
        n_freezes=rng.randint(0, 2),
        n_partitions=rng.randint(0, 2),
        n_leaves=rng.choice([0, 0, 0, 1]),
        returns=0.9,
        down_s=(0.1, 4.0),
    )
    world = World(options, **types)
    inject(world, faults)
    for _ in range(rng.randint(0, 2)):
        world.at(10.0 * rng.random(), world.crash, world.leader, rng.choice([1.0, 4.0, 60.0]))
    return world


def liars(seed: int, **types: Any) -> World:
    """A succession in which one voter makes up what it has signed, and a stand-in is heard and leads nowhere."""
    rng = Random(f"liars {seed}")
    world = succession(seed, **types)
    voter, stand_in = rng.choice(sorted(world.stand_ins)), rng.choice(sorted(world.stand_ins))
    lying_voters(world, [voter], LIES[rng.choice(PLAIN)])
    hold_up(world, stand_in, HOLDING_UP[rng.choice(sorted(HOLDING_UP))])
    return world


def run_succession(world: World) -> None:
    world.start()
    world.run_until(lambda: world.round >= 5, SUCCESSION_S)


def run_rounds(world: World) -> None:
    world.start()
    world.run_until(lambda: world.round >= 3, ROUNDS_S)


def recovery(seed: int, **types: Any) -> World:
    """A run that is hit for a while, and must then go on."""
    rng = Random(seed)
    n = rng.randint(1, 6)
    options = Options(
        seed=seed,
        n_members=n,
        n_leaders=rng.choice([1, 1, 1, 2]),
        unreachable=tuple(number for number in range(n) if rng.random() < 0.3),
        diverges=(0,) if n > 1 and rng.random() < 0.1 else (),
        h=3,
        n_chunks=rng.choice([1, 3, 8]),
        replicas=rng.choice(["auto", 1, 2]),
        rule=rng.choice(["mean", "median", "default", "default", "arc+nnm+trimmed_mean"]),
        step_s=(0.3, 0.5, 1.0),
        fifo=rng.random() < 0.7,
        loss=rng.choice([0.0, 0.03, 0.15]),
        spikes=rng.choice([0.0, 0.05]),
        duplication=rng.choice([0.0, 0.0, 0.1]),
        row_break=rng.choice([0.0, 0.2]),
    )
    faults = Faults(
        until_s=FAULTS_S,
        n_crashes=rng.randint(0, 5),
        n_torn_crashes=rng.randint(0, 4),
        n_breaks=rng.randint(0, 4),
        n_freezes=rng.randint(0, 2),
        n_partitions=rng.randint(0, 1),
        n_leaves=rng.choice([0, 0, 1, 2]),
        n_trainer_deaths=rng.choice([0, 1, 2]),
        returns=0.9,
        down_s=(0.1, 6.0),
    )
    world = World(options, **types)
    inject(world, faults)
    return world


def run_recovery(world: World, n_rounds: int, limit_s: float) -> bool:
    """Let the faults happen, then mend everything; whether so many rounds are committed in time after that."""
    world.start()
    world.run_for(QUIET_S)
    world.network.heal()
    for leader in world.leaders[1:]:
        leader.crash()
    for process in (world.leader, *world.members.values()):
        process.crash_after = None
        world.restart(process)
    for member in world.members.values():
        world.assign(member, [world.leader])
    wanted = world.n_committed + n_rounds
    return world.run_until(lambda: world.n_committed >= wanted, limit_s)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A family of schedules: how one is made of a seed, and run."""

    make: Callable[..., World]
    run: Callable[[World], None]


SCHEDULES = {
    "ballots": Schedule(ballots, run_ballots),
    "rounds": Schedule(rounds, run_rounds),
    "succession": Schedule(succession, run_succession),
    "liars": Schedule(liars, run_succession),
}


def main() -> int:
    """Run many; what fails is told by its family and seed, to be kept in tests/golden/seeds.txt."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.schedules", description=__doc__)
    parser.add_argument("family", choices=sorted(SCHEDULES))
    parser.add_argument("--seeds", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=1_000_000)
    asked = parser.parse_args()
    n_failed = n_committed = 0
    for seed in range(asked.first, asked.first + asked.seeds):
        schedule = SCHEDULES[asked.family]
        world = schedule.make(seed)
        try:
            schedule.run(world)
        except Exception as error:
            n_failed += 1
            print(f"{asked.family} {seed} FAILED: {type(error).__name__}: {error}", flush=True)
        n_committed += len(world.chain.commits)
    print(f"{asked.seeds} schedules, {n_committed} commits, {n_failed} failed")
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
