"""What makes the rules what they are: who may send what, and how far it moves the result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aggregation import rules

FLOATS = np.float32
ROBUST = [name for name in rules.names() if rules.needs_f(name) and name != "nnm"]
UNMOVED = [name for name in rules.names() if "arc" not in name and "norm_clip" not in name]
"""Rules to which it is all the same where zero is."""
TIES = ["mda", "bulyan"]
"""Rules that have ties in general position too, which the lowest index wins: a smallest diameter leaves rows that are
not on it a choice, and among few rows two that are nearest to each other have one score."""
HULL = ["median", "trimmed_mean", "meamed"]

seeds = st.integers(0, 2**32 - 1)


def scattered(seed: int, n: int, n_values: int = 24) -> np.ndarray:
    """Rows in general position: no two distances are alike."""
    random = np.random.default_rng(seed)
    return (random.standard_normal(n_values) + random.standard_normal((n, n_values))).astype(FLOATS)


def weights_of(seed: int, n: int) -> list[int]:
    return [int(weight) for weight in np.random.default_rng(seed).integers(50, 150, n)]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([rule for rule in rules.names() if rule not in TIES]), seeds, st.permutations(range(11)))
def test_the_order_of_contributions_does_not_matter(rule: str, seed: int, order: list[int]) -> None:
    """But for the rounding of sums."""
    updates, weights, previous = scattered(seed, 11), weights_of(seed, 11), scattered(seed + 1, 1)[0]
    result = rules.aggregate(rule, updates, f=2, weights_N=weights, previous_D=previous)
    permuted = rules.aggregate(rule, updates[order], f=2, weights_N=[weights[i] for i in order], previous_D=previous)
    np.testing.assert_allclose(permuted, result, atol=2e-5)
    if rule in (*HULL, "krum"):
        assert permuted.tobytes() == result.tobytes()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(UNMOVED), seeds)
def test_a_shift_of_all_shifts_the_result(rule: str, seed: int) -> None:
    updates, previous, shift = scattered(seed, 11), scattered(seed + 1, 1)[0], scattered(seed + 2, 1)[0]
    result = rules.aggregate(rule, updates, f=2, previous_D=previous)
    moved = rules.aggregate(rule, updates + shift, f=2, previous_D=previous + shift)
    np.testing.assert_allclose(moved, result + shift, atol=5e-5)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(rules.names()), seeds, st.integers(-40, 40))
def test_a_factor_of_two_doubles_the_result_to_the_bit(rule: str, seed: int, power: int) -> None:
    """So no rule has a constant that small pseudo-gradients would fall below."""
    updates, weights, previous = scattered(seed, 11), weights_of(seed, 11), scattered(seed + 1, 1)[0]
    factor = FLOATS(2.0**power)
    result = rules.aggregate(rule, updates, f=2, weights_N=weights, previous_D=previous)
    scaled = rules.aggregate(rule, updates * factor, f=2, weights_N=weights, previous_D=previous * factor)
    assert scaled.tobytes() == (result * factor).tobytes()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(HULL), st.data())
def test_rules_per_coordinate_stay_among_the_values_to_the_bit(rule: str, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 9))
    values = st.floats(allow_nan=False, allow_infinity=False, width=32)
    updates = data.draw(arrays(FLOATS, (n, 17), elements=values))
    f = data.draw(st.integers(0, (n - 1) // 2))
    result = rules.aggregate(rule, updates, f=f)
    assert (updates.min(axis=0) <= result).all()
    assert (result <= updates.max(axis=0)).all()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["median", "trimmed_mean"]), st.data())
def test_f_liars_cannot_leave_the_honest_values(rule: str, data: st.DataObject) -> None:
    f = data.draw(st.integers(1, 4))
    n = data.draw(st.integers(2 * f + 1, 2 * f + 4))
    honest = scattered(data.draw(seeds), n - f, 9)
    lies = data.draw(arrays(FLOATS, (f, 9), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
    result = rules.aggregate(rule, np.vstack([lies, honest]), f=f)
    assert (honest.min(axis=0) <= result).all()
    assert (result <= honest.max(axis=0)).all()


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(ROBUST), seeds, st.integers(1, 2), st.sampled_from(["plus", "both", "far apart", "one axis"]))
def test_f_liars_at_a_million_leave_the_result_near_the_honest_ones(rule: str, seed: int, f: int, lie: str) -> None:
    n = max(rules.minimum_contributions(rule, f), 4 * f + 1)
    random = np.random.default_rng(seed)
    honest = scattered(seed, n - f)
    lies = np.full((f, honest.shape[1]), 1e6)
    if lie == "both":
        lies *= np.where(np.arange(f) % 2, -1, 1)[:, None]
    elif lie == "far apart":
        lies *= random.standard_normal(lies.shape)
    elif lie == "one axis":
        lies[:, 1:] = honest[:1, 1:]
    updates = np.vstack([honest, lies])[random.permutation(n)]
    result = rules.aggregate(rule, updates, f=f)
    longest = np.linalg.norm(honest, axis=1).max()
    assert np.linalg.norm(result - honest.mean(axis=0)) <= 3 * longest


@pytest.mark.parametrize("rule", ["mean", "nnm"])
def test_a_mean_has_no_such_defence(rule: str) -> None:
    """Not after nnm either, which leaves a liar's own row a share of the lie: it is a step before a rule."""
    updates = scattered(0, 9)
    updates[4] = 1e6
    assert np.abs(rules.aggregate(rule, updates, f=1)).min() > 1e4


