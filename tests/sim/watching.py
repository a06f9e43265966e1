"""What tests of a simulated run look at: moments of a round, and whether it goes on in time."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.rounds.attempt import Attempt, Phase
from protos.messages import PeerId
from tests.sim.options import SHORT, Options
from tests.sim.world import World

ROUND_S = 8.0
"""A quiet round of these worlds takes less than half of it."""
DEATH_S = SHORT.gone_grace_s + 1.5
"""How long a death may cost: the grace for those who reconnect, and another attempt."""
SILENCE_S = SHORT.heartbeat_timeout_s + 1.5


def begun(n: int, **options: object) -> World:
    """A world in the middle of its second committed round."""
    world = World(Options(n_members=n, **{"h": 3, "step_s": (0.4, 0.5), **options}))  # type: ignore[arg-type]
    world.start()
    assert world.run_until(lambda: world.n_committed >= 1, 30.0)
    return world


def commits(world: World, n: int, within_s: float) -> None:
    """So many more rounds with contributions are committed in time."""
    wanted = world.n_committed + n
    assert world.run_until(lambda: world.n_committed >= wanted, within_s), story(world)


def story(world: World) -> str:
    view = world.leader.rounds.view(world.leader.now())
    said = "\n".join([*world.leader.said[-8:], f"{view.phase}: {view.waiting_for}"])
    return f"at {world.now}:\n{said}"


def counted(world: World, peer: PeerId) -> int:
    """Rounds that counted a peer."""
    return sum(
        1 for _, body, _ in world.chain.commits for entry in body.members if entry.peer == peer and entry.counted
    )


def counts_again(world: World, peer: PeerId, within_s: float) -> None:
    before = counted(world, peer)
    assert world.run_until(lambda: counted(world, peer) > before, within_s), story(world)


def attempt(world: World) -> Attempt | None:
    return world.leader.rounds._attempt


def phase(world: World) -> Phase:
    return world.leader.rounds.phase


def trained_half(world: World, victim: PeerId) -> bool:
    known = world.leader.rounds.members.get(victim)
    return phase(world) is Phase.TRAIN and known is not None and 0 < known.step < world.spec.work.h


def planned(world: World, victim: PeerId) -> bool:
    now = attempt(world)
    return phase(world) is Phase.COMMITMENT and now is not None and victim not in now.commitments


def committed_to(world: World, victim: PeerId) -> bool:
    now = attempt(world)
    return now is not None and now.body is None and victim in now.commitments


def exchanging(world: World, victim: PeerId) -> bool:
    return phase(world) is Phase.EXCHANGE


def reduced(world: World, victim: PeerId) -> bool:
    now = attempt(world)
    return now is not None and victim in now.results


def proposed(world: World, victim: PeerId) -> bool:
    now = attempt(world)
    return phase(world) is Phase.VOTE and now is not None and victim not in now.votes


def voted(world: World, victim: PeerId) -> bool:
    record = world.members[victim].disk.record
    ledger = world.leader.rounds.ledger
    return record is not None and record.round == ledger.round + 1 and record.voted_attempt >= 0


MOMENTS: list[Callable[[World, PeerId], bool]] = [
    trained_half,
    planned,
    committed_to,
    exchanging,
    reduced,
    proposed,
    voted,
]
