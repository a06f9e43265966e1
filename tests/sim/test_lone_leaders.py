"""Under a stand-in: who leaves and comes back, a run that ends, and settings that somebody has not heard of."""

from __future__ import annotations

import pytest

from protos.orders import Kind
from tests.coordinator.rounds.ordered import amended, ordered
from tests.sim.member import MemberProcess
from tests.sim.options import SHORT
from tests.sim.test_stand_ins import TURN_S, begun, comes_back, go_on, standing, told
from tests.sim.watching import ROUND_S
from tests.sim.world import RUN, World


def under_a_stand_in(n: int, **options: object) -> tuple[World, list[MemberProcess]]:
    world = begun(n, **options)  # type: ignore[arg-type]
    world.leader.crash()
    go_on(world, 1, TURN_S + 2 * ROUND_S)
    return world, [world.member(number) for number in range(n)]


def restart(world: World, members: list[MemberProcess]) -> None:
    for member in members:
        assert not member.alive, "it has ended at once"
        member.start()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_each_leaves_and_comes_back_one_after_the_other(n: int) -> None:
    world, members = under_a_stand_in(n)
    for member in members:
        world.ask_to_leave(member)
        world.run_for(1.0)
        assert member.stopped is not None
        assert member.stopped.code == 0
        assert "the coordinator is away, so the seat is kept" in member.stopped.reason
        restart(world, [member])
        world.run_for(1.0)
    go_on(world, 3, 3 * TURN_S + 3 * ROUND_S)
    comes_back(world)


@pytest.mark.parametrize("n", [1, 3])
def test_all_leave_at_once_and_come_back(n: int) -> None:
    world, members = under_a_stand_in(n)
    for member in members:
        world.ask_to_leave(member)
    world.run_for(20.0)
    restart(world, members)
    go_on(world, 3, 3 * TURN_S + 3 * ROUND_S)
    comes_back(world)


def test_one_that_leaves_for_good_costs_the_others_a_heartbeat_timeout() -> None:
    world, members = under_a_stand_in(4)
    leads = standing(world)[0].name
    goes = next(member for member in members if member.name != leads)
    world.ask_to_leave(goes)
    go_on(world, 3, SHORT.heartbeat_timeout_s + 4 * ROUND_S)


def test_a_run_that_ends_while_the_coordinator_is_away_is_left_in_peace() -> None:
    world, members = under_a_stand_in(3, end_rounds=5)
    assert world.run_until(lambda: world.n_committed >= 5, 6 * ROUND_S), told(world)
    world.run_for(5.0)
    n_terms = sum(stand_in.n_terms for stand_in in world.stand_ins.values())
    n_events = world.n_events
    world.run_for(120.0)
    assert sum(stand_in.n_terms for stand_in in world.stand_ins.values()) == n_terms
    assert world.n_events - n_events < 120 * 60
    assert world.n_committed == 5
    world.restart(world.leader)
    world.run_for(30.0)
    assert {member.stopped.code for member in members if member.stopped is not None} == {0}, told(world)


def test_settings_to_come_reach_who_comes_after_the_commit_that_ordered_them() -> None:
    """It fetches a state, in whose books they are numbers, and has a vote before they are in force."""
    world = begun(4, n_newcomers=1, start_contributors=3)
    late = world.member(3)
    late.crash()
    before = world.round
    spec = amended(world.spec, work={"h": 2})
    world.leader.order(ordered(1, Kind.AMEND, round_=before + 8, spec=spec, run=RUN))
    assert world.run_until(lambda: world.leader.rounds.ledger.next_revision == 2, 3 * ROUND_S), told(world)
    late.disk.ledger = late.disk.commit = None
    late.disk.revisions.clear()
    late.start()
    assert world.run_until(lambda: late.name in world.leader.rounds.ledger.voters, 6 * ROUND_S), told(world)
    assert world.leader.rounds.ledger.spec_revision == 1
    assert 2 in late.session.specs
    world.leader.crash()
    go_on(world, 10, TURN_S + 11 * ROUND_S)
    assert {world.member(number).session.spec.revision for number in range(4)} == {2}
