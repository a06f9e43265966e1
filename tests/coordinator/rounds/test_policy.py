"""The policies: quorums, what a commitment may claim, seats, and voters."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregation import codec as codecs
from aggregation import rules
from aggregation.codec import frame_bytes
from coordinator.rounds import leases, policy
from coordinator.rounds.ledger import round_lr
from protos import wire
from protos.limits import RANGES
from protos.messages import Bandwidth, Commitment, Excluded, MemberEntry, PeerId, Promise, Range
from protos.runspec import CodecSpec, MembershipSpec, RuleSpec, WorkSpec
from tests.coordinator.rounds.cases import (
    COORDINATOR,
    NO_HASH,
    PEERS,
    SPEC,
    after,
    beginning,
    body_of,
    commitment,
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
        ({"sum_lr": 0.0}, "less learning rate than its steps take"),
    ],
)
def test_what_a_commitment_may_not_claim(changes: dict[str, Any], why: str) -> None:
    ledger = seated(1)
    honest = commitment(ledger, PEERS[0], NO_HASH)
    seat = ledger.seat_of(PEERS[0])
    assert policy.fault_of(honest, seat, 0, SPEC) == ""
    assert policy.fault_of(replace(honest, **changes), seat, 0, SPEC) == why
    assert policy.fault_of(honest, None, 0, SPEC) == "no seat"


@given(st.integers(0, 4))
def test_fewer_steps_are_fine(steps: int) -> None:
    ledger = seated(1)
    assert policy.fault_of(commitment(ledger, PEERS[0], NO_HASH, steps=steps), ledger.seats[0], 0, SPEC) == ""


def test_who_is_out_before_a_byte_travels() -> None:
    ledger = seated(5)
    commitments = {peer: commitment(ledger, peer, NO_HASH) for peer in PEERS[:5]}
    assert policy.excluded(commitments, ledger, SPEC) == {}
    commitments[PEERS[0]] = commitment(ledger, PEERS[0], NO_HASH, norms=(100.0,) * 3)
    commitments[PEERS[1]] = commitment(ledger, PEERS[1], NO_HASH, steps=0)
    commitments[PEERS[2]] = commitment(ledger, PEERS[2], NO_HASH, tokens=1)
    reasons = policy.excluded(commitments, ledger, SPEC)
    assert sorted(reasons) == PEERS[:3]
    assert "times the median" in reasons[PEERS[0]]
    assert reasons[PEERS[1]] == "no steps"
    assert "tokens claimed" in reasons[PEERS[2]]


@pytest.mark.parametrize("n_steps", [(8, 8, 1, 1), (8, 8, 1, 1, 1)])
def test_machines_of_mixed_speeds_are_all_let_in(n_steps: tuple[int, ...]) -> None:
    """Two members at H and two, or three, at H/8: by their raw norms two of the five would be out."""
    spec = sim_spec(n_chunks=3, work=WorkSpec(batch_tokens=8, h=8))
    ledger = seated(len(n_steps), spec)
    made = {
        peer: commitment(ledger, peer, NO_HASH, spec, steps=steps, norms=(steps**1.6,) * 3)
        for peer, steps in zip(PEERS, n_steps, strict=False)
    }
    assert policy.excluded(made, ledger, spec) == {}


def test_weights_are_tokens_capped_at_the_median() -> None:
    ledger = seated(3)
    given_ = {PEERS[0]: 1, PEERS[1]: 2, PEERS[2]: 4}
    made = {peer: commitment(ledger, peer, NO_HASH, steps=steps) for peer, steps in given_.items()}
    assert policy.weights(made, SPEC) == {PEERS[0]: 8.0, PEERS[1]: 16.0, PEERS[2]: 32.0}
    capped = sim_spec(n_chunks=3, rule=RuleSpec(weight_cap=1.5))
    assert policy.weights(made, capped) == {PEERS[0]: 8.0, PEERS[1]: 16.0, PEERS[2]: 24.0}
    assert policy.weights({}, SPEC) == {}


@pytest.mark.parametrize(("admission", "most"), [("open", 32.0), ("invite", 128.0), ("allow_list", 128.0)])
def test_where_anyone_may_come_weights_are_capped_lower(admission: Any, most: float) -> None:
    spec = sim_spec(membership=MembershipSpec(admission=admission))
    weights = policy.weights(commitments(3, tokens=(16, 16, 1000)), spec)
    assert max(weights.values()) == most
    assert policy.weights(commitments(3, tokens=(0, 16, 16)), spec)[PEERS[0]] == 0.0  # never raised


def test_the_norm_of_a_contribution() -> None:
    ledger = seated(1)
    assert policy.delta_norm(commitment(ledger, PEERS[0], NO_HASH, norms=(9.0, 16.0, 0.0))) == 5.0


def commitments(n: int, *, tokens: tuple[int, ...] = ()) -> dict[PeerId, Commitment]:
    ledger = seated(n) if n else beginning()
    made = {peer: commitment(ledger, peer, NO_HASH) for peer in PEERS[:n]}
    return {peer: replace(made[peer], tokens=claimed) for peer, claimed in zip(made, tokens or (32,) * n, strict=True)}


GATED = Excluded(PEERS[30], "norm is 8 times the median, above 3")
IDLE = Excluded(PEERS[31], policy.NO_STEPS)


@pytest.mark.parametrize(
    ("rule", "n", "out", "expected"),
    [
        ("mean", 0, (), None),
        ("mean", 1, (), policy.Applied("mean", 0, "", "no robustness")),
        ("default", 1, (), policy.Applied("mean", 0, "mean", "no robustness with 1 contribution")),
        ("default", 2, (), policy.Applied("norm_clip", 0, "norm_clip", "no robustness with 2 contributions")),
        ("default", 3, (), policy.Applied("default", 1, "", "")),
        ("median", 3, (GATED,), policy.Applied("median", 1, "", "")),
        ("bulyan", 3, (), policy.Applied("nnm+trimmed_mean", 1, "nnm+trimmed_mean", "")),
        ("default", 12, (), policy.Applied("default", 2, "", "")),
        ("default", 12, (IDLE,), policy.Applied("default", 2, "", "")),
        ("default", 12, (GATED,), policy.Applied("default", 1, "", "")),
        ("kurm", 3, (), None),
    ],
)
def test_the_rule_for_so_many(rule: str, n: int, out: tuple[Excluded, ...], expected: policy.Applied | None) -> None:
    spec = sim_spec(rule=RuleSpec(name=rule))
    assert policy.applied_rule(spec, commitments(n), out) == expected
    if not out:
        assert policy.planned_rule(spec, n) == (expected or policy.Applied(rule, 0, "", ""))


def test_who_weighs_too_much_is_said() -> None:
    spec = sim_spec(rule=RuleSpec(weight_cap=8))
    applied = policy.applied_rule(spec, commitments(3, tokens=(8, 8, 64)), ())
    assert applied is not None
    assert applied.degraded == "the 1 heaviest of 3 contributions hold half of the weight or more"
    capped = policy.applied_rule(sim_spec(), commitments(3, tokens=(8, 8, 64)), ())
    assert capped is not None
    assert capped.degraded != ""  # 16 of 32
    even = policy.applied_rule(sim_spec(), commitments(4, tokens=(8, 8, 8, 64)), ())
    assert even is not None
    assert even.degraded == ""  # 16 of 40


def test_rounds_that_are_refused() -> None:
    strict = sim_spec(rule=RuleSpec(degraded=False))
    assert [bool(policy.refused(strict, commitments(n), ())) for n in range(4)] == [True, True, True, False]
    assert [bool(policy.refused(SPEC, commitments(n), ())) for n in range(4)] == [True, False, False, False]
    assert policy.refused(sim_spec(membership=MembershipSpec(min_contributors=3)), commitments(2), ()) == (
        "2 contributions, and this run needs 3"
    )
    for admission, alone in (("open", False), ("invite", True), ("allow_list", True)):
        membership = MembershipSpec.model_validate({"admission": admission})
        spec = SPEC.model_copy(update={"rule": RuleSpec(), "membership": membership})
        assert [not policy.refused(spec, commitments(n), ()) for n in (1, 2, 3)] == [alone, alone, True]
    half = sim_spec(rule=RuleSpec(name="median", fraction=0.5))
    assert policy.refused(half, commitments(4), ()) == "too few contributions for median: 4"


def test_a_rule_that_this_version_does_not_know_is_named() -> None:
    strange = sim_spec(rule=RuleSpec(name="kurm"))
    assert policy.unknown(SPEC) == ""
    assert "numerics_version is 9" in policy.unknown(SPEC.model_copy(update={"numerics_version": 9}))
    assert "did you mean krum?" in policy.unknown(strange)
    assert policy.refused(strange, commitments(3), ()) == policy.unknown(strange)


@pytest.mark.parametrize(
    ("replicas", "admission", "f", "n_senders", "n_reducers", "expected"),
    [
        ("auto", "open", 1, 4, 4, 4),  # small: everyone reduces everything
        ("auto", "invite", 1, 4, 3, 3),
        ("auto", "allow_list", 1, 4, 4, 1),
        ("auto", "open", 1, 4, 0, 1),
        ("auto", "open", 2, 20_000, 50, 3),  # too much for that: one of them is honest
        ("auto", "open", 0, 20_000, 50, 1),
        ("auto", "open", 9, 20_000, 5, 5),
        (3, "open", 1, 4, 4, 3),
        (3, "allow_list", 1, 4, 2, 2),
        (1, "open", 1, 4, 4, 1),
    ],
)
def test_how_many_reduce_a_chunk(
    replicas: Any, admission: Any, f: int, n_senders: int, n_reducers: int, expected: int
) -> None:
    spec = sim_spec(rule=RuleSpec(replicas=replicas), membership=MembershipSpec(admission=admission))
    assert policy.replicas(spec, f, n_senders, n_reducers) == expected


def test_a_mesh_while_a_reducer_receives_at_most_16_mib() -> None:
    spec = sim_spec(n_chunks=1)
    n_most = 16 * 2**20 // policy.vector_bytes(spec)
    assert policy.replicas(spec, 1, n_most, 9) == 9
    assert policy.replicas(spec, 1, n_most + 1, 9) == 2


@pytest.mark.parametrize("n_values", [1, 1023, 1024, 1025, 4096, 5000])
def test_the_bytes_of_a_contribution(n_values: int) -> None:
    whole = sim_spec(n_chunks=1)
    spec = whole.model_copy(update={"model": whole.model.model_copy(update={"n_values": n_values})})
    cut = policy.grid(spec)
    assert policy.vector_bytes(spec) == sum(
        frame_bytes("int8", cut.size(chunk), spec.codec.block) for chunk in range(cut.n_chunks)
    )


# -- norms -----------------------------------------------------------------------------------------------------------


def members(*sums_and_weights: tuple[float, float]) -> list[MemberEntry]:
    return [
        MemberEntry(PEERS[number], True, "", 1, 1, weight, (), NO_HASH, 1.0, sum_lr, 0.0)
        for number, (sum_lr, weight) in enumerate(sums_and_weights)
    ]


def test_a_rounds_learning_rate_is_the_weighted_lower_median() -> None:
    assert round_lr(members((0.3, 1), (0.1, 1), (0.2, 1))) == 0.2
    assert round_lr(members((0.3, 1), (0.1, 1))) == 0.1
    assert round_lr(members((0.3, 5), (0.1, 2), (0.2, 2))) == 0.3
    assert round_lr([]) == 0.0
    out = [replace(entry, counted=False) for entry in members((0.1, 9))]
    assert round_lr([*out, *members((0.3, 1))]) == 0.3


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 1e6)), min_size=1, max_size=9))
def test_the_median_is_that_of_the_exact_weights(rows: list[tuple[float, float]]) -> None:
    """Sums of floats are rounded otherwise from one version of Python to the next, and members may run any."""
    half = sum(Fraction(weight) for _, weight in rows) / 2
    ordered = sorted(rows)
    upto = [sum((Fraction(weight) for _, weight in ordered[: n + 1]), Fraction(0)) for n in range(len(rows))]
    assert round_lr(members(*rows)) == next(ordered[n][0] for n, so_far in enumerate(upto) if so_far >= half)


def test_the_median_of_weights_that_floats_can_not_add() -> None:
    assert round_lr(members((0.1, 0.6), (0.2, 0.2), (0.3, 0.4), (0.4, 0.4))) == 0.3  # 0.6 + 0.2 is a bit less than half


def test_a_norm_is_correctly_rounded() -> None:
    """What a libm's power makes of it differs in the last place, between machines too; the body names it."""
    made = commitment(seated(1), PEERS[0], NO_HASH, norms=(952.4673882682695, 0.0, 0.0))
    assert policy.delta_norm(made) == math.sqrt(952.4673882682695)


