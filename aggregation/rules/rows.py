"""A chunk's contributions as K rows of P fp32 values, decoded tile by tile, a centre last where there is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from aggregation.codec.frame import Bytes, Codec
from aggregation.codec.int8 import SCALE_BYTES
from aggregation.kernels import BYTES_IN, F32_IN, F32_ROWS_OUT, I64, I64_IN, kernel
from aggregation.rules.reduction import median

Floats = NDArray[np.float32]

_TILE_VALUES = 1 << 17
"""Decoded values that are held at a time, all rows together: half a mebibyte, so that they stay in the second cache."""


class Rows(Protocol):
    """K rows of finite values."""

    @property
    def n_rows(self) -> int: ...

    @property
    def n_values(self) -> int: ...

    def decode(self, start: int, out_KW: Floats) -> None:
        """Fill `out_KW` with the values from `start` on; both ends are on a block's boundary, or the end."""
        ...


class ArrayRows:
    """Rows that are fp32 already, (K, P)."""

    def __init__(self, values_KP: Floats) -> None:
        self._values_KP = values_KP
        self.n_rows, self.n_values = values_KP.shape

    def decode(self, start: int, out_KW: Floats) -> None:
        out_KW[:] = self._values_KP[:, start : start + out_KW.shape[1]]


class CodecRows:
    """Checked bodies of frames of any codec; the values of each are multiplied by `factor`, rounded to fp32."""

    def __init__(self, coder: Codec, bodies: Sequence[Bytes], n_values: int, block: int, factor: float = 1.0) -> None:
        self.n_rows, self.n_values = len(bodies), n_values
        self._coder, self._bodies, self._block, self._factor = coder, bodies, block, np.float32(factor)

    def decode(self, start: int, out_KW: Floats) -> None:
        stop = start + out_KW.shape[1]
        first, last = self._coder.body_bytes(start, self._block), self._coder.body_bytes(stop, self._block)
        for body, row_W in zip(self._bodies, out_KW, strict=True):
            self._coder.decode(body[first:last], self._block, row_W)
        if self._factor != 1:
            np.multiply(out_KW, self._factor, out=out_KW)


class Int8Rows:
    """Checked bodies of int8 frames, which kernels read in place; row k counts `factors_K[k]` times.

    numba takes no list of arrays without a copy, so a kernel gets one view that spans all bodies and where in it each
    of them begins. What lies between them is never read.
    """

    def __init__(
        self, bodies: Sequence[Bytes], n_values: int, block: int, factors: Sequence[float] | None = None
    ) -> None:
        addresses = [int(body.__array_interface__["data"][0]) for body in bodies]
        lowest = min(addresses)
        n_bytes = max(addresses) - lowest + bodies[0].size
        first = bodies[addresses.index(lowest)]
        self._bodies = bodies  # which keeps the memory behind the span
        self.span: Bytes = np.lib.stride_tricks.as_strided(first, (n_bytes,), (1,), writeable=False)
        self.offsets_K = np.array(addresses, np.int64) - lowest
        self.factors_K = np.array([1.0] * len(bodies) if factors is None else factors, np.float32)
        self.n_rows, self.n_values, self.block = len(bodies), n_values, block

    def offsets_at(self, start: int) -> NDArray[np.int64]:
        """Where in the span each row's block that begins with value `start` lies."""
        return self.offsets_K + (start + SCALE_BYTES * (start // self.block))

    def decode(self, start: int, out_KW: Floats) -> None:
        _decode(self.span, self.offsets_at(start), self.factors_K, self.block, out_KW)


class WithCentre:
    """Rows, and one row more behind them."""

    def __init__(self, rows: Rows, centre: Rows) -> None:
        self._rows, self._centre = rows, centre
        self.n_rows, self.n_values = rows.n_rows + 1, rows.n_values

    def decode(self, start: int, out_KW: Floats) -> None:
        self._rows.decode(start, out_KW[:-1])
        self._centre.decode(start, out_KW[-1:])


class WithMedian:
    """Rows, and behind them the centre of those who have none: their unweighted coordinate median."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._weights_N = np.ones(rows.n_rows, np.float32)
        self.n_rows, self.n_values = rows.n_rows + 1, rows.n_values

    def decode(self, start: int, out_KW: Floats) -> None:
        self._rows.decode(start, out_KW[:-1])
        median(out_KW[:-1], self._weights_N, 0, out_KW[-1])


def tiles(rows: Rows, block: int) -> Iterator[tuple[int, Floats]]:
    """All rows decoded, tile by tile: where it starts, and its (K, W) values, which the next tile overwrites."""
    width = min(block * max(1, _TILE_VALUES // rows.n_rows // block), rows.n_values)
    room_KW = np.empty((rows.n_rows, width), np.float32)
    for start in range(0, rows.n_values, width):
        n = min(width, rows.n_values - start)
        tile_KW = room_KW if n == width else np.empty((rows.n_rows, n), np.float32)
        rows.decode(start, tile_KW)
        yield start, tile_KW


@kernel(I64, BYTES_IN, I64_IN, F32_IN, I64, F32_ROWS_OUT)
def _decode(span, offsets_K, factors_K, block, out_KW):  # type: ignore[no-untyped-def]
    """value = factor · (code · scale), each product rounded; a factor of 1 changes nothing."""
    n_rows, n_values = out_KW.shape
    for row in range(n_rows):
        at = offsets_K[row]
        factor = factors_K[row]
        for start in range(0, n_values, block):
            n_codes = min(block, n_values - start)
            scale = np.uint32(
                np.uint32(span[at])
                | np.uint32(span[at + 1]) << np.uint32(8)
                | np.uint32(span[at + 2]) << np.uint32(16)
                | np.uint32(span[at + 3]) << np.uint32(24)
            ).view(np.float32)
            codes = span[at + 4 : at + 4 + n_codes].view(np.int8)
            out = out_KW[row, start : start + n_codes]
            for p in range(n_codes):
                out[p] = factor * (np.float32(codes[p]) * scale)
            at += 4 + n_codes
    return 0
