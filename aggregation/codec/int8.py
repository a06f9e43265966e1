"""Codec `int8`: blocks of one fp32 scale and one signed byte a value.

    body = for each block: scale fp32 | codes int8 * B, the last block shorter

scale = absmax / 127 by a true fp32 division, code = round-half-even(value / scale), again a true division. So the
largest |code| of a block is 127: absmax / scale is 127 to within two roundings. A block whose absmax is below
2^-100 is encoded as zero, because its scale would come near the denormals. One canonical form, anything else is
refused: scale +0 and all codes 0, or scale within [2^-107, cap] and the largest |code| exactly 127.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aggregation.codec.frame import Bytes, Floats
from aggregation.errors import CodecError
from aggregation.kernels import BYTES_IN, BYTES_OUT, F32, F32_IN, F32_OUT, F64, I64, I64_IN, kernel

SCALE_BYTES = 4
ZERO_BELOW = 2.0**-100
SCALE_MIN = 2.0**-107

_ZERO_BELOW_BITS = np.int32(np.float32(ZERO_BELOW).view(np.int32))
_SCALE_MIN_BITS = np.int32(np.float32(SCALE_MIN).view(np.int32))
_INF_BITS = np.int32(0x7F800000)
_SIGN_OFF = np.int32(0x7FFFFFFF)
_127 = np.float32(127.0)
_ROUNDER = np.float32(1.5 * 2.0**23)
"""Adding it rounds |x| ≤ 2^22 to the nearest integer, ties to even, and leaves that in the lowest bits."""

_FINE, _NOT_FINITE, _TOO_LARGE, _BAD_SCALE, _BAD_ZERO, _BAD_PEAK = -1, 0, 1, 2, 3, 4
_REASONS = (
    "a value is not finite",
    "a value is beyond the codec's cap",
    "the scale is out of range",
    "the scale is zero and a code is not",
    "the largest code is not 127",
)


@kernel(I64, F32_IN, I64, F32, BYTES_OUT)
def _encode(values_P, block, scale_cap, body):  # type: ignore[no-untyped-def]
    """Fill the body; -1, or 8·block index + reason of the first block refused."""
    n_values = values_P.size
    bits_P = values_P.view(np.int32)
    n_blocks = (n_values + block - 1) // block
    at = 0
    for b in range(n_blocks):
        start = b * block
        stop = min(start + block, n_values)
        values = values_P[start:stop]
        bits = bits_P[start:stop]
        peak = np.int32(0)
        # As integers, because a maximum of floats cannot be vectorised without giving up NaN.
        for i in range(bits.size):
            size = np.int32(bits[i] & _SIGN_OFF)
            peak = size if size > peak else peak
        if peak >= _INF_BITS:
            return 8 * b + _NOT_FINITE
        if peak < _ZERO_BELOW_BITS:
            body[at : at + 4 + stop - start] = np.uint8(0)
        else:
            scale = np.int32(peak).view(np.float32) / _127
            if scale > scale_cap:
                return 8 * b + _TOO_LARGE
            word = np.float32(scale).view(np.uint32)
            body[at] = np.uint8(word & np.uint32(255))
            body[at + 1] = np.uint8((word >> np.uint32(8)) & np.uint32(255))
            body[at + 2] = np.uint8((word >> np.uint32(16)) & np.uint32(255))
            body[at + 3] = np.uint8(word >> np.uint32(24))
            codes = body[at + 4 : at + 4 + stop - start]
            for i in range(codes.size):
                codes[i] = np.uint8(np.float32(values[i] / scale + _ROUNDER).view(np.uint32) & np.uint32(255))
        at += 4 + stop - start
    return _FINE


@kernel(I64, BYTES_IN, I64, I64, F32)
def _check(body, n_values, block, scale_cap):  # type: ignore[no-untyped-def]
    """-1 for a canonical body, else 8·block index + reason of the first block refused."""
    n_blocks = (n_values + block - 1) // block
    cap_bits = np.float32(scale_cap).view(np.int32)
    at = 0
    for b in range(n_blocks):
        n_codes = min(block, n_values - b * block)
        # The bits of non-negative floats are ordered like the floats; negative ones and NaN fall outside the range.
        bits = np.int32(
            np.uint32(body[at])
            | np.uint32(body[at + 1]) << np.uint32(8)
            | np.uint32(body[at + 2]) << np.uint32(16)
            | np.uint32(body[at + 3]) << np.uint32(24)
        )
        codes = body[at + 4 : at + 4 + n_codes].view(np.int8)
        high = np.int8(0)
        low = np.int8(0)
        for i in range(n_codes):
            high = max(high, codes[i])
            low = min(low, codes[i])
        peak = max(np.int64(high), -np.int64(low))
        if bits == 0:
            if peak != 0:
                return 8 * b + _BAD_ZERO
        elif bits < _SCALE_MIN_BITS or bits > cap_bits:
            return 8 * b + _BAD_SCALE
        elif peak != 127:
            return 8 * b + _BAD_PEAK
        at += 4 + n_codes
    return _FINE


@kernel(I64, BYTES_IN, I64, F32_OUT)
def _decode(body, block, out_P):  # type: ignore[no-untyped-def]
    """value = code · scale, one fp32 multiply."""
    n_values = out_P.size
    n_blocks = (n_values + block - 1) // block
    at = 0
    for b in range(n_blocks):
        start = b * block
        n_codes = min(block, n_values - start)
        scale = np.uint32(
            np.uint32(body[at])
            | np.uint32(body[at + 1]) << np.uint32(8)
            | np.uint32(body[at + 2]) << np.uint32(16)
            | np.uint32(body[at + 3]) << np.uint32(24)
        ).view(np.float32)
        codes = body[at + 4 : at + 4 + n_codes].view(np.int8)
        out = out_P[start : start + n_codes]
        for i in range(out.size):
            out[i] = np.float32(codes[i]) * scale
        at += 4 + n_codes
    return 0


@kernel(F64, BYTES_IN, I64, I64)
def _squared_norm(body, n_values, block):  # type: ignore[no-untyped-def]
    """Per block the integer Σ code², below 2^30, times scale², which fp64 holds; the blocks in order."""
    n_blocks = (n_values + block - 1) // block
    total = 0.0
    at = 0
    for b in range(n_blocks):
        n_codes = min(block, n_values - b * block)
        scale = np.uint32(
            np.uint32(body[at])
            | np.uint32(body[at + 1]) << np.uint32(8)
            | np.uint32(body[at + 2]) << np.uint32(16)
            | np.uint32(body[at + 3]) << np.uint32(24)
        ).view(np.float32)
        codes = body[at + 4 : at + 4 + n_codes].view(np.int8)
        squares = np.int32(0)
        for i in range(n_codes):
            # Narrowed at each step, lest numba count in int64.
            squares = np.int32(squares + np.int32(np.int32(codes[i]) * np.int32(codes[i])))
        total += (np.float64(scale) * np.float64(scale)) * np.float64(squares)
        at += 4 + n_codes
    return total


@kernel(I64, BYTES_IN, I64_IN, F32_IN, F32, I64, I64, F32, BYTES_OUT)
def _weighted_mean(span, offsets_K, weights_K, divisor, n_values, block, scale_cap, body):  # type: ignore[no-untyped-def]
    """(Σ_k weights[k]·x_k) / divisor in order of k, encoded; -1, or what `_encode` says.

    Block by block, so that the sums stay in the first cache. Weights are not zero; nothing is divided by 1.
    """
    n_blocks = (n_values + block - 1) // block
    room = np.empty(min(block, n_values), np.float32)
    at = 0
    for b in range(n_blocks):
        n_codes = min(block, n_values - b * block)
        sums = room[:n_codes]
        for k in range(offsets_K.size):
            o = offsets_K[k] + at
            scale = np.uint32(
                np.uint32(span[o])
                | np.uint32(span[o + 1]) << np.uint32(8)
                | np.uint32(span[o + 2]) << np.uint32(16)
                | np.uint32(span[o + 3]) << np.uint32(24)
            ).view(np.float32)
            codes = span[o + 4 : o + 4 + n_codes].view(np.int8)
            weight = weights_K[k]
            if k == 0:
                for p in range(n_codes):
                    sums[p] = weight * (np.float32(codes[p]) * scale)
            else:
                for p in range(n_codes):
                    sums[p] = sums[p] + weight * (np.float32(codes[p]) * scale)
        if divisor != np.float32(1):
            for p in range(n_codes):
                sums[p] = sums[p] / divisor
        verdict = _encode(sums, block, scale_cap, body[at : at + 4 + n_codes])
        if verdict != _FINE:
            return 8 * b + verdict
        at += 4 + n_codes
    return _FINE


class Int8:
    """Codec `int8`, id 1."""

    name = "int8"
    id = 1

    def body_bytes(self, n_values: int, block: int) -> int:
        return n_values + SCALE_BYTES * (-(-n_values // block))

    def encode(self, values_P: Floats, block: int, scale_cap: float, body: Bytes) -> None:
        _refuse(_encode(values_P, block, np.float32(scale_cap), body))

    def check(self, body: Bytes, n_values: int, block: int, scale_cap: float) -> None:
        _refuse(_check(body, n_values, block, np.float32(scale_cap)))

    def decode(self, body: Bytes, block: int, out_P: Floats) -> None:
        _decode(body, block, out_P)

    def squared_norm(self, body: Bytes, n_values: int, block: int) -> float:
        return float(_squared_norm(body, n_values, block))

    def weighted_mean(
        self,
        span: Bytes,
        offsets_K: NDArray[np.int64],
        weights_K: Floats,
        divisor: np.float32,
        n_values: int,
        block: int,
        scale_cap: float,
        body: Bytes,
    ) -> None:
        """Fill the body with Σ weights·rows / divisor; raises CodecError for what can't be encoded.

        The rows' bodies lie within `span`, where the offsets say; they are checked, and no weight is zero. Products and
        sums are rounded one by one in the order of rows.
        """
        _refuse(_weighted_mean(span, offsets_K, weights_K, divisor, n_values, block, np.float32(scale_cap), body))


def _refuse(verdict: int) -> None:
    if verdict != _FINE:
        raise CodecError(f"int8 block {verdict // 8}: {_REASONS[verdict % 8]}")
