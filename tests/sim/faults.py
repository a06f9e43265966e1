"""Faults at random moments: what is drawn from the world's own source of chance before it begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.sim.process import Process
from tests.sim.world import World


@dataclass(frozen=True, slots=True)
class Faults:
    """How many of each there are, at moments drawn from the first `until_s` seconds."""

    until_s: float = 10.0
    n_crashes: int = 0
    n_torn_crashes: int = 0
    """In the middle of what one event brings about: after some of its effects."""
    n_breaks: int = 0
    n_freezes: int = 0
    n_partitions: int = 0
    n_leaves: int = 0
    n_switches: int = 0
    """A member changes which leaders it talks to."""
    n_trainer_deaths: int = 0
    down_s: tuple[float, float] = (0.1, 4.0)
    """How long a crashed process stays away, and how long something is frozen or parted."""
    returns: float = 1.0
    """Share of those that crashed or left that come back."""


def inject(world: World, faults: Faults) -> None:
    """Put the faults into the world's future."""
    rng = world.rng
    kinds: list[tuple[int, Callable[[World, Faults], None]]] = [
        (faults.n_crashes, _crash),
        (faults.n_torn_crashes, _tear),
        (faults.n_breaks, _break),
        (faults.n_freezes, _freeze),
        (faults.n_partitions, _part),
        (faults.n_leaves, _leave),
        (faults.n_switches, _switch),
        (faults.n_trainer_deaths, _kill_trainer),
    ]
    for n, fault in kinds:
        for _ in range(n):
            world.at(faults.until_s * rng.random(), fault, world, faults)


def _processes(world: World) -> list[Process]:
    return [*world.leaders, *world.members.values()]


def _down_s(world: World, faults: Faults) -> float:
    low, high = faults.down_s
    return low + (high - low) * world.rng.random()


def _restart_s(world: World, faults: Faults) -> float | None:
    after_s = _down_s(world, faults)
    return after_s if world.rng.random() < faults.returns else None


def _crash(world: World, faults: Faults) -> None:
    process = world.rng.choice(_processes(world))
    if process.alive:
        world.crash(process, _restart_s(world, faults))


def _tear(world: World, faults: Faults) -> None:
    process = world.rng.choice(_processes(world))
    process.crash_after = world.rng.randrange(4)
    restart_s = _restart_s(world, faults)
    if restart_s is not None:
        world.at(world.now + 2.0 + restart_s, world.restart, process)


def _break(world: World, faults: Faults) -> None:
    lines = [line for member in world.members.values() for line in member.lines.values()]
    if lines:
        world.tell_line_broke(world.rng.choice(lines), "broken")


def _freeze(world: World, faults: Faults) -> None:
    world.rng.choice(_processes(world)).freeze(_down_s(world, faults))


def _part(world: World, faults: Faults) -> None:
    names = [process.name for process in _processes(world)]
    peers = {name for name in names if world.rng.random() < 0.4}
    world.part(peers, 2 * _down_s(world, faults))


def _leave(world: World, faults: Faults) -> None:
    members = [member for member in world.members.values() if not member.observer]
    member = world.rng.choice(members)
    world.ask_to_leave(member)
    restart_s = _restart_s(world, faults)
    if restart_s is not None:
        world.at(world.now + 0.5 + restart_s, world.restart, member)


def _switch(world: World, faults: Faults) -> None:
    member = world.rng.choice(list(world.members.values()))
    leaders = [leader for leader in world.leaders if world.rng.random() < 0.6]
    world.assign(member, leaders or [world.leader])


def _kill_trainer(world: World, faults: Faults) -> None:
    members = [member for member in world.members.values() if member.alive and not member.observer]
    if members:
        world.rng.choice(members).kill_trainer()
