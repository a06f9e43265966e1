"""Codec `int4`: blocks of one fp32 scale and four signed bits a value, two to a byte; for senders with a residual.

    body = for each block: scale fp32 | ceil(B / 2) bytes, the last block shorter

The value with the even index is in the low half of its byte, as two's complement; the half that an odd last block
leaves over is zero. scale = absmax / 7 by a true fp32 division, code = round-half-even(value / scale), again a true
division. So the largest |code| of a block is 7. A block whose absmax is below 2^-100 is encoded as zero. One
canonical form, anything else is refused: scale +0 and all codes 0, or scale within [2^-103, cap] and the largest
|code| exactly 7.

A value whose code is not 0 lies within a factor of two of what decodes from it, so the difference of the two, which
is what the residual keeps, is exact in fp32 (Sterbenz).
"""

from __future__ import annotations

import numpy as np

from aggregation.codec.fp32 import tiled_norm
from aggregation.codec.frame import Bytes, Floats
from aggregation.errors import CodecError
from aggregation.kernels import BYTES_IN, BYTES_OUT, F32, F32_IN, F32_OUT, I64, kernel

SCALE_BYTES = 4
ZERO_BELOW = 2.0**-100
SCALE_MIN = 2.0**-103

_ZERO_BELOW_BITS = np.int32(np.float32(ZERO_BELOW).view(np.int32))
_SCALE_MIN_BITS = np.int32(np.float32(SCALE_MIN).view(np.int32))
_INF_BITS = np.int32(0x7F800000)
_SIGN_OFF = np.int32(0x7FFFFFFF)
_7 = np.float32(7.0)
_ROUNDER = np.float32(1.5 * 2.0**23)
"""Adding it rounds |x| ≤ 2^22 to the nearest integer, ties to even, and leaves that in the lowest bits."""

_FINE, _NOT_FINITE, _TOO_LARGE, _BAD_SCALE, _BAD_ZERO, _BAD_PEAK, _BAD_PADDING = -1, 0, 1, 2, 3, 4, 5
_REASONS = (
    "a value is not finite",
    "a value is beyond the codec's cap",
    "the scale is out of range",
    "the scale is zero and a code is not",
    "the largest code is not 7",
    "the half byte left over is not zero",
)


@kernel(I64, F32_IN, I64, F32, BYTES_OUT)
def _encode(values_P, block, scale_cap, body):  # type: ignore[no-untyped-def]
    """Fill the body; -1, or 8·block index + reason of the first block refused."""
    n_values = values_P.size
    bits_P = values_P.view(np.int32)
    n_blocks = (n_values + block - 1) // block
    nibbles_B = np.empty(block, np.uint8)  # apart from packing them, so that the divisions stay a plain vector loop
    at = 0
    for b in range(n_blocks):
        start = b * block
        n = min(block, n_values - start)
        n_bytes = (n + 1) // 2
        values = values_P[start : start + n]
        bits = bits_P[start : start + n]
        peak = np.int32(0)
        for i in range(bits.size):
            size = np.int32(bits[i] & _SIGN_OFF)
            peak = size if size > peak else peak
        if peak >= _INF_BITS:
            return 8 * b + _NOT_FINITE
        if peak < _ZERO_BELOW_BITS:
            body[at : at + 4 + n_bytes] = np.uint8(0)
        else:
            scale = np.int32(peak).view(np.float32) / _7
            if scale > scale_cap:
                return 8 * b + _TOO_LARGE
            word = np.float32(scale).view(np.uint32)
            body[at] = np.uint8(word & np.uint32(255))
            body[at + 1] = np.uint8((word >> np.uint32(8)) & np.uint32(255))
            body[at + 2] = np.uint8((word >> np.uint32(16)) & np.uint32(255))
            body[at + 3] = np.uint8(word >> np.uint32(24))
            for i in range(values.size):
                nibbles_B[i] = np.uint8(np.float32(values[i] / scale + _ROUNDER).view(np.uint32) & np.uint32(15))
            if n % 2:
                nibbles_B[n] = np.uint8(0)
            codes = body[at + 4 : at + 4 + n_bytes]
            for i in range(codes.size):
                codes[i] = np.uint8(nibbles_B[2 * i] | nibbles_B[2 * i + 1] << 4)
        at += 4 + n_bytes
    return _FINE


