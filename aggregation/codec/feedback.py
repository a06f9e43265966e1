"""Error feedback: what a coarse frame leaves out of a sender's values is kept, and added to its next ones.

    a = decay · residual + delta            one product and one sum, each rounded to fp32
    frame = encode(a)
    next residual = a - decode(frame)       exact in fp32, so nothing is lost but what the decay takes

Seide et al. 2014 (1-bit SGD); for pseudo-gradients SparseLoCo (arXiv 2508.15706, decay 0.95). The caller keeps
`residual` until it knows whether the frame counted. If it did, `next` takes its place. If it did not, `next` is
thrown away and the old residual serves again, with a delta that still holds everything since the last commit: so no
update is lost, and none is sent twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aggregation.codec.frame import HEADER_BYTES, SCALE_CAP, Floats, as_bytes, pack_header
from aggregation.codec.registry import by_name, feedback_decay
from aggregation.errors import CodecError
from aggregation.kernels import F32, F32_IN, F32_OUT, I64, kernel

if TYPE_CHECKING:
    from aggregation.codec.frame import Buffer

_TILE_VALUES = 1 << 15
"""Added, encoded, decoded and subtracted so many values at a time, so that they stay in the second cache."""


@kernel(I64, F32, F32_IN, F32_IN, F32_OUT)
def _add(decay, residual_P, delta_P, out_P):  # type: ignore[no-untyped-def]
    for i in range(out_P.size):
        kept = decay * residual_P[i]
        out_P[i] = kept + delta_P[i]
    return 0


@kernel(I64, F32_IN, F32_OUT)
def _take_away(decoded_P, out_P):  # type: ignore[no-untyped-def]
    for i in range(out_P.size):
        out_P[i] = out_P[i] - decoded_P[i]
    return 0


def encode(name: str, delta_P: Floats, residual_P: Floats, out: Buffer, next_P: Floats, *, block: int) -> int:
    """Write the frame of a = decay · residual + delta to the beginning of `out`, and a - decoded to `next_P`.

    All three arrays are flat, contiguous fp32 of one length. Decoded and next add up to a exactly. Returns the bytes
    written. Raises CodecError for a codec without feedback, arrays that do not fit together, an `out` or a `next_P`
    that shares memory with what is read (the residual must outlive a round that does not commit) or with each other,
    and for what `encode_into` refuses; then the frame and `next_P` are undefined, delta and residual as they were.
    """
    codec = by_name(name)
    decay = feedback_decay(name)
    if decay is None:
        raise CodecError(f"{name} has no error feedback")
    delta, residual, following = (_flat(array) for array in (delta_P, residual_P, next_P))
    n_values = delta.size
    if residual.size != n_values or following.size != n_values:
        raise CodecError(f"{n_values} values, a residual of {residual.size} and a next one of {following.size}")
    if not following.flags.writeable or any(np.may_share_memory(following, read) for read in (residual, delta)):
        raise CodecError("the next residual is written to memory of its own")
    head = pack_header(codec.id, block, n_values)
    n_bytes = HEADER_BYTES + codec.body_bytes(n_values, block)
    target = as_bytes(out)
    if not target.flags.writeable or target.size < n_bytes:
        raise CodecError(f"the frame needs {n_bytes} writable bytes, the buffer has {target.size}")
    target = target[:n_bytes]
    if any(np.may_share_memory(target, other) for other in (residual, delta, following)):
        raise CodecError("the frame is written to memory of its own")
    target[:HEADER_BYTES] = np.frombuffer(head, np.uint8)
    body = target[HEADER_BYTES:]
    step = block * max(1, _TILE_VALUES // block)
    decoded = np.empty(min(step, n_values), np.float32)
    for start in range(0, n_values, step):
        stop = min(start + step, n_values)
        following_tile = following[start:stop]
        part = body[codec.body_bytes(start, block) : codec.body_bytes(stop, block)]
        _add(np.float32(decay), residual[start:stop], delta[start:stop], following_tile)
        try:
            codec.encode(following_tile, block, SCALE_CAP, part)
        except CodecError as error:
            raise CodecError(f"values from {start} on: {error}") from None
        codec.decode(part, block, decoded[: stop - start])
        _take_away(decoded[: stop - start], following_tile)
    return n_bytes


def _flat(array: Floats) -> Floats:
    plain = np.asarray(array)  # a plain view of a mapped array
    if not (plain.dtype == np.float32 and plain.ndim == 1 and plain.flags.c_contiguous and plain.flags.aligned):
        raise CodecError("residuals and what is added to them are contiguous, flat fp32 arrays")
    return plain
