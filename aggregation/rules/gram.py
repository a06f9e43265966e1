"""Gram matrices of a chunk's rows, G_ij = ⟨x_i, x_j⟩ in fp64, block by block: the same bits on every machine.

Rows of codes and scales (`Int8Rows`) never become floats: |Σ code·code| of a block is below 2^30 (127² · 65536), so its
integer dot is exact in any order; times both scales, whose product fp64 holds exactly, it is rounded once, and the
blocks are added in order. Other rows are summed as a codec sums a norm: products, exact in fp64, to lane (index mod 16)
of their block; the lanes in order, then the blocks. Equal rows have equal entries in both, so their distance is 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from aggregation.kernels import BYTES_IN, F32_ROWS_IN, F64_ROWS_OUT, I64, I64_IN, kernel

if TYPE_CHECKING:
    from aggregation.rules.rows import Int8Rows

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


def gram_of_codes(rows: Int8Rows) -> Doubles:
    """(K, K) of int8 rows as they are in their frames; a row's own factor (a centre's) counts in fp64, unrounded."""
    gram_KK = np.zeros((rows.n_rows, rows.n_rows))
    _add_codes(rows.span, rows.offsets_K, rows.n_values, rows.block, gram_KK)
    _mirror(gram_KK)
    for i, factor in enumerate(rows.factors_K.tolist()):
        if factor != 1.0:
            gram_KK[i, :] *= factor
            gram_KK[:, i] *= factor
    return gram_KK


class GramOfValues:
    """Sums up the Gram matrix of fp32 rows that come tile by tile, each tile a whole number of blocks (or the last)."""

    def __init__(self, n_rows: int, block: int) -> None:
        self._gram_KK = np.zeros((n_rows, n_rows))
        self._block = block

    def add(self, rows_KW: Floats) -> None:
        _add_values(rows_KW, self._block, self._gram_KK)

    def finish(self) -> Doubles:
        """The (K, K) matrix; nothing may be added after."""
        _mirror(self._gram_KK)
        return self._gram_KK


def _mirror(gram_KK: Doubles) -> None:
    upper = np.triu_indices(len(gram_KK), 1)
    gram_KK[upper] = gram_KK.T[upper]


@kernel(I64, BYTES_IN, I64_IN, I64, I64, F64_ROWS_OUT)
def _add_codes(span, offsets_K, n_values, block, gram_KK):  # type: ignore[no-untyped-def]
    """Add all blocks to the lower triangle."""
    n_rows = offsets_K.size
    scales_K = np.empty(n_rows, np.float64)
    at = 0
    for start in range(0, n_values, block):
        n_codes = min(block, n_values - start)
        for i in range(n_rows):
            o = offsets_K[i] + at
            scale = np.uint32(
                np.uint32(span[o])
                | np.uint32(span[o + 1]) << np.uint32(8)
                | np.uint32(span[o + 2]) << np.uint32(16)
                | np.uint32(span[o + 3]) << np.uint32(24)
            ).view(np.float32)
            scales_K[i] = np.float64(scale)
        for i in range(n_rows):
            o = offsets_K[i] + at + 4
            a = span[o : o + n_codes].view(np.int8)
            for j in range(i + 1):
                o = offsets_K[j] + at + 4
                b = span[o : o + n_codes].view(np.int8)
                dot = np.int32(0)
                for p in range(n_codes):
                    # Narrowed at each step, lest numba count in int64; so LLVM sees 16-bit products (pmaddwd).
                    dot = np.int32(dot + np.int32(np.int32(a[p]) * np.int32(b[p])))
                gram_KK[i, j] += (scales_K[i] * scales_K[j]) * np.float64(dot)
        at += 4 + n_codes
    return 0


@intrinsic  # type: ignore[untyped-decorator]
def _products(typingctx: Any, rows: Any, i: Any, j: Any, start: Any, stop: Any, lanes: Any) -> Any:
    """lanes[k] = Σ rows[i, p]·rows[j, p] over p = start + k, start + k + 16, … below `stop`, which is 16·m from start.

    Written in LLVM's terms, because it does not keep sixteen sums of a numba loop in registers by itself.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        target = context.make_array(signature.args[5])(context, builder, args[5])
        singles, doubles = ir.VectorType(ir.FloatType(), 16), ir.VectorType(ir.DoubleType(), 16)
        stride = builder.extract_value(array.strides, 0)
        four = ir.Constant(stride.type, 4)

        def values(row: Any, p: Any) -> Any:
            address = builder.add(builder.ptrtoint(array.data, stride.type), builder.mul(row, stride))
            pointer = builder.inttoptr(builder.add(address, builder.mul(p, four)), singles.as_pointer())
            return builder.fpext(builder.load(pointer, align=4), doubles)

        total = cgutils.alloca_once(builder, doubles)
        builder.store(ir.Constant(doubles, [0.0] * 16), total)
        step = ir.Constant(stride.type, 16)
        with cgutils.for_range_slice(builder, args[3], args[4], step, stride.type) as (p, _):
            product = builder.fmul(values(args[1], p), values(args[2], p))
            builder.store(builder.fadd(builder.load(total), product), total)
        builder.store(builder.load(total), builder.bitcast(target.data, doubles.as_pointer()), align=8)
        return context.get_dummy_value()

    return types.void(rows, i, j, start, stop, lanes), codegen


@kernel(I64, F32_ROWS_IN, I64, F64_ROWS_OUT)
def _add_values(rows_KW, block, gram_KK):  # type: ignore[no-untyped-def]
    """Add all blocks to the lower triangle."""
    n_rows, n_values = rows_KW.shape
    lanes = np.empty(16, np.float64)
    for start in range(0, n_values, block):
        stop = min(start + block, n_values)
        whole = stop - (stop - start) % 16
        for i in range(n_rows):
            for j in range(i + 1):
                _products(rows_KW, i, j, start, whole, lanes)
                for p in range(whole, stop):
                    lanes[p - whole] += np.float64(rows_KW[i, p]) * np.float64(rows_KW[j, p])
                total = lanes[0]
                for lane in range(1, 16):
                    total += lanes[lane]
                gram_KK[i, j] += total
    return 0
