"""The geometric median: the point with the smallest sum of distances to the rows."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from aggregation.errors import RuleError
from aggregation.kernels import F64, I64, kernel
from aggregation.rules.geometry.distances import checked_gram, checked_weights, lower_median, squared_distances
from aggregation.rules.geometry.matrix import Mixing, copies, weighted_mean
from aggregation.rules.geometry.signatures import F64_IN, F64_OUT, F64_ROWS_IN

NU = 1e-6
TOLERANCE = 1e-10
ITERATIONS_MAX = 1000
_NEWTON_EVERY = 8
_NEWTON_ARGUMENTS = (F64_ROWS_IN, F64_IN, F64_IN, F64, F64_OUT, F64_OUT, F64_OUT)


def geometric_median(gram_NN: ArrayLike, weights_N: ArrayLike, nu: float = NU, tolerance: float = TOLERANCE) -> Mixing:
    """argmin_y Σ w_i·‖y - x_i‖ (Weiszfeld 1937; as RFA, Pillutla et al. 2022), converged.

    (N, N) -> 1 row, a mean with weights w_i / max(ν·s, ‖y - x_i‖); needs N >= 1 (N >= 2f + 1 to withstand f);
    O(N²) an iteration, at most ITERATIONS_MAX.

    It starts from the row with the smallest sum of distances (lowest index first), which outliers cannot move. Where
    no point is better, that row is the outcome, copied; so is the lower index of two that are equally good. If not,
    the median is no row, and from there Weiszfeld's steps fall; every eighth is followed by a Newton step if that
    falls further. It ends with a step shorter than `tolerance`·s. s is the lower weighted median of the distances
    from the starting row, so ν and the tolerance are relative: an absolute ν makes a plain mean of small rows.
    """
    gram = checked_gram(gram_NN)
    n = len(gram)
    weights = checked_weights(weights_N, n)
    for name, value in (("nu", nu), ("a tolerance", tolerance)):
        if not 1e-12 <= value <= 1.0:
            raise RuleError(f"{name} of {value}, not within 1e-12 and 1")
    squared = squared_distances(gram)
    distances = np.sqrt(squared)
    start = int(_medoid(distances, weights))
    scale = lower_median(distances[start], weights)
    # ⟨x_i - x_start, x_j - x_start⟩, in differences that vanish exactly for copies of that row.
    shifted = np.ascontiguousarray((gram - gram[start][None, :]) - (gram[:, start] - gram[start, start])[:, None])
    coefficients = np.zeros(n)
    if scale == 0 or _step_off(shifted, distances[start], weights, start, coefficients) == 0:
        return copies([start], n)
    _descend(shifted, weights, nu * scale, tolerance * scale, coefficients)
    return weighted_mean(coefficients, squared)


@kernel(I64, F64_ROWS_IN, F64_IN)
def _medoid(distances_NN, weights_N):  # type: ignore[no-untyped-def]
    best = 0
    best_total = 0.0
    for i in range(weights_N.shape[0]):
        total = 0.0
        for j in range(weights_N.shape[0]):
            total = total + weights_N[j] * distances_NN[i, j]
        if i == 0 or total < best_total:
            best = i
            best_total = total
    return best


@kernel(I64, F64_ROWS_IN, F64_IN, F64_IN, I64, F64_OUT)
def _step_off(gram, distances_N, weights_N, start, coefficients_N):  # type: ignore[no-untyped-def]
    """Coefficients of a better point than the row `start` (Vardi and Zhang 2000); 0 where there is none."""
    n = weights_N.shape[0]
    here = 0.0
    total = 0.0
    for j in range(n):
        if distances_N[j] == 0.0:
            here = here + weights_N[j]
            coefficients_N[j] = 0.0
        else:
            coefficients_N[j] = weights_N[j] / distances_N[j]
            total = total + coefficients_N[j]
    pull_squared = 0.0
    for i in range(n):
        row = 0.0
        for j in range(n):
            row = row + gram[i, j] * coefficients_N[j]
        pull_squared = pull_squared + coefficients_N[i] * row
    pull = math.sqrt(max(pull_squared, 0.0))
    if pull <= here * (1.0 + 1e-9):
        return 0
    kept = here / pull
    for j in range(n):
        coefficients_N[j] = coefficients_N[j] / total * (1.0 - kept)
    coefficients_N[start] = coefficients_N[start] + kept
    return 1


@kernel(F64, F64_ROWS_IN, F64_IN, F64_IN, F64, F64_OUT, F64_OUT)
def _measure(gram, coefficients_N, weights_N, floor, products_N, distances_N):  # type: ignore[no-untyped-def]
    """G·a and the distances to y = Σ a_j·x_j, at least `floor`; the objective that Weiszfeld's steps make fall."""
    n = weights_N.shape[0]
    for i in range(n):
        products_N[i] = 0.0
    for j in range(n):
        coefficient = coefficients_N[j]
        if coefficient != 0.0:
            for i in range(n):
                products_N[i] = products_N[i] + coefficient * gram[j, i]
    square = 0.0
    for j in range(n):
        square = square + coefficients_N[j] * products_N[j]
    objective = 0.0
    for i in range(n):
        distance = math.sqrt(max((gram[i, i] + square) - 2.0 * products_N[i], 0.0))
        if distance < floor:
            objective = objective + weights_N[i] * 0.5 * (distance * distance / floor + floor)
            distance = floor
        else:
            objective = objective + weights_N[i] * distance
        distances_N[i] = distance
    return objective


