"""Who comes in mid-round, after a long absence, or stuck at the door: it soon counts, or delays nobody."""

from __future__ import annotations

import pytest

from protos.messages import MemberState, PeerId
from tests.sim.member import MemberProcess
from tests.sim.options import SHORT, Options
from tests.sim.watching import DEATH_S, ROUND_S, begun, commits, counted, counts_again, story
from tests.sim.world import World

RESULTS_KEPT_ROUNDS = 16


def with_a_newcomer_to_come(**options: object) -> tuple[World, MemberProcess]:
    """A run of three in its second round."""
    given = {"n_members": 4, "n_newcomers": 1, "start_contributors": 3, "h": 3, **options}
    world = World(Options(**given))  # type: ignore[arg-type]
    late = world.member(3)
    world.start([*world.leaders, *(member for member in world.members.values() if member is not late)])
    assert world.run_until(lambda: world.n_committed >= 1, 30.0), story(world)
    return world, late


def n_states_fetched(world: World, member: MemberProcess) -> int:
    return sum(f"fetched {member.name}" in line for line in world.story or ())


def is_current(world: World, member: MemberProcess) -> bool:
    held = member.disk.ledger
    return held is not None and held.round >= world.round


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_newcomer_in_the_middle_of_a_round_counts_two_rounds_later_at_most(share: float) -> None:
    world, late = with_a_newcomer_to_come()
    commits(world, 4, 4 * ROUND_S)
    began_at = world.now
    commits(world, 1, ROUND_S)
    world.run_for(share * (world.now - began_at))
    round_ = world.round + 1
    late.start()
    assert world.run_until(lambda: counted(world, late.name) > 0, 3 * ROUND_S), story(world)
    counts = [body.round for _, body, _ in world.chain.commits for e in body.members if e.peer == late.name]
    assert counts[0] <= round_ + 2
    commits(world, 3, 3 * ROUND_S)
    assert counted(world, late.name) == world.round - counts[0] + 1, "from then on it counts in every round"


def test_a_newcomer_that_freezes_at_the_door_delays_nobody_and_is_forgotten() -> None:
    world, late = with_a_newcomer_to_come(step_s=(0.5,))
    began_at = world.now
    commits(world, 3, 3 * ROUND_S)
    alike_s = world.now - began_at
    late.start()
    assert world.run_until(lambda: world.leader.rounds.members.get(late.name) is not None, 2.0)
    assert late.disk.ledger is None
    late.freeze(1000.0)

    def listed() -> list[str]:
        view = world.leader.rounds.view(world.leader.now())
        assert late.name[-6:] not in view.waiting_for
        return [member.state for member in view.members if member.peer == late.name]

    assert listed() == [MemberState.JOINING]
    began_at, n = world.now, world.n_committed
    while world.n_committed < n + 3:
        world.run_for(0.1)
        listed()
    assert world.now - began_at <= alike_s + SHORT.heartbeat_s
    for line in late.lines.values():  # as a leader does to a line that has been silent for so long
        world.at(world.now + SHORT.heartbeat_timeout_s, world.leader.line_broke, line, "nothing heard")
    commits(world, 1, ROUND_S)
    world.run_for(SHORT.heartbeat_timeout_s + SHORT.gone_grace_s + ROUND_S)
    assert listed() == []


@pytest.mark.parametrize("observer", [True, False], ids=["with the observer", "from members alone"])
def test_who_was_away_for_very_long_is_current_again_within_two_rounds_and_one_state(observer: bool) -> None:
    world = begun(4)
    away = world.member(3)
    away.crash()
    commits(world, 30, 31 * ROUND_S + DEATH_S)
    if not observer:
        world.members[PeerId("observer")].crash()
    round_, world.story = world.round, []
    away.start()
    assert world.run_until(lambda: is_current(world, away), 3 * ROUND_S), story(world)
    assert world.round <= round_ + 2
    counts_again(world, away.name, 3 * ROUND_S)
    assert n_states_fetched(world, away) == 1


@pytest.mark.parametrize(("n_rounds", "n_states"), [(4, 0), (RESULTS_KEPT_ROUNDS + 4, 1)])
def test_two_that_lag_behind_at_once_catch_up_from_who_does_not(n_rounds: int, n_states: int) -> None:
    world = begun(5)
    lagging = [world.member(1), world.member(4)]
    for member in lagging:
        member.freeze(10_000.0)
    commits(world, n_rounds, n_rounds * ROUND_S + 2 * SHORT.heartbeat_timeout_s)
    round_, world.story = world.round, []
    for member in lagging:
        member.frozen_until = world.now
        member.crash()
        member.start()
    assert world.run_until(lambda: all(is_current(world, member) for member in lagging), 3 * ROUND_S), story(world)
    assert world.round <= round_ + 2
    for member in lagging:
        counts_again(world, member.name, 3 * ROUND_S)
        assert n_states_fetched(world, member) == n_states
