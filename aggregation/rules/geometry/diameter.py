"""Minimum-diameter averaging: the mean of the N - f rows that lie closest together."""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import ArrayLike, NDArray

from aggregation.errors import RuleError
from aggregation.kernels import I64, kernel
from aggregation.rules.geometry.distances import ROWS_MAX, Doubles, checked_gram, squared_distances
from aggregation.rules.geometry.matrix import Mixing, mean_of
from aggregation.rules.geometry.signatures import I64_OUT

F_MAX = 24
"""The search may branch about 1.47^f times, over 10^4 at 24: below a second at the worst, milliseconds as a rule."""

_FLAG_ROWS = types.Array(types.uint8, 2, "C", readonly=True)
_FLAGS = types.Array(types.uint8, 1, "C")
_DEGREE_ROWS = types.Array(types.int64, 2, "C")
_FLAG_ROWS_OUT = types.Array(types.uint8, 2, "C")


def mda_fits(n: int, f: int) -> bool:
    """Whether `mda` takes n rows and f: enough rows, and a search that ends soon whatever the rows are."""
    return 0 <= f <= F_MAX and 2 * f + 1 <= n <= ROWS_MAX


def mda(gram_NN: ArrayLike, f: int) -> Mixing:
    """MDA (El Mhamdi et al. 2018; Rousseeuw 1985): the plain mean of the N - f rows whose largest distance is smallest.

    (N, N) -> 1 row; needs N >= 2f + 1, and f <= F_MAX (`mda_fits`). Of several such sets it takes the first in
    lexicographic order of their indices; they are not rare, since two rows make the diameter and the others may often
    be exchanged, so the outcome depends on the order of rows. Exact, without looking through all C(N, f) sets: a
    diameter of t is possible if and only if f rows can cover all pairs further apart than t, so t is found by
    bisection over the distances that there are, each by a vertex cover search: O(1.47^f·N·f·(N + log N)) at the worst.
    """
    gram = checked_gram(gram_NN, f=f, needed=2 * f + 1)
    if f > F_MAX:
        raise RuleError(f"a search with f = {f}, at most {F_MAX}")
    distances = squared_distances(gram)
    thresholds = np.unique(distances)
    low, high = 0, len(thresholds) - 1
    while low < high:
        middle = (low + high) // 2
        if _is_coverable(_conflicts(distances, float(thresholds[middle])), f):
            high = middle
        else:
            low = middle + 1
    kept = np.empty(len(gram) - f, np.int64)
    _first_kept(_conflicts(distances, float(thresholds[low])), f, kept)
    return mean_of(kept.tolist(), distances)


def _conflicts(distances_NN: Doubles, threshold: float) -> NDArray[np.uint8]:
    return (distances_NN > threshold).astype(np.uint8)


def _is_coverable(conflicts_NN: NDArray[np.uint8], budget: int) -> bool:
    there = np.ones(len(conflicts_NN), np.uint8)
    return bool(_coverable(conflicts_NN, there, budget))


@kernel(I64, _FLAG_ROWS, _FLAG_ROWS_OUT, _DEGREE_ROWS, I64, I64)
def _remove(conflicts_NN, there_LN, degrees_LN, level, row):  # type: ignore[no-untyped-def]
    there_LN[level, row] = 0
    degrees_LN[level, row] = 0
    for other in range(conflicts_NN.shape[0]):
        if there_LN[level, other] != 0 and conflicts_NN[row, other] != 0:
            degrees_LN[level, other] -= 1
    return 0


@kernel(I64, _FLAG_ROWS, _FLAGS, I64)
def _coverable(conflicts_NN, there_N, budget):  # type: ignore[no-untyped-def]
    """Whether `budget` of the rows that are there cover all conflicts among them (1 or 0)."""
    n = conflicts_NN.shape[0]
    if budget < 0:
        return 0
    # A level holds a graph that is still to be tried; trying one may put a second alternative on the level above it.
    there_LN = np.zeros((budget + 2, n), np.uint8)
    degrees_LN = np.zeros((budget + 2, n), np.int64)
    budgets_L = np.zeros(budget + 2, np.int64)
    budgets_L[0] = budget
    for i in range(n):
        there_LN[0, i] = there_N[i]
        if there_N[i] != 0:
            for j in range(n):
                if there_N[j] != 0 and conflicts_NN[i, j] != 0:
                    degrees_LN[0, i] += 1
    level = 0
    while level >= 0:
        left = budgets_L[level]
        most = -1
        leaf = -1
        ends = 0
        for i in range(n):
            degree = degrees_LN[level, i]
            ends += degree
            if degree > 0 and (most < 0 or degree > degrees_LN[level, most]):
                most = i
            if degree == 1 and leaf < 0:
                leaf = i
        if most < 0:
            return 1
        largest = degrees_LN[level, most]
        if ends > 2 * left * largest:  # `left` rows cover at most so many conflicts; so none is left where left is 0
            level -= 1
            continue
        if largest > left or largest <= 2:
            # More conflicts than rows that may go: it must go itself. In a cycle any row is in some smallest cover,
            # and of a row with one conflict the other end is.
            gone = most
            if largest <= left and leaf >= 0:
                for other in range(n):
                    if there_LN[level, other] != 0 and conflicts_NN[leaf, other] != 0:
                        gone = other
            _remove(conflicts_NN, there_LN, degrees_LN, level, gone)
            budgets_L[level] = left - 1
            continue
        # Either it goes, or all that it is in conflict with. The first is tried first, so it lies above.
        for i in range(n):
            there_LN[level + 1, i] = there_LN[level, i]
            degrees_LN[level + 1, i] = degrees_LN[level, i]
        _remove(conflicts_NN, there_LN, degrees_LN, level + 1, most)
        budgets_L[level + 1] = left - 1
        for other in range(n):
            if there_LN[level, other] != 0 and conflicts_NN[most, other] != 0:
                _remove(conflicts_NN, there_LN, degrees_LN, level, other)
        budgets_L[level] = left - largest
        level += 1
    return 0


@kernel(I64, _FLAG_ROWS, I64, I64_OUT)
def _first_kept(conflicts_NN, budget, kept):  # type: ignore[no-untyped-def]
    """The lexicographically first rows without a conflict, as many as `kept` has places; there are such rows."""
    n = conflicts_NN.shape[0]
    there_N = np.ones(n, np.uint8)  # neither kept nor out
    out_N = np.zeros(n, np.uint8)
    n_kept = 0
    for i in range(n):
        if out_N[i] != 0 or n_kept == kept.shape[0]:
            continue
        trial_N = there_N.copy()
        trial_N[i] = 0
        n_out = 0
        for other in range(n):
            if there_N[other] != 0 and conflicts_NN[i, other] != 0:
                trial_N[other] = 0
                n_out += 1
        if n_out == 0 or (n_out <= budget and _coverable(conflicts_NN, trial_N, budget - n_out) != 0):
            kept[n_kept] = i
            n_kept += 1
            budget -= n_out
            for other in range(n):
                if there_N[other] != 0 and trial_N[other] == 0 and other != i:
                    out_N[other] = 1
            there_N = trial_N
        else:
            out_N[i] = 1
            there_N[i] = 0
            budget -= 1
    return n_kept
