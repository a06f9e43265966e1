"""A run goes on: whoever is killed or frozen, the others commit in time, and who comes back takes part again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coordinator.rounds.attempt import Phase
from coordinator.rounds.events import Opened
from protos.hashes import body_hash
from protos.messages import Body, MemberState, Outcome, PeerId
from tests.sim.member import MemberProcess
from tests.sim.options import Options
from tests.sim.schedules import recovery, run_recovery
from tests.sim.watching import (
    DEATH_S,
    MOMENTS,
    ROUND_S,
    SILENCE_S,
    attempt,
    begun,
    commits,
    counted,
    counts_again,
    phase,
    story,
    voted,
)
from tests.sim.world import World


def kill_and_go_on(n: int, moment: Callable[[World, PeerId], bool], **options: object) -> None:
    world = begun(n, **options)
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


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_the_others_commit_without_who_reduces_alone_and_is_killed(moment: Callable[[World, PeerId], bool]) -> None:
    kill_and_go_on(3, moment, replicas=1)


def test_where_everyone_reduces_everything_the_death_of_who_has_sent_its_rows_fails_no_attempt() -> None:
    world = begun(3, work_s=0.2)
    victim = world.member(1)
    assert world.run_until(lambda: phase(world) is Phase.EXCHANGE, 30.0), story(world)
    assert world.run_until(lambda: victim._exchange is not None, 5.0)
    assert world.run_until(lambda: not any(victim._sending.values()), 5.0)
    assert phase(world) is Phase.EXCHANGE
    round_ = world.round
    victim.crash()
    assert world.run_until(lambda: world.round > round_, ROUND_S), story(world)
    _, body, _ = world.chain.commits[-1]
    assert (body.outcome, body.attempt) == (Outcome.COMMITTED, 0)
    assert [entry.counted for entry in body.members] == [True] * 3
    assert {entry.peer for entry in body.reducers} >= {world.member(0).name, world.member(2).name}


@pytest.mark.parametrize("replicas", ["auto", 1])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_round_that_nobody_can_combine_is_empty_and_the_next_one_counts_its_work(n: int, replicas: object) -> None:
    world = begun(n, unable_rounds=(4,), replicas=replicas)
    assert world.run_until(lambda: world.round >= 6, 6 * ROUND_S), story(world)
    by_round = {body.round: body for _, body, _ in world.chain.commits}
    assert [by_round[round_].outcome is Outcome.EMPTY for round_ in (3, 4, 5, 6)] == [False, True, False, False]
    assert "able to combine" in by_round[4].reason
    after = next(ledger for ledger in world.chain.ledgers.values() if ledger.round == 4)
    assert (after.centre_norm, after.n_committed) == (0.0, 2)


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
    assert "m11111"[-6:] in view.waiting_for
    assert "m11112"[-6:] in view.waiting_for
    world.member(1).start()
    commits(world, 2, 2 * ROUND_S + SILENCE_S)


@pytest.mark.parametrize("moment", MOMENTS[:4], ids=lambda moment: moment.__name__)
def test_who_stands_still_is_named_while_waited_for_and_in_the_books(moment: Callable[[World, PeerId], bool]) -> None:
    world = begun(4)
    still = [world.member(1), world.member(2)]
    assert world.run_until(lambda: moment(world, still[0].name), 30.0), story(world)
    for member in still:
        member.freeze(90.0)
    frozen_at, round_ = world.now, world.round
    named_after_s: list[float] = []
    while world.round == round_:
        world.run_for(0.25)
        view = world.leader.rounds.view(world.leader.now())
        if world.round == round_ and all(member.name[-6:] in view.waiting_for for member in still):
            named_after_s.append(world.now - frozen_at)
        seen = {member.peer: world.now - member.last_seen_at for member in view.members}
        assert all(seen[member.name] >= world.now - frozen_at - 0.1 for member in still)
        assert world.now - frozen_at < ROUND_S + SILENCE_S, story(world)
    assert min(named_after_s) < 3.0
    entries = {entry.peer: entry for entry in world.chain.commits[-1][1].members}
    assert [entries[world.member(number).name].counted for number in range(4)] == [True, False, False, True]
    assert all(entries[member.name].reason for member in still)


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


# -- anything at all -------------------------------------------------------------------------------------------------


def assert_recovers(seed: int) -> None:
    world = recovery(seed)
    assert run_recovery(world, 3, 90.0), f"seed {seed}\n{story(world)}"


def test_some_worlds_recover() -> None:
    for seed in range(25):
        assert_recovers(seed)


@pytest.mark.timeout(600)
@pytest.mark.sim
@pytest.mark.parametrize("n", [150, pytest.param(1_000, marks=pytest.mark.long)])
def test_many_worlds_recover(n: int) -> None:
    for seed in range(1_000, 1_000 + n):
        assert_recovers(seed)


@pytest.mark.sim
@pytest.mark.long
def test_a_thousand_members() -> None:
    world = World(
        Options(n_members=1000, n_chunks=16, h=10, step_s=(1.0, 1.3, 0.8), relay=True, checks=False, replicas=2)
    ).start()
    assert world.run_until(lambda: world.n_committed >= 2, 120.0), story(world)
    assert len(world.chain.commits[-1][1].members) == 1000
    assert len({member.disk.ledger.head for member in world.members.values() if member.disk.ledger}) <= 2


@pytest.mark.timeout(600)
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
