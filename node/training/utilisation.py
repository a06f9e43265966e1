"""Which share of what a device can compute goes into the model: MFU, as PaLM's appendix B has it (arXiv 2204.02311).

    MFU = tokens/s · (6 N + 12 L H Q T) / peak

N parameters, L layers, H query heads of Q values each, sequences of T tokens. Only what the model itself needs is
counted, forward and backward: who computes activations twice to save memory has no higher figure for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protos.runspec import RunSpec

PARAMETER_FLOPS = 6
"""Of a token for each parameter: a multiplication and an addition forward, twice that backward."""
ATTENTION_FLOPS = 12
"""Of a token for each value of each head and each token of the sequence: two products, 2 FLOPs each, times three."""

_PEAK_TFLOPS: Mapping[str, tuple[float | None, float | None]] = {
    "NVIDIA B200": (None, 2250.0),
    "NVIDIA H200": (67.0, 989.0),
    "NVIDIA H100 80GB HBM3": (67.0, 989.0),
    "NVIDIA H100 NVL": (60.0, 835.0),
    "NVIDIA H100 PCIe": (51.0, 756.0),
    "NVIDIA A100-SXM4-40GB": (19.5, 312.0),
    "NVIDIA A100-SXM4-80GB": (19.5, 312.0),
    "NVIDIA A100-PCIE-40GB": (19.5, 312.0),
    "NVIDIA A100 80GB PCIe": (19.5, 312.0),
    "NVIDIA A30": (10.3, 165.0),
    "NVIDIA A10": (31.2, 125.0),
    "NVIDIA L40S": (91.6, 362.0),
    "NVIDIA L40": (90.5, 181.0),
    "NVIDIA L4": (30.3, 121.0),
    "Tesla V100-SXM2-16GB": (15.7, None),
    "Tesla V100-SXM2-32GB": (15.7, None),
    "Tesla T4": (8.1, None),
    "NVIDIA GeForce RTX 3090": (35.6, 71.0),
    "NVIDIA GeForce RTX 4090": (82.6, 165.2),
}
"""By the name that CUDA gives: fp32 outside of the tensor cores, and bf16 in them, dense, added up in fp32; None: not
said, or not there. From NVIDIA's data sheets and architecture whitepapers. A name has to be the whole name: the same
chip is slower in a laptop, and a slice of it is less of it."""


def peak_flops(device: str, precision: str) -> float:
    """What the device can do at most at a precision of RunSpec's, in FLOP/s; 0 where that is not known (any CPU)."""
    fp32, bf16 = _PEAK_TFLOPS.get(device, (None, None))
    return 1e12 * ({"fp32": fp32, "bf16": bf16}.get(precision) or 0.0)


def flops_per_token(spec: RunSpec) -> float:
    """6 N + 12 L H Q T; without the second part where the config doesn't say what that is, so rather too few."""
    attention = _attention_values(spec.model.config) * spec.data.sequence_length
    return float(PARAMETER_FLOPS * spec.model.n_parameters + ATTENTION_FLOPS * attention)


def utilisation(tokens_per_s: float, flops_per_token: float, peak_flops: float) -> float | None:
    """The share, from the speed at which a node trains; None where no speed is measured or no peak is known.

    What waiting for others costs is no part of it: the idle share says that.
    """
    if tokens_per_s <= 0 or peak_flops <= 0:
        return None
    return tokens_per_s * flops_per_token / peak_flops


def _attention_values(config: Mapping[str, Any]) -> int:
    """L · H · Q, by the names that Hugging Face's configs use for it; 0 where one of them is not there."""
    layers = _first(config, "num_hidden_layers", "n_layer", "num_layers")
    width = _first(config, "hidden_size", "n_embd", "d_model")
    heads, head_size = _first(config, "num_attention_heads", "n_head"), _first(config, "head_dim")
    if not heads:
        return 0
    return layers * (heads * head_size if head_size else width)


def _first(config: Mapping[str, Any], *names: str) -> int:
    """The first of these that is there as a size, else 0."""
    values = (config.get(name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), 0)
