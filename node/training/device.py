"""What a trainer computes on: by the name that its maker gave it, and what it can do at most."""

from __future__ import annotations

import torch
from torch import Tensor

from node.training.utilisation import peak_flops

_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def name_of(device: torch.device) -> str:
    """As CUDA calls it ("NVIDIA H200"); elsewhere the kind alone ("cpu")."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_flops_of(parameter: Tensor) -> float:
    """What the device of a model's parameter can do at most at the parameter's precision, in FLOP/s; 0: not known."""
    return peak_flops(name_of(parameter.device), _PRECISIONS.get(parameter.dtype, ""))
