"""The covariance-bound filter: rows lose weight until no direction stands out."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from aggregation.kernels import F64, I64, kernel
from aggregation.rules.geometry.distances import Doubles, checked_gram, squared_distances
from aggregation.rules.geometry.eigen import largest_eigenpair
from aggregation.rules.geometry.matrix import Mixing, weighted_mean
from aggregation.rules.geometry.signatures import F64_IN, F64_OUT, F64_ROWS_IN, F64_ROWS_OUT


def caf(gram_NN: ArrayLike, f: int) -> Mixing:
    """CAF (Allouah et al. 2025, arXiv 2505.01874): the weighted mean whose rows spread least in their widest direction.

    (N, N) -> 1 row; needs N >= 2f + 1; at most N eigenpairs of O(N³) each. All rows start with weight c_i = 1. While
    the weights' sum is above N - 2f: μ = Σ c_i·x_i / Σ c_i, the largest eigenpair (λ, v) of the covariance under c,
    and c_i ← c_i·(1 - τ_i / τ_max) with τ_i = ⟨x_i - μ, v⟩². The outcome is the μ of the smallest λ, the earliest
    of equal ones. τ_max is the largest of the rows that still weigh, so each turn takes the last weight of one row
    at least and the loop ends; where nothing spreads any more it ends at once. For f = 0 it is the mean.
    """
    gram = checked_gram(gram_NN, f=f, needed=2 * f + 1)
    n = len(gram)
    weights = np.ones(n)
    best = weights.copy()
    least = math.inf
    for _ in range(n if f > 0 else 0):
        spread, projections = _widest(gram, weights)
        if spread < least:
            least, best = spread, weights.copy()
        if spread == 0 or _lighten(weights, projections) <= n - 2 * f:
            break
    return weighted_mean(best, squared_distances(gram))


def _widest(gram_NN: Doubles, weights_N: Doubles) -> tuple[float, Doubles]:
    """(λ, |⟨x_i - μ, v⟩| up to a common factor) of the weighted covariance; 0 for rows that weigh nothing."""
    projections = np.zeros(len(weights_N))
    there = np.flatnonzero(weights_N)
    inner = np.empty((len(there), len(there)))
    scaled = np.empty_like(inner)
    trace = float(_covariance(np.ascontiguousarray(gram_NN[np.ix_(there, there)]), weights_N[there], inner, scaled))
    if not trace > 0:
        return 0.0, projections
    value, vector = largest_eigenpair(scaled)
    found = np.empty(len(there))
    _project(inner, weights_N[there], vector, found)
    projections[there] = found
    return value * trace, projections


@kernel(F64, F64_ROWS_IN, F64_IN, F64_ROWS_OUT, F64_ROWS_OUT)
def _covariance(gram, weights_N, inner_NN, scaled_NN):  # type: ignore[no-untyped-def]
    """⟨x_i - μ, x_j - μ⟩, and times √(c_i·c_j) / Σ c over the trace of that, which is returned."""
    n = weights_N.shape[0]
    total = 0.0
    for j in range(n):
        total = total + weights_N[j]
    products_N = np.zeros(n)
    for j in range(n):
        share = weights_N[j] / total
        for i in range(n):
            products_N[i] = products_N[i] + share * gram[j, i]
    square = 0.0
    for j in range(n):
        square = square + weights_N[j] / total * products_N[j]
    trace = 0.0
    for i in range(n):
        inner_NN[i, i] = max((gram[i, i] + square) - 2.0 * products_N[i], 0.0)
        trace = trace + weights_N[i] / total * inner_NN[i, i]
        for j in range(i + 1, n):
            inner_NN[i, j] = (gram[i, j] + square) - (products_N[i] + products_N[j])
            inner_NN[j, i] = inner_NN[i, j]
    if trace > 0.0:
        for i in range(n):
            for j in range(n):
                root = math.sqrt(weights_N[i]) * math.sqrt(weights_N[j])
                scaled_NN[i, j] = inner_NN[i, j] / trace * (root / total)
    return trace


@kernel(I64, F64_ROWS_IN, F64_IN, F64_IN, F64_OUT)
def _project(inner_NN, weights_N, vector_N, out_N):  # type: ignore[no-untyped-def]
    """|⟨x_i - μ, v⟩| up to a common factor: v is Σ √c_j·w_j·(x_j - μ) for the eigenvector w of the N by N matrix."""
    n = weights_N.shape[0]
    for i in range(n):
        total = 0.0
        for j in range(n):
            total = total + inner_NN[i, j] * (math.sqrt(weights_N[j]) * vector_N[j])
        out_N[i] = abs(total)
    return 0


@kernel(F64, F64_OUT, F64_IN)
def _lighten(weights_N, projections_N):  # type: ignore[no-untyped-def]
    """c_i ← c_i·(1 - τ_i / τ_max); the new sum of the weights, 0 where no projection is positive."""
    largest = 0.0
    for i in range(weights_N.shape[0]):
        if weights_N[i] > 0.0:
            largest = max(largest, projections_N[i])
    if not largest > 0.0:
        return 0.0
    total = 0.0
    for i in range(weights_N.shape[0]):
        ratio = projections_N[i] / largest
        weights_N[i] = weights_N[i] * (1.0 - ratio * ratio)
        total = total + weights_N[i]
    return total
