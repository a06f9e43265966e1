"""Norms and learning rates of a round: medians, where an aggregate is clipped, and how long a result may be."""

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
from coordinator.rounds import policy, proposing
from coordinator.rounds.ledger import Ledger, round_lr
from coordinator.rounds.proposing import Evidence, evidence_faults
from coordinator.rounds.voter import body_faults
from protos.messages import MemberEntry
from protos.runspec import CodecSpec, RuleSpec, RunSpec
from tests.coordinator.rounds.cases import (
    COORDINATOR,
    NO_HASH,
    PEERS,
    SPEC,
    after,
    beginning,
    body_of,
    commitment,
    commitments,
    empty_body,
    evidence_of,
    seated,
)
from tests.coordinator.rounds.honest import BODY, LEDGER
from tests.sim.options import sim_spec


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


def test_the_norm_of_a_contribution() -> None:
    ledger = seated(1)
    assert policy.delta_norm(commitment(ledger, PEERS[0], NO_HASH, norms=(9.0, 16.0, 0.0))) == 5.0


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


# -- the clip factor and the centre, round after round ---------------------------------------------------------------


def scaled(ledger: Ledger, times: float, spec: RunSpec = SPEC, **changed: Any) -> Evidence:
    """A round whose contributions and whose results are so many times as long as usual."""
    longer: dict[str, Any] = {
        str(peer): commitment(ledger, peer, NO_HASH, spec, norms=(times * times,) * 3, **changed) for peer in PEERS[:3]
    }
    evidence = evidence_of(ledger, 3, spec, **longer)
    results = {
        peer: replace(item, results=tuple(replace(r, norm_sq=r.norm_sq * times * times) for r in item.results))
        for peer, item in evidence.results.items()
    }
    return replace(evidence, results=results)


def test_the_aggregate_is_clipped_once_three_are_known_and_jumps_stay_bounded() -> None:
    ledger, usual = seated(3), BODY.aggregate_norm
    for _ in range(2):
        ledger = after(ledger, body_of(ledger, scaled(ledger, 1.0)))
    third = body_of(ledger, scaled(ledger, 100.0))
    assert third.clip_factor == 1.0  # nothing to compare with yet
    ledger = after(ledger, body_of(ledger, scaled(ledger, 1.0)))
    steps = []
    for _ in range(12):
        evidence = scaled(ledger, 1000.0)
        body = body_of(ledger, evidence)
        hashes = proposing.result_hashes(evidence, SPEC)
        assert body_faults(body, evidence, hashes, ledger, SPEC, COORDINATOR) == []
        assert np.float32(body.clip_factor) == body.clip_factor
        steps.append(body.clip_factor * body.aggregate_norm / usual)
        ledger = after(ledger, body)
        assert ledger.centre_norm == pytest.approx(body.clip_factor * body.aggregate_norm)
    assert steps[:4] == pytest.approx([2, 2, 2, 3])  # the median moves only when half of what is kept is long
    assert steps[-1] < 10


def test_more_steps_are_no_jump() -> None:
    ledger = seated(3)
    for _ in range(3):
        ledger = after(ledger, body_of(ledger, scaled(ledger, 1.0, steps=1)))
    assert body_of(ledger, scaled(ledger, 3.0)).clip_factor == 1.0  # 4^0.8 is 3.03
    assert body_of(ledger, scaled(ledger, 7.0)).clip_factor < 1.0


def test_after_an_empty_round_there_is_no_centre() -> None:
    ledger = after(LEDGER, BODY)
    assert ledger.centre_norm == pytest.approx(BODY.aggregate_norm)
    assert len(ledger.norms) == 1
    evidence = evidence_of(ledger, 3)
    lengthened = replace(
        evidence,
        results={
            peer: replace(item, results=tuple(replace(r, norm_sq=2.0) for r in item.results))
            for peer, item in evidence.results.items()
        },
    )
    assert evidence_faults(lengthened, ledger, SPEC) == []  # the centre may be longer than all contributions
    ledger = after(ledger, empty_body(ledger, PEERS[:3]))
    assert (ledger.centre_norm, len(ledger.norms)) == (0.0, 1)
    evidence = evidence_of(ledger, 3)
    lengthened = replace(
        evidence,
        results={
            peer: replace(item, results=tuple(replace(r, norm_sq=2.0) for r in item.results))
            for peer, item in evidence.results.items()
        },
    )
    assert "longer than any contribution" in evidence_faults(lengthened, ledger, SPEC)[0]
