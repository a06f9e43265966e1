"""Worlds of the churn benchmark: members of mixed speeds and links that come, go and slow down, and what came of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Literal

from protos.messages import Outcome
from protos.runspec import DeadlineSpec
from tests.sim.member import MemberProcess
from tests.sim.options import Options
from tests.sim.sizes import Meter, Sizes
from tests.sim.world import World

MBIT = 125_000.0
"""Bytes a second of one Mbit/s."""
SLOWEST = 30.0
"""So many times slower than the fastest is the slowest that a heavy tail gives."""
START_S = 600.0
ROUND_MOST_S = 1500.0
UNCOUNTED = 1
"""Committed rounds before the measured ones: speeds and bandwidths are not known in the first."""
SETTLES = 3.0
"""Where members come and go, so many times what they are away pass before the measured rounds: at first all are there,
and a world whose first round is longer than another's would have fewer of them in those that are measured."""

Speeds = Literal["alike", "mixed", "heavy"]


class Stuck(RuntimeError):
    """The rounds did not come in time."""


@dataclass(frozen=True, slots=True)
class Mix:
    """A world of the benchmark. Times in seconds, links in Mbit/s."""

    n: int
    h: int = 30
    step_s: float = 2.0
    """Of the fastest members."""
    speeds: Speeds = "alike"
    life_s: float = math.inf
    """How long a member stays, on the average; half of those that go are killed, the others leave."""
    away_s: float = 120.0
    spell_s: float = math.inf
    """How long a machine works undisturbed, on the average, before it is four times slower for a while."""
    link_mbit: float = 0.0
    """Up and down of the middle member; 0: rows take no time."""
    link_spread: float = 0.0
    """σ of the logarithm of the links."""
    n_chunks: int = 4
    reachable: float = 1.0
    round_s: float = 0.0
    deadline_k: float = DeadlineSpec().deadline_k
    train_limit_s: float = 600.0
    slow: tuple[float, ...] = ()
    """Times by which the first members are slower than the rest."""
    newcomers: int = 0
    seed: int = 1

    def options(self) -> Options:
        every = max(1, round(1 / self.reachable))
        rng = Random(self.seed)
        factors = [*self.slow, *(_factor(self.speeds, rng) for _ in range(self.n - len(self.slow)))]
        deadlines = DeadlineSpec(
            train_limit_s=self.train_limit_s, deadline_k=self.deadline_k, exchange_s=600.0, commitment_s=60.0
        )
        return Options(
            seed=self.seed,
            n_members=self.n,
            n_newcomers=self.newcomers,
            unreachable=tuple(number for number in range(self.n) if number % every),
            start_contributors=self.n - self.newcomers,
            h=self.h,
            round_s=self.round_s,
            n_chunks=self.n_chunks,
            chunk_values=2**20,
            replicas=2,
            deadlines=deadlines,
            step_s=tuple(self.step_s * factor for factor in factors),
            work_s=0.05,
            fetch_s=2.0,
            delay_s=(0.02, 0.12),
            instant_rows=not self.link_mbit,
            checks=False,
        )


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What was measured over some rounds."""

    n_rounds: int
    round_s: float
    trained: float
    """Share of the members' time in which they trained."""
    utilised: float
    """Share of it in which they trained what counted."""
    lost: float
    """Share of the trained batches that did not count."""
    batches_per_s: float
    """That counted."""
    leader_sent_bytes: float
    """A round."""
    leader_heard_bytes: float
    slow_counted: float
    """Share of the rounds that counted the first member."""


def made(mix: Mix) -> World:
    world = World(mix.options())
    rng = Random(mix.seed + 1)
    if mix.link_mbit:
        for name, member in world.members.items():
            mbit = mix.link_mbit * (1.0 if member.observer else math.exp(rng.gauss(0.0, mix.link_spread)))
            world.network.throttle(world, name, mbit * MBIT, mbit * MBIT)
    for member in world.members.values():
        if not member.observer:
            if math.isfinite(mix.life_s):
                world.at(rng.expovariate(1 / mix.life_s), _go, world, mix, rng, member)
            if math.isfinite(mix.spell_s):
                world.at(rng.expovariate(1 / mix.spell_s), _slow_down, world, mix, rng, member)
    return world


