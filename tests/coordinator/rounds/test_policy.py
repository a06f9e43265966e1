"""The policies: quorums, what a commitment may claim, seats, voters, and whom a failed exchange is blamed on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds import leases, policy
from protos.messages import Bandwidth, PeerId, Promise, Range
from protos.runspec import MembershipSpec, RuleSpec, WorkSpec
from tests.coordinator.rounds.cases import (
    COORDINATOR,
    NO_HASH,
    PEERS,
    SPEC,
    after,
    beginning,
    body_of,
    commitment,
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


# -- contributions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"used": (Range(4, 4),)}, "batches outside the lease"),
        ({"used": (Range(1, 3),), "steps": 3}, "batches outside the lease"),
        ({"used": (Range(0, -3),), "steps": -3, "tokens": -24}, "batches outside the lease"),
        ({"used": (Range(0, 5),)}, "batches outside the lease"),
        ({"used": (Range(0, 2), Range(2, 2))}, "batches outside the lease"),
        ({"used": (Range(0, 3),)}, "4 steps claimed for 3 batches"),
        ({"tokens": 33}, "33 tokens claimed for 4 batches"),
        ({"norms": (1.0, 1.0)}, "2 chunk norms instead of 3"),
        ({"norms": (1.0, -1.0, 1.0)}, "a norm that no values have"),
        ({"norms": (1.0, float("nan"), 1.0)}, "a norm that no values have"),
        ({"norms": (1.0, 1e101, 1.0)}, "a norm that no values have"),
        ({"sum_lr": 0.05}, "more learning rate than its steps allow"),
        ({"sum_lr": -0.01}, "more learning rate than its steps allow"),
        ({"sum_lr": float("nan")}, "more learning rate than its steps allow"),
    ],
)
def test_what_a_commitment_may_not_claim(changes: dict[str, Any], why: str) -> None:
    ledger = seated(1)
    honest = commitment(ledger, PEERS[0], NO_HASH)
    seat = ledger.seat_of(PEERS[0])
    assert policy.fault_of(honest, seat, SPEC) == ""
    assert policy.fault_of(replace(honest, **changes), seat, SPEC) == why
    assert policy.fault_of(honest, None, SPEC) == "no seat"


@given(st.integers(0, 4))
def test_fewer_steps_are_fine(steps: int) -> None:
    ledger = seated(1)
    assert policy.fault_of(commitment(ledger, PEERS[0], NO_HASH, steps=steps), ledger.seats[0], SPEC) == ""


def test_who_is_out_before_a_byte_travels() -> None:
    ledger = seated(5)
    seats = {seat.peer: seat for seat in ledger.seats}
    commitments = {peer: commitment(ledger, peer, NO_HASH) for peer in PEERS[:5]}
    assert policy.excluded(commitments, seats, SPEC) == {}
    commitments[PEERS[0]] = commitment(ledger, PEERS[0], NO_HASH, norms=(100.0,) * 3)
    commitments[PEERS[1]] = commitment(ledger, PEERS[1], NO_HASH, steps=0)
    commitments[PEERS[2]] = commitment(ledger, PEERS[2], NO_HASH, tokens=1)
    reasons = policy.excluded(commitments, seats, SPEC)
    assert sorted(reasons) == PEERS[:3]
    assert "times the median" in reasons[PEERS[0]]
    assert reasons[PEERS[1]] == "no steps"
    assert "tokens claimed" in reasons[PEERS[2]]


def test_weights_are_tokens_capped_at_the_median() -> None:
    ledger = seated(3)
    given_ = {PEERS[0]: 1, PEERS[1]: 2, PEERS[2]: 4}
    made = {peer: commitment(ledger, peer, NO_HASH, steps=steps) for peer, steps in given_.items()}
    assert policy.weights(made, SPEC) == {PEERS[0]: 8.0, PEERS[1]: 16.0, PEERS[2]: 32.0}
    capped = sim_spec(n_chunks=3, rule=RuleSpec(weight_cap=1.5))
    assert policy.weights(made, capped) == {PEERS[0]: 8.0, PEERS[1]: 16.0, PEERS[2]: 24.0}
    assert policy.weights({}, SPEC) == {}


def test_the_norm_of_a_contribution() -> None:
    ledger = seated(1)
    assert policy.delta_norm(commitment(ledger, PEERS[0], NO_HASH, norms=(9.0, 16.0, 0.0))) == 5.0


@pytest.mark.parametrize(
    ("rule", "n", "expected"),
    [
        ("mean", 0, None),
        ("mean", 1, policy.Applied("mean", 0, "", "no robustness")),
        ("median", 1, policy.Applied("median", 0, "", "no robustness with 1 contribution")),
        ("median", 3, policy.Applied("median", 1, "", "")),
    ],
)
def test_the_rule_for_so_many(rule: str, n: int, expected: policy.Applied | None) -> None:
    assert policy.applied_rule(sim_spec(rule=RuleSpec(name=rule, f_max=1)), n) == expected


def test_rounds_that_are_refused() -> None:
    strict = sim_spec(rule=RuleSpec(degraded=False))
    assert [bool(policy.refused(strict, n)) for n in range(4)] == [True, True, True, False]
    assert [bool(policy.refused(SPEC, n)) for n in range(4)] == [True, False, False, False]
    assert policy.refused(sim_spec(membership=MembershipSpec(min_contributors=3)), 2) == (
        "2 contributions, and this run needs 3"
    )


def test_lines_depend_on_every_root() -> None:
    ledger = seated(3)
    made = {peer: commitment(ledger, peer, NO_HASH) for peer in PEERS[:3]}
    rates = [Bandwidth(peer, 0.0) for peer in PEERS[:3]]
    lines = policy.lines(NO_HASH, made, rates, 16)
    assert len(lines) == 16
    assert all(sorted(line) == PEERS[:3] for line in lines)
    made[PEERS[1]] = replace(made[PEERS[1]], root=bytes([1]) * 32)
    assert policy.lines(NO_HASH, made, rates, 16) != lines


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


# -- blame -----------------------------------------------------------------------------------------------------------

CLAIMS = st.dictionaries(st.sampled_from(PEERS[:6]), st.sets(st.sampled_from(PEERS[:6])), max_size=6)


@given(CLAIMS)
def test_blame_explains_every_claim(claims: dict[PeerId, set[PeerId]]) -> None:
    senders, reducers = policy.blame(claims)
    assert all(reducer in reducers or sender in senders for reducer, named in claims.items() for sender in named)
    assert senders <= {sender for named in claims.values() for sender in named}
    assert reducers <= {reducer for reducer, named in claims.items() if named}


def test_a_sender_that_several_miss_is_at_fault() -> None:
    assert policy.blame({peer: {PEERS[5]} for peer in PEERS[:3]}) == ({PEERS[5]}, set())


def test_a_reducer_that_misses_everybody_is_at_fault() -> None:
    assert policy.blame({PEERS[0]: set(PEERS[1:5])}) == (set(), {PEERS[0]})


def test_one_word_against_another_is_the_reducers_fault() -> None:
    assert policy.blame({PEERS[0]: {PEERS[1]}}) == (set(), {PEERS[0]})


def test_no_claims_no_blame() -> None:
    assert policy.blame({PEERS[0]: set()}) == (set(), set())