@kernel(I64, *_NEWTON_ARGUMENTS)
def _newton(gram, weights_N, coefficients_N, floor, products_N, distances_N, out_N):  # type: ignore[no-untyped-def]
    """Coefficients after one Newton step from y; 0 where the Hessian is not positive to working precision.

    With b_i = w_i / d_i, S = Σ b_i and u_i = (y - x_i) / d_i the Hessian is S·I - V·Vᵀ, V's columns √b_i·u_i (none for
    rows within the floor), and its inverse (I + V·(S·I - Vᵀ·V)⁻¹·Vᵀ) / S: an N by N system whatever the dimension.
    """
    n = weights_N.shape[0]
    square = 0.0
    total = 0.0
    for i in range(n):
        square = square + coefficients_N[i] * products_N[i]
        total = total + weights_N[i] / distances_N[i]
    factors_N = np.zeros(n)  # √b_i / d_i
    for i in range(n):
        if distances_N[i] > floor:
            factors_N[i] = math.sqrt(weights_N[i] / distances_N[i]) / distances_N[i]
    system = np.empty((n, n))
    side_N = np.empty(n)
    for i in range(n):
        side = 0.0
        for j in range(n):
            inner = (gram[i, j] - products_N[j]) + (square - products_N[i])
            side = side + inner * (weights_N[j] / distances_N[j])
            system[i, j] = -(factors_N[i] * factors_N[j] * inner)
        side_N[i] = factors_N[i] * side
        system[i, i] = system[i, i] + total
    # Cholesky on the upper triangle, row by row; then forward and backward substitution.
    for k in range(n):
        pivot = system[k, k]
        if not pivot > total * 1e-12:
            return 0
        root = math.sqrt(pivot)
        for j in range(k, n):
            system[k, j] = system[k, j] / root
        for i in range(k + 1, n):
            factor = system[k, i]
            for j in range(i, n):
                system[i, j] = system[i, j] - factor * system[k, j]
        side_N[k] = side_N[k] / root
        for j in range(k + 1, n):
            side_N[j] = side_N[j] - system[k, j] * side_N[k]
    for k in range(n - 1, -1, -1):
        value = side_N[k]
        for j in range(k + 1, n):
            value = value - system[k, j] * side_N[j]
        side_N[k] = value / system[k, k]
    shift = 0.0
    for j in range(n):
        shift = shift + factors_N[j] * side_N[j]
    for j in range(n):
        ahead = weights_N[j] / distances_N[j] + factors_N[j] * side_N[j]
        out_N[j] = (ahead - shift * coefficients_N[j]) / total
    return 1


@kernel(I64, F64_ROWS_IN, F64_IN, F64, F64, F64_OUT)
def _descend(gram, weights_N, floor, shortest, coefficients_N):  # type: ignore[no-untyped-def]
    """Steps until one is no longer than `shortest`; the coefficients end as Weiszfeld's, so none is negative."""
    n = weights_N.shape[0]
    products_N = np.empty(n)
    distances_N = np.empty(n)
    trial_N = np.empty(n)
    trial_products_N = np.empty(n)
    trial_distances_N = np.empty(n)
    _measure(gram, coefficients_N, weights_N, floor, products_N, distances_N)
    for iteration in range(ITERATIONS_MAX):
        total = 0.0
        for j in range(n):
            total = total + weights_N[j] / distances_N[j]
        length_squared = 0.0
        for j in range(n):
            trial_N[j] = weights_N[j] / distances_N[j] / total - coefficients_N[j]
            trial_products_N[j] = 0.0
        for j in range(n):
            for i in range(n):
                trial_products_N[i] = trial_products_N[i] + trial_N[j] * gram[j, i]
        for j in range(n):
            length_squared = length_squared + trial_N[j] * trial_products_N[j]
            coefficients_N[j] = weights_N[j] / distances_N[j] / total
        if length_squared <= shortest * shortest:
            return iteration
        objective = _measure(gram, coefficients_N, weights_N, floor, products_N, distances_N)
        if iteration % _NEWTON_EVERY == _NEWTON_EVERY - 1 and (
            _newton(gram, weights_N, coefficients_N, floor, products_N, distances_N, trial_N) != 0
        ):
            reached = _measure(gram, trial_N, weights_N, floor, trial_products_N, trial_distances_N)
            if reached < objective:
                for j in range(n):
                    coefficients_N[j] = trial_N[j]
                    products_N[j] = trial_products_N[j]
                    distances_N[j] = trial_distances_N[j]
    # The last step may have been Newton's; one of Weiszfeld's makes a mean of it.
    total = 0.0
    for j in range(n):
        total = total + weights_N[j] / distances_N[j]
    for j in range(n):
        coefficients_N[j] = weights_N[j] / distances_N[j] / total
    return ITERATIONS_MAX
