"""Voters that make up what they have signed, and stand-ins that are heard and lead nowhere: the others go on."""

from __future__ import annotations

import pytest

from node.session.standing_in import order
from protos.messages import PeerId
from tests.sim.liars import HOLDING_UP, LIES, PLAIN, hold_up, lying_voters
from tests.sim.options import SHORT
from tests.sim.test_stand_ins import TURN_S, begun, go_on, leaders, standing, told
from tests.sim.test_votes import run_all
from tests.sim.watching import ROUND_S
from tests.sim.world import World

QUICK = SHORT.model_copy(update={"commitment_s": 3.0, "exchange_s": 4.0, "vote_s": 3.0, "no_progress_s": 2.0})
HELD_UP_S = 2 * 1.25 * (3 + 4 + 2 * 3) + 2 * SHORT.heartbeat_timeout_s + 3 * TURN_S + ROUND_S
"""A turn of two attempts that take all the time they may, and the next one's turn after it."""


LIAR = PeerId("m11114")


def first_in_line(world: World) -> PeerId:
    ledger = world.leader.rounds.ledger
    return order(ledger, world.coordinator)[0]


@pytest.mark.parametrize("kind", HOLDING_UP)
def test_a_stand_in_that_is_heard_and_commits_nothing_holds_the_others_off_for_its_turn(kind: str) -> None:
    world = begun(5, deadlines=QUICK)
    first = first_in_line(world)
    world.leader.crash()
    holds_up = hold_up(world, first, HOLDING_UP[kind])
    before = world.round
    go_on(world, 4, 2 * HELD_UP_S)
    assert holds_up.alive
    assert holds_up.n_terms == 1, "it has led, and stays"
    assert first not in leaders(world)[before + 1 :], told(world)
    world.restart(world.leader)
    go_on(world, 4, TURN_S + 4 * ROUND_S)
    assert leaders(world)[-1] == world.coordinator


def test_each_of_two_has_its_turn() -> None:
    world = begun(5, deadlines=QUICK)
    ledger = world.leader.rounds.ledger
    world.leader.crash()
    for peer in order(ledger, world.coordinator)[:2]:
        hold_up(world, peer, HOLDING_UP["Freezing"])
    go_on(world, 3, 4 * HELD_UP_S)


@pytest.mark.parametrize("lie", PLAIN)
def test_a_proposal_that_nobody_can_have_signed_is_passed_over(lie: str) -> None:
    world = begun(4, lambda world: lying_voters(world, [LIAR], LIES[lie]))
    world.leader.crash()
    go_on(world, 5, TURN_S + 6 * ROUND_S)
    said = [text for stand_in in standing(world) for text in stand_in.said]
    assert any(f"{LIAR[-6:]} reports a proposal" in text for text in said), said


@pytest.mark.parametrize("lie", PLAIN)
def test_its_promise_counts_as_one_that_reports_nothing_where_no_quorum_can_be_had_without(lie: str) -> None:
    world = begun(3, lambda world: lying_voters(world, [PeerId("m11113")], LIES[lie], votes=True))
    world.leader.crash()
    world.member(0).crash()
    go_on(world, 4, 3 * TURN_S + 5 * ROUND_S)


def test_an_empty_round_that_one_voter_alone_reports_is_not_made_where_others_are_enough() -> None:
    world = begun(4, lambda world: lying_voters(world, [LIAR], LIES["groundless"]))
    world.leader.crash()
    go_on(world, 5, TURN_S + 6 * ROUND_S)
    assert not any(body.reason == "made up" for _, body, _ in world.chain.commits)


def test_some_successions_among_liars() -> None:
    assert run_all("liars", range(40)) > 20


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_many_successions_among_liars() -> None:
    assert run_all("liars", range(10**6, 10**6 + 10**4)) > 5_000
