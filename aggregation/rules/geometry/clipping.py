"""Clipping: static, adaptive and around a centre."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from aggregation.errors import RuleError
from aggregation.kernels import F64, I64, kernel
from aggregation.rules.geometry.distances import (
    Doubles,
    checked_gram,
    checked_weights,
    lower_median,
    norms,
    squared_distances,
)
from aggregation.rules.geometry.matrix import Mixing, scaled, weighted_mean
from aggregation.rules.geometry.signatures import F64_IN, F64_OUT, F64_ROWS_IN

_ITERATIONS_MAX = 10_000


def norm_clip(gram_NN: ArrayLike, weights_N: ArrayLike, radius: float | None = None, *, n_fixed: int = 0) -> Mixing:
    """Static clipping: y_i = x_i·min(1, radius / ‖x_i‖).

    (N, N) -> N rows; needs N >= 1; O(N log N). Without a radius it is the lower median of the norms: the smallest
    norm up to which the rows have at least half of the weight. So of two equals the larger is clipped to the smaller,
    and a fast peer is not cut down to a slow one's norm. The last `n_fixed` rows (a centre) stay and are in no median.
    """
    gram = checked_gram(gram_NN, n_fixed=n_fixed)
    n = len(gram) - n_fixed
    weights = checked_weights(weights_N, n)
    norms_N = norms(gram)[:n]
    if radius is None:
        radius = lower_median(norms_N, weights)
    elif not 0 <= radius < np.inf:
        raise RuleError(f"a radius of {radius}")
    return scaled(_scales(norms_N, radius), n_fixed)


def arc(gram_NN: ArrayLike, f: int, *, n_fixed: int = 0) -> Mixing:
    """ARC (Allouah et al. 2025, arXiv 2405.14432): the k = ⌊2f(N-f)/N⌋ longest rows are clipped to the next one's norm.

    (N, N) -> N rows; needs N >= 2f + 1; O(N log N). For f = 0 nothing is clipped. The last `n_fixed` rows (a centre)
    stay and are not ranked.
    """
    gram = checked_gram(gram_NN, f=f, needed=2 * f + 1, n_fixed=n_fixed)
    n = len(gram) - n_fixed
    norms_N = norms(gram)[:n]
    k = 2 * f * (n - f) // n
    return scaled(_scales(norms_N, sorted(norms_N.tolist())[n - 1 - k]), n_fixed)


def centered_clip(
    gram_with_centre: ArrayLike, weights_N: ArrayLike, tau: float | None = None, iterations: int = 3
) -> Mixing:
    """Centred clipping (Karimireddy et al. 2021): v ← v + Σ w_i·(x_i - v)·min(1, τ / ‖x_i - v‖) / Σ w_i, repeated.

    (N + 1, N + 1) -> 1 row; the last row is the centre v_0; needs N >= 1 (N >= 2f + 1 to withstand f); O(L·N²). τ is
    the smallest distance from v_0 up to which the rows have at least half of the weight, unless it is given; it is
    taken once. v stays a combination Σ a_j·x_j of the rows and the centre with a_j >= 0 of sum 1, so that
    ‖x_i - v‖² = G_ii - 2·(G·a)_i + aᵀ·G·a.
    """
    gram = checked_gram(gram_with_centre, n_fixed=1)
    n = len(gram) - 1
    weights = checked_weights(weights_N, n)
    if not 0 <= iterations <= _ITERATIONS_MAX:
        raise RuleError(f"{iterations} iterations, at most {_ITERATIONS_MAX}")
    distances = squared_distances(gram)
    if tau is None:
        tau = lower_median(np.sqrt(distances[n, :n]), weights)
    elif not 0 <= tau < np.inf:
        raise RuleError(f"a clipping radius of {tau}")
    coefficients = np.zeros(n + 1)
    coefficients[n] = 1
    _centered_clip(gram, weights, tau, iterations, coefficients)
    return weighted_mean(coefficients, distances)


def _scales(norms_N: Doubles, radius: float) -> Doubles:
    out = np.ones(len(norms_N))
    for i, norm in enumerate(norms_N):
        if norm > radius:
            out[i] = radius / norm
    return out


@kernel(I64, F64_ROWS_IN, F64_IN, F64, I64, F64_OUT)
def _centered_clip(gram, weights_N, tau, iterations, coefficients_K):  # type: ignore[no-untyped-def]
    n = weights_N.shape[0]
    products_K = np.empty(n + 1)
    clips_N = np.empty(n)
    weight = 0.0
    for i in range(n):
        weight = weight + weights_N[i]
    for _ in range(iterations):
        for i in range(n + 1):
            products_K[i] = 0.0
        for j in range(n + 1):
            coefficient = coefficients_K[j]
            if coefficient != 0.0:
                for i in range(n + 1):
                    products_K[i] = products_K[i] + coefficient * gram[j, i]
        square = 0.0
        for j in range(n + 1):
            square = square + coefficients_K[j] * products_K[j]
        moved = 0.0
        for i in range(n):
            # The very sum of squared_distances where v is a row, as at first: what is 0 there is 0 here.
            squared = (gram[i, i] + square) - 2.0 * products_K[i]
            distance = math.sqrt(max(squared, 0.0))
            clip = tau / distance if distance > tau else 1.0
            clips_N[i] = weights_N[i] * clip
            moved = moved + clips_N[i]
        # moved <= weight, since each term of its sum is at most the other's; so no coefficient is ever negative.
        kept = 1.0 - moved / weight
        for j in range(n + 1):
            coefficients_K[j] = coefficients_K[j] * kept
        for i in range(n):
            coefficients_K[i] = coefficients_K[i] + clips_N[i] / weight
    return 0
