"""The geometric median: converged, relative in its lengths, exact where it is one of the rows."""

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


def rows(n: int, n_values: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, n_values))


def found(updates: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    mixing = geometry.geometric_median(twins.gram(updates), np.ones(len(updates)) if weights is None else weights)
    point: np.ndarray = twins.applied(mixing, updates)[0]
    return point


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 9).flatmap(lambda n: arrays(np.float64, (n, 2), elements=st.integers(-5, 5).map(float))),
    st.data(),
)
def test_no_step_in_any_direction_is_better(updates: np.ndarray, data: st.DataObject) -> None:
    n = len(updates)
    weights = np.array(data.draw(st.lists(st.integers(1, 4), min_size=n, max_size=n)), np.float64)
    point = found(updates, weights)
    here = twins.spread(updates.tolist(), point.tolist(), weights.tolist())
    size = np.abs(updates).max() + 1e-9
    for angle in np.linspace(0, 2 * np.pi, 16, endpoint=False):
        for step in (1e-3, 0.1, 1.0):
            there = point + step * size * np.array([np.cos(angle), np.sin(angle)])
            assert here <= twins.spread(updates.tolist(), there.tolist(), weights.tolist()) + 1e-6 * size * n
    for row in updates:
        assert here <= twins.spread(updates.tolist(), row.tolist(), weights.tolist()) + 1e-6 * size * n


@pytest.mark.parametrize(("n", "n_values"), [(3, 2), (5, 3), (8, 40), (16, 5), (33, 100)])
def test_the_pulls_of_all_rows_cancel(n: int, n_values: int) -> None:
    """Σ w_i·(x_i - y) / ‖x_i - y‖ = 0, which is what converged means."""
    for seed in range(5):
        updates = rows(n, n_values, seed)
        weights = np.random.default_rng(seed).uniform(0.5, 2.0, n)
        mixing = geometry.geometric_median(twins.gram(updates), weights)
        away = updates - twins.applied(mixing, updates)[0]
        distances = np.linalg.norm(away, axis=1)
        if twins.chosen(mixing) != list(range(n)):
            here = twins.chosen(mixing)[0]
            others = np.arange(n) != here
            pull = (weights[others] / distances[others]) @ away[others]
            assert np.linalg.norm(pull) <= weights[here] * (1 + 1e-6)
            continue
        pull = (weights / distances) @ away
        assert np.linalg.norm(pull) <= 1e-6 * weights.sum()


def test_a_row_that_is_the_median_is_copied() -> None:
    cross = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    mixing = geometry.geometric_median(twins.gram(cross), np.ones(5))
    assert twins.chosen(mixing) == [2]
    assert mixing.divisors_M[0] == 1
    heavy = geometry.geometric_median(twins.gram(cross[:2]), [1.0, 1.5])
    assert twins.chosen(heavy) == [1]


def test_of_two_that_are_equally_good_the_first_is_taken() -> None:
    """Rows on a line, an even number of them: all between the two middle ones is a median."""
    line = np.array([[0.0], [1.0], [2.0], [5.0]])
    assert twins.chosen(geometry.geometric_median(twins.gram(line), np.ones(4))) == [1]
    assert twins.chosen(geometry.geometric_median(twins.gram(line[::-1]), np.ones(4))) == [1]
    assert twins.chosen(geometry.geometric_median(twins.gram(line[:2]), np.ones(2))) == [0]


def test_rows_on_a_line_have_their_middle_one() -> None:
    """A library that stops after three steps from 0 says 3.79 for the first coordinate."""
    np.testing.assert_array_equal(found(np.arange(1.0, 10.0).reshape(3, 3)), [4.0, 5.0, 6.0])


def test_small_rows_are_no_excuse_for_a_mean() -> None:
    """With an absolute ν of 0.1 all weights are equal once distances are below it."""
    updates = rows(8)
    updates[0] = 50.0
    honest = updates[1:].mean(axis=0)
    for scale in (1.0, 1e-3, 1e-9, 1e6):
        point = found(updates * scale)
        assert np.linalg.norm(point - honest * scale) < scale
        assert np.linalg.norm(updates.mean(axis=0) * scale - honest * scale) > 10 * scale


def test_it_starts_and_ends_among_the_majority() -> None:
    """‖y - mean of the honest‖ is bounded by the honest rows' spread whatever f others send (Minsker 2015)."""
    for far in (10.0, 1e6, 1e15, 1e30):
        for f in (1, 2, 3):
            updates = rows(9)
            updates[:f] = far
            honest = updates[f:]
            radius = np.linalg.norm(honest - honest.mean(axis=0), axis=1).max()
            bound = 2 * (9 - f) / (9 - 2 * f) * radius
            assert np.linalg.norm(found(updates) - honest.mean(axis=0)) <= bound


def test_the_coefficients_of_a_far_row_are_those_of_its_direction() -> None:
    """A row at 1e15 and one at 1e30 pull alike, and neither loses to cancellation what the others have to say."""
    updates = rows(9)
    points = []
    for far in (1e8, 1e15, 1e30):
        updates[0] = far
        points.append(found(updates))
    np.testing.assert_allclose(points[0], points[1], atol=1e-5)
    np.testing.assert_allclose(points[2], points[1], atol=1e-5)


def test_more_weight_pulls_harder_and_never_out_of_the_hull() -> None:
    updates = rows(6)
    lengths = []
    for weight in (0.1, 1.0, 2.0, 3.0, 4.9):
        weights = np.array([weight, *[1.0] * 5])
        mixing = geometry.geometric_median(twins.gram(updates), weights)
        assert (mixing.numerators_MK >= 0).all()
        lengths.append(float(np.linalg.norm(twins.applied(mixing, updates)[0] - updates[0])))
    assert lengths == sorted(lengths, reverse=True)
    assert twins.chosen(geometry.geometric_median(twins.gram(updates), [5.1, 1, 1, 1, 1, 1])) == [0]


def test_slow_cases_converge_too() -> None:
    """A median close to a row, and rows nearly on a line, where Weiszfeld's steps alone shrink for thousands."""
    near = np.array([[1.0, 0.0], [-0.5, 0.75**0.5 + 1e-3], [-0.5, -(0.75**0.5)], [0.0, 0.0]])
    weights = np.array([1.0, 1.0, 1.0, 1e-4])
    flat = np.array([[0.0, 0.0], [1.0, 1e-3], [2.0, -1e-3], [3.0, 0.0]])
    for updates, w in ((near, weights), (flat, np.ones(4))):
        mixing = geometry.geometric_median(twins.gram(updates), w)
        point = twins.applied(mixing, updates)[0]
        here = twins.spread(updates.tolist(), point.tolist(), w.tolist())
        for seed in range(200):
            away = point + np.random.default_rng(seed).standard_normal(2) * 10.0 ** -(seed % 8)
            assert here <= twins.spread(updates.tolist(), away.tolist(), w.tolist()) * (1 + 1e-9)


def test_what_makes_no_sense_is_refused() -> None:
    gram = twins.gram(rows(3))
    calls: list[Callable[[], geometry.Mixing]] = [
        lambda: geometry.geometric_median(gram, np.ones(4)),
        lambda: geometry.geometric_median(gram, [1, 0, 1]),
        lambda: geometry.geometric_median(gram, np.ones(3), nu=0.0),
        lambda: geometry.geometric_median(gram, np.ones(3), nu=np.nan),
        lambda: geometry.geometric_median(gram, np.ones(3), tolerance=2.0),
    ]
    for call in calls:
        with pytest.raises(RuleError):
            call()
