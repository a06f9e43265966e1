"""Krum, Multi-Krum, Bulyan's selection, minimum diameter, nearest neighbours: equal to brute force, ties included."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregation.errors import RuleError
from aggregation.rules import geometry
from aggregation.rules.geometry import diameter
from tests.aggregation import geometry_twins as twins

SMALL = st.integers(-3, 3)


@st.composite
def rows_and_f(draw: st.DrawFn, per_f: int, extra: int, f_max: int = 3) -> tuple[np.ndarray, int]:
    """Rows of small integers, with duplicates: distances are exact and ties abound."""
    f = draw(st.integers(0, f_max))
    n = draw(st.integers(per_f * f + extra, per_f * f + extra + 4))
    row = st.lists(SMALL, min_size=2, max_size=2)
    listed = draw(st.lists(row, min_size=n, max_size=n))
    return np.array(listed, np.float64), f


def rows(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, 8))


@settings(max_examples=150, deadline=None)
@given(rows_and_f(2, 3), st.integers(1, 20))
def test_krum_and_multi_krum_are_their_definitions(drawn: tuple[np.ndarray, int], m: int) -> None:
    updates, f = drawn
    n = len(updates)
    gram = twins.gram(updates)
    assert twins.chosen(geometry.krum(gram, f)) == twins.multi_krum(updates.tolist(), f, 1)
    for best in (min(m, n), n - f):
        mixing = geometry.multi_krum(gram, f, best)
        expected = twins.multi_krum(updates.tolist(), f, best)
        assert_mean_of(mixing, expected, updates)
    default = geometry.multi_krum(gram, f)
    assert default.numerators_MK.tobytes() == mixing.numerators_MK.tobytes()


def assert_mean_of(mixing: geometry.Mixing, expected: list[int], updates: np.ndarray) -> None:
    if all((updates[i] == updates[expected[0]]).all() for i in expected):
        assert twins.chosen(mixing) == expected[:1]
        assert mixing.numerators_MK[0, expected[0]] == mixing.divisors_M[0] == 1
        return
    assert twins.chosen(mixing) == expected
    assert (mixing.numerators_MK[0, expected] == 1).all()
    assert mixing.divisors_M[0] == len(expected)


@settings(max_examples=100, deadline=None)
@given(rows_and_f(4, 3, f_max=2))
def test_bulyan_selects_again_and_again(drawn: tuple[np.ndarray, int]) -> None:
    updates, f = drawn
    mixing = geometry.bulyan_selection(twins.gram(updates), f)
    assert np.argmax(mixing.numerators_MK, axis=1).tolist() == twins.bulyan(updates.tolist(), f)
    assert (mixing.numerators_MK.sum(axis=1) == 1).all()


def test_one_pass_of_scores_is_not_bulyan() -> None:
    """A pull request elsewhere says that it is: the sets differ in most draws."""
    differ = 0
    for seed in range(50):
        updates = rows(11, seed)
        one_pass = twins.multi_krum(updates.tolist(), 2, 7)
        mixing = geometry.bulyan_selection(twins.gram(updates), 2)
        differ += sorted(np.argmax(mixing.numerators_MK, axis=1).tolist()) != one_pass
    assert differ > 25


@settings(max_examples=150, deadline=None)
@given(rows_and_f(2, 1))
def test_the_smallest_diameter_is_the_smallest_of_all_subsets(drawn: tuple[np.ndarray, int]) -> None:
    updates, f = drawn
    mixing = geometry.mda(twins.gram(updates), f)
    assert_mean_of(mixing, twins.mda(updates.tolist(), f), updates)


@pytest.mark.parametrize(("n", "f", "n_values"), [(11, 5, 3), (13, 4, 2), (15, 3, 1), (16, 2, 6), (12, 5, 40)])
def test_the_smallest_diameter_of_rows_that_do_not_tie(n: int, f: int, n_values: int) -> None:
    for seed in range(4):
        updates = np.random.default_rng(seed).standard_normal((n, n_values))
        updates[: f // 2] *= 5
        assert twins.chosen(geometry.mda(twins.gram(updates), f)) == twins.mda(updates.tolist(), f)


@pytest.mark.parametrize("degree", [3, 4, 6])
def test_a_cover_is_found_where_there_is_one(degree: int) -> None:
    """Against brute force over all subsets of the conflicts' rows, on random graphs that need branching."""
    for seed in range(30):
        generator = np.random.default_rng(seed)
        n = 12
        conflicts = np.triu(generator.random((n, n)) < degree / n, 1).astype(np.uint8)
        conflicts |= conflicts.T
        subsets = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
        first, second = np.nonzero(np.triu(conflicts))
        covers = (subsets[:, first] | subsets[:, second]).all(axis=1)
        smallest = int(subsets.sum(axis=1)[covers].min())
        for budget in range(n):
            assert diameter._is_coverable(conflicts, budget) == (budget >= smallest)