@given(st.floats(0, 0.04), st.integers(3, 9))
def test_a_liar_moves_a_rounds_learning_rate_no_further_than_to_anothers(lie: float, n: int) -> None:
    honest = [(0.04 - 0.001 * number, 32.0) for number in range(n)]
    found = round_lr(members(*honest, (lie, 32.0)))
    assert honest[-1][0] <= found <= 0.04


def test_an_aggregate_that_jumps_is_clipped() -> None:
    spec, ledger = sim_spec(), beginning()
    honest = members((1.0, 1), (1.0, 1), (1.0, 1))
    for kept in ((), (1.0,), (1.0, 1.0)):
        assert policy.clip_factor(spec, replace(ledger, norms=kept), 100.0, honest) == 1.0
    ledger = replace(ledger, norms=(1.0, 0.5, 4.0))
    assert policy.clip_factor(spec, ledger, 2.0, honest) == 1.0
    assert policy.clip_factor(spec, ledger, 8.0, honest) == 0.25
    assert policy.clip_factor(spec, ledger, 3.0, honest) == np.float32(2 / 3)
    assert policy.clip_factor(sim_spec(rule=RuleSpec(name="median")), ledger, 8.0, honest) == 1.0
    longer = members((32.0, 1), (32.0, 1), (32.0, 1))  # more steps go further: 32^0.8 is 16
    assert policy.clip_factor(spec, ledger, 32.0, longer) == 1.0
    assert policy.clip_factor(spec, ledger, 64.0, longer) == 0.5
    liar = members((32.0, 1), (32.0, 1), (32.0, 1), (1e-30, 1))
    assert policy.clip_factor(spec, ledger, 64.0, liar) == 0.5


