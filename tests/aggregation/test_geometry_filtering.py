"""Covariance filtering, and the eigenpair under it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aggregation.rules import geometry
from aggregation.rules.geometry.eigen import largest_eigenpair
from tests.aggregation import geometry_twins as twins


def assert_eigenpair(matrix: np.ndarray) -> None:
    matrix = matrix / max(float(np.trace(matrix)), 1e-300)
    before = matrix.tobytes()
    value, vector = largest_eigenpair(matrix)
    assert value == pytest.approx(np.linalg.eigvalsh(matrix)[-1], abs=1e-14)
    assert np.linalg.norm(vector) == pytest.approx(1.0)
    assert np.linalg.norm(matrix @ vector - value * vector) <= 1e-13
    assert matrix.tobytes() == before


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 12).flatmap(lambda n: arrays(np.float64, (n, 3), elements=st.integers(-3, 3).map(float))))
def test_the_largest_eigenpair_of_matrices_full_of_zeros_and_ties(updates: np.ndarray) -> None:
    assert_eigenpair(twins.gram(updates))


@pytest.mark.parametrize("n", [1, 2, 3, 7, 40])
def test_the_largest_eigenpair_of_matrices_of_full_rank(n: int) -> None:
    for seed in range(5):
        assert_eigenpair(twins.gram(np.random.default_rng(seed).standard_normal((n, n + 3))))


@pytest.mark.parametrize(
    "matrix",
    [
        np.eye(6),
        np.diag([1.0, 5.0, 2.0, 5.0]),
        np.ones((5, 5)),
        np.kron(np.eye(3), np.ones((2, 2))),
        np.diag([1.0, 1e-30, 1e-60]),
        np.outer([1.0, 1e-9, 1e9], [1.0, 1e-9, 1e9]),
        np.diag(np.linspace(1, 1 + 1e-13, 8)),
        np.zeros((3, 3)),
    ],
    ids=["one", "twice", "ones", "blocks", "spread", "outer", "close", "zeros"],
)
def test_the_largest_eigenpair_where_it_is_hard_to_find(matrix: np.ndarray) -> None:
    """Where a power iteration from a vector of ones would stand still or need for ever."""
    assert_eigenpair(matrix)


def test_the_eigenvector_is_found_across_a_start_of_ones() -> None:
    """It is at right angles to the vector of ones."""
    vector = np.array([1.0, -1.0, 2.0, -2.0])
    value, found = largest_eigenpair(np.outer(vector, vector) / 10 + np.ones((4, 4)) / 100)
    assert value == pytest.approx(1.0)
    assert abs(found @ vector) == pytest.approx(np.sqrt(10))


@pytest.mark.parametrize(("n", "f", "n_values"), [(5, 1, 3), (7, 3, 4), (9, 2, 20), (15, 4, 6), (3, 1, 2)])
def test_filtering_is_its_definition(n: int, f: int, n_values: int) -> None:
    for seed in range(5):
        updates = np.random.default_rng(seed).standard_normal((n, n_values))
        updates[:f] *= -4
        mixing = geometry.caf(twins.gram(updates), f)
        coefficients = mixing.numerators_MK[0] / mixing.divisors_M[0]
        np.testing.assert_allclose(coefficients, twins.caf(updates, f), atol=1e-6)


def test_a_far_row_loses_all_its_weight() -> None:
    """Elsewhere a row of 1e8 and more, once at weight 0, kept the largest projection, and the loop went on for ever."""
    for far in (1e3, 1e8, 1e15, 1e30):
        updates = np.random.default_rng(0).standard_normal((9, 6))
        updates[4] = far
        mixing = geometry.caf(twins.gram(updates), 2)
        assert mixing.numerators_MK[0, 4] == 0
        good = np.delete(updates, 4, axis=0)
        assert np.linalg.norm(twins.applied(mixing, updates)[0] - good.mean(axis=0)) < 2.0


def test_without_liars_it_is_the_mean_and_not_none() -> None:
    updates = np.random.default_rng(0).standard_normal((5, 6))
    mixing = geometry.caf(twins.gram(updates), 0)
    assert (mixing.numerators_MK == 1).all()
    assert mixing.divisors_M[0] == 5


def test_colluders_in_one_place_are_filtered() -> None:
    updates = np.random.default_rng(1).standard_normal((11, 6))
    updates[:3] = 7.0
    mixing = geometry.caf(twins.gram(updates), 3)
    assert mixing.numerators_MK[0, :3].max() < 1e-6


def test_it_ends_once_no_more_than_the_rows_that_are_surely_honest_weigh() -> None:
    """Two opposite rows lose all their weight at once; exactly 3 of 5 are left, whose own mean is not asked for."""
    updates = np.array([[4.0, 0.0], [-4.0, 0.0], [0.0, 3.0], [0.0, -1.0], [0.0, -1.0]])
    mixing = geometry.caf(twins.gram(updates), 1)
    assert mixing.numerators_MK[0].tolist() == [1, 1, 1, 1, 1]
    mixing = geometry.caf(twins.gram(updates), 2)
    assert mixing.numerators_MK[0, :2].tolist() == [0, 0]


def test_two_calls_agree_to_the_bit() -> None:
    """A library starts its power iteration from an unseeded vector, and peers end with different updates."""
    gram = twins.gram(np.random.default_rng(2).standard_normal((15, 30)))
    results = {geometry.caf(gram, 4).numerators_MK.tobytes() for _ in range(5)}
    assert len(results) == 1
