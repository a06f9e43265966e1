"""Whole runs of members of different speed, over empty rounds, and with one that fails again and again."""

from __future__ import annotations

import pytest

from coordinator.rounds import leases, work
from protos.messages import Body, MemberEntry, Outcome, PeerId
from tests.sim.options import Options
from tests.sim.watching import ROUND_S, begun, commits, counted, story
from tests.sim.world import World


def started(**options: object) -> World:
    world = World(Options(**options))  # type: ignore[arg-type]
    world.start()
    assert world.run_until(lambda: world.n_committed >= 1, 200.0), story(world)
    return world


def bodies(world: World) -> list[Body]:
    return [body for _, body, _ in world.chain.commits]


def entries(world: World, peer: PeerId) -> list[MemberEntry]:
    """A peer's part in each committed round."""
    return [
        entry
        for body in bodies(world)
        if body.outcome is Outcome.COMMITTED
        for entry in body.members
        if entry.peer == peer
    ]


def round_s(world: World, n: int) -> float:
    """Mean length of the next n rounds."""
    began_at = world.now
    commits(world, n, n * 60.0)
    return (world.now - began_at) / n


@pytest.mark.parametrize("n", [2, 4, 9])
def test_one_member_10_times_slower_costs_15_percent_at_most_and_counts_in_every_round(n: int) -> None:
    """Rounds of 10 s of training; what an exchange takes comes on top in both worlds."""
    alike = round_s(started(n_members=n, h=20, step_s=(0.5,)), 3)
    world = started(n_members=n, h=20, step_s=(5.0, *(0.5,) * (n - 1)))
    assert round_s(world, 3) <= 1.15 * alike
    slow = entries(world, world.member(0).name)
    assert [entry.counted for entry in slow] == [True] * world.n_committed
    assert all(entry.steps == 2 and entry.weight == 16.0 for entry in slow)
    assert all(entry.steps == 20 for entry in entries(world, world.member(1).name))


def test_progress_adds_up_over_empty_rounds() -> None:
    """Nobody can combine in three rounds running: the fourth counts the steps of all of them, to 4 H."""
    world = started(n_members=3, h=3, step_s=(0.4, 0.5), unable_rounds=(3, 4, 5, 6, 7))
    assert world.run_until(lambda: any(body.round == 8 for body in bodies(world)), 200.0), story(world)
    by_round = {body.round: body for body in bodies(world)}
    assert [by_round[round_].outcome for round_ in range(2, 9)] == [
        Outcome.COMMITTED, *[Outcome.EMPTY] * 5, Outcome.COMMITTED
    ]  # fmt: skip
    assert {(entry.steps, entry.counted) for entry in by_round[8].members} == {(12, True)}
    assert [work.asked(seat) for round_ in (2, 3, 4, 5, 6, 7) for seat in by_round[round_].seats[:1]] == [
        3, 6, 9, 12, 12, 12
    ]  # fmt: skip
    for before, after in zip(range(2, 7), range(3, 8), strict=True):
        for seat, grown in zip(by_round[before].seats, by_round[after].seats, strict=True):
            assert leases.begins_with(grown.ranges, seat.ranges)
        assert by_round[after].returned == ()


def test_when_nothing_can_ever_be_combined_rounds_come_more_and_more_slowly() -> None:
    """Leases are full after four of them, so that nothing else would take time."""
    world = started(n_members=3, h=3, step_s=(0.4,), unable_rounds=tuple(range(3, 1000)))
    world.run_until(lambda: False, 60.0)
    before = len(bodies(world))
    world.run_until(lambda: False, 100.0)
    assert 8 <= len(bodies(world)) - before <= 12
    assert "empty rounds" in world.leader.rounds.view(world.leader.now()).waiting_for


def test_members_of_different_speed_are_asked_for_what_they_can_do() -> None:
    world = started(n_members=4, h=10, step_s=(0.25, 1.0, 2.0, 30.0), round_s=10.0)
    commits(world, 4, 200.0)
    seats = {seat.peer: work.of(seat) for seat in bodies(world)[-1].seats}
    names = [world.member(number).name for number in range(4)]
    assert [seats.get(name) for name in names[:3]] == [work.Work(10, 4), work.Work(10), work.Work(5)]
    assert names[3] not in seats  # not a step in the time: it is told
    told = "no seat: this machine trains 0.267 tokens/s, and this run needs 0.8"
    assert sum(told in text for text in world.member(3).said) == 1
    assert {entry.tokens for entry in entries(world, names[0])[-2:]} == {10 * 4 * 8}
    assert round_s(world, 6) <= 1.15 * 10.0 + 1.0  # everybody is done at about the same time
    shares = [world.member(number).session.view().idle_share for number in range(3)]
    assert all(share is not None and share < 0.15 for share in shares)


def test_who_dies_again_and_again_sits_out_more_and_more_rounds_and_comes_back() -> None:
    world = begun(4, h=6, step_s=(0.4, 0.4, 0.4, 1.2))
    victim = world.member(3)
    seated_in: list[bool] = []
    for _ in range(6):
        before = world.n_committed
        had_seat = world.leader.rounds.ledger.seat_of(victim.name) is not None
        seated_in.append(had_seat)
        if had_seat:
            assert world.run_until(lambda: victim.session.view().step > 0, ROUND_S), story(world)
            world.crash(victim, 2.5)
        assert world.run_until(lambda before=before: world.n_committed > before, 3 * ROUND_S), story(world)  # type: ignore[misc]
    assert seated_in.count(False) >= 2
    assert any("no seat: until round" in text for text in victim.said)
    n_counted = counted(world, victim.name)
    commits(world, 8, 8 * ROUND_S)
    assert counted(world, victim.name) > n_counted


def test_a_newcomer_is_never_waited_for_before_it_holds_the_state() -> None:
    alike = round_s(started(n_members=3, h=20, step_s=(0.5,), fetch_s=2.5), 2)
    world = started(n_members=4, n_newcomers=1, start_contributors=3, h=20, step_s=(0.5,), fetch_s=2.5)
    newcomer = world.member(3).name
    began_at, n = world.now, world.n_committed
    while world.n_committed < n + 2:
        assert world.run_until(lambda: False, 0.5) is False
        if world.members[newcomer].disk.ledger is None:
            assert newcomer[-6:] not in world.leader.rounds.view(world.leader.now()).waiting_for
    assert world.now - began_at <= 2 * 1.05 * alike
