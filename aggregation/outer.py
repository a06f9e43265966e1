"""The outer optimiser's step on flat fp32 vectors: Nesterov momentum, the same bytes on every machine.

The arithmetic is that of torch.optim.SGD(nesterov=True) without dampening or decay:

    buf = μ·buf + g        step = g + μ·buf        p = p - lr·step

with every product and every sum rounded to fp32 by itself. torch's own kernels may fuse them, which is why members
do not use them here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aggregation import codec
from aggregation.codec.frame import as_bytes
from aggregation.codec.registry import by_name
from aggregation.denormals import check_denormals
from aggregation.kernels import F32, F32_IN, F32_OUT, I64, kernel

if TYPE_CHECKING:
    from aggregation.codec.frame import Buffer

Floats = NDArray[np.float32]

_TILE_VALUES = 1 << 15
"""Values of a frame that are decoded at a time: between decoding and step they stay in the second cache."""


@kernel(I64, F32_OUT, F32_OUT, F32_IN, F32, F32, F32)
def _nesterov(anchor_P, momentum_P, delta_P, scale, lr, mu):  # type: ignore[no-untyped-def]
    for i in range(anchor_P.size):
        g = scale * delta_P[i]
        buf = mu * momentum_P[i] + g
        momentum_P[i] = buf
        step = g + mu * buf
        anchor_P[i] = anchor_P[i] - lr * step
    return 0


def nesterov(anchor_D: Floats, momentum_D: Floats, delta_D: ArrayLike, *, lr: float, momentum: float) -> None:
    """One outer step in place: `delta_D` is anchor minus trained parameters, so the anchor moves where nodes went.

    `lr` and `momentum` are rounded to fp32 once. Raises ValueError, and changes nothing, where the arrays are not
    flat, fp32, equally long and (anchor, momentum) writable, or where lr or momentum is not finite; DenormalsError.
    """
    check_denormals()
    anchor, buffer = _in_place(anchor_D), _in_place(momentum_D)
    delta = np.require(np.asarray(delta_D), np.float32, ["C", "A"])
    if not anchor.shape == buffer.shape == delta.shape:
        raise ValueError(f"anchor {anchor.shape}, momentum {buffer.shape} and delta {delta.shape} differ in length")
    _nesterov(anchor, buffer, delta, np.float32(1.0), _fp32("lr", lr), _fp32("momentum", momentum))


def nesterov_from_frame(
    anchor_P: Floats, momentum_P: Floats, frame: Buffer, *, lr: float, momentum: float, scale: float = 1.0
) -> None:
    """One outer step of one chunk with `scale` times the decoded values of an encoded result.

    `scale` is the commit's clip factor, rounded to fp32 once. Raises CodecError for a frame that is not canonical or
    not of the chunk's length, ValueError and DenormalsError as `nesterov` does; then nothing has changed.
    """
    check_denormals()
    anchor, buffer = _in_place(anchor_P), _in_place(momentum_P)
    if anchor.shape != buffer.shape:
        raise ValueError(f"anchor {anchor.shape} and momentum {buffer.shape} differ in length")
    factors = _fp32("scale", scale), _fp32("lr", lr), _fp32("momentum", momentum)
    name, head = codec.header(frame)
    codec.check(frame, codec=name, block=head.block, n_values=anchor.size, scale_cap=codec.RESULT_SCALE_CAP)
    coder, body = by_name(name), as_bytes(frame)[codec.HEADER_BYTES :]
    width = head.block * max(1, _TILE_VALUES // head.block)
    room = np.empty(min(width, anchor.size), np.float32)
    for start in range(0, anchor.size, width):
        stop = min(start + width, anchor.size)
        first, last = coder.body_bytes(start, head.block), coder.body_bytes(stop, head.block)
        delta = room[: stop - start]
        coder.decode(body[first:last], head.block, delta)
        _nesterov(anchor[start:stop], buffer[start:stop], delta, *factors)


def _in_place(values: Floats) -> Floats:
    array = np.asarray(values)  # a plain view of a mapped array
    fits = array.dtype == np.float32 and array.ndim == 1
    if not (fits and array.flags.c_contiguous and array.flags.aligned and array.flags.writeable):
        raise ValueError("anchor and momentum are writable, contiguous, flat fp32 arrays")
    return array


def _fp32(name: str, value: float) -> np.float32:
    if not (math.isfinite(value) and abs(value) <= float(np.finfo(np.float32).max)):
        raise ValueError(f"{name} is {value}, which no fp32 number can be")
    return np.float32(value)
