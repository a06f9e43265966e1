"""Rules per coordinate: equal to brute force and to an independent library; and what `aggregate` refuses."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aggregation import codec, rules
from aggregation.errors import RuleError
from aggregation.rules.sorting import ROWS_COMPILED_MAX, compile_networks, network
from tests.aggregation import twins

CASES = json.loads((Path(__file__).parents[1] / "golden" / "aggregation_cases.json").read_text())["cases"]
ROWS = st.integers(1, 9).flatmap(
    lambda n: arrays(np.float32, (n, 33), elements=st.floats(-(2.0**20), 2.0**20, width=32, allow_subnormal=False))
)
FLOATS = np.float32
PER_COORDINATE = ["mean", "median", "trimmed_mean", "meamed"]


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


@settings(max_examples=60, deadline=None)
@given(ROWS, st.data())
def test_trimmed_mean_and_meamed_equal_their_twins_bit_for_bit(updates: np.ndarray, data: st.DataObject) -> None:
    updates += FLOATS(0)  # no -0, whose place among zeros is the network's
    f = data.draw(st.integers(0, (len(updates) - 1) // 2))
    assert rules.aggregate("trimmed_mean", updates, f=f).tobytes() == twins.trimmed_mean(updates, f).tobytes()
    assert rules.aggregate("meamed", updates, f=f).tobytes() == twins.meamed(updates, f).tobytes()


@pytest.mark.parametrize("n", [*range(1, 20), 31, 32, 33, 64, 100])
def test_columns_of_any_length_are_sorted(n: int) -> None:
    updates = rows(n, 301, seed=n)
    updates[:, ::3] = np.round(updates[:, ::3]) + FLOATS(0)  # ties
    f = (n - 1) // 3
    assert rules.aggregate("median", updates).tobytes() == twins.median(updates).tobytes()
    assert rules.aggregate("trimmed_mean", updates, f=f).tobytes() == twins.trimmed_mean(updates, f).tobytes()
    assert rules.aggregate("meamed", updates, f=f).tobytes() == twins.meamed(updates, f).tobytes()


def test_networks_that_are_compiled_in_and_those_that_are_not_give_the_same_bytes(monkeypatch: Any) -> None:
    updates = np.where(rows(8, 1000) > 1, FLOATS(-0.0), rows(8, 1000, seed=1).round())  # zeros of both signs too
    compiled_in = [rules.aggregate(rule, updates, f=2).tobytes() for rule in PER_COORDINATE]
    monkeypatch.setattr("aggregation.rules.sorting.ROWS_COMPILED_MAX", 0)
    assert [rules.aggregate(rule, updates, f=2).tobytes() for rule in PER_COORDINATE] == compiled_in
    assert ROWS_COMPILED_MAX > 0


def test_networks_can_be_compiled_before_they_are_needed(monkeypatch: Any) -> None:
    compile_networks(3)
    monkeypatch.setattr("aggregation.rules.sorting.kernel", None)  # nobody compiles any more
    assert [rules.aggregate("median", rows(n, 20)).size for n in (1, 2, 3)] == [20] * 3
    assert [rules.aggregate("trimmed_mean", rows(n, 20)).size for n in (1, 2, 3)] == [20] * 3


def test_of_two_values_at_one_distance_from_the_median_the_smaller_stays() -> None:
    assert rules.aggregate("meamed", [[0.0], [2.0], [1.0]], f=1) == [0.5]
    assert rules.aggregate("meamed", [[3.0], [2.0], [0.0], [1.0]], f=1) == [1.0]
    assert rules.aggregate("meamed", [[0.0], [1.0], [1.75]], f=1) == [1.375]


def test_a_trim_that_rounds_to_nothing_is_no_silent_mean() -> None:
    """A share of rows to trim, 0.2·4 rounded down, is a plain mean elsewhere; and sum minus extremes loses 3 in 1e9."""
    assert rules.aggregate("trimmed_mean", [[1.0], [2.0], [3.0], [4.0], [1e9]], f=1) == [3.0]
    with pytest.raises(RuleError, match="needs 5 contributions for f = 2, 4 count"):
        rules.aggregate("trimmed_mean", rows(4, 10), f=2)


@pytest.mark.parametrize("n", range(1, 11))
def test_the_network_is_right_for_all_zeros_and_ones(n: int) -> None:
    """The zero-one principle: a comparator network that is right on 0 and 1 is right on everything."""
    columns = np.array(list(itertools.product((0.0, 1.0), repeat=n)), FLOATS).T
    assert np.array_equal(rules.aggregate("median", columns), twins.median(np.ascontiguousarray(columns)))


def test_networks_are_small() -> None:
    assert [len(network(n, (n - 1) // 2, n // 2)) for n in (1, 2, 3, 4, 5, 8, 16)] == [0, 1, 3, 5, 8, 17, 53]
    assert [len(network(n, 0, n - 1)) for n in (1, 2, 3, 4, 5, 8, 16)] == [0, 1, 3, 5, 9, 19, 63]


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "meamed"])
@pytest.mark.parametrize("n", range(1, 10))
def test_identical_contributions_give_that_contribution(rule: str, n: int) -> None:
    row = rows(1, 3000)[0]
    assert rules.aggregate(rule, np.tile(row, (n, 1)), f=(n - 1) // 3).tobytes() == row.tobytes()


@pytest.mark.parametrize("rule", PER_COORDINATE)
def test_chunks_and_tiles_do_not_show_in_a_result_per_coordinate(rule: str) -> None:
    updates = rows(5, 40_001)
    whole = rules.aggregate(rule, updates, f=1)
    for start, stop in ((0, 1000), (1000, 40_001)):
        assert rules.aggregate(rule, updates[:, start:stop], f=1).tobytes() == whole[start:stop].tobytes()
    assert rules.aggregate(rule, updates, f=1, chunk_values=1000).tobytes() == whole.tobytes()


@pytest.mark.parametrize("rule", rules.names())
def test_inputs_stay_as_they_were(rule: str) -> None:
    updates = rows(4, 100)
    before = updates.tobytes()
    rules.aggregate(rule, updates)
    assert updates.tobytes() == before


@pytest.mark.parametrize("rule", rules.names())
def test_who_weighs_nothing_is_not_there(rule: str) -> None:
    updates = rows(9, 50)
    updates[3] = np.nan  # not even looked at
    weights = [1, 2, 1, 0, 3, 1, 1, 1, 1]
    without = rules.aggregate(rule, np.delete(updates, 3, 0), f=1, weights_N=np.delete(weights, 3))
    assert np.array_equal(rules.aggregate(rule, updates, f=1, weights_N=weights), without)
    with pytest.raises(RuleError, match="no contribution has weight"):
        rules.aggregate(rule, updates, weights_N=[0] * 9)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.parametrize("rule", rules.names())
def test_what_is_not_finite_reaches_no_rule_and_uses_up_f(rule: str, bad: float) -> None:
    updates = rows(12, 40).astype(np.float64)
    poisoned = updates.copy()
    poisoned[4, 17] = bad
    kept = np.delete(updates, 4, 0)
    for given_f, f in ((2, 1), (1, 1), (0, 0)):  # one is always withstood, if any was asked for
        assert np.array_equal(rules.aggregate(rule, poisoned, f=given_f), rules.aggregate(rule, kept, f=f))


def test_nobody_finite_or_too_few_of_them_is_an_error() -> None:
    updates = rows(5, 10)
    updates[:3] = np.inf
    assert np.array_equal(rules.aggregate("median", updates, f=2), rules.aggregate("median", updates[3:]))
    updates[3:] = np.nan
    with pytest.raises(RuleError, match="finite"):
        rules.aggregate("mean", updates)
    updates[:4] = 0
    with pytest.raises(RuleError, match="krum needs 5 contributions for f = 1, 4 count"):
        rules.aggregate("krum", updates, f=1)


ABSURD_WEIGHTS: list[Any] = [
    -1.0, float("nan"), float("inf"), 2.0**63, 2**63, 10**400, -(10**400), 2.0**-33, 1e-45, 5e-324, "1", None, 1j, [1],
]  # fmt: skip


@pytest.mark.parametrize("bad", ABSURD_WEIGHTS, ids=lambda bad: repr(bad)[:12])
def test_absurd_weights_are_refused(bad: Any) -> None:
    """Tiny ones too: a product with a denormal keeps no place, and the mean of 1.5 and 1.5 would be 2."""
    frames = [codec.encode("int8", row, block=16) for row in rows(2, 50)]
    for call in (
        lambda: rules.aggregate("mean", rows(2, 50), weights_N=[1, bad]),
        lambda: rules.combine("mean", frames, weights_N=[1, bad], f=0, codec="int8", block=16),
    ):
        with pytest.raises(RuleError, match="weight"):
            call()


@pytest.mark.parametrize("weight", [2.0**-32, 1e-9, 1, 2**62, np.int64(7), np.float32(0.3), True])
def test_the_mean_of_equal_rows_is_that_row_whatever_they_weigh(weight: Any) -> None:
    row = rows(1, 50)[0] * FLOATS(2.0**-90)
    for weights in ([weight] * 3, np.array([weight] * 3)):
        np.testing.assert_allclose(rules.aggregate("mean", np.tile(row, (3, 1)), weights_N=weights), row, rtol=3e-7)


def test_a_mean_with_tiny_weights_is_off_by_no_more_than_their_products_lose_among_denormals() -> None:
    """A product is off by half of 2^-149 at the most, so the mean by 2^-150 over the least weight, and its rounding."""
    row = np.array([1.76e-38, 2.0**-107, 2.0**-118, 3e-40, 2.0**-149, 1.0], FLOATS)
    for weight in (2.0**-32, 1.3e-9, 0.01, 0.7, 1.0, 3.0, 1e9):
        exact = row.astype(np.float64)
        mean = rules.aggregate("mean", np.stack([row] * 3), weights_N=[weight] * 3)
        assert (np.abs(mean - exact) <= 2.0**-150 / min(weight, 1.0) + 2.0**-150 + exact * 2.0**-21).all()
    assert rules.aggregate("mean", np.stack([row] * 2), weights_N=[2.0**-32] * 2)[0] == 0  # which is that much off


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "meamed", "default"])
def test_a_sum_that_overflows_is_no_kept_value(rule: str) -> None:
    """Clamped to what was summed, infinity would be the largest of it."""
    for sign in (1, -1):
        assert rules.aggregate(rule, [[sign * 1e38], [sign * 3e38]]) == [FLOATS(sign * 2e38)]
        three = rules.aggregate(rule, [[sign * 1e38], [sign * 2e38], [sign * 3e38]])
        np.testing.assert_allclose(three, [sign * 2e38], rtol=3e-7)


@pytest.mark.parametrize("n", [2, 4, 7, 40])
@pytest.mark.parametrize("n_values", [3, 2500])
def test_near_the_end_of_fp32_reductions_equal_their_twins_too(n: int, n_values: int) -> None:
    """Columns of which some overflow at once, some on the way, some not at all, and some that are small."""
    updates = np.clip(rows(n, n_values), -1.7, 1.7) * FLOATS(2e38)
    updates[:, ::3] *= FLOATS(2.0**-30)
    f = (n - 1) // 3
    assert rules.aggregate("median", updates).tobytes() == twins.median(updates).tobytes()
    assert rules.aggregate("trimmed_mean", updates, f=f).tobytes() == twins.trimmed_mean(updates, f).tobytes()
    assert rules.aggregate("meamed", updates, f=f).tobytes() == twins.meamed(updates, f).tobytes()


NO_PLAIN_MEAN = [rule for rule in rules.names() if rule not in ("mean", "arc", "nnm", "norm_clip")]


@pytest.mark.parametrize("rule", [*NO_PLAIN_MEAN, "nnm+median", "arc+nnm+bulyan", "nnm+default"])
def test_rows_near_the_end_of_fp32_are_combined_as_smaller_ones_are(rule: str) -> None:
    """Neither what a clamp nor what a mixing makes of an overflow shows in the result."""
    updates = np.clip(rows(9, 200, seed=2), -1.7, 1.7) * FLOATS(2e38)
    small = rules.aggregate(rule, updates * FLOATS(2.0**-40), f=1).astype(np.float64) * 2.0**40
    np.testing.assert_allclose(rules.aggregate(rule, updates, f=1), small, rtol=1e-6, atol=1e32)


@pytest.mark.parametrize("rule", ["mean", "arc", "norm_clip"])
def test_a_result_that_fp32_cannot_hold_is_said_and_not_given(rule: str) -> None:
    with pytest.raises(RuleError, match=f"{rule} of these rows is beyond"):
        rules.aggregate(rule, np.full((5, 2), 3e38), f=1)
    for sound in ("median", "trimmed_mean", "default", "krum", "geometric_median"):
        assert rules.aggregate(sound, np.full((5, 2), 3e38), f=1).tolist() == [FLOATS(3e38)] * 2


def test_any_numbers_will_do_whatever_their_type_and_order_in_memory() -> None:
    updates = rows(6, 50)
    expected = rules.aggregate("default", updates, f=1)
    for same in (
        updates.tolist(),
        updates.astype(np.float64),
        np.asfortranarray(updates),
        np.repeat(updates, 2, 1)[:, ::2],
    ):
        assert rules.aggregate("default", same, f=1).tobytes() == expected.tobytes()


def test_what_makes_no_sense_is_refused() -> None:
    four = rows(4, 8)
    anything: Any = lambda *given, **more: rules.aggregate(*given, **more)  # noqa: E731
    calls: list[Callable[[], object]] = [
        lambda: rules.aggregate("mean", np.ones(5)),
        lambda: rules.aggregate("mean", np.ones((0, 5))),
        lambda: rules.aggregate("mean", np.ones((5, 0))),
        lambda: rules.aggregate("mean", [[1.0, np.nan]]),
        lambda: rules.aggregate("mean", [[1.0, 1e300]]),
        lambda: rules.aggregate("mean", [[1.0]], chunk_values=0),
        lambda: rules.aggregate("mean", [[1.0]], previous_D=[1.0, 2.0]),
        lambda: rules.aggregate("default", four, previous_D=[np.nan] * 8),
        lambda: rules.aggregate("default", four, f=-1),
        lambda: rules.aggregate("kurm", four),
        lambda: rules.aggregate("median", four, f=2),
        lambda: rules.aggregate("mean", [[1.0]], trim=1),
        lambda: rules.aggregate("krum", four, m=1),
        lambda: rules.aggregate("multi_krum", rows(5, 8), m=6),
        lambda: rules.aggregate("multi_krum", rows(5, 8), m=1.5),
        lambda: rules.aggregate("centered_clip", four, tau=-1.0),
        lambda: rules.aggregate("centered_clip", four, tau=np.inf),
        lambda: rules.aggregate("default", four, tau="wide"),
        lambda: rules.aggregate("default", four, iterations=True),
        lambda: rules.aggregate("geometric_median", four, nu=0),
        lambda: rules.aggregate("norm_clip", four, radius=np.nan),
        lambda: rules.aggregate("krum", np.ones((257, 2))),
        lambda: anything("mean", [[1.0, 2.0], [1.0]]),
        lambda: anything("mean", [["1", "2"]]),
        lambda: anything("mean", [[None, 1.0]]),
        lambda: anything("mean", [[1.0, 1j]]),
        lambda: anything("mean", np.ones((2, 2), "M8[s]")),
        lambda: anything("mean", torch.ones(2, 2, requires_grad=True)),
        lambda: anything("default", four, previous_D=["a"] * 8),
        lambda: anything("default", four, previous_D=[1j] * 8),
        lambda: anything("mean", four, weights_N=3),
        lambda: anything("mean", four, weights_N=np.ones((4, 1))),
        lambda: anything("mean", four, weights_N=[1, 2, 3]),
        lambda: anything("median", four, f=1.5),
        lambda: anything("median", four, f="1"),
        lambda: anything("median", four, f=None),
        lambda: anything("median", four, f=10**400),
        lambda: anything("mean", four, chunk_values=1.5),
        lambda: anything("mean", four, chunk_values="8"),
        lambda: anything("centered_clip", four, tau=10**400),
        lambda: anything("centered_clip", four, iterations=10**400),
        lambda: anything("centered_clip", four, iterations=3.0),
        lambda: anything("multi_krum", rows(5, 8), m=-(10**5000)),
    ]
    for call in calls:
        with pytest.raises(RuleError):
            call()
