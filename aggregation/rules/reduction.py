"""Reductions: N values of each coordinate become one, (N, P) -> (P,), in fp32 and in a pinned order.

Rows are finite; a reduction leaves them as they are. Sums that are clamped to the values summed stay among them
whatever rounding does, so equal rows give that row to the bit. Of a sum that overflows, as of rows far beyond what any
codec sends, a clamp would make one of the values; those columns are summed once more, in fp64, which holds the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from aggregation.kernels import F32_IN, F32_OUT, F32_ROWS_IN, I64, kernel
from aggregation.rules.sorting import middle_of_columns, sort_columns

Floats = NDArray[np.float32]

_TILE_VALUES = 1 << 17
"""Sorted values that are held at a time: half a mebibyte, so that they stay in the second cache."""
_TILE_COLUMNS_MAX = 1 << 15
_SIGN_OFF = np.int32(0x7FFFFFFF)
_INF_BITS = np.int32(0x7F800000)


class Reduction(Protocol):
    """A reduction of finite rows with positive weights."""

    def __call__(self, rows_NP: Floats, weights_N: Floats, f: int, out_P: Floats) -> None: ...


def mean(rows_NP: Floats, weights_N: Floats, f: int, out_P: Floats) -> None:
    """Σ w_i·x_i / Σ w_i: products and sums rounded one by one in row order, one division; `f` plays no part."""
    _mean(rows_NP, weights_N, out_P)


def median(rows_NP: Floats, weights_N: Floats, f: int, out_P: Floats) -> None:
    """Median of each coordinate (Yin et al. 2018), for even N half the sum of the two middle ones; unweighted.

    `f` only decides how many rows there must be.
    """
    for start, middle_KW, out_W in _tiles(2 - len(rows_NP) % 2, out_P):
        middle_of_columns(rows_NP, start, middle_KW)
        _clamped_mean(middle_KW, out_W)


def trimmed_mean(rows_NP: Floats, weights_N: Floats, f: int, out_P: Floats) -> None:
    """Mean of the N - 2f middle values of each coordinate (Yin et al. 2018); unweighted; N > 2f.

    They are summed from the smallest on, divided once and clamped to the smallest and largest of them.
    """
    n = len(rows_NP)
    for start, sorted_NW, out_W in _tiles(n, out_P):
        sort_columns(rows_NP, start, sorted_NW)
        _clamped_mean(sorted_NW[f : n - f], out_W)


def meamed(rows_NP: Floats, weights_N: Floats, f: int, out_P: Floats) -> None:
    """Mean around the median (Xie et al. 2018): of the N - f values of each coordinate nearest its median; N > f.

    In sorted order they are a window that has moved up k times: once for each of the f lowest values that lies
    farther from the median m than the value N - f places on, x_k + x_(k+N-f) < 2m, with 2m = the sum of the two middle
    values, in fp64. So of two values at one distance the smaller stays. Summed from the smallest on, divided once,
    clamped to the window's ends; unweighted.
    """
    for start, sorted_NW, out_W in _tiles(len(rows_NP), out_P):
        sort_columns(rows_NP, start, sorted_NW)
        _meamed(sorted_NW, f, out_W)


def _tiles(n_rows: int, out_P: Floats) -> Iterator[tuple[int, Floats, Floats]]:
    """Tile by tile: where it starts, room for its sorted rows, which the next tile has too, and the part of `out_P`."""
    n_values = out_P.size
    width = min(max(_TILE_VALUES // n_rows, 1024), _TILE_COLUMNS_MAX, n_values)
    room_NW = np.empty((n_rows, width), np.float32)
    for start in range(0, n_values, width):
        out_W = out_P[start : start + width]
        yield start, room_NW if out_W.size == width else np.empty((n_rows, out_W.size), np.float32), out_W


@kernel(I64, F32_ROWS_IN, F32_IN, F32_OUT)
def _mean(rows_NP, weights_N, out_P):  # type: ignore[no-untyped-def]
    n_rows, n_values = rows_NP.shape
    total = weights_N[0]
    for row in range(1, n_rows):
        total = total + weights_N[row]
    for start in range(0, n_values, 2048):
        stop = min(start + 2048, n_values)
        out = out_P[start:stop]
        for row in range(n_rows):
            values = rows_NP[row, start:stop]
            weight = weights_N[row]
            if row == 0:
                for p in range(stop - start):
                    out[p] = weight * values[p]
            else:
                for p in range(stop - start):
                    out[p] = out[p] + weight * values[p]
        for p in range(stop - start):
            out[p] = out[p] / total
    return 0


@kernel(I64, F32_ROWS_IN, F32_OUT)
def _clamped_mean(kept_KW, out_W):  # type: ignore[no-untyped-def]
    """Mean of rows that ascend in each column, within the first and the last."""
    n_kept, n_values = kept_KW.shape
    divisor = np.float32(n_kept)
    for start in range(0, n_values, 2048):
        stop = min(start + 2048, n_values)
        out = out_W[start:stop]
        lowest = kept_KW[0, start:stop]
        highest = kept_KW[n_kept - 1, start:stop]
        for p in range(stop - start):
            out[p] = lowest[p]
        for k in range(1, n_kept):
            values = kept_KW[k, start:stop]
            for p in range(stop - start):
                out[p] = out[p] + values[p]
        peak = np.int32(0)
        for p in range(stop - start):
            value = out[p] / divisor
            peak = max(peak, np.int32(np.float32(value).view(np.int32) & _SIGN_OFF))
            low = lowest[p]
            high = highest[p]
            value = low if value < low else value
            out[p] = high if high < value else value
        if peak >= _INF_BITS:
            for p in range(start, stop):
                total = kept_KW[0, p]
                wide = np.float64(total)
                for k in range(1, n_kept):
                    total = total + kept_KW[k, p]
                    wide = wide + np.float64(kept_KW[k, p])
                if abs(total) == np.inf:
                    out_W[p] = min(max(np.float32(wide / n_kept), kept_KW[0, p]), kept_KW[n_kept - 1, p])
    return 0


@kernel(I64, F32_ROWS_IN, I64, F32_OUT)
def _meamed(sorted_NW, f, out_W):  # type: ignore[no-untyped-def]
    n_rows, n_values = sorted_NW.shape
    n_kept = n_rows - f
    divisor = np.float32(n_kept)
    width = 1024
    moved_W = np.empty(width, np.int32)
    low_W = np.empty(width, np.float32)
    high_W = np.empty(width, np.float32)
    for start in range(0, n_values, width):
        stop = min(start + width, n_values)
        n_columns = stop - start
        out = out_W[start:stop]
        lower = sorted_NW[(n_rows - 1) // 2, start:stop]
        upper = sorted_NW[n_rows // 2, start:stop]
        for p in range(n_columns):
            moved_W[p] = 0
        for k in range(f):
            leaving = sorted_NW[k, start:stop]
            entering = sorted_NW[k + n_kept, start:stop]
            for p in range(n_columns):
                twice = np.float64(lower[p]) + np.float64(upper[p])
                # True for the lowest k first, so that the count is the window's place.
                moved_W[p] += np.int32(np.float64(leaving[p]) + np.float64(entering[p]) < twice)
        for k in range(n_rows):
            values = sorted_NW[k, start:stop]
            for p in range(n_columns):
                value = values[p]
                at = np.int32(k) - moved_W[p]
                if at == 0:
                    low_W[p] = value
                    out[p] = value
                elif 0 < at < n_kept:
                    out[p] = out[p] + value
                if at == n_kept - 1:
                    high_W[p] = value
        peak = np.int32(0)
        for p in range(n_columns):
            value = out[p] / divisor
            peak = max(peak, np.int32(np.float32(value).view(np.int32) & _SIGN_OFF))
            low = low_W[p]
            high = high_W[p]
            value = low if value < low else value
            out[p] = high if high < value else value
        if peak >= _INF_BITS:
            for p in range(n_columns):
                total = low_W[p]
                wide = np.float64(total)
                for k in range(moved_W[p] + 1, moved_W[p] + n_kept):
                    total = total + sorted_NW[k, start + p]
                    wide = wide + np.float64(sorted_NW[k, start + p])
                if abs(total) == np.inf:
                    out[p] = min(max(np.float32(wide / n_kept), low_W[p]), high_W[p])
    return 0
