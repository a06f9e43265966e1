"""The one way in which numba kernels are compiled here: serial IEEE arithmetic, without the GIL, cached on disk.

`fastmath` stays off, so LLVM neither reorders sums nor contracts a multiply and an add into one rounding.
`error_model="numpy"` makes division IEEE division instead of a branch that raises. A kernel calls no function of
another file: numba's cache would not notice a change there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit, types

Kernel = Callable[..., Any]

F32 = types.float32
F64 = types.float64
I64 = types.int64
BYTES_IN = types.Array(types.uint8, 1, "C", readonly=True)
BYTES_OUT = types.Array(types.uint8, 1, "C")
F32_IN = types.Array(types.float32, 1, "C", readonly=True)
F32_OUT = types.Array(types.float32, 1, "C")
F32_ROWS_IN = types.Array(types.float32, 2, "C", readonly=True)
F32_ROWS_OUT = types.Array(types.float32, 2, "C")
I32_PAIRS_IN = types.Array(types.int32, 2, "C", readonly=True)
I64_IN = types.Array(types.int64, 1, "C", readonly=True)
F64_ROWS_OUT = types.Array(types.float64, 2, "C")


def kernel(result: Any, *arguments: Any) -> Callable[[Kernel], Kernel]:
    """Compile a function for exactly this signature (numba types), at import or from the cache."""

    def compiled(function: Kernel) -> Kernel:
        decorate = njit(result(*arguments), nogil=True, cache=True, fastmath=False, error_model="numpy")
        dispatcher: Kernel = decorate(function)
        return dispatcher

    return compiled
