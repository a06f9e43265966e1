"""What can happen to a run at any moment: one function a fault, and what it may cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.sim.disk import MemberDisk
from tests.sim.process import Process
from tests.sim.scene import Scene
from tests.sim.world import OBSERVER, World

BACK_S = 8.0
AWAY_S = 30.0
GO_ON_S = 45.0
"""Silence, a turn of a stand-in, attempts that end at their deadlines: within this the others have a round."""
LOSS = 0.1
MBIT_BYTES_PER_S = 125_000.0
CLOCK_S = 300.0
DISK_S = 10.0


@dataclass(frozen=True, slots=True)
class Fault:
    """`hit` does it; it is over after `for_s`.

    `needs` rounds are committed within `goes_on_in_s`; none need be where that is 0.
    """

    hit: Callable[[Scene], None]
    for_s: float = 10.0
    goes_on_in_s: float = GO_ON_S
    needs: int = 1


def _comes_back(world: World, process: Process, after_s: float) -> None:
    """Whoever watches over it starts it again, now or after it has ended."""
    for n in range(1, 5):
        world.at(world.now + n * after_s, world.restart, process)


def sigkill(scene: Scene) -> None:
    scene.world.crash(scene.victim, BACK_S)


def sigterm(scene: Scene) -> None:
    scene.world.ask_to_leave(scene.victim)
    _comes_back(scene.world, scene.victim, BACK_S)


def sigstop_30s(scene: Scene) -> None:
    scene.victim.freeze(30.0)


def reset(scene: Scene) -> None:
    """All connections break; what was on them is lost, and new ones are opened at once."""
    world, peer = scene.world, scene.victim.name
    for line in world.lines():
        if peer in (line.member.name, line.leader.name):
            world.tell_line_broke(line, "reset")
    for other in scene.names():
        if other != peer:
            for one, two in ((peer, other), (other, peer)):
                world.network.block(one, two)
                world.at(world.now + 0.2, world.network.unblock, one, two)


def half_open(scene: Scene) -> None:
    scene.world.half_open(scene.victim.name, 20.0)


def deaf(scene: Scene) -> None:
    """Nothing gets to it, and what it says arrives."""
    for other in scene.names():
        if other != scene.victim.name:
            scene.world.block(other, scene.victim.name, 20.0)


def mute(scene: Scene) -> None:
    for other in scene.names():
        if other != scene.victim.name:
            scene.world.block(scene.victim.name, other, 20.0)


def not_dialled(scene: Scene) -> None:
    """From now on nobody can open a connection to it; what it opens itself carries both ways."""
    for other in scene.names():
        scene.world.network.undial(other, scene.victim.name)


def loss_10(scene: Scene) -> None:
    scene.world.network.lose(scene.victim.name, LOSS)


def rate_1mbit(scene: Scene) -> None:
    scene.world.network.throttle(scene.world, scene.victim.name, MBIT_BYTES_PER_S, MBIT_BYTES_PER_S)


def disk_full(scene: Scene) -> None:
    scene.victim.fill_disk(DISK_S)


def leader_disk_full(scene: Scene) -> None:
    scene.host.fill_disk(DISK_S)


def clock_ahead(scene: Scene) -> None:
    scene.victim.leap(CLOCK_S)


def clock_behind(scene: Scene) -> None:
    """It comes back with a clock that is five minutes behind."""
    scene.world.crash(scene.victim, 1.0)
    scene.victim.clock_offset_s -= CLOCK_S


def coordinator_killed(scene: Scene) -> None:
    scene.world.crash(scene.host, AWAY_S)


def coordinator_parted(scene: Scene) -> None:
    scene.world.part({scene.leader.name}, AWAY_S)


def coordinator_parted_beside_one(scene: Scene) -> None:
    scene.world.part({scene.leader.name, scene.victim.name}, AWAY_S)


def half_lost(scene: Scene) -> None:
    """Two of the four; with the coordinator the others are a quorum."""
    for member in (scene.victim, scene.others[0]):
        scene.world.crash(member, 20.0)


def parted_and_healed(scene: Scene) -> None:
    """Two and the leader here, two there, the observer nowhere."""
    there = {scene.victim.name, scene.others[0].name}
    scene.world.divide([there, {OBSERVER}], 20.0)


def leader_dies_with_votes(scene: Scene) -> None:
    """It has committed, one member holds the commit, and all others have not heard of it."""
    world, round_ = scene.world, scene.world.round
    if not world.run_until(lambda: world.round > round_, 60.0):
        return
    world.network.cut({member.name for member in (scene.victim, *scene.others[1:])} | {OBSERVER})
    world.run_for(0.2)
    world.crash(scene.host, AWAY_S)
    world.network.cut(set())


def leader_stopped_60s(scene: Scene) -> None:
    scene.host.freeze(60.0)


def voter_restarted(scene: Scene) -> None:
    """Between its vote and the commit."""
    world, victim = scene.world, scene.victim

    def voted() -> bool:
        record, ledger = victim.disk.record, scene.leader.rounds.ledger
        return record is not None and record.round == ledger.round + 1 and record.voted_attempt >= 0

    if world.run_until(voted, 60.0) and victim.alive:
        world.crash(victim, 0.5)


def crash_in_apply(scene: Scene) -> None:
    """In the middle of what the commit brings about."""
    world, victim = scene.world, scene.victim
    if world.run_until(lambda: victim.alive and victim.session._applying, 60.0):
        world.crash(victim, 1.0)


def one_holder_left(scene: Scene) -> None:
    """The states of all members but one are gone, the observer's too."""
    world = scene.world
    for member in world.members.values():
        if member is not scene.others[-1]:
            member.crash()
            member.disk = MemberDisk(record=member.disk.record, revisions=member.disk.revisions)
            world.at(world.now + 2.0, world.restart, member)


FAULTS: dict[str, Fault] = {
    "sigkill": Fault(sigkill),
    "sigterm": Fault(sigterm),
    "sigstop_30s": Fault(sigstop_30s, for_s=30.0),
    "reset": Fault(reset),
    "half_open": Fault(half_open, for_s=20.0),
    "deaf": Fault(deaf, for_s=20.0),
    "mute": Fault(mute, for_s=20.0),
    "not_dialled": Fault(not_dialled),
    "loss_10": Fault(loss_10),
    "rate_1mbit": Fault(rate_1mbit),
    "disk_full": Fault(disk_full),
    "leader_disk_full": Fault(leader_disk_full),
    "clock_ahead": Fault(clock_ahead),
    "clock_behind": Fault(clock_behind),
    "coordinator_killed": Fault(coordinator_killed, for_s=AWAY_S, goes_on_in_s=AWAY_S),
    "coordinator_parted": Fault(coordinator_parted, for_s=AWAY_S, goes_on_in_s=AWAY_S),
    "coordinator_parted_beside_one": Fault(coordinator_parted_beside_one, for_s=AWAY_S, goes_on_in_s=AWAY_S),
    "half_lost": Fault(half_lost, for_s=20.0),
    "parted_and_healed": Fault(parted_and_healed, for_s=20.0),
    "leader_dies_with_votes": Fault(leader_dies_with_votes, for_s=AWAY_S, goes_on_in_s=AWAY_S),
    "leader_stopped_60s": Fault(leader_stopped_60s, for_s=60.0, goes_on_in_s=60.0),
    "voter_restarted": Fault(voter_restarted),
    "crash_in_apply": Fault(crash_in_apply),
    "one_holder_left": Fault(one_holder_left, goes_on_in_s=0.0),
}
