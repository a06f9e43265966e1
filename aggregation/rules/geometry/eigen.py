"""The largest eigenvalue of a symmetric matrix and its eigenvector, without LAPACK and without a starting vector."""

from __future__ import annotations

import math

import numpy as np

from aggregation.kernels import F64, I64, kernel
from aggregation.rules.geometry.distances import Doubles
from aggregation.rules.geometry.signatures import F64_IN, F64_OUT, F64_ROWS_OUT


def largest_eigenpair(matrix_NN: Doubles) -> tuple[float, Doubles]:
    """(λ, v), ‖v‖ = 1, of a symmetric positive semidefinite matrix whose entries are near 1 at most; O(N³).

    Householder reflections make it tridiagonal, bisection on the sign of the pivots finds the smallest number that no
    eigenvalue exceeds, to the last bit, and the factorisations from both ends that meet where they fit worst give the
    vector (Parlett and Dhillon 1997): each step ends by itself, for any matrix. Within an eigenspace of more than one
    dimension the vector is pinned by the arithmetic alone.
    """
    vector = np.empty(len(matrix_NN))
    value = _largest_eigenpair(matrix_NN.copy(), vector)
    return float(value), vector


@kernel(I64, F64_ROWS_OUT, F64_OUT, F64_OUT)
def _tridiagonal(matrix, diagonal_N, beside_N):  # type: ignore[no-untyped-def]
    """Reduce by reflections I - 2·h·hᵀ/(hᵀ·h), each h left in its row of the matrix, right of the diagonal."""
    n = matrix.shape[0]
    products_N = np.empty(n)
    for k in range(n - 2):
        first = matrix[k, k + 1]
        rest = 0.0
        for j in range(k + 2, n):
            rest = rest + matrix[k, j] * matrix[k, j]
        diagonal_N[k] = matrix[k, k]
        if rest == 0.0:
            beside_N[k] = first
            matrix[k, k + 1] = 0.0
            continue
        length = math.sqrt(first * first + rest)
        beside_N[k] = -length if first > 0.0 else length
        matrix[k, k + 1] = first - beside_N[k]
        squared = matrix[k, k + 1] * matrix[k, k + 1] + rest
        for j in range(k + 1, n):
            products_N[j] = 0.0
        for i in range(k + 1, n):
            factor = matrix[k, i]
            for j in range(k + 1, n):
                products_N[j] = products_N[j] + factor * matrix[i, j]
        inner = 0.0
        for j in range(k + 1, n):
            products_N[j] = products_N[j] * 2.0 / squared
            inner = inner + products_N[j] * matrix[k, j]
        for j in range(k + 1, n):
            products_N[j] = products_N[j] - inner / squared * matrix[k, j]
        for i in range(k + 1, n):
            a = matrix[k, i]
            b = products_N[i]
            for j in range(k + 1, n):
                matrix[i, j] = matrix[i, j] - (a * products_N[j] + b * matrix[k, j])
    if n > 1:
        diagonal_N[n - 2] = matrix[n - 2, n - 2]
        beside_N[n - 2] = matrix[n - 2, n - 1]
    diagonal_N[n - 1] = matrix[n - 1, n - 1]
    return 0


@kernel(I64, F64_IN, F64_IN, F64)
def _exceeds(diagonal_N, beside_N, value):  # type: ignore[no-untyped-def]
    """Whether an eigenvalue is larger than `value`: a pivot of T - value·I is positive (1 or 0)."""
    pivot = diagonal_N[0] - value
    for i in range(1, diagonal_N.shape[0]):
        if pivot > 0.0:
            return 1
        pivot = (diagonal_N[i] - value) - beside_N[i - 1] * (beside_N[i - 1] / min(pivot, -1e-300))
    return 1 if pivot > 0.0 else 0


@kernel(I64, F64_IN, F64_IN, F64, F64_OUT)
def _vector(diagonal_N, beside_N, value, vector_N):  # type: ignore[no-untyped-def]
    """T·v = value·v for a value just not below all eigenvalues, so that all pivots are negative; v's largest is 1."""
    n = diagonal_N.shape[0]
    tiny = -1e-18
    down_N = np.empty(n)  # pivots from the first row on
    up_N = np.empty(n)  # and from the last
    for i in range(n):
        down_N[i] = diagonal_N[i] - value
        if i > 0:
            down_N[i] = down_N[i] - beside_N[i - 1] * (beside_N[i - 1] / down_N[i - 1])
        down_N[i] = min(down_N[i], tiny)
    for i in range(n - 1, -1, -1):
        up_N[i] = diagonal_N[i] - value
        if i < n - 1:
            up_N[i] = up_N[i] - beside_N[i] * (beside_N[i] / up_N[i + 1])
        up_N[i] = min(up_N[i], tiny)
    # 1 / fit is the diagonal of the inverse of T - value·I: largest where the eigenvector is.
    meeting = 0
    best = 0.0
    for i in range(n):
        fit = abs((down_N[i] - (diagonal_N[i] - value)) + up_N[i])
        if i == 0 or fit < best:
            meeting = i
            best = fit
    vector_N[meeting] = 1.0
    for i in range(meeting - 1, -1, -1):
        vector_N[i] = -(beside_N[i] / down_N[i]) * vector_N[i + 1]
    for i in range(meeting + 1, n):
        vector_N[i] = -(beside_N[i - 1] / up_N[i]) * vector_N[i - 1]
    return 0


@kernel(F64, F64_ROWS_OUT, F64_OUT)
def _largest_eigenpair(matrix, vector_N):  # type: ignore[no-untyped-def]
    n = matrix.shape[0]
    diagonal_N = np.empty(n)
    beside_N = np.zeros(n)
    _tridiagonal(matrix, diagonal_N, beside_N)
    low = diagonal_N[0]
    high = diagonal_N[0]
    for i in range(n):
        reach = abs(beside_N[i])
        if i > 0:
            reach = reach + abs(beside_N[i - 1])
        low = max(low, diagonal_N[i])
        high = max(high, diagonal_N[i] + reach)
    high = high + abs(high) * 1e-15
    while True:
        middle = low + (high - low) * 0.5
        if not (low < middle and middle < high):
            break
        if _exceeds(diagonal_N, beside_N, middle) != 0:
            low = middle
        else:
            high = middle
    _vector(diagonal_N, beside_N, high, vector_N)
    for k in range(n - 3, -1, -1):
        squared = 0.0
        inner = 0.0
        for j in range(k + 1, n):
            squared = squared + matrix[k, j] * matrix[k, j]
            inner = inner + matrix[k, j] * vector_N[j]
        if matrix[k, k + 1] != 0.0:
            for j in range(k + 1, n):
                vector_N[j] = vector_N[j] - 2.0 * inner / squared * matrix[k, j]
    square = 0.0
    for j in range(n):
        square = square + vector_N[j] * vector_N[j]
    length = math.sqrt(square)
    for j in range(n):
        vector_N[j] = vector_N[j] / length
    return high