@pytest.mark.parametrize(("times", "n_rounds"), [(3, 8), (10, 25), (1000, 80), (1e6, 170)])
def test_a_norm_that_stays_longer_is_taken_whole_after_a_while(times: float, n_rounds: int) -> None:
    """The median follows what was clipped, so a run isn't held at its first norms: twice as far every 8 rounds."""
    spec, ledger, honest = sim_spec(), replace(beginning(), norms=(1.0,) * 16), members((1.0, 1))
    factors = []
    for _ in range(n_rounds + 20):
        factors.append(policy.clip_factor(spec, ledger, times, honest))
        ledger = replace(ledger, norms=(*ledger.norms, factors[-1] * times)[-16:])
    assert factors[0] == np.float32(2 / times)
    assert factors[n_rounds:] == [1.0] * 20


@pytest.mark.parametrize("still", [0.0, 1e-60, 5e-324])
def test_a_run_that_stood_still_is_not_held_there(still: float) -> None:
    spec, ledger, honest = sim_spec(), replace(beginning(), norms=(still,) * 16), members((1.0, 1))
    for _ in range(12):
        factor = policy.clip_factor(spec, ledger, 1.0, honest)
        ledger = replace(ledger, norms=(*ledger.norms, factor)[-16:])
    assert factor == 1.0


