"""Codec `fp16`: each value as IEEE half precision, little-endian, rounded to the nearest, ties to even.

The block says only in which groups the squared norm is summed. Canonical means finite; what would round to infinity
is refused at the sender. The largest half, 65504, lies far below every cap. Values below 2^-25 become zero, with
their sign.
"""

from __future__ import annotations

import numpy as np

from aggregation.codec.fp32 import tiled_norm
from aggregation.codec.frame import Bytes, Floats
from aggregation.errors import CodecError
from aggregation.kernels import BYTES_IN, BYTES_OUT, F32_IN, F32_OUT, I64, kernel

VALUE_BYTES = 2

_OVERFLOW_BITS = np.int32(np.float32(65520.0).view(np.int32))
"""Halfway between the largest half and the next, which would be infinite; ties go there."""
_NORMAL_BITS = np.int32(np.float32(2.0**-14).view(np.int32))
_REBIAS = np.int32((127 - 15) << 23)
_HALF = np.float32(0.5)
"""Its last place is the last place of a half's denormals, so adding to it rounds a value to them."""
_HALF_BITS = np.int32(np.float32(0.5).view(np.int32))
_SIGN_OFF = np.int32(0x7FFFFFFF)
_DENORMAL_UNIT = np.float32(2.0**-24)
_TILE_VALUES = 1 << 12


@kernel(I64, F32_IN, BYTES_OUT)
def _encode(values_P, body):  # type: ignore[no-untyped-def]
    """Fill the body; -1, or where the first tile begins that is refused."""
    bits_P = values_P.view(np.int32)
    for start in range(0, values_P.size, _TILE_VALUES):
        bits = bits_P[start : start + _TILE_VALUES]
        halves = body[2 * start : 2 * (start + bits.size)]
        peak = np.int32(0)
        for i in range(bits.size):
            size = np.int32(bits[i] & _SIGN_OFF)
            peak = size if size > peak else peak
        if peak >= _OVERFLOW_BITS:
            return start
        for i in range(bits.size):
            size = np.int32(bits[i] & _SIGN_OFF)
            # Both forms are computed and one is taken, which stays a vector loop.
            odd = np.int32(np.int32(size >> 13) & 1)
            normal = np.int32(np.int32(size + odd + 0xFFF - _REBIAS) >> 13)
            small = np.int32(np.float32(size.view(np.float32) + _HALF).view(np.int32) - _HALF_BITS)
            half = np.int32((normal if size >= _NORMAL_BITS else small) | (np.int32(bits[i] >> 16) & 0x8000))
            halves[2 * i] = np.uint8(half & 255)
            halves[2 * i + 1] = np.uint8(np.int32(half >> 8) & 255)
    return -1


@kernel(I64, BYTES_IN)
def _check(body):  # type: ignore[no-untyped-def]
    """-1, or the index of the first value that is infinite or no number."""
    for start in range(0, body.size, 2 * _TILE_VALUES):
        tile = body[start : start + 2 * _TILE_VALUES]
        peak = np.uint8(0)
        for i in range(tile.size // 2):
            high = np.uint8(tile[2 * i + 1] & 0x7F)
            peak = high if high > peak else peak
        if peak >= 0x7C:
            for i in range(tile.size // 2):
                if tile[2 * i + 1] & 0x7F >= 0x7C:
                    return start // 2 + i
    return -1


@kernel(I64, BYTES_IN, F32_OUT)
def _decode(body, out_P):  # type: ignore[no-untyped-def]
    """Exact: every half is an fp32 value."""
    bits_P = out_P.view(np.int32)
    for i in range(bits_P.size):
        half = np.int32(np.int32(body[2 * i]) | np.int32(np.int32(body[2 * i + 1]) << 8))
        size = np.int32(half & 0x7FFF)
        normal = np.int32(np.int32(size << 13) + _REBIAS)
        small = np.float32(np.float32(size) * _DENORMAL_UNIT).view(np.int32)
        sign = np.int32(np.int32(half & 0x8000) << 16)
        bits_P[i] = np.int32((normal if size >= 0x400 else small) | sign)
    return 0


class Fp16:
    """Codec `fp16`, id 3."""

    name = "fp16"
    id = 3

    def body_bytes(self, n_values: int, block: int) -> int:
        return VALUE_BYTES * n_values

    def encode(self, values_P: Floats, block: int, scale_cap: float, body: Bytes) -> None:
        start = _encode(values_P, body)
        if start >= 0:
            fine = np.abs(values_P[start : start + _TILE_VALUES]) < np.float32(65520.0)  # False for NaN
            at = start + int(np.argmin(fine))
            raise CodecError(f"fp16 value {at} is not finite in half precision, which ends at 65504")

    def check(self, body: Bytes, n_values: int, block: int, scale_cap: float) -> None:
        at = _check(body)
        if at >= 0:
            raise CodecError(f"fp16 value {at} is not finite")

    def decode(self, body: Bytes, block: int, out_P: Floats) -> None:
        _decode(body, out_P)

    def squared_norm(self, body: Bytes, n_values: int, block: int) -> float:
        return tiled_norm(self, body, n_values, block)
