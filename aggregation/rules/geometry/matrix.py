"""What geometry hands to a reduction: mixed rows as coefficients of the rows there are, in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aggregation.errors import RuleError
from aggregation.kernels import I64, kernel
from aggregation.rules.geometry.signatures import F64_IN, F64_ROWS_IN, F64_ROWS_OUT

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Mixing:
    """M mixed rows of K rows: y_m = (Σ_j numerators[m, j]·x_j) / divisors[m].

    Products and sums are rounded to fp32 one by one, in order of j over the numerators that are not zero; where the
    divisor is 1 nothing is divided. A row with the one numerator 1 and the divisor 1 (one-hot) is an exact copy, a
    row of zeros is a row of zeros.

    Coefficients are computed in fp64 and rounded to fp32 once, half to even. A mean over rows keeps its weights as
    numerators and their fp32 sum, added in order of j, as its divisor, so that what rounding takes from the
    coefficients it takes from both sides, and a shift of all rows shifts the outcome.
    """

    numerators_MK: Floats
    divisors_M: Floats

    def __post_init__(self) -> None:
        shape = self.numerators_MK.shape
        if len(shape) != 2 or self.divisors_M.shape != shape[:1]:
            raise RuleError(f"a mixing of shape {shape} with divisors of shape {self.divisors_M.shape}")
        self.numerators_MK.setflags(write=False)
        self.divisors_M.setflags(write=False)

    @property
    def n_mixed(self) -> int:
        """M, how many rows come out."""
        return len(self.numerators_MK)

    @property
    def n_rows(self) -> int:
        """K, how many rows go in."""
        return int(self.numerators_MK.shape[1])


def copies(chosen_M: Sequence[int], n: int) -> Mixing:
    """Exact copies of the chosen ones of n rows, in that order."""
    numerators = np.zeros((len(chosen_M), n), np.float32)
    for m, j in enumerate(chosen_M):
        numerators[m, j] = 1
    return Mixing(numerators, np.ones(len(chosen_M), np.float32))


def mean_of(chosen: Sequence[int], distances_NN: Doubles) -> Mixing:
    """The plain mean of the chosen rows; a copy of the first of them where they are all the same."""
    coefficients = np.zeros(len(distances_NN))
    for j in chosen:
        coefficients[j] = 1
    return weighted_mean(coefficients, distances_NN)


def weighted_mean(weights_N: Doubles, distances_NN: Doubles) -> Mixing:
    """Σ w_j·x_j / Σ w_j as one mixed row; a copy where all rows that weigh are the same.

    Weights are not negative, and one of them at least is positive. Where all vanish in fp32 the heaviest row, lowest
    index first, is the outcome.
    """
    n = len(weights_N)
    with np.errstate(over="ignore", under="ignore"):
        numerators = weights_N.astype(np.float32)
    there = [j for j in range(n) if numerators[j] > 0]
    if not there:
        heaviest = max(range(n), key=lambda j: (weights_N[j], -j))
        return copies([heaviest], n)
    if all(distances_NN[there[0], j] == 0 for j in there):
        return copies(there[:1], n)
    total = np.float32(0)
    for j in there:
        total = np.float32(total + numerators[j])
    return Mixing(numerators[None, :], np.array([total], np.float32))


def stacked(rows: Sequence[Mixing]) -> Mixing:
    """Mixings of the same rows, one under the other."""
    return Mixing(np.concatenate([row.numerators_MK for row in rows]), np.concatenate([row.divisors_M for row in rows]))


def scaled(scales_N: Doubles, n_fixed: int) -> Mixing:
    """Each row times its scale, rounded to fp32, and the last `n_fixed` rows as they are."""
    n = len(scales_N)
    numerators = np.zeros((n + n_fixed, n + n_fixed), np.float32)
    for j in range(n):
        numerators[j, j] = np.float32(scales_N[j])
    for j in range(n, n + n_fixed):
        numerators[j, j] = 1
    return Mixing(numerators, np.ones(n + n_fixed, np.float32))


def with_fixed(mixing: Mixing, n_fixed: int) -> Mixing:
    """The same with `n_fixed` rows more behind the others, each a copy of itself."""
    n_mixed, n = mixing.numerators_MK.shape
    numerators = np.zeros((n_mixed + n_fixed, n + n_fixed), np.float32)
    numerators[:n_mixed, :n] = mixing.numerators_MK
    for j in range(n_fixed):
        numerators[n_mixed + j, n + j] = 1
    return Mixing(numerators, np.concatenate([mixing.divisors_M, np.ones(n_fixed, np.float32)]))


def mixed_gram(gram_KK: Doubles, mixing: Mixing) -> Doubles:
    """The (M, M) Gram matrix of the mixed rows, A·G·Aᵀ over both divisors, in fp64; O(M·K² + M²·K).

    Sums run in order of the index over the numerators that are not zero. Rows of the mixing that are alike give
    entries that are alike to the bit, so a distance between them is exactly 0.
    """
    if gram_KK.shape != (mixing.n_rows, mixing.n_rows):
        raise RuleError(f"a Gram matrix of shape {gram_KK.shape} for a mixing of {mixing.n_rows} rows")
    numerators_MK = mixing.numerators_MK.astype(np.float64)
    out_MM = np.empty((mixing.n_mixed, mixing.n_mixed))
    _mixed_gram(np.ascontiguousarray(gram_KK), numerators_MK, mixing.divisors_M.astype(np.float64), out_MM)
    return out_MM


@kernel(I64, F64_ROWS_IN, F64_ROWS_IN, F64_IN, F64_ROWS_OUT)
def _mixed_gram(gram_KK, numerators_MK, divisors_M, out_MM):  # type: ignore[no-untyped-def]
    n_mixed, n_rows = numerators_MK.shape
    products_K = np.empty(n_rows)
    for a in range(n_mixed):
        for j in range(n_rows):
            products_K[j] = 0.0
        for i in range(n_rows):
            numerator = numerators_MK[a, i]
            if numerator != 0.0:
                for j in range(n_rows):
                    products_K[j] = products_K[j] + numerator * gram_KK[i, j]
        for b in range(a, n_mixed):
            total = 0.0
            for j in range(n_rows):
                if numerators_MK[b, j] != 0.0:
                    total = total + products_K[j] * numerators_MK[b, j]
            total = total / divisors_M[a] / divisors_M[b]
            out_MM[a, b] = total
            out_MM[b, a] = total
    return 0
