"""Codec `fp32`: the values as they are, little-endian; for tests and for runs that can afford four bytes a value.

The block says only in which groups the squared norm is summed. Canonical means finite and at most 127 times the
scale cap, so that both codecs bound a decoded value alike.
"""

from __future__ import annotations

import numpy as np

from aggregation.codec.frame import Bytes, Codec, Floats
from aggregation.errors import CodecError
from aggregation.kernels import F32_IN, F64, I64, kernel

VALUE_BYTES = 4
_LITTLE = np.dtype("<f4")
_TILE_VALUES = 1 << 14
_NORM_TILE_VALUES = 1 << 15
"""Twice as many, since a tile's two kernels cost a call each and the tile may fill half the second cache."""


@kernel(F64, F32_IN, I64, F64)
def _squared_norm(values_P, block, total):  # type: ignore[no-untyped-def]
    """Adds whole blocks to `total`: sixteen fp64 lanes by value index mod 16, the lanes in order, then the blocks."""
    lanes = np.empty(16, np.float64)
    for start in range(0, values_P.size, block):
        values = values_P[start : min(start + block, values_P.size)]
        lanes[:] = 0.0
        # Four of a lane's values at a time, in their order: a lane is loaded and stored a quarter as often.
        long = values.size - values.size % 64
        for i in range(0, long, 64):
            part = values[i : i + 64]
            for lane in range(16):
                value = np.float64(part[lane])
                squares = lanes[lane] + value * value
                value = np.float64(part[lane + 16])
                squares += value * value
                value = np.float64(part[lane + 32])
                squares += value * value
                value = np.float64(part[lane + 48])
                lanes[lane] = squares + value * value
        for i in range(long, values.size):
            value = np.float64(values[i])
            lanes[i % 16] += value * value
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
        return tiled_norm(self, body, n_values, block)


def tiled_norm(codec: Codec, body: Bytes, n_values: int, block: int) -> float:
    """`squared_norm` of a checked body of any codec, by decoding tiles of whole blocks."""
    total = 0.0
    step = block * max(1, _NORM_TILE_VALUES // block)
    tile = np.empty(min(step, n_values), np.float32)
    for start in range(0, n_values, step):
        stop = min(start + step, n_values)
        part = body[codec.body_bytes(start, block) : codec.body_bytes(stop, block)]
        codec.decode(part, block, tile[: stop - start])
        total = float(_squared_norm(tile[: stop - start], block, total))
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
