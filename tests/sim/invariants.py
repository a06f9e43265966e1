"""What holds at every moment of a simulated run: states are commits' states, and whatever waits says for whom and till
when.

That a round is committed once, that batches and contributions count once, and that a state changes by commits alone is
checked where it happens (`tests.sim.chain`, `MemberProcess`). This looks at all processes again and again.
"""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.rounds.attempt import Phase
from node.session.view import View
from tests.sim.chain import Violated
from tests.sim.leader import LeaderProcess
from tests.sim.member import MemberProcess
from tests.sim.process import Process
from tests.sim.world import World

EVERY_S = 0.5
LATE_S = 0.25
"""A deadline is what a process wakes by; so much later it has been dealt with."""
BUSY = ("training", "applying", "paused")
"""States in which a member works, and waits for nobody."""


class Watch:
    """Looks at a world's processes every half second until its end. Raises Violated."""

    def __init__(self, world: World) -> None:
        self.world = world
        world.at(world.now + EVERY_S, self._look)

    def _look(self) -> None:
        for leader in self._leading():
            _check_leader(leader)
        for member in self.world.members.values():
            if _is_awake(member):
                check_state(self.world, member)
                _check_view(member, member.session.view())
        self.world.at(self.world.now + EVERY_S, self._look)

    def _leading(self) -> Iterator[LeaderProcess]:
        yield from (leader for leader in self.world.leaders if _is_awake(leader))
        yield from (stand_in for stand_in in self.world.stand_ins.values() if _is_awake(stand_in))


def check_state(world: World, member: MemberProcess) -> None:
    """The state that a member holds is one that a commit leads to, with the commit's digest."""
    held = member.disk.ledger
    if held is None:
        return
    known = world.chain.ledgers.get(held.head)
    if known is None or known.digest != held.digest or known != held:
        raise Violated(f"{member.name} holds a state that no commit leads to")


def _check_leader(leader: LeaderProcess) -> None:
    now = leader.now()
    view = leader.rounds.view(now)
    if view.phase == Phase.ENDED:
        return
    if not view.waiting_for:
        raise Violated(f"{leader.name} waits in {view.phase} and doesn't say for whom")
    if view.deadline_at is not None and now > view.deadline_at + LATE_S:
        late_s = now - view.deadline_at
        raise Violated(f"{leader.name} waits in {view.phase} for {late_s:.1f} s past its deadline: {view.waiting_for}")


def _check_view(member: MemberProcess, view: View) -> None:
    if view.state not in BUSY and not view.waiting_for:
        raise Violated(f"{member.name} is {view.state} and doesn't say for whom")


def _is_awake(process: Process) -> bool:
    return process.alive and process.frozen_until + LATE_S < process.world.now
