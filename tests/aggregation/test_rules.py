"""Rules: equal to brute force and to an independent library, and the properties that make them what they are."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aggregation import codec, rules
from aggregation.errors import CodecError, RuleError
from aggregation.rules.reduction import median_network
from tests.aggregation import twins

CASES = json.loads((Path(__file__).parents[1] / "golden" / "aggregation_cases.json").read_text())["cases"]
ROWS = st.integers(1, 9).flatmap(
    lambda n: arrays(np.float32, (n, 33), elements=st.floats(-(2.0**20), 2.0**20, width=32, allow_subnormal=False))
)
FLOATS = np.float32


def rows(n: int, n_values: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, n_values)).astype(FLOATS)


def generated(case: dict[str, Any]) -> np.ndarray:
    n, n_values, seed = case["n"], case["d"], case["seed"]
    states = np.array([[seed * 1000003 + i * 100003 + k for k in range(n_values)] for i in range(n)], np.uint64)
    z = states + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = ((z ^ (z >> np.uint64(31))) >> np.uint64(40)).astype(np.float64) / 2**24 - 0.25
    x[n - case["outlier_rows"] :] *= -4
    assert hashlib.sha256(x.astype("<f8").tobytes()).hexdigest() == case["input_sha256_f64le"]
    return x


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['n']}x{case['d']}")
@pytest.mark.parametrize("rule", ["mean", "median"])
def test_an_independent_library_agrees(case: dict[str, Any], rule: str) -> None:
    result = rules.aggregate(rule, generated(case))
    expected = case[rule]
    if "values" in expected:
        np.testing.assert_allclose(result, expected["values"], atol=1e-5)
    else:
        np.testing.assert_allclose(result[:5], expected["first5"], atol=1e-5)
        assert result.sum(dtype=np.float64) == pytest.approx(expected["sum"], abs=1e-3)
        assert np.linalg.norm(result.astype(np.float64)) == pytest.approx(expected["l2"], rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.data())
def test_the_mean_equals_its_twin_bit_for_bit(updates: np.ndarray, data: st.DataObject) -> None:
    n = len(updates)
    weights = data.draw(st.lists(st.integers(1, 10**9), min_size=n, max_size=n))
    result = rules.aggregate("mean", updates, weights_N=weights)
    assert result.tobytes() == twins.mean(updates, weights).tobytes()


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_the_median_equals_its_twin_and_numpy(updates: np.ndarray) -> None:
    result = rules.aggregate("median", updates)
    assert np.array_equal(result, twins.median(updates))
    assert np.array_equal(result, np.median(updates, axis=0))


@pytest.mark.parametrize("n", [*range(1, 20), 31, 32, 33, 64, 100])
def test_the_network_sorts_its_middle(n: int) -> None:
    updates = rows(n, 600, seed=n)
    updates[:, ::3] = np.round(updates[:, ::3])  # ties
    assert np.array_equal(rules.aggregate("median", updates), twins.median(updates))


@pytest.mark.parametrize("n", range(1, 11))
def test_the_network_is_right_for_all_zeros_and_ones(n: int) -> None:
    """The zero-one principle: a comparator network that is right on 0 and 1 is right on everything."""
    columns = np.array(list(itertools.product((0.0, 1.0), repeat=n)), FLOATS).T
    assert np.array_equal(rules.aggregate("median", columns), twins.median(np.ascontiguousarray(columns)))


def test_networks_are_small() -> None:
    assert [len(median_network(n)) for n in (1, 2, 3, 4, 5, 8, 16)] == [0, 1, 3, 5, 8, 17, 53]


@settings(max_examples=40, deadline=None)
@given(ROWS, st.randoms(use_true_random=False))
def test_the_median_does_not_depend_on_the_order_of_contributions(updates: np.ndarray, random: Any) -> None:
    order = list(range(len(updates)))
    random.shuffle(order)
    assert np.array_equal(rules.aggregate("median", updates), rules.aggregate("median", updates[order]))


@pytest.mark.parametrize("n", range(1, 10))
def test_the_median_of_identical_contributions_is_that_contribution(n: int) -> None:
    row = rows(1, 3000)[0]
    assert rules.aggregate("median", np.tile(row, (n, 1))).tobytes() == row.tobytes()


@pytest.mark.parametrize(("n", "f"), [(3, 1), (5, 2), (8, 3), (9, 4)])
def test_the_median_stays_among_honest_values_whatever_f_others_send(n: int, f: int) -> None:
    updates = rows(n, 500, seed=n)
    updates[:f] = np.where(rows(f, 500, seed=1) > 0, FLOATS(1e30), FLOATS(-1e30))
    result = rules.aggregate("median", updates, f=f)
    honest = updates[f:]
    assert (result >= honest.min(axis=0)).all()
    assert (result <= honest.max(axis=0)).all()
    assert np.abs(rules.aggregate("mean", updates)).max() > 1e28


def test_a_shift_shifts_the_result() -> None:
    updates = np.round(rows(7, 500) * 1024) / 1024  # so that all sums are exact
    for rule in rules.names():
        moved = rules.aggregate(rule, updates + FLOATS(2))
        np.testing.assert_allclose(moved, rules.aggregate(rule, updates) + FLOATS(2), atol=1e-6)


@pytest.mark.parametrize("rule", rules.names())
def test_chunks_and_tiles_do_not_show_in_a_result_per_coordinate(rule: str) -> None:
    updates = rows(5, 40_001)
    whole = rules.aggregate(rule, updates)
    for chunk_values in (1000, 1 << 14, 1 << 20):
        assert rules.aggregate(rule, updates, chunk_values=chunk_values).tobytes() == whole.tobytes()


@pytest.mark.parametrize("rule", rules.names())
def test_inputs_stay_as_they_were(rule: str) -> None:
    updates = rows(4, 100)
    before = updates.tobytes()
    rules.aggregate(rule, updates)
    assert updates.tobytes() == before


@pytest.mark.parametrize("rule", rules.names())
@pytest.mark.parametrize("name", codec.names())
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_combining_frames_is_decode_reduce_encode(rule: str, name: str, n: int) -> None:
    weights = [1000 + 37 * i for i in range(n)]
    updates = rows(n, 40_001) * FLOATS(1e-3)
    frames = [codec.encode(name, row, block=64) for row in updates]
    result, norm = rules.combine(rule, frames, weights_N=weights, f=0, codec=name, block=64)
    decoded = np.stack([codec.decode(frame, 40_001) for frame in frames])
    expected = twins.mean(decoded, [float(each) for each in weights]) if rule == "mean" else twins.median(decoded)
    assert result == codec.encode(name, expected, block=64)
    assert norm == codec.squared_norm(result)
    codec.check(result, codec=name, block=64, n_values=40_001, scale_cap=codec.RESULT_SCALE_CAP)


def test_a_mean_at_the_cap_is_still_a_result() -> None:
    top = np.full(40, 127 * 2.0**32, FLOATS)
    frames = [codec.encode("int8", top, block=16)] * 3
    result, _ = rules.combine("mean", frames, weights_N=[3, 5, 2**62], f=0, codec="int8", block=16)
    codec.check(result, codec="int8", block=16, n_values=40, scale_cap=codec.RESULT_SCALE_CAP)


def combine(frames: list[bytes], weights: list[float], rule: str = "mean", f: int = 0, **more: Any) -> bytes:
    return rules.combine(rule, frames, weights_N=weights, f=f, codec="int8", block=16, **more)[0]


def test_who_weighs_nothing_is_not_there() -> None:
    frames = [codec.encode("int8", row, block=16) for row in rows(4, 50)]
    for rule in rules.names():
        assert combine(frames, [1, 0, 1, 1], rule) == combine([frames[0], *frames[2:]], [1, 1, 1], rule)
        with pytest.raises(RuleError, match="no contribution has weight"):
            combine(frames, [0, 0, 0, 0], rule)
    with pytest.raises(RuleError, match="3 contributions for f = 1, 2 count"):
        combine(frames, [1, 0, 1, 0], "median", 1)
    updates = rows(4, 50)
    assert np.array_equal(
        rules.aggregate("median", updates, weights_N=[1, 0, 9, 1]), np.median(updates[[0, 2, 3]], axis=0)
    )


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), 2.0**63])
def test_absurd_weights_are_refused(bad: float) -> None:
    frames = [codec.encode("int8", row, block=16) for row in rows(2, 50)]
    with pytest.raises(RuleError, match="weight"):
        combine(frames, [1, bad])
    with pytest.raises(RuleError, match="weight"):
        rules.aggregate("mean", rows(2, 50), weights_N=[1, bad])


def test_a_frame_that_is_not_canonical_or_unlike_the_others_never_reaches_a_rule() -> None:
    good = codec.encode("int8", rows(1, 50)[0], block=16)
    poisoned = good[:16] + np.float32(np.nan).tobytes() + good[20:]
    for bad in (
        poisoned,
        good[:-1],
        codec.encode("int8", np.ones(49), block=16),
        codec.encode("int8", np.ones(50), block=32),
        codec.encode("fp32", np.ones(50), block=16),
        b"",
    ):
        for frames in ([good, bad], [bad, good]):
            for weights in ([1.0, 1.0], [0.0, 1.0]):
                with pytest.raises(CodecError):
                    combine(frames, weights)


def test_what_makes_no_sense_is_refused() -> None:
    good = codec.encode("int8", rows(1, 50)[0], block=16)
    for call in (
        lambda: combine([good], [1, 1]),
        lambda: combine([], []),
        lambda: combine([good], [1], f=-1),
        lambda: combine([good], [1], previous=np.zeros(49, FLOATS)),
        lambda: combine([good], [1], "kurm"),
        lambda: combine([good, good], [1, 1], "median", 1),
        lambda: rules.aggregate("mean", np.ones(5)),
        lambda: rules.aggregate("mean", np.ones((0, 5))),
        lambda: rules.aggregate("mean", np.ones((5, 0))),
        lambda: rules.aggregate("mean", [[1.0, np.nan]]),
        lambda: rules.aggregate("mean", [[1.0, 1e300]]),
        lambda: rules.aggregate("mean", [[1.0]], chunk_values=0),
        lambda: rules.aggregate("mean", [[1.0]], previous_D=[1.0, 2.0]),
        lambda: rules.aggregate("mean", [[1.0]], trim=1),
        lambda: rules.minimum_contributions("median", -1),
        lambda: rules.needs_f("kurm"),
    ):
        with pytest.raises(RuleError):
            call()


def test_a_rule_without_f_ignores_it() -> None:
    updates = rows(2, 50)
    assert np.array_equal(rules.aggregate("mean", updates, f=7), rules.aggregate("mean", updates))
    assert rules.minimum_contributions("mean", 7) == 1
    assert not rules.needs_f("mean")
    assert rules.needs_f("median")
    assert [rules.minimum_contributions("median", f) for f in range(3)] == [1, 3, 5]
    assert rules.names() == ["mean", "median"]
