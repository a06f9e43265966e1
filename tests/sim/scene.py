"""Where a fault strikes: a world, the member that is hit, and who leads."""

from __future__ import annotations

from dataclasses import dataclass

from protos.messages import PeerId
from tests.sim.leader import LeaderProcess
from tests.sim.member import MemberProcess
from tests.sim.process import Process
from tests.sim.world import World


def leading(world: World) -> LeaderProcess | None:
    """The coordinator where it runs, else a stand-in."""
    if world.leader.alive:
        return world.leader
    return next((stand_in for stand_in in world.stand_ins.values() if stand_in.alive), None)


@dataclass(frozen=True, slots=True)
class Scene:
    """`victim` leads only where the coordinator does not, and then never the round that is running."""

    world: World
    victim: MemberProcess
    leader: LeaderProcess

    @property
    def host(self) -> Process:
        """The process that the leader lives and dies with."""
        return self.world.members.get(self.leader.name, self.leader)

    @property
    def others(self) -> list[MemberProcess]:
        """The members that neither lead nor are the victim."""
        hit = (self.victim.name, self.leader.name)
        return [member for name, member in self.world.members.items() if not member.observer and name not in hit]

    def names(self) -> list[PeerId]:
        """All hosts."""
        return [self.world.coordinator, *self.world.members]
