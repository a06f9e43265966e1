"""Members behind links of all kinds: slow and far ones, NATs, and one whose link is down for a while."""

from __future__ import annotations

import pytest

from protos.messages import Outcome
from protos.runspec import DeadlineSpec
from tests.sim.options import SHORT, Options
from tests.sim.watching import ROUND_S, counts_again, story
from tests.sim.world import World

MBIT = 125_000.0
"""Bytes a second of one Mbit/s."""
H, STEP_S = 10, 0.5


def uneven(slow_mbit: float) -> World:
    """Four members with 2 M values at 100 Mbit/s, the last one at another rate and 200 ms away."""
    world = World(
        Options(
            n_members=4, h=H, step_s=(STEP_S,), n_chunks=2, chunk_values=2**20, replicas=1, deadlines=DeadlineSpec()
        )
    )
    far = world.member(3)
    for name in world.members:
        rate = MBIT * (slow_mbit if name == far.name else 100.0)
        world.network.throttle(world, name, rate, rate)
    world.network.move_away(far.name, 0.2)
    return world.start()


def overhead_s(world: World) -> float:
    """How much longer than its training the next round takes."""
    began_at, n = world.now, world.n_committed
    assert world.run_until(lambda: world.n_committed > n, 100.0), story(world)
    return world.now - began_at - H * STEP_S


def test_a_slow_link_counts_and_is_no_longer_waited_for_once_it_has_gone() -> None:
    """By no setting: what is waited for is what is on its way."""
    alike = uneven(100.0)
    overhead_s(alike)
    fast_s = max(overhead_s(alike) for _ in range(3))
    world = uneven(8.0)
    overhead_s(world)
    with_it = [overhead_s(world) for _ in range(5)]
    assert min(with_it) > 1.5 * fast_s, "else it shows nothing"
    for _, body, _ in world.chain.commits[1:]:
        assert (body.outcome, body.attempt) == (Outcome.COMMITTED, 0)
        assert [entry.counted for entry in body.members] == [True] * 4
    world.ask_to_leave(world.member(3))
    overhead_s(world)
    assert max(overhead_s(world) for _ in range(3)) <= 1.5 * fast_s


@pytest.mark.parametrize("behind_nat", [(1,), (0, 1)])
def test_members_of_different_speed_behind_nats_count_together_in_every_round(behind_nat: tuple[int, ...]) -> None:
    world = World(Options(n_members=2, h=6, step_s=(STEP_S, 3 * STEP_S), unreachable=behind_nat)).start()
    assert world.run_until(lambda: world.n_committed >= 20, 20 * ROUND_S), story(world)
    for _, body, _ in world.chain.commits:
        if body.round > 1:
            assert (body.outcome, body.attempt) == (Outcome.COMMITTED, 0)
            assert [entry.counted for entry in body.members] == [True, True]
            assert all(entry.steps > 0 for entry in body.members)


@pytest.mark.parametrize("stand_ins", [False, True])
def test_who_is_cut_off_says_so_all_the_while_and_is_back_by_itself(stand_ins: bool) -> None:
    """Also where it stands in for the coordinator, which it can't hear: it finds no voters."""
    world = World(Options(n_members=3, h=3, step_s=(0.4, 0.5), stand_ins=stand_ins, deadlines=SHORT)).start()
    assert world.run_until(lambda: world.n_committed >= 1, 30.0), story(world)
    away = world.member(2)
    others = {world.member(number).name[-6:] for number in (0, 1)}
    world.part({away.name}, 120.0)
    world.run_for(30.0)
    n_alone = 0
    for _ in range(45):
        world.run_for(2.0)
        stand_in = world.stand_ins.get(away.name)
        if stand_in is not None and stand_in.alive:
            waits_for = stand_in.rounds.view(stand_in.now()).waiting_for
            assert waits_for.startswith("voters for a quorum: ")
            assert all(name in waits_for for name in others)
            n_alone += 1
        else:
            assert away.session.view().waiting_for.startswith("the leader: ")
            assert away.session.view().state == "offline"
    assert (n_alone > 0) == stand_ins
    held = away.disk.ledger
    assert held is not None
    assert world.round > held.round + 10, "the others went on"
    counts_again(world, away.name, 60.0)
    assert away.disk.ledger is not None
    assert away.disk.ledger.round >= world.round - 1, "from the state that they have now"
