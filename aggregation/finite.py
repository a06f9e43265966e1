"""Whether values are all finite, at the speed of reading them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aggregation.kernels import F32_IN, I64, kernel

_TILE = 1 << 14
_SIGN_OFF = np.int32(0x7FFFFFFF)
_INF_BITS = np.int32(0x7F800000)


def is_finite(values_D: NDArray[np.float32]) -> bool:
    """Whether no value is NaN or infinite; the values are contiguous."""
    return bool(_peak(values_D) < _INF_BITS)


@kernel(I64, F32_IN)
def _peak(values_D):  # type: ignore[no-untyped-def]
    """The largest magnitude as bits, which are ordered like magnitudes, with infinity and NaN above all others."""
    bits_D = values_D.view(np.int32)
    peak = np.int32(0)
    for start in range(0, bits_D.size, _TILE):
        tile = bits_D[start : start + _TILE]
        for i in range(tile.size):
            # Narrowed at each step, lest numba count in int64.
            peak = max(peak, np.int32(tile[i] & _SIGN_OFF))
        if peak >= _INF_BITS:
            return np.int64(peak)
    return np.int64(peak)
