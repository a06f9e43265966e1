"""Clipping: static, adaptive and centred, equal to their definitions on the rows themselves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aggregation.errors import RuleError
from aggregation.rules import geometry
from tests.aggregation import geometry_twins as twins

VALUES = st.floats(-100, 100, width=32).map(lambda value: round(value * 64) / 64)
WEIGHTS = st.integers(1, 9)


@st.composite
def rows_and_weights(draw: st.DrawFn) -> tuple[np.ndarray, list[float]]:
    n = draw(st.integers(1, 8))
    updates = draw(arrays(np.float64, (n, 4), elements=VALUES))
    return updates, [float(weight) for weight in draw(st.lists(WEIGHTS, min_size=n, max_size=n))]


def close(result: np.ndarray, expected: np.ndarray, size: float) -> None:
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6 * max(size, 1e-30))


@settings(max_examples=100, deadline=None)
@given(rows_and_weights(), st.integers(0, 3))
def test_adaptive_clipping_is_its_definition(drawn: tuple[np.ndarray, list[float]], f: int) -> None:
    updates, _ = drawn
    if len(updates) < 2 * f + 1:
        with pytest.raises(RuleError, match="rows are needed"):
            geometry.arc(twins.gram(updates), f)
        return
    mixing = geometry.arc(twins.gram(updates), f)
    close(twins.applied(mixing, updates), np.array(twins.arc(updates.tolist(), f)), np.abs(updates).max())
    assert np.count_nonzero(np.diagonal(mixing.numerators_MK) != 1) <= 2 * f * (len(updates) - f) // len(updates)


@settings(max_examples=100, deadline=None)
@given(rows_and_weights(), st.one_of(st.none(), st.floats(0, 50)))
def test_norm_clipping_is_its_definition(drawn: tuple[np.ndarray, list[float]], radius: float | None) -> None:
    updates, weights = drawn
    mixing = geometry.norm_clip(twins.gram(updates), weights, radius)
    if radius is None:
        radius = twins.lower_median([twins.norm(row) for row in updates.tolist()], weights)
    expected = np.array([twins.clipped(row, radius) for row in updates.tolist()])
    close(twins.applied(mixing, updates), expected, np.abs(updates).max())


def test_a_row_that_is_short_enough_stays_as_it_is() -> None:
    updates = np.array([[3.0, 4.0], [0.0, 5.0], [6.0, 8.0], [0.0, 0.0]])
    mixing = geometry.norm_clip(twins.gram(updates), np.ones(4), 5.0)
    assert np.diagonal(mixing.numerators_MK).tolist() == [1.0, 1.0, 0.5, 1.0]
    assert np.diagonal(geometry.norm_clip(twins.gram(updates), np.ones(4), 0.0).numerators_MK).tolist() == [0, 0, 0, 1]


def test_the_larger_of_two_equals_is_clipped_and_a_heavy_one_is_not() -> None:
    updates = np.array([[1.0, 0.0], [0.0, 8.0]])
    for order in ([0, 1], [1, 0]):
        scales = np.diagonal(geometry.norm_clip(twins.gram(updates[order]), [1.0, 1.0]).numerators_MK)
        assert scales[order].tolist() == [1.0, 0.125]
    assert np.diagonal(geometry.norm_clip(twins.gram(updates), [1.0, 2.0]).numerators_MK).tolist() == [1.0, 1.0]


@settings(max_examples=150, deadline=None)
@given(
    rows_and_weights(),
    arrays(np.float64, 4, elements=VALUES),
    st.one_of(st.none(), st.floats(0.125, 200)),
    st.integers(0, 6),
)
def test_centred_clipping_is_its_definition(
    drawn: tuple[np.ndarray, list[float]], centre: np.ndarray, tau: float | None, iterations: int
) -> None:
    updates, weights = drawn
    everything = np.concatenate([updates, centre[None, :]])
    mixing = geometry.centered_clip(twins.gram(everything), weights, tau, iterations)
    expected = twins.centered_clip(updates.tolist(), centre.tolist(), weights, tau, iterations)
    # A distance is known to 1e-8 of the rows' size here, and to 1e-16 there.
    np.testing.assert_allclose(
        twins.applied(mixing, everything)[0], expected, atol=2e-6 * max(np.abs(everything).max(), 1e-30)
    )


def test_no_iteration_is_the_centre_itself() -> None:
    updates = np.random.default_rng(0).standard_normal((5, 8))
    mixing = geometry.centered_clip(twins.gram(updates), np.ones(4), iterations=0)
    assert twins.chosen(mixing) == [4]
    assert mixing.numerators_MK[0, 4] == mixing.divisors_M[0] == 1


def test_a_radius_past_all_rows_is_the_weighted_mean() -> None:
    updates = np.random.default_rng(1).standard_normal((6, 8))
    weights = np.arange(1.0, 6.0)
    mixing = geometry.centered_clip(twins.gram(updates), weights, 1e6, 1)
    np.testing.assert_allclose(
        twins.applied(mixing, updates)[0], np.average(updates[:5], axis=0, weights=weights), rtol=1e-6
    )
    assert mixing.numerators_MK[0, 5] == 0


def test_each_row_pulls_no_further_than_its_share_of_the_radius() -> None:
    updates = np.random.default_rng(2).standard_normal((8, 20))
    updates[0] = 1e30
    for weight in (1.0, 2.0):
        weights = np.array([weight, *[1.0] * 6])
        mixing = geometry.centered_clip(twins.gram(updates), weights, 0.5, 1)
        without = updates.copy()
        without[0] = updates[7]  # a row at the centre pulls nothing
        still = geometry.centered_clip(twins.gram(without), weights, 0.5, 1)
        pulled = twins.applied(mixing, updates)[0] - twins.applied(still, without)[0]
        assert np.linalg.norm(pulled) == pytest.approx(0.5 * weight / (6 + weight), rel=1e-5)


def test_the_radius_is_the_weighted_lower_median_of_the_first_distances() -> None:
    updates = np.array([[1.0], [2.0], [4.0], [8.0], [0.0]])
    for weights, tau in (([1, 1, 1, 1], 2.0), ([1, 1, 2, 2], 4.0), ([9, 1, 1, 1], 1.0), ([1, 1, 1, 4], 8.0)):
        own = geometry.centered_clip(twins.gram(updates), weights)
        given_one = geometry.centered_clip(twins.gram(updates), weights, tau)
        assert own.numerators_MK.tobytes() == given_one.numerators_MK.tobytes()


def test_a_majority_at_the_centre_does_not_move() -> None:
    updates = np.array([[1.0, 1.0], [1.0, 1.0], [5.0, 5.0], [1.0, 1.0]])
    mixing = geometry.centered_clip(twins.gram(updates), np.ones(3))
    assert twins.applied(mixing, updates)[0].tolist() == [1.0, 1.0]


def test_what_makes_no_sense_is_refused() -> None:
    gram = twins.gram(np.eye(4))
    calls: list[Callable[[], geometry.Mixing]] = [
        lambda: geometry.norm_clip(gram, np.ones(4), -1.0),
        lambda: geometry.norm_clip(gram, np.ones(4), np.nan),
        lambda: geometry.norm_clip(gram, np.ones(4), np.inf),
        lambda: geometry.norm_clip(gram, np.ones(3)),
        lambda: geometry.norm_clip(gram, [1, 1, 0, 1]),
        lambda: geometry.centered_clip(gram, np.ones(4)),
        lambda: geometry.centered_clip(gram, [1, -1, 1]),
        lambda: geometry.centered_clip(gram, [1, np.nan, 1]),
        lambda: geometry.centered_clip(gram, [1, np.inf, 1]),
        lambda: geometry.centered_clip(gram, np.ones(3), -1.0),
        lambda: geometry.centered_clip(gram, np.ones(3), np.nan),
        lambda: geometry.centered_clip(gram, np.ones(3), 1.0, -1),
        lambda: geometry.centered_clip(gram, np.ones(3), 1.0, 10**9),
        lambda: geometry.centered_clip(gram[:1, :1], []),
    ]
    for call in calls:
        with pytest.raises(RuleError):
            call()
