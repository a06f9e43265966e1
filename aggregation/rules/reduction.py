"""Reductions: N values of each coordinate become one, (N, P) -> (P,), in fp32 and in a pinned order.

A kernel works through the columns in tiles that stay in the first cache, row against row, so that the inner loop is
a plain vector loop over one tile.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from aggregation.kernels import F32_IN, F32_OUT, F32_ROWS_IN, F32_ROWS_OUT, I32_PAIRS_IN, I64, kernel

Floats = NDArray[np.float32]
Pairs = NDArray[np.int32]


class Reduction(Protocol):
    """A reduction of rows that are finite; it may destroy them."""

    def __call__(self, rows_NP: Floats, weights_N: Floats, f: int, out_P: Floats) -> None: ...


def mean(rows_NP: Floats, weights_N: Floats, f: int, out_P: Floats) -> None:
    """Σ w_i·x_i / Σ w_i: products and sums rounded one by one in row order, one division; `f` plays no part.

    The weights' sum is positive.
    """
    _mean(rows_NP, weights_N, out_P)


def median(rows_NP: Floats, weights_N: Floats, f: int, out_P: Floats) -> None:
    """Median of each coordinate (Yin et al. 2018), for even N half the sum of the two middle ones; unweighted.

    `f` only decides how many rows there must be. The rows end up sorted in part.
    """
    n = len(rows_NP)
    low, high = (n - 1) // 2, n // 2
    _median(rows_NP, median_network(n), low, high, out_P)


@lru_cache(maxsize=1024)
def median_network(n: int) -> Pairs:
    """Comparators (i, j), smaller value to i, that bring the middle one or two of n rows to their places.

    Batcher's merge exchange (Knuth, The Art of Computer Programming 3, 5.2.2 M), which sorts any n, without the
    comparators on which the middle rows do not depend.
    """
    needed = {(n - 1) // 2, n // 2}
    kept: list[tuple[int, int]] = []
    for i, j in reversed(_merge_exchange(n)):
        if i in needed or j in needed:
            needed |= {i, j}
            kept.append((i, j))
    network = np.array(kept[::-1], np.int32).reshape(-1, 2)
    network.setflags(write=False)
    return network


def _merge_exchange(n: int) -> list[tuple[int, int]]:
    comparators: list[tuple[int, int]] = []
    if n < 2:
        return comparators
    top = 1 << ((n - 1).bit_length() - 1)
    p = top
    while p > 0:
        q, r, d = top, 0, p
        while True:
            comparators.extend((i, i + d) for i in range(n - d) if i & p == r)
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
    return comparators


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


@kernel(I64, F32_ROWS_OUT, I32_PAIRS_IN, I64, I64, F32_OUT)
def _median(rows_NP, network, low, high, out_P):  # type: ignore[no-untyped-def]
    n_values = rows_NP.shape[1]
    half = np.float32(0.5)
    for start in range(0, n_values, 512):
        stop = min(start + 512, n_values)
        for c in range(network.shape[0]):
            smaller = rows_NP[network[c, 0], start:stop]
            larger = rows_NP[network[c, 1], start:stop]
            for p in range(stop - start):
                a = smaller[p]
                b = larger[p]
                smaller[p] = a if a < b else b
                larger[p] = b if a < b else a
        if low == high:
            for p in range(start, stop):
                out_P[p] = rows_NP[low, p]
        else:
            for p in range(start, stop):
                out_P[p] = (rows_NP[low, p] + rows_NP[high, p]) * half
    return 0
