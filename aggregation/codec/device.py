"""The `int8` encoder in eager torch, on the tensor's own device: the same bytes as the kernel's, before the copy out.

It needs IEEE fp32 division and no flushing of denormals, which CPUs and CUDA devices give; on others encode a copy on
the CPU. Every divisor is a tensor of the device, because torch divides by a Python number on CUDA by multiplying with
its reciprocal, which rounds differently.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aggregation.codec.frame import HEADER_BYTES, SCALE_CAP, pack_header
from aggregation.codec.int8 import SCALE_BYTES, ZERO_BELOW, Int8
from aggregation.errors import CodecError

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
def encode_int8(values_P: Tensor, *, block: int = 1024, scale_cap: float = SCALE_CAP) -> Tensor:
    """The frame of a flat fp32, fp16 or bf16 tensor, as uint8 on its device; the halves are widened, which is exact.

    Raises CodecError for another kind of tensor, a non-finite value or one beyond the codec's cap.
    """
    if values_P.dtype not in _DTYPES or values_P.ndim != 1:
        raise CodecError(f"values are one flat fp32 vector, not {values_P.dtype} of shape {tuple(values_P.shape)}")
    values_P = values_P.to(torch.float32)
    n_values = values_P.numel()
    header = torch.tensor(list(pack_header(Int8.id, block, n_values)), dtype=torch.uint8)
    n_whole = n_values - n_values % block
    parts = [header.to(values_P.device)]
    if n_whole:
        parts.append(_encode_blocks(values_P[:n_whole].reshape(-1, block), scale_cap))
    if n_whole < n_values:
        parts.append(_encode_blocks(values_P[n_whole:].reshape(1, -1), scale_cap))
    frame = torch.cat(parts)
    if frame.numel() != HEADER_BYTES + Int8().body_bytes(n_values, block):
        raise AssertionError("the device encoder and the frame's layout disagree")
    return frame


def _encode_blocks(values_nB: Tensor, scale_cap: float) -> Tensor:
    """(n, B) values to the bytes of n interleaved blocks, flat."""
    peak_n1 = values_nB.abs().amax(dim=1, keepdim=True)
    # One look at the whole: amax carries NaN and infinity along, and a device is asked only once.
    top = float(peak_n1.max())
    scale_n1 = peak_n1 / torch.full_like(peak_n1, 127.0)
    if not top < float("inf"):
        raise CodecError("int8: a value is not finite")
    if float(scale_n1.max()) > scale_cap:
        raise CodecError("int8: a value is beyond the codec's cap")
    zero_n1 = peak_n1 < ZERO_BELOW
    divisor_n1 = torch.where(zero_n1, torch.ones_like(scale_n1), scale_n1)
    codes_nB = torch.round(values_nB / divisor_n1).to(torch.int8)  # round half to even
    stored_n1 = torch.where(zero_n1, torch.zeros_like(scale_n1), scale_n1)
    n = values_nB.shape[0]
    scales = stored_n1.view(torch.uint8).view(n, SCALE_BYTES)
    return torch.cat([scales, codes_nB.view(torch.uint8)], dim=1).view(-1)
