"""What all of geometry has in common: the mixing that comes out, the Gram matrix that goes in, what never happens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregation.errors import RuleError
from aggregation.rules import geometry
from aggregation.rules.geometry import (
    Mixing,
    clipping,
    diameter,
    eigen,
    filtering,
    matrix,
    median,
    selection,
)
from aggregation.rules.geometry.distances import lower_median, norms, squared_distances
from tests.aggregation import geometry_twins as twins

Function = Callable[[np.ndarray, int], Mixing]

ONE_ROW: dict[str, Function] = {
    "krum": geometry.krum,
    "multi_krum": geometry.multi_krum,
    "mda": geometry.mda,
    "caf": geometry.caf,
    "geometric_median": lambda gram, f: geometry.geometric_median(gram, np.ones(len(gram))),
    "centered_clip": lambda gram, f: geometry.centered_clip(gram, np.ones(max(len(gram) - 1, 0))),
}
MANY_ROWS: dict[str, Function] = {
    "bulyan_selection": geometry.bulyan_selection,
    "nnm": geometry.nnm,
    "arc": geometry.arc,
    "norm_clip": lambda gram, f: geometry.norm_clip(gram, np.ones(len(gram))),
}
ALL = ONE_ROW | MANY_ROWS
PRE: dict[str, Callable[..., Mixing]] = {
    "nnm": lambda gram, n_fixed: geometry.nnm(gram, 1, n_fixed=n_fixed),
    "arc": lambda gram, n_fixed: geometry.arc(gram, 1, n_fixed=n_fixed),
    "norm_clip": lambda gram, n_fixed: geometry.norm_clip(gram, np.ones(len(gram) - n_fixed), n_fixed=n_fixed),
}
MODULES = (clipping, diameter, eigen, filtering, matrix, median, selection)
NEEDED = {"krum": (2, 3), "multi_krum": (2, 3), "mda": (2, 1), "caf": (2, 1), "nnm": (2, 1), "arc": (2, 1)}


def rows(n: int, n_values: int = 12, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, n_values)) + 0.5


def same(a: Mixing, b: Mixing) -> bool:
    return a.numerators_MK.tobytes() == b.numerators_MK.tobytes() and a.divisors_M.tobytes() == b.divisors_M.tobytes()


@pytest.mark.parametrize("name", ALL)
def test_a_mixing_is_small_and_closed(name: str) -> None:
    gram = twins.gram(rows(11))
    mixing = ALL[name](gram, 2)
    assert mixing.n_rows == 11
    assert mixing.n_mixed == {"bulyan_selection": 7}.get(name, 1 if name in ONE_ROW else 11)
    assert mixing.numerators_MK.dtype == mixing.divisors_M.dtype == np.float32
    assert (mixing.numerators_MK >= 0).all()
    assert (mixing.divisors_M > 0).all()
    with pytest.raises(ValueError, match="read-only"):
        mixing.numerators_MK[0, 0] = 1


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("arc", "norm_clip")])
def test_the_coefficients_add_up_to_one(name: str) -> None:
    mixing = ALL[name](twins.gram(rows(11)), 2)
    for numerators, divisor in zip(mixing.numerators_MK, mixing.divisors_M, strict=True):
        total = np.float32(0)
        for numerator in numerators:
            total = np.float32(total + numerator)
        assert total == divisor


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_kept_and_nothing_is_changed(name: str) -> None:
    gram = twins.gram(rows(11))
    before = gram.tobytes()
    first = ALL[name](gram, 2)
    ALL[name](twins.gram(rows(11, seed=3)), 2)
    assert same(ALL[name](gram, 2), first)
    assert gram.tobytes() == before
    assert same(ALL[name](np.asfortranarray(gram), 2), first)


@pytest.mark.parametrize("name", ALL)
def test_kernels_do_what_their_source_says_to_the_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same functions run by Python, product by product: compiled code fuses and reorders nothing."""
    grams = [twins.gram(rows(n, seed=n)) for n in (11, 14)]
    compiled = [ALL[name](gram, 2) for gram in grams]
    compiled_grams = [geometry.mixed_gram(gram, mixing) for gram, mixing in zip(grams, compiled, strict=True)]
    n_kernels = 0
    for module in MODULES:
        for attribute, value in vars(module).items():
            if hasattr(value, "py_func"):
                monkeypatch.setattr(module, attribute, value.py_func)
                n_kernels += 1
    assert n_kernels > 15
    for gram, expected, mixed in zip(grams, compiled, compiled_grams, strict=True):
        assert same(ALL[name](gram, 2), expected)
        assert geometry.mixed_gram(gram, expected).tobytes() == mixed.tobytes()


