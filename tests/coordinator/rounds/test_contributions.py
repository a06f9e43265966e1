"""The policies of contributions: what they may claim and weigh, which rule combines so many, and who reduces them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregation.codec import frame_bytes
from coordinator.rounds import policy
from protos.messages import Bandwidth, Excluded, Range
from protos.runspec import MembershipSpec, RuleSpec, WorkSpec
from tests.coordinator.rounds.cases import NO_HASH, PEERS, SPEC, commitment, commitments, seated
from tests.sim.options import sim_spec


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
