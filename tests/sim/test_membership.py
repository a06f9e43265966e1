"""A run goes on while members freeze, leave, join, diverge, or can't be reached."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from protos.messages import Outcome, PeerId
from tests.sim.member import MemberProcess
from tests.sim.options import Options
from tests.sim.watching import (
    DEATH_S,
    MOMENTS,
    ROUND_S,
    SILENCE_S,
    begun,
    commits,
    counted,
    counts_again,
    story,
    trained_half,
)
from tests.sim.world import World

# -- frozen, leaving, joining ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_a_frozen_member_costs_at_most_the_heartbeat_timeout(moment: Callable[[World, PeerId], bool]) -> None:
    world = begun(4)
    victim = world.member(2)
    assert world.run_until(lambda: moment(world, victim.name), 30.0)
    victim.freeze(90.0)
    commits(world, 1, ROUND_S + SILENCE_S)
    commits(world, 3, 3 * ROUND_S)
    assert world.now < victim.frozen_until
    world.run_for(victim.frozen_until - world.now)
    counts_again(world, victim.name, 3 * ROUND_S)


def test_a_newcomer_has_a_seat_in_the_round_after_it_holds_the_state() -> None:
    world = World(Options(n_members=3, n_newcomers=1, start_contributors=2, h=3))
    late = world.member(2)
    world.start([*world.leaders, *(member for member in world.members.values() if member is not late)])
    assert world.run_until(lambda: world.n_committed >= 2, 30.0)
    late.start()
    assert world.run_until(lambda: late.disk.ledger is not None, 5.0)
    held = late.disk.ledger
    assert held is not None
    assert world.run_until(lambda: counted(world, late.name) > 0, 3 * ROUND_S)
    first = next(body.round for _, body, _ in world.chain.commits for e in body.members if e.peer == late.name)
    assert first <= held.round + 2  # not in the round that it finds running, but in the one after
    assert sorted(world.chain.commits[-1][1].voters) == sorted(
        [*(m for m in world.members if m != "observer"), "coordinator"]
    )


def test_who_leaves_returns_its_range_and_takes_its_weight_out() -> None:
    world = begun(3)
    leaver = world.member(1)
    assert world.run_until(lambda: trained_half(world, leaver.name), 30.0)
    ledger = world.leader.rounds.ledger
    seat = ledger.seat_of(leaver.name)
    assert seat is not None
    world.ask_to_leave(leaver)
    commits(world, 1, ROUND_S)
    assert not leaver.alive
    assert leaver.stopped is not None
    assert leaver.stopped.code == 0
    body = world.chain.commits[-1][1]
    assert leaver.name not in body.voters
    assert leaver.name not in {seat.peer for seat in body.seats}
    leased = {batch for r in seat.ranges for batch in range(r.start, r.start + r.count)}
    free = [*world.leader.rounds.ledger.pool, *(r for seat in body.seats for r in seat.ranges)]
    assert leased <= {batch for r in free for batch in range(r.start, r.start + r.count)}
    world.member(0).crash()  # the two that are left of three are a quorum of two, with the coordinator's vote
    commits(world, 1, ROUND_S + DEATH_S)


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_who_leaves_in_a_round_counts_whole_or_not_at_all_in_it(moment: Callable[[World, PeerId], bool]) -> None:
    """What it has handed in before is in the aggregate, in the books and in its credit, or in none of them."""
    world = begun(4)
    leaver, others = world.member(1), [world.member(number) for number in (0, 2, 3)]
    assert world.run_until(lambda: moment(world, leaver.name), 30.0)
    before = world.leader.rounds.ledger
    world.ask_to_leave(leaver)
    commits(world, 1, ROUND_S + DEATH_S)
    body, after = world.chain.commits[-1][1], world.leader.rounds.ledger
    entry = {each.peer: each for each in body.members}.get(leaver.name)
    tokens = entry.tokens if entry is not None and entry.counted else 0
    assert after.credit.get(leaver.name, 0) - before.credit.get(leaver.name, 0) == tokens
    assert after.tokens - before.tokens == sum(each.tokens for each in body.members if each.counted)
    assert entry is None or entry.counted or entry.reason
    credit = after.credit.get(leaver.name, 0)
    commits(world, 2, 2 * ROUND_S)  # a body that was made before it left may still give it a seat and a vote
    later = world.leader.rounds.ledger
    assert later.credit.get(leaver.name, 0) == credit
    assert later.seat_of(leaver.name) is None
    assert leaver.name not in later.voters
    assert all(counted(world, other.name) == world.n_committed for other in others)


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_most_of_them_may_leave_at_once_and_come_back(moment: Callable[[World, PeerId], bool]) -> None:
    """Who is left is no quorum of those whom the last body names as voters: it needs their word that they are gone."""
    world = begun(4)
    stays, *leavers = [world.member(number) for number in range(4)]
    assert world.run_until(lambda: moment(world, leavers[0].name), 30.0)
    for leaver in leavers:
        world.ask_to_leave(leaver)
    before = counted(world, stays.name)
    commits(world, 3, 3 * ROUND_S + DEATH_S)
    assert counted(world, stays.name) >= before + 2
    assert world.leader.rounds.ledger.voters == (stays.name, world.leader.rounds.ledger.voters[-1])
    for leaver in leavers:
        world.restart(leaver)
    for leaver in leavers:
        counts_again(world, leaver.name, 3 * ROUND_S)


def test_when_all_have_gone_nobody_is_shown_as_here_and_who_comes_back_goes_on() -> None:
    world = begun(3)
    for number in range(3):
        world.member(number).crash()
    world.run_for(2 * SILENCE_S)
    members = [member for member in world.leader.rounds.view(world.leader.now()).members if not member.observer]
    assert {member.state for member in members} <= {"gone"}
    round_ = world.round
    world.run_for(600.0)
    assert world.round == round_, "nothing is committed for nobody"
    for number in range(3):
        world.member(number).start()
    commits(world, 2, 3 * ROUND_S)


def test_the_last_one_leaves_and_comes_back() -> None:
    world = begun(1)
    world.run_for(0.5)
    only = world.member(0)
    world.ask_to_leave(only)
    world.run_for(5.0)
    assert not only.alive
    only.start()
    counts_again(world, only.name, 3 * ROUND_S)


@pytest.mark.parametrize("n", [1, 2])
def test_a_leave_that_nobody_heard_is_said_again(n: int) -> None:
    """The coordinator is away when members leave; when both are back, the round must not wait for their votes."""
    world = begun(n)
    assert world.run_until(lambda: trained_half(world, world.member(0).name), 30.0)
    world.leader.crash()
    for number in range(n):
        world.ask_to_leave(world.member(number))
    world.run_for(2.0)
    world.leader.start()
    for number in range(n):
        world.member(number).start()
    commits(world, 2, 5 * ROUND_S)


def test_over_a_whole_pass_no_batch_is_lost_or_used_twice() -> None:
    """Leaves, deaths and dead trainers; the chain checks every commit, and in the end every batch has been used."""
    world = begun(4, h=3)
    for number in range(12):
        at = world.now + 1.7 * number
        if number % 3 == 0:
            world.at(at, world.ask_to_leave, world.member(number % 4))
            world.at(at + 2.0, world.restart, world.member(number % 4))
        elif number % 3 == 1:
            world.at(at, world.crash, world.member(number % 4), 1.0)
        else:
            world.at(at, world.member(number % 4).kill_trainer)
    world.run_for(30.0)
    commits(world, 6, 8 * ROUND_S)
    ledger = world.leader.rounds.ledger
    waiting = {b for r in ledger.pool for b in range(r.start, r.start + r.count)}
    leased = {b for seat in ledger.seats for r in seat.ranges for b in range(r.start, r.start + r.count)}
    assert world.chain.used() | waiting | leased == set(range(ledger.cursor))
    assert ledger.tokens == world.chain.n_used * world.spec.work.batch_tokens


# -- trainers --------------------------------------------------------------------------------------------------------


def test_who_never_trains_costs_the_limit_and_no_more() -> None:
    world = World(Options(n_members=3, never_trains=(1,), h=3, step_s=(0.3,)))
    world.start()
    limit_s = world.spec.deadlines.train_limit_s
    assert world.run_until(lambda: world.n_committed >= 1, limit_s + ROUND_S), story(world)
    assert counted(world, world.member(1).name) == 0
    assert counted(world, world.member(0).name) == 1


def test_a_diverged_member_is_left_out_at_once_and_the_others_commit() -> None:
    world = begun(3, diverges=(1,))
    commits(world, 3, 3 * ROUND_S)
    assert counted(world, world.member(1).name) == 0
    assert counted(world, world.member(0).name) == world.n_committed


def test_when_all_diverge_the_round_is_empty_and_keeps_the_anchor() -> None:
    world = World(Options(n_members=2, diverges=(0, 1), h=2))
    world.start()
    assert world.run_until(lambda: world.round >= 3, 3 * ROUND_S), story(world)
    assert {body.outcome for _, body, _ in world.chain.commits} == {Outcome.EMPTY}
    assert len({commit.digest for commit, _, _ in world.chain.commits}) == 1


def test_a_killed_trainer_comes_back_and_counts() -> None:
    world = begun(2)
    assert world.run_until(lambda: trained_half(world, world.member(1).name), 30.0)
    world.member(1).kill_trainer()
    commits(world, 1, ROUND_S)
    counts_again(world, world.member(1).name, 2 * ROUND_S)


# -- below the minimum, out of reach ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("leaves", [False, True])
def test_below_the_minimum_and_up_again(n: int, leaves: bool) -> None:
    """One goes; a newcomer holds the state: the round is given up at once, for the newcomer needs a seat."""
    world = World(Options(n_members=n + 1, n_newcomers=1, start_contributors=n, min_contributors=n, h=3))
    late = world.member(n)
    world.start([*world.leaders, *(member for member in world.members.values() if member is not late)])
    assert world.run_until(lambda: world.n_committed >= 1, 30.0)
    gone = world.member(0)
    if leaves:
        world.ask_to_leave(gone)
    else:
        gone.crash()
    world.run_for(20.0)
    done = world.n_committed
    world.run_for(20.0)
    assert world.n_committed == done
    assert f"{n - 1} of {n}" in world.leader.rounds.view(world.leader.now()).waiting_for
    late.start()
    assert world.run_until(lambda: late.disk.ledger is not None, ROUND_S)
    commits(world, 1, ROUND_S)
    assert counted(world, late.name) == 1
    commits(world, 1, ROUND_S)
    here = [member for member in world.members.values() if member.alive]
    assert world.run_until(lambda: {held_by(member) for member in here} == {world.chain.commits[-1][0].digest}, ROUND_S)


def held_by(member: MemberProcess) -> bytes:
    """The digest of the state that it holds."""
    return member.disk.ledger.digest if member.disk.ledger is not None else b""


def test_alone_a_member_waits_for_nobody() -> None:
    h, step_s = 5, 0.5
    world = World(Options(n_members=1, h=h, step_s=(step_s,))).start()
    assert world.run_until(lambda: world.n_committed >= 1, 30.0), story(world)
    began_at = world.now
    commits(world, 10, 10 * (h * step_s + 1.0))
    assert counted(world, world.member(0).name) == world.n_committed
    assert world.now - began_at < 10 * (h * step_s + 1.0)
    assert [body.attempt for _, body, _ in world.chain.commits[1:]] == [0] * world.n_committed


def test_when_nobody_can_be_reached_the_observer_reduces() -> None:
    world = begun(3, unreachable=(0, 1, 2))
    commits(world, 2, 2 * ROUND_S)
    assert {entry.peer for entry in world.chain.commits[-1][1].reducers} == {"observer"}


def test_an_observer_that_missed_empty_rounds_needs_no_donor() -> None:
    """All members dial out, so nobody could give it the state; but what it holds is that state already."""
    world = begun(1, unreachable=(0,))
    observer = world.members[PeerId("observer")]
    world.run_for(0.5)
    observer.crash()
    only = world.member(0)
    for _ in range(2):
        world.ask_to_leave(only)
        world.run_for(1.0)
        only.start()
        world.run_for(8.0)
    assert observer.disk.ledger is not None
    assert world.round > observer.disk.ledger.round + 1
    observer.start()
    commits(world, 2, 3 * ROUND_S)


@pytest.mark.parametrize(("n_rounds", "n_states"), [(5, 0), (16, 0), (20, 1)])
def test_who_was_away_follows_by_results_as_far_as_they_are_kept(n_rounds: int, n_states: int) -> None:
    world = begun(3)
    away = world.member(2)
    away.crash()
    commits(world, n_rounds - 1, n_rounds * ROUND_S + DEATH_S)
    world.story = []
    away.start()
    counts_again(world, away.name, 3 * ROUND_S)
    assert sum(f"fetched {away.name}" in line for line in world.story) == n_states


def test_the_run_ends_and_everybody_stops() -> None:
    world = World(Options(n_members=3, end_rounds=2, h=2)).start()
    members = [member for member in world.members.values() if not member.observer]
    assert world.run_until(lambda: all(member.stopped is not None for member in members), 10 * ROUND_S), story(world)
    assert world.n_committed == 2
    assert {stopped.code for member in members if (stopped := member.stopped)} == {0}
    assert len({member.disk.ledger.digest for member in members if member.disk.ledger}) == 1
    assert "end of 2 rounds" in world.leader.ended


def test_a_member_that_comes_after_the_end_has_the_last_state_and_stops() -> None:
    world = World(Options(n_members=3, n_newcomers=1, start_contributors=2, end_rounds=2, h=2))
    late = world.member(2)
    world.start([*world.leaders, *(member for member in world.members.values() if member is not late)])
    assert world.run_until(lambda: bool(world.leader.ended), 10 * ROUND_S)
    late.start()
    assert world.run_until(lambda: late.stopped is not None, ROUND_S)
    assert late.disk.ledger is not None
    assert late.disk.ledger.head == world.leader.rounds.ledger.head
