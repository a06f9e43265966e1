"""What geometry sees of the rows: squared distances and norms, in fp64, from their Gram matrix.

numpy is used for elementwise arithmetic, comparisons and stable sorts alone: those have one possible outcome. Its
sums have not, so sums are kernels or loops.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aggregation.errors import RuleError

Doubles = NDArray[np.float64]
Order = NDArray[np.int64]

ROWS_MAX = 256
"""Rows that geometry takes, a centre not counted: all its memory and time follow from their number."""
_GRAM_MAX = 1e120
"""Entries stay below it, so that no product of two overflows. An fp32 row of 2^40 values has at most 1.3e89."""


def checked_gram(gram_NN: ArrayLike, *, f: int = 0, needed: int = 1, n_fixed: int = 0) -> Doubles:
    """The Gram matrix as contiguous fp64; raises RuleError where it is none, or has too few rows for the rule and f."""
    gram = np.ascontiguousarray(gram_NN, np.float64)
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1]:
        raise RuleError(f"a Gram matrix is square, not of shape {gram.shape}")
    if f < 0:
        raise RuleError(f"f is {f}, less than none")
    if n_fixed not in (0, 1):
        raise RuleError(f"{n_fixed} fixed rows; there is one centre at most")
    n = len(gram) - n_fixed
    if n < needed:
        raise RuleError(f"{needed} rows are needed for f = {f}, there are {n}")
    if n > ROWS_MAX:
        raise RuleError(f"{n} rows, at most {ROWS_MAX}")
    if not (np.abs(gram) <= _GRAM_MAX).all():  # a NaN is not
        raise RuleError(f"a Gram matrix with entries that are not finite or beyond {_GRAM_MAX:g}")
    return gram


def checked_weights(weights_N: ArrayLike, n: int) -> Doubles:
    """Positive finite fp64 weights of n rows; raises RuleError. Who weighs nothing is no row."""
    weights = np.ascontiguousarray(weights_N, np.float64)
    if weights.shape != (n,):
        raise RuleError(f"weights of shape {weights.shape} for {n} rows")
    if not ((weights > 0) & (weights < 2.0**64)).all():
        raise RuleError("a weight is not positive or not finite")
    return weights


def squared_distances(gram_NN: Doubles) -> Doubles:
    """D_ij = (G_ii + G_jj) - 2·G_ij, at least 0: exactly 0 between rows that are alike to the bit, and symmetric.

    What is below some 2^-52 of the squared norms is lost in their rounding: 0 may also be rows that differ by less.
    """
    squares = np.diagonal(gram_NN)
    out: Doubles = np.maximum((squares[:, None] + squares[None, :]) - 2.0 * gram_NN, 0.0)
    return out


def norms(gram_NN: Doubles) -> Doubles:
    """‖x_i‖ = √G_ii, correctly rounded."""
    out: Doubles = np.sqrt(np.maximum(np.diagonal(gram_NN), 0.0))
    return out


def neighbours(distances_NN: Doubles) -> Order:
    """For each row all rows by distance, nearest first, ties by lowest index; itself before all others."""
    keys = distances_NN.copy()
    np.fill_diagonal(keys, -1.0)
    return np.argsort(keys, axis=1, kind="stable").astype(np.int64)


def lower_median(values: Sequence[float] | Doubles, weights: Sequence[float] | Doubles) -> float:
    """The smallest value at which the weights of the values up to it are at least half of all weights.

    Both sums run in order of the values. For equal weights it is the lower of the two middle ones.
    """
    ordered = sorted(zip(map(float, values), map(float, weights), strict=True))
    total = 0.0
    for _, weight in ordered:
        total += weight
    cumulated = 0.0
    for value, weight in ordered:
        cumulated += weight
        if cumulated >= total * 0.5:
            return value
    raise RuleError("no median of no values")
