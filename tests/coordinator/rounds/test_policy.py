"""The policies of votes and of the next round: what makes a quorum, who has a seat and a vote, and when a run ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds import leases, policy
from protos import wire
from protos.limits import RANGES
from protos.messages import PeerId, Promise, Range
from protos.runspec import MembershipSpec, WorkSpec
from tests.coordinator.rounds.cases import (
    COORDINATOR,
    NO_HASH,
    PEERS,
    SPEC,
    after,
    beginning,
    body_of,
    empty_body,
    evidence_of,
    seated,
)
from tests.sim.options import sim_spec

VOTERS = st.integers(0, 7).map(lambda n: (*PEERS[:n], COORDINATOR))


# -- votes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "signers", "coordinator", "enough"),
    [
        (0, 0, True, True),
        (1, 1, False, True),  # one member goes on alone
        (1, 0, True, False),
        (2, 1, False, False),
        (2, 1, True, True),  # one of two needs the coordinator's word
        (3, 2, False, True),  # three lose one
        (3, 1, True, False),
        (4, 2, False, False),
        (4, 2, True, True),
        (5, 3, False, True),  # five lose two
        (5, 2, True, False),
        (7, 4, False, True),
    ],
)
def test_what_makes_a_quorum(n: int, signers: int, coordinator: bool, enough: bool) -> None:
    signed = [*PEERS[:signers], *([COORDINATOR] if coordinator else [])]
    assert policy.is_quorum(signed, (*PEERS[:n], COORDINATOR), COORDINATOR) is enough


def test_who_is_no_voter_weighs_nothing() -> None:
    assert not policy.is_quorum(PEERS[3:9], (*PEERS[:3], COORDINATOR), COORDINATOR)


def test_nobody_is_no_quorum_even_of_nobody() -> None:
    assert not policy.is_quorum([], (PEERS[0], COORDINATOR), COORDINATOR, left=(PEERS[0], COORDINATOR))


@given(VOTERS, st.data())
def test_two_quorums_share_a_voter(voters: tuple[PeerId, ...], data: st.DataObject) -> None:
    one, other = (data.draw(st.sets(st.sampled_from(voters))) for _ in range(2))
    if policy.is_quorum(one, voters, COORDINATOR) and policy.is_quorum(other, voters, COORDINATOR):
        assert one & other


@given(VOTERS, st.data())
def test_quorums_that_know_of_different_leaves_still_meet(voters: tuple[PeerId, ...], data: st.DataObject) -> None:
    """Votes of a lower attempt, promises of a higher one: they share a voter, or a LEAVE tells the higher of a vote.

    Who left without having promised the higher attempt can't be among its promises: that is what `heeds` is for.
    """
    left = data.draw(st.sets(st.sampled_from(voters)))
    known_low, known_high = (data.draw(st.sets(st.sampled_from(sorted(left)))) if left else set() for _ in range(2))
    votes = data.draw(st.sets(st.sampled_from(voters))) - known_low
    promises = data.draw(st.sets(st.sampled_from(voters))) - known_high - known_low
    if policy.is_quorum(votes, voters, COORDINATOR, known_low) and policy.is_quorum(
        promises, voters, COORDINATOR, known_high
    ):
        assert votes & (promises | known_high)


@pytest.mark.parametrize(
    ("promised", "leader", "attempt", "asking", "heeds"),
    [
        (3, "a", 2, "a", False),
        (3, "a", 3, "a", True),
        (3, "a", 3, "b", False),
        (3, "a", 4, "b", True),
        (-1, "", 0, "a", True),
    ],
)
def test_heeds(promised: int, leader: str, attempt: int, asking: str, heeds: bool) -> None:
    record = Promise(0, 1, promised, PeerId(leader), NO_HASH, -1, None)
    assert policy.heeds(record, attempt, PeerId(asking)) is heeds


@pytest.mark.parametrize(
    ("signers", "reachable", "enough"),
    [
        ([*PEERS[:2]], PEERS[:2], True),
        ([*PEERS[:2]], PEERS[:1], False),
        ([PEERS[0], COORDINATOR], [], True),
        ([*PEERS[:3]], [], True),
    ],
)
def test_a_commit_must_survive_its_signers(signers: list[PeerId], reachable: list[PeerId], enough: bool) -> None:
    voters = (*PEERS[:3], COORDINATOR)
    assert policy.spread_enough(signers, voters, COORDINATOR, reachable) is enough


# -- the next round --------------------------------------------------------------------------------------------------


def test_seats_are_disjoint_and_the_longest_in_the_run_come_first() -> None:
    ledger = seated(3)
    short = sim_spec(n_chunks=3, membership=MembershipSpec(max_members=2))
    ledger = replace(ledger, since={PEERS[2]: 1, PEERS[1]: 2, PEERS[0]: 5})
    seats, pool = policy.seats_for(ledger, policy.returned(ledger, {}), PEERS[:3], short)
    assert [seat.peer for seat in seats] == PEERS[1:3]
    assert leases.count(pool) == 4  # what the third had
    taken = leases.normalise(r for seat in seats for r in seat.ranges)
    assert leases.count(taken) == 8


@given(st.lists(st.integers(0, 4), min_size=3, max_size=3), st.integers(0, 3))
def test_what_was_not_used_is_leased_again(used: list[int], n_next: int) -> None:
    ledger = seated(3)
    prefixes = {seat.peer: leases.prefix(seat.ranges, n) for seat, n in zip(ledger.seats, used, strict=True)}
    returned = policy.returned(ledger, prefixes)
    assert leases.count(returned) == 12 - sum(used)
    seats, pool = policy.seats_for(ledger, returned, PEERS[:n_next], SPEC)
    leased = [r for seat in seats for r in seat.ranges]
    everything = leases.normalise([*leased, *pool, *(r for ranges in prefixes.values() for r in ranges)])
    assert everything == (Range(0, max(12, sum(used) + 4 * n_next)),)


def test_a_pool_in_more_pieces_than_a_lease_may_have_is_leased_all_the_same() -> None:
    """Every other batch came back: a seat of all of them could be encoded by nobody."""
    spec = sim_spec(n_chunks=3, work=WorkSpec(batch_tokens=8, h=5000))
    ledger = beginning()
    pool = tuple(Range(2 * number, 1) for number in range(12_000))
    ledger = replace(ledger, pool=pool, cursor=24_000)
    seats, left = policy.seats_for(ledger, (), PEERS[:2], spec)
    assert [leases.count(seat.ranges) for seat in seats] == [5000, 5000]
    assert [len(seat.ranges) for seat in seats] == [RANGES, RANGES]
    assert leases.count(left) == 12_000 - 2 * (RANGES - 1)
    body = empty_body(ledger, PEERS[:2], spec)
    assert body.seats == seats
    assert wire.encode(body)


def test_voters_are_who_signed_longest_in_the_run_first_and_the_coordinator_last() -> None:
    ledger = replace(seated(3), since={PEERS[0]: 3, PEERS[1]: 1, PEERS[2]: 2})
    voters = policy.voters_for(ledger, PEERS[:3], ledger.seats, [], COORDINATOR)
    assert voters == (PEERS[1], PEERS[2], PEERS[0], COORDINATOR)
    assert policy.voters_for(ledger, PEERS[:3], (), [PEERS[1]], COORDINATOR) == (PEERS[2], PEERS[0], COORDINATOR)


def test_voters_after_an_empty_round_are_as_before() -> None:
    ledger = seated(3)
    assert policy.voters_for(ledger, (), (), [PEERS[0]], COORDINATOR) == (PEERS[1], PEERS[2], COORDINATOR)
    assert policy.voters_for(ledger, (), ledger.seats[:1], PEERS[:3], COORDINATOR) == (PEERS[0], COORDINATOR)
    assert policy.voters_for(beginning(), (), (), [], COORDINATOR) == (COORDINATOR,)


def test_there_are_at_most_32_voters() -> None:
    voters = policy.voters_for(seated(3), PEERS, (), [], COORDINATOR)
    assert len(voters) == policy.VOTERS_MAX
    assert voters[-1] == COORDINATOR


def test_the_end() -> None:
    ledger = seated(1)
    for _ in range(2):
        ledger = after(ledger, body_of(ledger, evidence_of(ledger, 1)))
    assert policy.has_ended(ledger, SPEC) == ""
    assert "end of 2 rounds" in policy.has_ended(ledger, sim_spec(work=WorkSpec(batch_tokens=8, h=4, end_rounds=2)))
    assert "end of 64 tokens" in policy.has_ended(ledger, sim_spec(work=WorkSpec(batch_tokens=8, h=4, end_tokens=64)))
    assert policy.has_ended(ledger, sim_spec(work=WorkSpec(batch_tokens=8, h=4, end_tokens=65))) == ""
