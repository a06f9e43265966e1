"""The coordinator is away: members go on under one of them, nobody commits twice, and it follows when it is back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.rounds.attempt import Phase
from protos.messages import Outcome, PeerId
from protos.orders import Kind
from tests.coordinator.rounds.ordered import ordered
from tests.sim.options import SHORT, Options
from tests.sim.standing_in import StandIn
from tests.sim.test_votes import run, run_all
from tests.sim.watching import ROUND_S, voted
from tests.sim.world import RUN, World, heads

STAND_IN_S = 6.0
TURN_S = STAND_IN_S + SHORT.heartbeat_timeout_s + 2.0
"""How long it takes until the first stand-in leads: silence, and those who are gone are given up."""


def begun(n: int, change: Callable[[World], object] = lambda _: None, **options: object) -> World:
    changes = {"stand_in_s": STAND_IN_S, "minority_wait_s": options.pop("minority_wait_s", 10_000.0)}
    deadlines = options.pop("deadlines", SHORT).model_copy(update=changes)  # type: ignore[attr-defined]
    world = World(
        Options(n_members=n, stand_ins=True, deadlines=deadlines, **{"h": 3, "step_s": (0.4, 0.5), **options})  # type: ignore[arg-type]
    )
    world.story = []
    change(world)
    world.start()
    assert world.run_until(lambda: world.n_committed >= 2, 60.0), told(world)
    return world


def told(world: World) -> str:
    return "\n".join((world.story or [])[-40:])


def go_on(world: World, n: int, within_s: float) -> None:
    wanted = world.n_committed + n
    assert world.run_until(lambda: world.n_committed >= wanted, within_s), told(world)


def standing(world: World) -> list[StandIn]:
    return [stand_in for stand_in in world.stand_ins.values() if stand_in.alive]


def leaders(world: World) -> list[PeerId]:
    return [body.leader for _, body, _ in world.chain.commits]


def all_agree(world: World) -> bool:
    """Whether the coordinator has the newest head, leads alone, and all who live hold it."""
    head = world.leader.rounds.ledger.head
    return not standing(world) and set(heads(world.members).values()) == {head}


def comes_back(world: World) -> None:
    world.restart(world.leader)
    wanted = world.round + 2
    assert world.run_until(lambda: world.leader.rounds.ledger.round >= wanted, 60.0), told(world)
    assert world.run_until(lambda: all_agree(world), ROUND_S), told(world)
    assert leaders(world)[-1] == world.coordinator


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_ten_rounds_without_the_coordinator_which_then_has_them_all(n: int) -> None:
    world = begun(n)
    world.leader.crash()
    before = world.round
    go_on(world, 10, TURN_S + 10 * ROUND_S)
    assert len(standing(world)) == 1, "one of them leads, and goes on leading"
    assert set(leaders(world)[before + 1 :]) == {standing(world)[0].name}
    credit = world.chain.ledgers[world.chain.commits[-1][2]].credit
    comes_back(world)
    now = world.leader.rounds.ledger.credit
    assert all(now[peer] >= tokens for peer, tokens in credit.items())
    assert [body.round for _, body, _ in world.chain.commits] == list(range(1, world.round + 1))


def test_the_stand_in_dies_too_and_another_takes_its_place() -> None:
    world = begun(5)
    world.leader.crash()
    go_on(world, 2, TURN_S + 2 * ROUND_S)
    first = standing(world)[0]
    world.members[first.name].crash()
    go_on(world, 2, 3 * TURN_S + 3 * ROUND_S)
    assert [stand_in.name for stand_in in standing(world)] != [first.name]
    comes_back(world)


def test_without_a_quorum_nobody_goes_on_and_with_it_they_do() -> None:
    world = begun(4)
    for process in (world.leader, world.member(0), world.member(1)):
        process.crash()
    round_ = world.round
    world.run_for(60.0)
    assert world.round <= round_ + 1
    world.member(1).start()
    go_on(world, 2, 4 * TURN_S + 3 * ROUND_S)


def test_a_coordinator_that_is_cut_off_beside_one_node_follows_the_others_afterwards() -> None:
    world = begun(5)
    alone = world.member(0)
    cut = {world.coordinator, alone.name}
    world.part(cut, 60.0)
    before = world.round
    world.run_for(60.0)
    assert world.round >= before + 4, told(world)
    assert not any(body.leader == alone.name for _, body, _ in world.chain.commits)
    assert world.run_until(lambda: all_agree(world) and world.leader.rounds.ledger.round == world.round, 60.0)
    go_on(world, 2, 3 * ROUND_S)


def test_members_that_hear_the_coordinator_stay_with_it_when_some_do_not() -> None:
    world = begun(5)
    world.part({world.member(0).name, world.member(1).name}, 50.0)
    before = world.round
    world.run_for(50.0)
    assert world.round >= before + 3, told(world)
    assert set(leaders(world)) == {world.coordinator}
    assert world.run_until(lambda: all_agree(world), 40.0), told(world)


@pytest.mark.parametrize("stand_in_dies", [False, True])
def test_a_leader_that_dies_with_the_votes_in_hand_when_one_member_holds_the_commit(stand_in_dies: bool) -> None:
    world = begun(5)
    if stand_in_dies:
        world.leader.crash()
        go_on(world, 1, TURN_S + 2 * ROUND_S)
    leader = standing(world)[0] if stand_in_dies else world.leader
    round_ = world.round
    assert world.run_until(lambda: world.round > round_, 2 * ROUND_S)  # it has committed, and told nobody yet
    victim = leader if not stand_in_dies else world.members[leader.name]
    names = [name for name in world.members if name != leader.name]
    world.network.cut(set(names[1:]))  # all but one member (and the observer) miss it
    world.run_for(0.2)
    victim.crash()
    world.network.cut(set())
    hash_ = world.chain.commits[-1][2]
    go_on(world, 2, 4 * TURN_S + 3 * ROUND_S)
    again = next(item for _, item, _ in world.chain.commits if item.previous == hash_)
    assert again.round == round_ + 2, "the commit that one of them held is the chain's"


def test_a_leader_that_stands_still_for_a_minute_wakes_up_in_another_round() -> None:
    world = begun(3)
    assert world.run_until(lambda: world.leader.rounds.phase is Phase.VOTE, 2 * ROUND_S)
    world.leader.freeze(60.0)
    go_on(world, 3, 60.0)
    assert world.run_until(lambda: all_agree(world) and world.now > 70.0, 120.0), told(world)
    go_on(world, 2, 3 * ROUND_S)
    assert leaders(world)[-1] == world.coordinator


def test_a_voter_that_restarts_between_vote_and_commit() -> None:
    world = begun(3)
    voter = world.member(1)
    assert world.run_until(lambda: voted(world, voter.name), 2 * ROUND_S)
    world.leader.crash()
    world.crash(voter, 0.5)
    body = world.members[voter.name].disk.record
    assert body is not None
    go_on(world, 2, 2 * TURN_S + 3 * ROUND_S)
    comes_back(world)


def test_who_is_admitted_comes_back_under_a_stand_in() -> None:
    world = begun(4)
    back = world.member(2)
    back.crash()
    world.leader.crash()
    go_on(world, 2, TURN_S + 3 * ROUND_S)
    back.start()
    wanted = world.round + 8
    assert world.run_until(lambda: back.disk.ledger is not None and back.disk.ledger.round >= wanted, 80.0), told(world)


# -- branches --------------------------------------------------------------------------------------------------------


def test_branches_that_meet_heal_and_the_larger_one_is_followed() -> None:
    """The coordinator, cut off beside one node, opens an epoch with it; the others go on, with more tokens."""
    world = begun(5, minority_wait_s=15.0)
    world.part({world.coordinator, world.member(0).name}, 90.0)
    world.run_for(90.0)
    epochs = {body.epoch for _, body, _ in world.chain.commits}
    assert epochs == {0, 1}, "both sides have gone on"
    longest = max((ledger for ledger in world.chain.ledgers.values()), key=lambda ledger: (ledger.tokens, ledger.epoch))
    assert longest.epoch == 0
    assert world.run_until(lambda: all_agree(world), 90.0), told(world)
    chain, head = [], world.leader.rounds.ledger.head
    by_hash = {hash_: body for _, body, hash_ in world.chain.commits}
    while head in by_hash:
        chain.append(head)
        head = by_hash[head].previous
    assert longest.head in chain
    orphaned = [body for _, body, hash_ in world.chain.commits if hash_ not in chain and body.epoch == 1]
    assert any(body.outcome is Outcome.COMMITTED for body in orphaned)
    assert any("orphaned" in text for text in world.leader.said)
    go_on(world, 2, 4 * ROUND_S)


def test_who_voted_on_the_branch_that_was_given_up_votes_again_on_the_other() -> None:
    world = begun(5, minority_wait_s=15.0)
    world.part({world.coordinator, world.member(0).name, world.member(1).name}, 90.0)
    world.run_for(90.0)
    assert {body.epoch for _, body, _ in world.chain.commits} == {0, 1}, "both sides have gone on"
    assert world.run_until(lambda: all_agree(world), 90.0), told(world)
    assert world.leader.rounds.ledger.epoch == 0
    world.member(4).crash()  # no quorum without them now
    go_on(world, 3, 6 * ROUND_S)


def test_an_order_that_the_branch_which_was_given_up_has_carried_is_obeyed_on_the_other() -> None:
    world = begun(5, minority_wait_s=15.0)
    world.part({world.coordinator, world.member(0).name}, 90.0)
    world.run_for(60.0)
    evicted = world.member(4).name
    world.leader.order(ordered(1, Kind.EVICT, peer=evicted, run=RUN))
    assert world.run_until(lambda: world.leader.rounds.ledger.is_banned(evicted), 20.0)
    assert world.leader.rounds.ledger.epoch == 1
    assert world.run_until(lambda: world.leader.rounds.ledger.epoch == 0, 90.0), told(world)
    assert world.run_until(lambda: world.leader.rounds.ledger.is_banned(evicted), 4 * ROUND_S), told(world)


def test_a_coordinator_that_restarts_after_giving_a_branch_up_opens_no_epoch() -> None:
    world = begun(5, minority_wait_s=15.0)
    world.part({world.coordinator, world.member(0).name}, 90.0)
    world.run_for(90.0)
    given_up = {body.round for _, body, _ in world.chain.commits if body.epoch == 1}
    leader = world.leader
    assert world.run_until(lambda: leader.rounds.ledger.epoch == 0 and leader.rounds.ledger.round + 1 in given_up, 90.0)
    leader.crash()
    leader.start()
    assert leader.rounds.ledger.epoch == 0, "the epoch was of the other branch"


# -- many schedules --------------------------------------------------------------------------------------------------


def test_some_successions() -> None:
    assert run_all("succession", range(60)) > 40


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(10_000, 10**9))
def test_any_succession(seed: int) -> None:
    run("succession", seed)


@pytest.mark.sim
@pytest.mark.timeout(600)
@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(10**9, 10**10))
def test_any_of_many_successions(seed: int) -> None:
    run("succession", seed)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("block", range(10))
def test_very_many_successions(block: int) -> None:
    """10^5 schedules: `pytest -m long tests/sim/test_stand_ins.py`."""
    first = 10**6 + 10**4 * block
    assert run_all("succession", range(first, first + 10**4)) > 5_000