def test_one_more_liar_than_f_is_too_many() -> None:
    """The bounds above are about f, and tests that pass whatever f is would show nothing."""
    honest = scattered(0, 5)
    for rule in ("median", "trimmed_mean", "krum", "multi_krum", "mda", "nnm", "geometric_median", "default"):
        f = 1 if "krum" in rule else 2
        lies = np.full((len(honest) + 1, honest.shape[1]), 1e6)
        assert np.abs(rules.aggregate(rule, np.vstack([honest, lies]), f=f)).max() > 1e5


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["default", "centered_clip"]), seeds, st.integers(1, 5), st.integers(1, 400))
def test_a_weight_pulls_a_centred_rule_by_its_share_of_the_radius(
    rule: str, seed: int, iterations: int, weight: int
) -> None:
    """Each iteration is the weighted mean of steps that bring two points no further apart: 2·τ·w/W each."""
    honest, previous = scattered(seed, 8), scattered(seed + 1, 1)[0]
    random = np.random.default_rng(seed)
    weights = [100] * 8 + [weight]
    options: dict[str, Any] = {"tau": 2.0, "iterations": iterations, "weights_N": weights, "previous_D": previous}
    results = [
        rules.aggregate(rule, np.vstack([honest, size * random.standard_normal((1, 24))]), f=1, **options)
        for size in (1e-3, 1e9)
    ]
    bound = iterations * 2 * 2.0 * weight / sum(weights)
    assert np.linalg.norm(results[0] - results[1]) <= bound * (1 + 1e-4)
    assert np.linalg.norm(results[1] - previous) <= iterations * 2.0 * (1 + 1e-4)


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 45))
def test_less_than_half_the_weight_moves_a_geometric_median_by_a_bounded_step(seed: int, percent: int) -> None:
    """At most 2(1-a)/(1-2a) times the honest radius, a the liar's share of the weight."""
    honest = scattered(seed, 8)
    share = percent / 100
    weights = [100 - percent] * 8 + [8 * percent]
    updates = np.vstack([honest, np.full((1, 24), -1e7)])
    result = rules.aggregate("geometric_median", updates, weights_N=weights)
    middle = honest.mean(axis=0)
    radius = np.linalg.norm(honest - middle, axis=1).max()
    assert np.linalg.norm(result - middle) <= 2 * (1 - share) / (1 - 2 * share) * radius * (1 + 1e-4)


def test_a_heavy_row_below_half_the_weight_is_not_the_radius() -> None:
    """τ is the distance up to which lie half the weights, so a liar of 40 % far away does not stretch it."""
    near = scattered(0, 6) * FLOATS(0.1)
    zeros = np.zeros(24, FLOATS)
    lies = np.vstack([near, np.full((1, 24), 1e5)])
    result = rules.aggregate("default", lies, f=1, weights_N=[10] * 6 + [40], previous_D=zeros)
    assert np.linalg.norm(result) <= 3 * np.linalg.norm(near, axis=1).max()
    heavier = rules.aggregate("default", lies, f=1, weights_N=[10] * 6 + [61], previous_D=zeros)
    assert np.linalg.norm(heavier) > 1e4


def test_centred_rules_start_where_they_are_told_and_else_from_the_median() -> None:
    updates = scattered(4, 7)
    previous = scattered(5, 1)[0]
    for rule in ("default", "centered_clip"):
        nothing_done = rules.aggregate(rule, updates, iterations=0, previous_D=previous)
        assert nothing_done.tobytes() == previous.tobytes()
        assert rules.aggregate(rule, updates, iterations=0).tobytes() == rules.aggregate("median", updates).tobytes()
        median = rules.aggregate("median", updates)
        assert rules.aggregate(rule, updates).tobytes() == rules.aggregate(rule, updates, previous_D=median).tobytes()
        three = rules.aggregate(rule, updates, previous_D=previous)
        assert three.tobytes() == rules.aggregate(rule, updates, iterations=3, previous_D=previous).tobytes()
    assert rules.aggregate("default", updates).tobytes() == rules.aggregate("centered_clip", updates).tobytes()


def test_the_centre_of_a_chain_is_no_contribution_to_what_comes_before() -> None:
    """A centre far away is neither mixed nor clipped, and clips no one."""
    updates = scattered(6, 9)
    far = np.full(24, 1e5, FLOATS)
    for rule in ("nnm+default", "arc+default", "norm_clip+default"):
        assert rules.aggregate(rule, updates, f=2, iterations=0, previous_D=far).tobytes() == far.tobytes()
        pulled = rules.aggregate(rule, updates, f=2, tau=1e9, iterations=1, previous_D=far)
        mean = rules.aggregate(rule.replace("default", "mean"), updates, f=2)
        np.testing.assert_allclose(pulled, mean, atol=0.05)


@pytest.mark.parametrize("rule", rules.names())
def test_n_identical_rows_and_nothing_else_give_that_row(rule: str) -> None:
    row = scattered(7, 1)[0]
    for n, f in ((3, 0), (7, 1), (11, 2)):
        result = rules.aggregate(rule, np.tile(row, (n, 1)), f=f)
        if rule in ("mean", "norm_clip", "arc", "nnm"):
            np.testing.assert_allclose(result, row, rtol=1e-6)
        else:
            assert result.tobytes() == row.tobytes()