def test_a_centred_rules_result_may_be_as_long_as_its_centre() -> None:
    made, spec = commitments(3), sim_spec(codec=CodecSpec(name="fp32", chunk_values=1024, leaf_values=1024))
    default, median = (policy.Applied(rule, 1, "", "") for rule in ("default", "median"))
    assert policy.result_norm_limit(spec, made, 0, median, 7.0) == pytest.approx(1.02 * 1.5**0.5)
    assert policy.result_norm_limit(spec, made, 0, default, 0.0) == pytest.approx(1.02 * 1.5**0.5)
    assert policy.result_norm_limit(spec, made, 0, default, 7.0) == pytest.approx(1.02 * 1.5**0.5 * 7.0)
    assert policy.result_norm_limit(spec, made, 0, policy.Applied("mean", 0, "", ""), 7.0) == 1.02


@pytest.mark.parametrize("name", codecs.names())
@pytest.mark.parametrize("block", [64, 1024, 4096, 65536])
def test_no_honest_result_is_too_long(name: str, block: int) -> None:
    """Rows in whose mean every value lies just above half a step, beside one outlier a block: all are rounded up."""
    if name == "topk" and block > 4096:
        return
    n, n_values = 11, max(block, 4096)
    codec = CodecSpec.model_validate({"name": name, "block": block, "chunk_values": n_values, "leaf_values": n_values})
    spec = sim_spec(n_chunks=1, codec=codec)
    ledger = seated(n, spec)
    for unit in (1.0, 2.0**-24):  # the smaller one is fp16's least
        for low in (0, 3):
            up_NP = (np.arange(n)[:, None] + np.arange(n_values)) % n < 6  # of 11 a bit more than half
            rows_NP = ((low + up_NP) * unit).astype(np.float32)
            rows_NP[:, ::block] = 127 * unit
            frames = [codecs.encode(name, row_P, block=block) for row_P in rows_NP]
            made = {
                peer: commitment(ledger, peer, NO_HASH, spec, norms=(codecs.squared_norm(frame),))
                for peer, frame in zip(PEERS[:n], frames, strict=True)
            }
            for rule in ("mean", "geometric_median"):
                applied = policy.Applied(rule, 0, "", "")
                _, norm_sq = rules.combine(rule, frames, weights_N=[1] * n, f=0, codec=name, block=block)
                assert norm_sq <= policy.result_norm_limit(spec, made, 0, applied, 0.0) ** 2


def test_lines_depend_on_every_root() -> None:
    ledger = seated(3)
    made = {peer: commitment(ledger, peer, NO_HASH) for peer in PEERS[:3]}
    rates = [Bandwidth(peer, 0.0) for peer in PEERS[:3]]
    lines = policy.lines(NO_HASH, made, rates, 16)
    assert len(lines) == 16
    assert all(sorted(line) == PEERS[:3] for line in lines)
    assert len({id(line) for line in lines}) <= 3  # one for each first reducer, however many chunks there are
    reserved = policy.lines(NO_HASH, made, [*rates, Bandwidth(PEERS[3], 9.0)], 16, [PEERS[3]])
    assert reserved == tuple((*line, PEERS[3]) for line in lines)
    assert len({id(line) for line in reserved}) <= 3
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
