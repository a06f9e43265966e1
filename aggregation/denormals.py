"""Whether the calling thread keeps denormals, as everything that strangers must agree on needs.

A processor flushes them to zero where its control register says so, and that belongs to a thread and what the thread
starts: a library built with -ffast-math sets it when it is loaded, and `torch.set_flush_denormal` does.
"""

from __future__ import annotations

import sys

from aggregation.errors import DenormalsError

_SMALLEST_NORMAL = sys.float_info.min


def check_denormals() -> None:
    """Raise DenormalsError unless products of this thread may be denormal, and denormal factors count.

    The bits that it looks for hold for fp64 and fp32 alike, so that Python's own floats tell, in 0.1 µs: the half would
    be zero where results are flushed, and twice the half where operands are.
    """
    if _SMALLEST_NORMAL * 0.5 * 2.0 != _SMALLEST_NORMAL:
        raise DenormalsError(
            "this thread's floating point takes denormals for zero, so its results would differ from everybody's: "
            "look for torch.set_flush_denormal, or for a library built with -ffast-math that this process has loaded"
        )