@kernel(I64, BYTES_IN, I64, I64, F32)
def _check(body, n_values, block, scale_cap):  # type: ignore[no-untyped-def]
    """-1 for a canonical body, else 8·block index + reason of the first block refused."""
    n_blocks = (n_values + block - 1) // block
    cap_bits = np.float32(scale_cap).view(np.int32)
    at = 0
    for b in range(n_blocks):
        n = min(block, n_values - b * block)
        n_bytes = (n + 1) // 2
        bits = np.int32(
            np.uint32(body[at])
            | np.uint32(body[at + 1]) << np.uint32(8)
            | np.uint32(body[at + 2]) << np.uint32(16)
            | np.uint32(body[at + 3]) << np.uint32(24)
        )
        codes = body[at + 4 : at + 4 + n_bytes]
        if n % 2 and codes[n_bytes - 1] >> np.uint8(4):
            return 8 * b + _BAD_PADDING
        # A code plus 8 lies within 1 … 15 for -7 … 7 and is 0 for -8.
        high = np.uint8(8)
        low = np.uint8(8)
        for i in range(n_bytes):
            even = (codes[i] ^ np.uint8(8)) & np.uint8(15)
            odd = (codes[i] >> np.uint8(4)) ^ np.uint8(8)
            high = max(high, max(even, odd))
            low = min(low, min(even, odd))
        peak = max(np.int64(high) - 8, 8 - np.int64(low))
        if bits == 0:
            if peak != 0:
                return 8 * b + _BAD_ZERO
        elif bits < _SCALE_MIN_BITS or bits > cap_bits:
            return 8 * b + _BAD_SCALE
        elif peak != 7:
            return 8 * b + _BAD_PEAK
        at += 4 + n_bytes
    return _FINE


@kernel(I64, BYTES_IN, I64, F32_OUT)
def _decode(body, block, out_P):  # type: ignore[no-untyped-def]
    """value = code · scale, one fp32 multiply."""
    n_values = out_P.size
    n_blocks = (n_values + block - 1) // block
    at = 0
    for b in range(n_blocks):
        start = b * block
        n = min(block, n_values - start)
        n_bytes = (n + 1) // 2
        scale = np.uint32(
            np.uint32(body[at])
            | np.uint32(body[at + 1]) << np.uint32(8)
            | np.uint32(body[at + 2]) << np.uint32(16)
            | np.uint32(body[at + 3]) << np.uint32(24)
        ).view(np.float32)
        codes = body[at + 4 : at + 4 + n_bytes]
        out = out_P[start : start + n]
        for i in range(n // 2):
            out[2 * i] = np.float32(np.int32((codes[i] & np.uint8(15)) ^ np.uint8(8)) - np.int32(8)) * scale
            out[2 * i + 1] = np.float32(np.int32((codes[i] >> np.uint8(4)) ^ np.uint8(8)) - np.int32(8)) * scale
        if n % 2:
            out[n - 1] = np.float32(np.int32((codes[n // 2] & np.uint8(15)) ^ np.uint8(8)) - np.int32(8)) * scale
        at += 4 + n_bytes
    return 0


class Int4:
    """Codec `int4`, id 4."""

    name = "int4"
    id = 4

    def body_bytes(self, n_values: int, block: int) -> int:
        n_blocks = -(-n_values // block)
        return SCALE_BYTES * n_blocks + (n_values + 1) // 2  # a block is even, so only the last may leave half a byte

    def encode(self, values_P: Floats, block: int, scale_cap: float, body: Bytes) -> None:
        _refuse(_encode(values_P, block, np.float32(scale_cap), body))

    def check(self, body: Bytes, n_values: int, block: int, scale_cap: float) -> None:
        _refuse(_check(body, n_values, block, np.float32(scale_cap)))

    def decode(self, body: Bytes, block: int, out_P: Floats) -> None:
        _decode(body, block, out_P)

    def squared_norm(self, body: Bytes, n_values: int, block: int) -> float:
        return tiled_norm(self, body, n_values, block)


def _refuse(verdict: int) -> None:
    if verdict != _FINE:
        raise CodecError(f"int4 block {verdict // 8}: {_REASONS[verdict % 8]}")
