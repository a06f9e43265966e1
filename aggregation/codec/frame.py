"""The header of an encoded chunk, and what a codec must be able to do.

offset  bytes  field (little-endian)
0       4      magic "BRF1": frame, version 1
4       1      codec id
5       3      zero
8       4      block: values that share a scale, a multiple of 16
12      4      n_values, at least 1
16      …      the codec's body; its length follows from the header alone
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aggregation.errors import CodecError

if TYPE_CHECKING:
    from typing_extensions import Buffer as _Buffer

    Buffer: TypeAlias = _Buffer | NDArray[Any]

MAGIC = b"BRF1"
HEADER_BYTES = 16
BLOCK_STEP = 16
"""A block is a multiple of it: sixteen lanes of the squared norm, and every scale on a four-byte boundary."""
BLOCK_MAX = 1 << 16
N_VALUES_MAX = (1 << 32) - 1
SCALE_CAP = 2.0**32
"""Largest scale of a contribution; its values stay below 2^39. Honest pseudo-gradients are below 2^10; what the cap
buys is that no sum of 2^20 rows with weights below 2^63 can overflow."""
RESULT_SCALE_CAP = 2.0 * SCALE_CAP
"""Largest scale of a result: a mean of rows at the cap may round to a little above it."""

_HEADER = struct.Struct("<4sB3sII")

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class Codec(Protocol):
    """How values become a body and back. Sizes are already right when these are called."""

    @property
    def name(self) -> str: ...

    @property
    def id(self) -> int: ...

    def body_bytes(self, n_values: int, block: int) -> int:
        """Length of a body; also the offset of value `n_values`, where that is a multiple of the block.

        Raises CodecError for a block that fits a frame, but not this codec.
        """
        ...

    def encode(self, values_P: Floats, block: int, scale_cap: float, body: Bytes) -> None:
        """Fill the body; raises CodecError for a non-finite or too large value."""
        ...

    def check(self, body: Bytes, n_values: int, block: int, scale_cap: float) -> None:
        """Raise CodecError unless the body is the canonical form of finite values within the cap."""
        ...

    def decode(self, body: Bytes, block: int, out_P: Floats) -> None:
        """Fill `out_P` from a checked body."""
        ...

    def squared_norm(self, body: Bytes, n_values: int, block: int) -> float:
        """‖·‖² of a checked body, in the pinned order."""
        ...


@dataclass(frozen=True, slots=True)
class Header:
    """What a frame says of itself; within limits, but not yet compared with the frame's length."""

    codec_id: int
    block: int
    n_values: int


def pack_header(codec_id: int, block: int, n_values: int) -> bytes:
    """The 16 bytes of a header; raises CodecError for a block or a length out of range."""
    _check_sizes(block, n_values)
    return _HEADER.pack(MAGIC, codec_id, b"\0\0\0", block, n_values)


def read_header(data: Bytes) -> Header:
    """The header of a frame (or of its beginning); raises CodecError for anything but a canonical one."""
    if data.size < HEADER_BYTES:
        raise CodecError(f"frame of {data.size} bytes is shorter than its header")
    magic, codec_id, zeros, block, n_values = _HEADER.unpack_from(data.data)
    if magic != MAGIC:
        raise CodecError(f"frame begins with {magic!r}, not {MAGIC!r}")
    if zeros != b"\0\0\0":
        raise CodecError("reserved bytes of the frame's header are not zero")
    _check_sizes(block, n_values)
    return Header(codec_id, block, n_values)


def as_bytes(buffer: Buffer) -> Bytes:
    """A one-dimensional view of a bytes-like object, without a copy; raises CodecError if it is not contiguous."""
    try:
        view = (buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)).cast("B")
    except (TypeError, ValueError) as error:
        raise CodecError(f"a frame is a contiguous buffer: {error}") from None
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def _check_sizes(block: int, n_values: int) -> None:
    if not (BLOCK_STEP <= block <= BLOCK_MAX and block % BLOCK_STEP == 0):
        raise CodecError(f"block {block} is not a multiple of {BLOCK_STEP} up to {BLOCK_MAX}")
    if not 1 <= n_values <= N_VALUES_MAX:
        raise CodecError(f"{n_values} values do not fit a frame (1 to {N_VALUES_MAX})")
