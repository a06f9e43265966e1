"""Sorting networks for columns: which comparators, and one sorted column after the other in vector registers.

A network makes the same comparisons whatever the values, so sixteen columns sort at once, one a lane. For few rows the
network is compiled in: a column is loaded once, sorted in registers, and only the wanted rows are stored.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from aggregation.kernels import F32_ROWS_IN, F32_ROWS_OUT, I32_PAIRS_IN, I64, Kernel, kernel

Floats = NDArray[np.float32]
Pairs = NDArray[np.int32]

ROWS_COMPILED_MAX = 32
"""Networks for up to so many rows, as many as there are vector registers, are compiled in: 0.3 s once, then cached."""


def sort_columns(rows_NP: Floats, start: int, out_NW: Floats) -> None:
    """Sort the columns [start, start + W), smallest values to row 0 of `out_NW`.

    Rows are finite and stay as they are. Where zeros of both signs meet, their order is the network's.
    """
    _sorted_rows(rows_NP, start, 0, out_NW)


def middle_of_columns(rows_NP: Floats, start: int, out_KW: Floats) -> None:
    """The middle one (of odd N) or two (of even N) values of the columns [start, start + W), the smaller one first."""
    _sorted_rows(rows_NP, start, (len(rows_NP) - 1) // 2, out_KW)


def compile_networks(n_max: int = ROWS_COMPILED_MAX) -> None:
    """Fill numba's cache for up to `n_max` rows, so that nobody waits for a compiler in the middle of a round."""
    for n in range(1, min(n_max, ROWS_COMPILED_MAX) + 1):
        _compiled(n, 0, n - 1)
        _compiled(n, (n - 1) // 2, n // 2)


def _sorted_rows(rows_NP: Floats, start: int, first: int, out_KW: Floats) -> None:
    n, last = len(rows_NP), first + len(out_KW) - 1
    if n <= ROWS_COMPILED_MAX:
        _compiled(n, first, last)(rows_NP, start, out_KW)
    else:
        _sort(rows_NP, start, network(n, first, last), first, out_KW)


@lru_cache(maxsize=1024)
def network(n: int, first: int, last: int) -> Pairs:
    """Comparators (i, j), smaller value to i, that bring the sorted rows [first, last] of n rows to their places.

    Batcher's merge exchange (Knuth, The Art of Computer Programming 3, 5.2.2 M), which sorts any n, without the
    comparators on which the wanted rows do not depend.
    """
    needed = set(range(first, last + 1))
    kept: list[tuple[int, int]] = []
    for i, j in reversed(_merge_exchange(n)):
        if i in needed or j in needed:
            needed |= {i, j}
            kept.append((i, j))
    pairs = np.array(kept[::-1], np.int32).reshape(-1, 2)
    pairs.setflags(write=False)
    return pairs


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


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _sort_lanes(
    typingctx: Any, rows: Any, column: Any, out: Any, at: Any, n: Any, first: Any, last: Any, lanes: Any
) -> Any:
    """Sort columns [column, column + lanes) of `rows` and store the sorted rows from `at` on into `out`.

    Written in LLVM's terms because n rows at n addresses are more than its loop vectoriser tells apart from the
    output. `fcmp olt` and `select` are one vector minimum or maximum.
    """
    n_rows, low, high, width = (each.literal_value for each in (n, first, last, lanes))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source = context.make_array(signature.args[0])(context, builder, args[0])
        target = context.make_array(signature.args[2])(context, builder, args[2])
        vector = ir.VectorType(ir.FloatType(), width)
        four = ir.Constant(args[1].type, 4)

        def pointers(array: Any, value: Any, count: int) -> list[Any]:
            address = builder.add(builder.ptrtoint(array.data, four.type), builder.mul(value, four))
            stride = builder.extract_value(array.strides, 0)
            found = []
            for _ in range(count):
                found.append(builder.inttoptr(address, vector.as_pointer()))
                address = builder.add(address, stride)
            return found

        values = [builder.load(pointer, align=4) for pointer in pointers(source, args[1], n_rows)]
        for i, j in network(n_rows, low, high).tolist():
            a, b = values[i], values[j]
            less = builder.fcmp_ordered("<", a, b)
            values[i], values[j] = builder.select(less, a, b), builder.select(less, b, a)
        for value, pointer in zip(values[low : high + 1], pointers(target, args[3], high - low + 1), strict=True):
            builder.store(value, pointer, align=4)
        return context.get_dummy_value()

    return types.void(rows, column, out, at, n, first, last, lanes), codegen


@lru_cache(maxsize=1024)
def _compiled(n: int, first: int, last: int) -> Kernel:
    @kernel(I64, F32_ROWS_IN, I64, F32_ROWS_OUT, variant=f"_{n}_{first}_{last}")
    def sort(rows_NP, start, out_KW):  # type: ignore[no-untyped-def]
        width = out_KW.shape[1]
        whole = width - width % 16
        for p in range(0, whole, 16):
            _sort_lanes(rows_NP, start + p, out_KW, p, n, first, last, 16)
        for p in range(whole, width):
            _sort_lanes(rows_NP, start + p, out_KW, p, n, first, last, 1)
        return 0

    return sort


@kernel(I64, F32_ROWS_IN, I64, I32_PAIRS_IN, I64, F32_ROWS_OUT)
def _sort(rows_NP, start, network, first, out_KW):  # type: ignore[no-untyped-def]
    n_rows = rows_NP.shape[0]
    n_kept, n_values = out_KW.shape
    width = 128
    tile_NW = np.empty((n_rows, width), np.float32)
    for at in range(0, n_values, width):
        n_columns = min(width, n_values - at)
        for row in range(n_rows):
            values = rows_NP[row, start + at : start + at + n_columns]
            tile = tile_NW[row, :n_columns]
            for p in range(n_columns):
                tile[p] = values[p]
        for c in range(network.shape[0]):
            smaller = tile_NW[network[c, 0], :n_columns]
            larger = tile_NW[network[c, 1], :n_columns]
            for p in range(n_columns):
                a = smaller[p]
                b = larger[p]
                smaller[p] = a if a < b else b
                larger[p] = b if a < b else a
        for k in range(n_kept):
            out = out_KW[k, at : at + n_columns]
            tile = tile_NW[first + k, :n_columns]
            for p in range(n_columns):
                out[p] = tile[p]
    return 0