PINNED = {
    "krum": "4ead77b0dce2845e",
    "multi_krum": "01ad483336e2268b",
    "mda": "01ad483336e2268b",
    "caf": "508382a4302a4c10",
    "geometric_median": "532fecc7cd6c956a",
    "centered_clip": "bdfed53fb9076592",
    "bulyan_selection": "64a6220ff0e5c8a5",
    "nnm": "54cb74a95f304bb6",
    "arc": "d739b8792d8ba36f",
    "norm_clip": "f88dcdbd510a17d4",
}
"""BLAKE2 of the mixings of 40 rows of integers, f = 9: another value is another `numerics_version`."""


@pytest.mark.parametrize("name", ALL)
def test_the_bits_are_those_of_every_machine(name: str) -> None:
    states = np.arange(40 * 25, dtype=np.uint64).reshape(40, 25) * np.uint64(0x9E3779B97F4A7C15)
    updates = (states >> np.uint64(50)).astype(np.float64) - 4000.0
    updates[:9] *= -4
    mixing = ALL[name](twins.gram(updates), 9)
    digest = hashlib.blake2b(mixing.numerators_MK.tobytes() + mixing.divisors_M.tobytes(), digest_size=8)
    assert digest.hexdigest() == PINNED[name]


@pytest.mark.parametrize("exponent", [-60, -10, 20, 99])
@pytest.mark.parametrize("name", ALL)
def test_rows_twice_as_long_give_the_same_mixing(name: str, exponent: int) -> None:
    """To the bit, for powers of two: no rule has a length of its own, such as an absolute ν or radius."""
    gram = twins.gram(rows(11))
    assert same(ALL[name](gram * 4.0**exponent, 2), ALL[name](gram, 2))


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("arc", "norm_clip")])
def test_a_shift_of_all_rows_changes_no_coefficient(name: str) -> None:
    updates = np.round(rows(11) * 64)
    for shift in (3.0, 1000.0):
        one, other = ALL[name](twins.gram(updates), 2), ALL[name](twins.gram(updates + shift), 2)
        np.testing.assert_allclose(other.numerators_MK, one.numerators_MK, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("mda", "bulyan_selection")])
