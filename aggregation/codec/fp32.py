"""Codec `fp32`: the values as they are, little-endian; for tests and for runs that can afford four bytes a value.

The block says only in which groups the squared norm is summed. Canonical means finite and at most 127 times the
scale cap, so that both codecs bound a decoded value alike.
"""

from __future__ import annotations

import numpy as np

from aggregation.codec.frame import Bytes, Floats
from aggregation.errors import CodecError
from aggregation.kernels import F32_IN, F64, I64, kernel

VALUE_BYTES = 4
_LITTLE = np.dtype("<f4")
_TILE_VALUES = 1 << 14


@kernel(F64, F32_IN, I64, F64)
def _squared_norm(values_P, block, total):  # type: ignore[no-untyped-def]
    """Adds whole blocks to `total`: sixteen fp64 lanes by value index mod 16, the lanes in order, then the blocks."""
    lanes = np.empty(16, np.float64)
    for start in range(0, values_P.size, block):
        stop = min(start + block, values_P.size)
        for lane in range(16):
            lanes[lane] = 0.0
        whole = stop - (stop - start) % 16
        for i in range(start, whole, 16):
            for lane in range(16):
                value = np.float64(values_P[i + lane])
                lanes[lane] += value * value
        for i in range(whole, stop):
            value = np.float64(values_P[i])
            lanes[i - whole] += value * value
        block_sum = 0.0
        for lane in range(16):
            block_sum += lanes[lane]
        total += block_sum
    return total


class Fp32:
    """Codec `fp32`, id 2."""

    name = "fp32"
    id = 2

    def body_bytes(self, n_values: int, block: int) -> int:
        return VALUE_BYTES * n_values

    def encode(self, values_P: Floats, block: int, scale_cap: float, body: Bytes) -> None:
        _check_values(values_P, scale_cap)
        body[:] = values_P.astype(_LITTLE, copy=False).view(np.uint8)

    def check(self, body: Bytes, n_values: int, block: int, scale_cap: float) -> None:
        _check_values(_values(body), scale_cap)

    def decode(self, body: Bytes, block: int, out_P: Floats) -> None:
        out_P[:] = _values(body)

    def squared_norm(self, body: Bytes, n_values: int, block: int) -> float:
        values_P = _values(body)
        total = 0.0
        step = block * max(1, _TILE_VALUES // block)
        for start in range(0, n_values, step):
            # Copied tile by tile, because a received body may lie at any address and be of the other byte order.
            tile = np.array(values_P[start : start + step], np.float32)
            total = float(_squared_norm(tile, block, total))
        return total


def _values(body: Bytes) -> Floats:
    return np.frombuffer(body.data, _LITTLE)


def _check_values(values_P: Floats, scale_cap: float) -> None:
    cap = np.float32(127.0 * scale_cap)
    # Written so that NaN, which compares false with everything, is refused.
    for start in range(0, values_P.size, _TILE_VALUES):
        fine = np.abs(values_P[start : start + _TILE_VALUES]) <= cap
        if not fine.all():
            at = start + int(np.argmin(fine))
            raise CodecError(f"fp32 value {at} is not finite or beyond the codec's cap")