def measured(mix: Mix, n_rounds: int) -> Outcomes:
    """Live through so many committed rounds, after the first ones. Raises Stuck if they don't come."""
    world = made(mix).start()
    _run(world, UNCOUNTED, START_S)
    while math.isfinite(mix.life_s) and world.now < SETTLES * mix.away_s:
        _run(world, 1, ROUND_MOST_S)
    world.meter = Meter(Sizes(world.registry, [*world.members, world.coordinator]))
    before, began_at = _books(world), world.now
    n_before = len(world.chain.commits)
    _run(world, n_rounds, ROUND_MOST_S * n_rounds)
    after = _books(world)
    trained_s, lived_s, batches = (b - a for a, b in zip(before, after, strict=True))
    counted_s, counted, slow = 0.0, 0, 0
    per_step = world.spec.work.batch_tokens
    first = world.member(0).name
    for _, body, _ in world.chain.commits[n_before:]:
        for entry in body.members:
            if entry.counted and body.outcome is Outcome.COMMITTED:
                n_batches = entry.tokens // per_step
                counted += n_batches
                counted_s += n_batches * world.members[entry.peer].step_s
                slow += entry.peer == first
    passed_s = world.now - began_at
    meter = world.meter
    return Outcomes(
        n_rounds=n_rounds,
        round_s=passed_s / n_rounds,
        trained=trained_s / lived_s,
        utilised=counted_s / lived_s,
        lost=max(0.0, 1.0 - counted / batches) if batches else 0.0,
        batches_per_s=counted / passed_s,
        leader_sent_bytes=sum(meter.sent.values()) / n_rounds,
        leader_heard_bytes=sum(meter.heard.values()) / n_rounds,
        slow_counted=slow / n_rounds,
    )


def _run(world: World, n_rounds: int, limit_s: float) -> None:
    wanted = world.n_committed + n_rounds
    if not world.run_until(lambda: world.n_committed >= wanted, limit_s):
        view = world.leader.rounds.view(world.leader.now())
        raise Stuck(f"no {n_rounds} rounds in {limit_s:g} s: {view.phase}, {view.waiting_for}")


def _books(world: World) -> tuple[float, float, int]:
    """Seconds that members have trained and lived, and batches that they have trained."""
    members = [member for member in world.members.values() if not member.observer]
    trained_s = sum(member.batches() * member.step_s for member in members)
    return trained_s, sum(member.lived_s for member in members), sum(member.batches() for member in members)


def _factor(speeds: Speeds, rng: Random) -> float:
    if speeds == "alike":
        return rng.uniform(1.0, 1.1)
    if speeds == "mixed":
        return math.exp(abs(rng.gauss(0.0, 0.5)))
    return min(rng.paretovariate(1.2), SLOWEST)


def _go(world: World, mix: Mix, rng: Random, member: MemberProcess) -> None:
    if rng.random() < 0.5:
        member.crash()
    else:
        world.ask_to_leave(member)
    world.at(world.now + rng.expovariate(1 / mix.away_s), _come, world, mix, rng, member)


def _come(world: World, mix: Mix, rng: Random, member: MemberProcess) -> None:
    world.restart(member)
    world.at(world.now + rng.expovariate(1 / mix.life_s), _go, world, mix, rng, member)


def _slow_down(world: World, mix: Mix, rng: Random, member: MemberProcess) -> None:
    usual_s = member.next_step_s
    member.next_step_s = 4 * usual_s
    spell_s = rng.expovariate(4 / mix.spell_s)
    world.at(world.now + spell_s, setattr, member, "next_step_s", usual_s)
    world.at(world.now + spell_s + rng.expovariate(1 / mix.spell_s), _slow_down, world, mix, rng, member)
