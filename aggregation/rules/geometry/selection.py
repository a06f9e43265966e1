"""Krum and what is built on its scores: Multi-Krum and Bulyan's selection."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from aggregation.errors import RuleError
from aggregation.kernels import I64, kernel
from aggregation.rules.geometry.distances import (
    Doubles,
    checked_gram,
    neighbours,
    squared_distances,
)
from aggregation.rules.geometry.matrix import Mixing, copies, mean_of
from aggregation.rules.geometry.signatures import F64_OUT, F64_ROWS_IN, I64_OUT, I64_ROWS_IN


def krum(gram_NN: ArrayLike, f: int) -> Mixing:
    """Krum (Blanchard et al. 2017): the row with the smallest sum of squared distances to its N - f - 2 nearest others.

    (N, N) -> 1 row, a copy; needs N >= 2f + 3; O(N² log N). Distances are squared, a row is not its own neighbour, a
    score is summed from the nearest on, and of equal scores the lowest index wins.
    """
    gram = checked_gram(gram_NN, f=f, needed=2 * f + 3)
    scores = krum_scores(squared_distances(gram), f)
    return copies([int(np.argsort(scores, kind="stable")[0])], len(gram))


def multi_krum(gram_NN: ArrayLike, f: int, m: int | None = None) -> Mixing:
    """Multi-Krum (Blanchard et al. 2017): the plain mean of the m rows with the lowest Krum scores, N - f by default.

    (N, N) -> 1 row; needs N >= 2f + 3 and 1 <= m <= N; O(N² log N). The paper proves its bound for m <= N - f - 2; with
    m = N - f no honest row is left out for nothing, and for f = 0 it is the mean.
    """
    gram = checked_gram(gram_NN, f=f, needed=2 * f + 3)
    n = len(gram)
    m = n - f if m is None else m
    if not 1 <= m <= n:
        raise RuleError(f"a mean of the {m} best of {n} rows")
    distances = squared_distances(gram)
    best = np.argsort(krum_scores(distances, f), kind="stable")[:m]
    return mean_of(sorted(best.tolist()), distances)


def bulyan_selection(gram_NN: ArrayLike, f: int) -> Mixing:
    """Bulyan's first stage (El Mhamdi et al. 2018): N - 2f rows, each the Krum of the rows that are left.

    (N, N) -> N - 2f rows, copies in the order of selection; needs N >= 4f + 3; O(N³). After each selection the
    scores are computed anew among the m rows that are left, over the m - f - 2 nearest of them, or one where that is
    less (there two rows nearest to each other tie, and the order of rows decides). Taking the best scores of one pass
    instead gives other sets.
    """
    gram = checked_gram(gram_NN, f=f, needed=4 * f + 3)
    n = len(gram)
    distances = squared_distances(gram)
    chosen = np.empty(n - 2 * f, np.int64)
    _bulyan_selection(distances, neighbours(distances), f, chosen)
    return copies(chosen.tolist(), n)


def krum_scores(distances_NN: Doubles, f: int) -> Doubles:
    """For each row the sum of its N - f - 2 smallest squared distances to others, from the nearest on."""
    scores = np.empty(len(distances_NN))
    _krum_scores(distances_NN, neighbours(distances_NN), len(distances_NN) - f - 2, scores)
    return scores


@kernel(I64, F64_ROWS_IN, I64_ROWS_IN, I64, F64_OUT)
def _krum_scores(distances_NN, neighbours_NN, n_nearest, scores_N):  # type: ignore[no-untyped-def]
    for i in range(distances_NN.shape[0]):
        score = 0.0
        for rank in range(1, n_nearest + 1):  # rank 0 is the row itself
            score = score + distances_NN[i, neighbours_NN[i, rank]]
        scores_N[i] = score
    return 0


@kernel(I64, F64_ROWS_IN, I64_ROWS_IN, I64, I64_OUT)
def _bulyan_selection(distances_NN, neighbours_NN, f, chosen):  # type: ignore[no-untyped-def]
    n = distances_NN.shape[0]
    there_N = np.ones(n, np.bool_)
    for step in range(chosen.shape[0]):
        n_nearest = max(n - step - f - 2, 1)
        best = -1
        best_score = 0.0
        for i in range(n):
            if not there_N[i]:
                continue
            score = 0.0
            n_summed = 0
            rank = 1
            while rank < n and n_summed < n_nearest:
                other = neighbours_NN[i, rank]
                if there_N[other]:
                    score = score + distances_NN[i, other]
                    n_summed += 1
                rank += 1
            if best < 0 or score < best_score:
                best = i
                best_score = score
        chosen[step] = best
        there_N[best] = False
    return 0