def test_a_search_has_a_limit_that_can_be_asked_for() -> None:
    assert geometry.mda_fits(256, 24)
    assert geometry.mda_fits(1, 0)
    for n, f in ((256, 25), (257, 1), (4, 2), (5, -1)):
        assert not geometry.mda_fits(n, f)
    updates = rows(60)
    geometry.mda(twins.gram(updates), 24)
    with pytest.raises(RuleError, match="at most 24"):
        geometry.mda(twins.gram(updates), 25)


@settings(max_examples=150, deadline=None)
@given(rows_and_f(2, 1))
def test_neighbours_are_the_nearest_and_itself(drawn: tuple[np.ndarray, int]) -> None:
    updates, f = drawn
    mixing = geometry.nnm(twins.gram(updates), f)
    for i, nearest in enumerate(twins.nnm(updates.tolist(), f)):
        if all((updates[j] == updates[i]).all() for j in nearest):
            assert twins.chosen(mixing, i) == [i]
            assert mixing.divisors_M[i] == 1
        else:
            assert twins.chosen(mixing, i) == nearest
            assert (mixing.numerators_MK[i, nearest] == 1).all()
            assert mixing.divisors_M[i] == len(updates) - f


def test_krum_counts_neighbours_without_itself_and_squares_once() -> None:
    """Each miscounting that is in use elsewhere picks another row here: n - f - 1 or n - f neighbours, Σd and Σd⁴."""
    winners: dict[str, int] = {}
    for seed in range(200):
        updates = rows(9, seed)
        listed = updates.tolist()
        ours = twins.chosen(geometry.krum(twins.gram(updates), 2))[0]
        for wrong, scores in {
            "n - f - 1": twins.krum_scores(listed, 2, 6),
            "n - f": twins.krum_scores(listed, 2, 7),
            "distances": [sum(sorted(twins.squared(a, b) ** 0.5 for b in listed)[1:6]) for a in listed],
            "fourth powers": [sum(sorted(twins.squared(a, b) ** 2 for b in listed)[1:6]) for a in listed],
        }.items():
            winners[wrong] = winners.get(wrong, 0) + (scores.index(min(scores)) != ours)
    assert min(winners.values()) >= 5, winners


@pytest.mark.parametrize("f", [1, 2, 3])
def test_far_rows_up_to_f_are_never_selected(f: int) -> None:
    for seed in range(10):
        updates = rows(4 * f + 3, seed)
        updates[:f] += 100.0
        gram = twins.gram(updates)
        for mixing in (geometry.krum(gram, f), geometry.multi_krum(gram, f), geometry.mda(gram, f)):
            assert min(twins.chosen(mixing)) >= f
        assert not geometry.nnm(gram, f).numerators_MK[f:, :f].any()
        # The last row is chosen by one neighbour, and far rows may have each other; the second stage is for that.
        assert not geometry.bulyan_selection(gram, f).numerators_MK[:-1, :f].any()


def test_a_mean_of_no_row_is_refused() -> None:
    gram = twins.gram(rows(9))
    for m in (0, -1, 10):
        with pytest.raises(RuleError, match="best of 9"):
            geometry.multi_krum(gram, 2, m)
