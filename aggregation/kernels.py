"""The one way in which numba kernels are compiled here: serial IEEE arithmetic, without the GIL, cached on disk.

`fastmath` stays off, so LLVM neither reorders sums nor contracts a multiply and an add into one rounding.
`error_model="numpy"` makes division IEEE division instead of a branch that raises. A kernel calls no function of
another file: numba's cache would not notice a change there.

numba keeps a function's machine code in numbered files and an index of them, and writes the index first. Of two
processes that compile at the same time one may so read what the other is about to replace: the code of an older source,
or of another network, or, where hosts share a home, of another processor, with instructions that this one lacks. So
each kernel's files bear a name of their own, made of the source and of the processor that it was compiled for.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2s
from typing import Any

import numba
from llvmlite import binding
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


def kernel(result: Any, *arguments: Any, variant: str = "") -> Callable[[Kernel], Kernel]:
    """Compile a function for exactly this signature (numba types), at import or from the cache.

    `variant` tells apart the functions that one `def` makes.
    """

    def compiled(function: Kernel) -> Kernel:
        function.__qualname__ += f"{variant}_{_stamp(function.__code__.co_filename)}"  # which names the files
        decorate = njit(result(*arguments), nogil=True, cache=True, fastmath=False, error_model="numpy")
        dispatcher: Kernel = decorate(function)
        return dispatcher

    return compiled


@lru_cache(maxsize=64)
def _stamp(source: str) -> str:
    # This file too: other flags make other code of the same source.
    text = "".join((numba.__version__, _processor(), *linecache.getlines(__file__), *linecache.getlines(source)))
    return blake2s(text.encode(), digest_size=5).hexdigest()


def _processor() -> str:
    """What numba compiles for: this host's processor, unless it was asked for another."""
    try:
        features = binding.get_host_cpu_features().flatten()
    except RuntimeError:  # LLVM knows no features of this kind of processor
        features = ""
    asked = (numba.config.CPU_NAME, numba.config.CPU_FEATURES)
    return repr((binding.get_process_triple(), binding.get_host_cpu_name(), features, asked))
