"""The numba types of the arrays that geometry's kernels take."""

from __future__ import annotations

from numba import types

F64_IN = types.Array(types.float64, 1, "C", readonly=True)
F64_OUT = types.Array(types.float64, 1, "C")
F64_ROWS_IN = types.Array(types.float64, 2, "C", readonly=True)
F64_ROWS_OUT = types.Array(types.float64, 2, "C")
I64_IN = types.Array(types.int64, 1, "C", readonly=True)
I64_OUT = types.Array(types.int64, 1, "C")
I64_ROWS_IN = types.Array(types.int64, 2, "C", readonly=True)