def test_the_order_of_rows_does_not_matter(name: str) -> None:
    """A centre stays last. Not so where ties are the rule: MDA's sets of one diameter, and the last rows that Bulyan
    selects, by one neighbour each, so that two nearest to each other have one score."""
    updates = rows(11)
    expected = twins.applied(ALL[name](twins.gram(updates), 2), updates)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(10 if name == "centered_clip" else 11)
        if name == "centered_clip":
            order = np.append(order, 10)
        result = twins.applied(ALL[name](twins.gram(updates[order]), 2), updates[order])
        if name in ("nnm", "arc", "norm_clip"):
            expected_here = expected[order]
        else:
            expected_here = expected
        np.testing.assert_allclose(result, expected_here, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("f", [0, 2])
@pytest.mark.parametrize("value", [0.0, 0.1, 1e30])
@pytest.mark.parametrize("name", ALL)
def test_equal_rows_come_back_exactly(name: str, value: float, f: int) -> None:
    updates = np.full((11, 7), value)
    updates[:, 3] *= -0.3
    mixing = ALL[name](twins.gram(updates), f)
    assert ((mixing.numerators_MK == 1).sum(axis=1) == 1).all()
    assert (mixing.numerators_MK.sum(axis=1) == 1).all()
    assert (mixing.divisors_M == 1).all()


def degenerate() -> dict[str, np.ndarray]:
    line = np.outer(np.arange(11.0), rows(1)[0])
    huge, mixed_sizes, groups = rows(11), rows(11), rows(11)
    huge[3] = 1e30
    mixed_sizes *= 10.0 ** np.arange(-30, 25, 5)[:, None]
    groups[:6] = groups[0]
    groups[6:] = groups[6]
    zeros = np.zeros((11, 12))
    zeros[5] = 1.0
    return {
        "line": line,
        "line of two ends": np.sign(line - line[5]),
        "huge": huge,
        "all sizes": mixed_sizes,
        "two groups": groups,
        "one that is not zero": zeros,
        "square": np.eye(12)[:11],
        "one value": rows(11, 1),
        "tiny": rows(11) * 1e-38,
        "far off": rows(11) * 1e-6 + 1e3,
    }


@pytest.mark.parametrize("f", [0, 1, 2])
@pytest.mark.parametrize("kind", degenerate())
@pytest.mark.parametrize("name", ALL)
def test_degenerate_rows_end_in_numbers(name: str, kind: str, f: int) -> None:
    updates = degenerate()[kind]
    mixing = ALL[name](twins.gram(updates), f)
    assert np.isfinite(mixing.numerators_MK).all()
    assert (mixing.divisors_M > 0).all()
    mixed = twins.applied(mixing, updates)
    assert np.isfinite(mixed).all()
    assert np.linalg.norm(mixed, axis=1).max() <= np.linalg.norm(updates, axis=1).max() * (1 + 1e-6)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("n", [1, 2])
def test_one_row_and_two(name: str, n: int) -> None:
    gram = twins.gram(rows(n + (name == "centered_clip")))
    if name in ("krum", "multi_krum", "bulyan_selection"):
        with pytest.raises(RuleError, match="3 rows are needed"):
            ALL[name](gram, 0)
        return
    mixing = ALL[name](gram, 0)
    assert np.isfinite(mixing.numerators_MK).all()
    if n == 1:
        assert mixing.numerators_MK[0, 0] == mixing.divisors_M[0] == 1


@pytest.mark.parametrize("f", [0, 1, 2, 5])
@pytest.mark.parametrize("name", NEEDED)
def test_too_few_rows_are_refused(name: str, f: int) -> None:
    a, b = NEEDED[name]
    enough = twins.gram(rows(a * f + b))
    ALL[name](enough, f)
    for gram, wrong in ((enough[:-1, :-1], f), (enough, f + 1), (enough, -1)):
        with pytest.raises(RuleError):
            ALL[name](gram, wrong)


@pytest.mark.parametrize("name", ALL)
def test_what_is_no_gram_matrix_is_refused(name: str) -> None:
    gram = twins.gram(rows(11))
    for bad in (np.nan, np.inf, -np.inf, 1e130):
        poisoned = gram.copy()
        poisoned[4, 4] = bad
        with pytest.raises(RuleError, match="not finite"):  # a library's Krum returns the NaN row
            ALL[name](poisoned, 2)
    for shape in (gram[:, :5], gram[0], np.empty((0, 0)), np.zeros((300, 300))):
        with pytest.raises(RuleError):
            ALL[name](shape, 0)


@pytest.mark.parametrize("size", [1e6, 1e-6])
@pytest.mark.parametrize("name", PRE)
def test_a_centre_behind_the_rows_stays_and_is_not_counted(name: str, size: float) -> None:
    """Neither a long one nor a short one, which would be in the median of the norms and everyone's neighbour."""
    updates = rows(9)
    centre = size * updates[:1]
    alone = PRE[name](twins.gram(updates), n_fixed=0)
    both = PRE[name](twins.gram(np.concatenate([updates, centre])), n_fixed=1)
    assert np.array_equal(both.numerators_MK[:9, :9], alone.numerators_MK)
    assert np.array_equal(both.divisors_M[:9], alone.divisors_M)
    assert not both.numerators_MK[:9, 9].any()
    assert twins.chosen(both, 9) == [9]
    assert both.numerators_MK[9, 9] == both.divisors_M[9] == 1
    with pytest.raises(RuleError, match="fixed"):
        PRE[name](twins.gram(updates), n_fixed=2)


def test_distances_of_equal_rows_are_exactly_0_and_none_is_negative() -> None:
    """Where squared norms are far larger than distances: the offset that makes a library's cdist return 0.22."""
    updates = rows(30, 40) * 0.01 + 10.0
    updates[7] = updates[3]
    distances = squared_distances(twins.gram(updates))
    expected = np.array([[twins.squared(a, b) for b in updates.tolist()] for a in updates.tolist()])
    np.testing.assert_allclose(distances, expected, atol=1e-10)
    assert (distances >= 0).all()
    assert not np.diagonal(distances).any()
    assert distances[7, 3] == distances[3, 7] == 0
    assert np.array_equal(distances, distances.T)
    np.testing.assert_allclose(norms(twins.gram(updates)), np.linalg.norm(updates, axis=1))


def test_rows_that_differ_by_less_than_their_norms_can_tell_count_as_the_same() -> None:
    """And no further apart than that: 1e-9 of a norm is nothing, 1e-6 is seen."""
    for apart, seen in ((1e-9, False), (1e-6, True)):
        updates = np.array([[1.0, 0.0], [1.0, apart], [1.0, -apart]])
        assert squared_distances(twins.gram(updates)).any() == seen
        assert same(geometry.multi_krum(twins.gram(updates), 0), matrix.copies([0], 3)) != seen


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=9))
def test_the_lower_median_has_half_of_the_weight_below_it(pairs: list[tuple[int, int]]) -> None:
    values, weights = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    assert lower_median(values, weights) == twins.lower_median(values, weights)
    assert lower_median(values, [1.0] * len(values)) == sorted(values)[(len(values) - 1) // 2]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 9))
def test_the_gram_of_mixed_rows(seed: int, n: int, n_mixed: int) -> None:
    generator = np.random.default_rng(seed)
    updates = generator.standard_normal((n, 6))
    numerators = generator.standard_normal((n_mixed, n)).astype(np.float32)
    numerators[generator.random((n_mixed, n)) < 0.3] = 0
    mixing = Mixing(numerators, generator.uniform(0.5, 3, n_mixed).astype(np.float32))
    result = geometry.mixed_gram(twins.gram(updates), mixing)
    np.testing.assert_allclose(result, twins.gram(twins.applied(mixing, updates)), atol=1e-12 * 6 * n * n)
    assert np.array_equal(result, result.T)


def test_mixed_rows_that_are_alike_have_no_distance() -> None:
    updates = rows(9) * 1e3
    mixed = geometry.mixed_gram(twins.gram(updates), geometry.nnm(twins.gram(updates), 0))
    assert not squared_distances(mixed).any()
    assert twins.chosen(geometry.krum(mixed, 1)) == [0]


def test_copies_have_the_gram_of_their_rows() -> None:
    gram = twins.gram(rows(11))
    mixing = geometry.bulyan_selection(gram, 2)
    order = np.argmax(mixing.numerators_MK, axis=1)
    assert np.array_equal(geometry.mixed_gram(gram, mixing), gram[np.ix_(order, order)])


def test_a_mixing_that_makes_no_sense_is_refused() -> None:
    ones: Any = np.ones((2, 3), np.float32)
    for numerators, divisors in ((ones, np.ones(3, np.float32)), (ones[0], ones[0])):
        with pytest.raises(RuleError, match="mixing"):
            Mixing(numerators, divisors)
    with pytest.raises(RuleError, match="mixing of 3 rows"):
        geometry.mixed_gram(np.ones((2, 2)), Mixing(ones, np.ones(2, np.float32)))
