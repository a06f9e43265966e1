"""A run goes on: whoever dies, freezes or leaves, the others commit in time, and who comes back takes part again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coordinator.rounds.attempt import Attempt, Phase
from coordinator.rounds.events import Opened
from protos.hashes import body_hash
from protos.messages import Body, MemberState, Outcome, PeerId
from tests.sim.member import MemberProcess
from tests.sim.options import SHORT, Options
from tests.sim.schedules import recovery, run_recovery
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


# -- one node is killed ----------------------------------------------------------------------------------------------


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


def kill_and_go_on(n: int, moment: Callable[[World, PeerId], bool]) -> None:
    world = begun(n)
    victim = world.member(n // 2)
    assert world.run_until(lambda: moment(world, victim.name), 30.0), story(world)
    round_ = world.round
    victim.crash()
    if n > 1:
        assert world.run_until(lambda: world.round > round_, ROUND_S + DEATH_S), story(world)
        assert all(body.outcome is Outcome.COMMITTED for _, body, _ in world.chain.commits if body.round > 1)
        commits(world, 1, ROUND_S + DEATH_S)
    else:
        world.run_for(10.0)
        assert world.round == round_ + (moment is voted)  # a vote that was sent still counts
    victim.start()
    counts_again(world, victim.name, 2 * ROUND_S + SILENCE_S)
    commits(world, 1, ROUND_S)


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_others_commit_without_who_is_killed(n: int, moment: Callable[[World, PeerId], bool]) -> None:
    kill_and_go_on(n, moment)


@pytest.mark.sim
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
@pytest.mark.parametrize("n", [4, 5, 6, 7])
def test_the_others_commit_without_who_is_killed_of_more(n: int, moment: Callable[[World, PeerId], bool]) -> None:
    kill_and_go_on(n, moment)


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_who_comes_back_at_once_costs_little(moment: Callable[[World, PeerId], bool]) -> None:
    """Within the grace its line is open again, but its Δ is gone: nobody waits for it until a deadline."""
    world = begun(3)
    victim = world.member(1)
    assert world.run_until(lambda: moment(world, victim.name), 30.0)
    round_ = world.round
    world.crash(victim, 0.2)
    assert world.run_until(lambda: world.round > round_, ROUND_S + DEATH_S), story(world)
    counts_again(world, victim.name, 2 * ROUND_S)


def test_two_of_two_with_one_dead_go_on_with_the_coordinator() -> None:
    world = begun(2)
    world.member(0).crash()
    commits(world, 3, 3 * ROUND_S + DEATH_S)
    assert [body.voters for _, body, _ in world.chain.commits][-1] == (world.member(1).name, world.coordinator)


def test_without_a_quorum_the_run_waits_and_says_for_whom() -> None:
    world = begun(3)
    for number in (0, 1):
        world.member(number).crash()
    world.run_for(30.0)
    round_ = world.round
    world.run_for(60.0)
    assert world.round == round_
    view = world.leader.rounds.view(world.leader.now())
    assert "m00000"[-6:] in view.waiting_for
    assert "m00001"[-6:] in view.waiting_for
    world.member(1).start()
    commits(world, 2, 2 * ROUND_S + SILENCE_S)


# -- the coordinator is killed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_what_was_voted_on_is_proposed_again_byte_for_byte(n: int) -> None:
    """Killed when the votes are in and the commit is not on disk: the same body becomes the commit."""
    world = begun(n)
    assert world.run_until(lambda: phase(world) is Phase.VOTE, 30.0)
    first = world.leader.journal.proposals[-1]
    round_ = world.round
    voters = [member for member in world.members.values() if not member.observer]
    assert world.run_until(lambda: sum(voted(world, member.name) for member in voters) > n // 2, 5.0)
    world.crash(world.leader, 2.0)
    assert world.run_until(lambda: world.round > round_, ROUND_S + SILENCE_S), story(world)
    commit, body, _ = world.chain.commits[-1]
    assert commit.body == first.body
    assert body.attempt == 0
    assert commit.attempt > 0
    commits(world, 2, 2 * ROUND_S)


def test_a_commit_on_disk_is_told_after_a_restart() -> None:
    world = begun(3)
    assert world.run_until(lambda: phase(world) is Phase.VOTE, 30.0)
    round_ = world.round
    now = attempt(world)
    assert now is not None
    while world.round == round_:  # the vote that makes the quorum: Committed is carried out, Tell is not
        world.leader.crash_after = 1
        world.run_until(lambda: not world.leader.alive, 0.05)
        if not world.leader.alive:
            world.leader.start()
    assert world.leader.journal.commits[-1][0].body == world.chain.commits[-1][0].body
    if not world.leader.alive:
        world.leader.start()
    world.leader.crash_after = None
    commits(world, 2, 2 * ROUND_S + SILENCE_S)


@pytest.mark.parametrize("during", [Phase.TRAIN, Phase.COMMITMENT, Phase.EXCHANGE, Phase.VOTE])
def test_a_killed_coordinator_costs_no_round(during: Phase) -> None:
    world = begun(3)
    assert world.run_until(lambda: phase(world) is during, 30.0)
    world.run_for(0.1)
    world.crash(world.leader, 3.0)
    commits(world, 2, 2 * ROUND_S + SILENCE_S)
    assert all(body.outcome is Outcome.COMMITTED for _, body, _ in world.chain.commits if body.round > 1)
    assert counted(world, world.member(0).name) == world.n_committed


def test_a_restarted_leader_waits_for_members_to_come_back() -> None:
    """Two of three find it at once and are ready; the third, still training, reconnects later and is not left out."""
    world = begun(3, step_s=(0.2, 0.2, 1.5))
    slow = world.member(2)
    assert world.run_until(
        lambda: (
            all(world.member(i).session.state() is MemberState.READY for i in (0, 1)) and phase(world) is Phase.TRAIN
        ),
        10.0,
    )
    world.crash(world.leader, 0.2)
    world.part({slow.name}, 3.0)
    before = counted(world, slow.name)
    commits(world, 1, 2 * ROUND_S)
    assert counted(world, slow.name) == before + 1


def test_numbers_are_not_used_again_after_a_restart() -> None:
    world = begun(2)
    for _ in range(4):
        assert world.run_until(lambda: phase(world) is not Phase.TRAIN, 30.0)
        world.crash(world.leader, 0.5)
        world.run_for(1.0)
    opened = world.leader.journal.opened
    assert len(opened) == len(set(opened))
    assert any(entry.attempt >= 2 for entry in opened if isinstance(entry, Opened))
    commits(world, 1, 2 * ROUND_S)


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


def test_below_the_minimum_and_up_again() -> None:
    """One of two goes; a newcomer holds the state: the round is given up at once, for the newcomer needs a seat."""
    world = World(Options(n_members=3, n_newcomers=1, start_contributors=2, min_contributors=2, h=3))
    late = world.member(2)
    world.start([*world.leaders, *(member for member in world.members.values() if member is not late)])
    assert world.run_until(lambda: world.n_committed >= 1, 30.0)
    world.member(0).crash()
    world.run_for(20.0)
    done = world.n_committed
    world.run_for(20.0)
    assert world.n_committed == done
    assert "1 of 2" in world.leader.rounds.view(world.leader.now()).waiting_for
    late.start()
    commits(world, 2, 3 * ROUND_S)


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


def test_a_member_that_many_rounds_passed_by_fetches_the_state_once() -> None:
    world = begun(3)
    away = world.member(2)
    away.crash()
    commits(world, 6, 6 * ROUND_S + DEATH_S)
    world.story = []
    away.start()
    counts_again(world, away.name, 3 * ROUND_S)
    assert sum(f"fetched {away.name}" in line for line in world.story) == 1


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


# -- anything at all -------------------------------------------------------------------------------------------------


def assert_recovers(seed: int) -> None:
    world = recovery(seed)
    assert run_recovery(world, 3, 90.0), f"seed {seed}\n{story(world)}"


def test_some_worlds_recover() -> None:
    for seed in range(25):
        assert_recovers(seed)


@pytest.mark.sim
def test_many_worlds_recover() -> None:
    for seed in range(1_000, 1_500):
        assert_recovers(seed)


@pytest.mark.sim
def test_a_thousand_members() -> None:
    world = World(Options(n_members=1000, n_chunks=16, h=10, step_s=(1.0, 1.3, 0.8), relay=True, checks=False)).start()
    assert world.run_until(lambda: world.n_committed >= 2, 120.0), story(world)
    assert len(world.chain.commits[-1][1].members) == 1000
    assert len({member.disk.ledger.head for member in world.members.values() if member.disk.ledger}) <= 2


def test_a_hundred_members() -> None:
    world = World(Options(n_members=100, n_chunks=8, h=4, relay=True)).start()
    assert world.run_until(lambda: world.n_committed >= 1, 60.0), story(world)
    assert sum(entry.counted for entry in world.chain.commits[-1][1].members) == 100


def test_bodies_of_the_simulation_are_what_they_say() -> None:
    """The fake hashes are the real ones of fake bytes: a commit names the hash of the one before."""
    world = begun(2)
    commits(world, 2, 2 * ROUND_S)
    previous = None
    for commit, body, hash_ in world.chain.commits:
        assert isinstance(body, Body)
        assert previous is None or body.previous == previous
        assert len(body_hash(commit.body)) == 32
        previous = hash_


def test_one_member_process_at_a_time() -> None:
    world = begun(1)
    only = world.member(0)
    assert isinstance(only, MemberProcess)
    with pytest.raises(AssertionError, match="running already"):
        only.start()
