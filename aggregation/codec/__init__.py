"""Values to frames and back: bounded, total, and to the same bytes on every machine.

Whatever bytes come in, a function here gives a value or raises CodecError, and it compares sizes before it spends
memory. `frame` has the layout of the header, each codec's module that of its body; `feedback` encodes with a residual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from aggregation.codec.frame import (
    HEADER_BYTES,
    RESULT_SCALE_CAP,
    SCALE_CAP,
    Bytes,
    Codec,
    Floats,
    Header,
    as_bytes,
    pack_header,
    read_header,
)
from aggregation.codec.registry import by_id, by_name, feedback_decay, names, result_codec
from aggregation.denormals import check_denormals
from aggregation.errors import CodecError

if TYPE_CHECKING:
    from aggregation.codec.frame import Buffer

__all__ = [
    "HEADER_BYTES",
    "RESULT_SCALE_CAP",
    "SCALE_CAP",
    "body_range",
    "check",
    "decode",
    "decode_into",
    "encode",
    "encode_into",
    "feedback_decay",
    "frame_bytes",
    "header",
    "measure",
    "names",
    "result_codec",
    "squared_norm",
]

BLOCK = 1024


def frame_bytes(name: str, n_values: int, block: int) -> int:
    """Length in bytes of the frame of so many values, header included."""
    codec = by_name(name)
    pack_header(codec.id, block, n_values)
    return HEADER_BYTES + codec.body_bytes(n_values, block)


def body_range(name: str, *, block: int, n_values: int, value_start: int, value_stop: int) -> tuple[int, int]:
    """Where in a frame the values [start, stop) lie, as bytes [start, stop).

    `value_start` is a multiple of the block, `value_stop` one too or the end. Raises CodecError otherwise.
    """
    codec = by_name(name)
    pack_header(codec.id, block, n_values)
    whole = value_start % block == 0 and (value_stop % block == 0 or value_stop == n_values)
    if not (whole and 0 <= value_start < value_stop <= n_values):
        raise CodecError(f"values [{value_start}, {value_stop}) are no range of whole blocks of {block} in {n_values}")
    return (
        HEADER_BYTES + codec.body_bytes(value_start, block),
        HEADER_BYTES + codec.body_bytes(value_stop, block),
    )


def encode(name: str, values_D: ArrayLike, *, block: int = BLOCK) -> bytes:
    """One frame of a flat vector of numbers, which are taken as fp32.

    fp16 and bf16 arrays are widened, fp64 and integers rounded; strided and read-only ones will do. Raises CodecError
    for a non-finite value, one beyond the codec's cap, a block that the codec can't have, and for no flat vector.
    """
    values = _as_values(values_D)
    frame = np.empty(frame_bytes(name, values.size, block), np.uint8)
    encode_into(name, values, frame, block=block)
    return frame.tobytes()


def encode_into(
    name: str, values_P: ArrayLike, out: Buffer, *, block: int = BLOCK, scale_cap: float = SCALE_CAP
) -> int:
    """Write the frame to the beginning of a writable buffer; the bytes written.

    Raises CodecError for a non-finite or too large value and for a buffer that is read-only or too short; what the
    buffer holds then is undefined.
    """
    codec = by_name(name)
    values = _as_values(values_P)
    head = pack_header(codec.id, block, values.size)
    n_bytes = HEADER_BYTES + codec.body_bytes(values.size, block)
    target = as_bytes(out)
    if not target.flags.writeable:
        raise CodecError("the buffer to encode into is read-only")
    if target.size < n_bytes:
        raise CodecError(f"the frame needs {n_bytes} bytes, the buffer has {target.size}")
    target[:HEADER_BYTES] = np.frombuffer(head, np.uint8)
    codec.encode(values, block, scale_cap, target[HEADER_BYTES:n_bytes])
    return n_bytes


def header(frame: Buffer) -> tuple[str, Header]:
    """Codec name and header of a frame, whose length is then known to be right; raises CodecError."""
    codec, head, _ = _open(frame)
    return codec.name, head


def check(frame: Buffer, *, codec: str, block: int, n_values: int, scale_cap: float = SCALE_CAP) -> None:
    """Raise CodecError unless the bytes are the canonical frame of such values.

    Results are checked with `RESULT_SCALE_CAP`, contributions with the default.
    """
    found, body = _open_as(frame, codec, block, n_values)
    found.check(body, n_values, block, scale_cap)


def measure(frame: Buffer, *, codec: str, block: int, n_values: int, scale_cap: float = SCALE_CAP) -> float:
    """`check`, and then `squared_norm`, which would check again by itself."""
    check_denormals()
    found, body = _open_as(frame, codec, block, n_values)
    found.check(body, n_values, block, scale_cap)
    return found.squared_norm(body, n_values, block)


def decode(frame: Buffer, max_values: int) -> Floats:
    """The (D,) fp32 values of a frame, if it is canonical and holds at most so many; raises CodecError."""
    codec, head, body = _open(frame)
    if head.n_values > max_values:
        raise CodecError(f"frame holds {head.n_values} values, at most {max_values} are wanted")
    codec.check(body, head.n_values, head.block, RESULT_SCALE_CAP)
    out_D = np.empty(head.n_values, np.float32)
    codec.decode(body, head.block, out_D)
    return out_D


def decode_into(frame: Buffer, out_P: Floats, *, checked: bool = False) -> None:
    """Decode into an array of exactly the frame's length; raises CodecError, and then leaves the array alone.

    `checked` says that the caller knows the frame to be canonical.
    """
    codec, head, body = _open(frame)
    out = _as_output(out_P)
    if head.n_values != out.size:
        raise CodecError(f"frame holds {head.n_values} values, the array {out.size}")
    if not checked:
        codec.check(body, head.n_values, head.block, RESULT_SCALE_CAP)
    codec.decode(body, head.block, out)


def squared_norm(frame: Buffer) -> float:
    """‖·‖² in fp64 of a canonical frame's values, the same number on every machine; raises CodecError.

    Of int8 a block's integer sum of squared codes times its scale², both exact. Else a decoded value is squared in
    fp64, where the square of an fp32 value is exact, and added to lane (index mod 16) of its block, and the sixteen
    lanes are added in order. The blocks are added in order. Raises DenormalsError too.
    """
    check_denormals()
    codec, head, body = _open(frame)
    codec.check(body, head.n_values, head.block, RESULT_SCALE_CAP)
    return codec.squared_norm(body, head.n_values, head.block)


def _open(frame: Buffer) -> tuple[Codec, Header, Bytes]:
    """Codec, header and body of a frame of exactly the right length."""
    data = as_bytes(frame)
    head = read_header(data)
    codec = by_id(head.codec_id)
    n_bytes = HEADER_BYTES + codec.body_bytes(head.n_values, head.block)
    if data.size != n_bytes:
        raise CodecError(f"frame of {head.n_values} values has {data.size} bytes instead of {n_bytes}")
    return codec, head, data[HEADER_BYTES:]


def _open_as(frame: Buffer, name: str, block: int, n_values: int) -> tuple[Codec, Bytes]:
    """Codec and body of a frame that is to hold such values; raises CodecError for one that doesn't say so."""
    found, head, body = _open(frame)
    if (found.name, head.block, head.n_values) != (name, block, n_values):
        raise CodecError(
            f"frame holds {head.n_values} values as {found.name} with block {head.block}, "
            f"not {n_values} as {name} with block {block}"
        )
    return found, body


def _as_values(values: ArrayLike) -> Floats:
    """A flat, contiguous fp32 vector: what is narrower is widened, what is wider is rounded to the nearest."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists; tensors that numpy has no type or memory for
        raise CodecError(f"values are no numbers that numpy knows: {error}") from None
    # Extension types, such as the bf16 of ml_dtypes, say themselves that they fit into fp32.
    if array.dtype.kind not in "fiub" and not np.can_cast(array.dtype, np.float32):
        raise CodecError(f"values are real numbers, not {array.dtype}")
    if array.ndim != 1:
        raise CodecError(f"values are one flat vector, not of shape {array.shape}")
    with np.errstate(over="ignore"):  # an fp64 value beyond fp32 becomes infinite, which the codec refuses
        return np.asarray(np.require(array, np.float32, ["C", "A"]))


def _as_output(out_P: Floats) -> Floats:
    out = np.asarray(out_P)  # a plain view of a mapped array
    fits = out.dtype == np.float32 and out.ndim == 1
    if not (fits and out.flags.c_contiguous and out.flags.aligned and out.flags.writeable):
        raise CodecError("values are decoded into a writable, contiguous, flat fp32 array")
    return out
