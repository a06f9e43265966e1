"""Applying a mixing: rows become sums of rows over a divisor, each product and each sum rounded to fp32 by itself.

y_m = (Σ_j numerators[m, j]·x_j) / divisors[m] in order of j over the numerators that are not zero. The weighted mean of
int8 rows is the same sum with the weights as numerators, and is taken from the codes without decoding them first. Where
a sum overflows, as of rows far beyond what any codec sends, it is taken once more in fp64: a row that a reduction then
sorts to one end must not be there for its overflow alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from aggregation.kernels import BYTES_IN, F32, F32_IN, F32_OUT, F32_ROWS_IN, F32_ROWS_OUT, I64, I64_IN, kernel

if TYPE_CHECKING:
    from aggregation.rules.geometry import Mixing
    from aggregation.rules.rows import Int8Rows

Floats = NDArray[np.float32]

_SIGN_OFF = np.int32(0x7FFFFFFF)
_INF_BITS = np.int32(0x7F800000)


def mix(mixings: Sequence[Mixing], rows_KW: Floats) -> Floats:
    """One mixing after the other; the last one's (M, W) rows."""
    for mixing in mixings:
        mixed_MW = np.empty((mixing.n_mixed, rows_KW.shape[1]), np.float32)
        _mix(rows_KW, mixing.numerators_MK, mixing.divisors_M, mixed_MW)
        rows_KW = mixed_MW
    return rows_KW


def without_unused(mixings: Sequence[Mixing]) -> list[Mixing]:
    """The same chain, each mixing without the mixed rows that no later one takes: those become rows of zeros."""
    kept: list[Mixing] = []
    for mixing in reversed(mixings):
        if kept:
            used_K = (kept[-1].numerators_MK != 0).any(axis=0)
            mixing = type(mixing)(
                np.where(used_K[:, None], mixing.numerators_MK, np.float32(0)),
                np.where(used_K, mixing.divisors_M, np.float32(1)),
            )
        kept.append(mixing)
    return kept[::-1]


def sum_of_codes(rows: Int8Rows, start: int, numerators_K: Floats, divisor: np.float32, out_W: Floats) -> None:
    """(Σ_k numerators[k]·x_k) / divisor of the values from `start` on, in order of k; nothing is divided by 1."""
    _sum_of_codes(rows.span, rows.offsets_at(start), rows.factors_K, numerators_K, divisor, rows.block, out_W)


def weights_sum(weights_N: Floats) -> np.float32:
    """Their fp32 sum in order, as the mean divides by it."""
    total = weights_N[0]
    for weight in weights_N[1:]:
        total = np.float32(total + weight)
    return np.float32(total)


@kernel(I64, F32_ROWS_IN, F32_ROWS_IN, F32_IN, F32_ROWS_OUT)
def _mix(rows_KW, numerators_MK, divisors_M, out_MW):  # type: ignore[no-untyped-def]
    n_mixed, n_rows = numerators_MK.shape
    n_values = rows_KW.shape[1]
    for start in range(0, n_values, 1024):
        stop = min(start + 1024, n_values)
        for m in range(n_mixed):
            out = out_MW[m, start:stop]
            first = True
            for j in range(n_rows):
                numerator = numerators_MK[m, j]
                if numerator != np.float32(0):
                    values = rows_KW[j, start:stop]
                    if first:
                        for p in range(stop - start):
                            out[p] = numerator * values[p]
                        first = False
                    else:
                        for p in range(stop - start):
                            out[p] = out[p] + numerator * values[p]
            divisor = divisors_M[m]
            if first:
                for p in range(stop - start):
                    out[p] = np.float32(0)
            bits = out.view(np.int32)
            peak = np.int32(0)
            for p in range(stop - start):
                peak = max(peak, np.int32(bits[p] & _SIGN_OFF))
            if peak >= _INF_BITS:
                for p in range(stop - start):
                    if abs(out[p]) < np.inf:
                        out[p] = out[p] / divisor
                    else:
                        total = 0.0
                        for j in range(n_rows):
                            if numerators_MK[m, j] != np.float32(0):
                                total += np.float64(numerators_MK[m, j]) * np.float64(rows_KW[j, start + p])
                        out[p] = np.float32(total / np.float64(divisor))
            elif not first and divisor != np.float32(1):
                for p in range(stop - start):
                    out[p] = out[p] / divisor
    return 0


@kernel(I64, BYTES_IN, I64_IN, F32_IN, F32_IN, F32, I64, F32_OUT)
def _sum_of_codes(span, offsets_K, factors_K, numerators_K, divisor, block, out_W):  # type: ignore[no-untyped-def]
    n_values = out_W.size
    at = 0
    for start in range(0, n_values, block):
        n_codes = min(block, n_values - start)
        out = out_W[start : start + n_codes]
        first = True
        for k in range(offsets_K.size):
            numerator = numerators_K[k]
            if numerator == np.float32(0):
                continue
            o = offsets_K[k] + at
            scale = np.uint32(
                np.uint32(span[o])
                | np.uint32(span[o + 1]) << np.uint32(8)
                | np.uint32(span[o + 2]) << np.uint32(16)
                | np.uint32(span[o + 3]) << np.uint32(24)
            ).view(np.float32)
            codes = span[o + 4 : o + 4 + n_codes].view(np.int8)
            factor = factors_K[k]
            if first:
                for p in range(n_codes):
                    out[p] = numerator * (factor * (np.float32(codes[p]) * scale))
                first = False
            elif factor == np.float32(1):
                for p in range(n_codes):
                    out[p] = out[p] + numerator * (np.float32(codes[p]) * scale)
            else:
                for p in range(n_codes):
                    out[p] = out[p] + numerator * (factor * (np.float32(codes[p]) * scale))
        if first:
            for p in range(n_codes):
                out[p] = np.float32(0)
        elif divisor != np.float32(1):
            for p in range(n_codes):
                out[p] = out[p] / divisor
        at += 4 + n_codes
    return 0
