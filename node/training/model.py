"""Builds the model of a RunSpec, with the same first parameters everywhere, and loads and stores flat vectors of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from aggregation.vector import Layout, flatten_into, layout_of
from node.training.task import CausalLMTask
from protos.runspec import RunSpec

_REFUSED = frozenset({"auto_map", "attn_implementation", "experts_implementation", "quantization_config"})
"""What would choose other code or another precision than the run's: never a stranger's config to say."""

_INT_MAX = 2**31 - 1
_LAYERS_MAX = 1024


class ModelError(ValueError):
    """A model that can't be built here: says why."""


def check_config(config: dict[str, Any]) -> None:
    """Raise ModelError for a config that is not plain data of a known kind, before anything is built from it."""
    if not isinstance(config.get("model_type"), str):
        raise ModelError("model.config has no model_type")
    for key, value in config.items():
        if key.startswith("_") or key in _REFUSED:
            raise ModelError(f"model.config must not set {key}")
        if type(value) is int and abs(value) > _INT_MAX:
            raise ModelError(f"model.config: {key} is {value}")
        if key.endswith("layers") and type(value) is int and value > _LAYERS_MAX:
            raise ModelError(f"model.config: {value} {key}, at most {_LAYERS_MAX}")


def build(config: dict[str, Any], seed: int) -> nn.Module:
    """The model in fp32 on the CPU, with the parameters that its own initialisation draws from this seed.

    Raises ModelError for an unknown or contradictory config.
    """
    # Here, not above: with torch it takes seconds that a process which builds no model should not spend.
    from transformers import AutoConfig, AutoModelForCausalLM

    check_config(config)
    arguments = {key: value for key, value in config.items() if key != "model_type"}
    try:
        hf_config = AutoConfig.for_model(config["model_type"], **arguments)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: nn.Module = AutoModelForCausalLM.from_config(
                hf_config, attn_implementation="sdpa", dtype=torch.float32, trust_remote_code=False
            )
    except Exception as error:
        # The library has errors of its own kinds for a config that makes no sense, with nothing in common.
        raise ModelError(f"model.config gives no model: {' '.join(str(error).split())[:300]}") from error
    return model


def build_task(spec: RunSpec) -> CausalLMTask:
    """The task of a run; raises ModelError."""
    return CausalLMTask(build(spec.model.config, spec.seed))


def initial_vector(spec: RunSpec) -> NDArray[np.float32]:
    """(D,) the first parameters of a run as its flat vector; raises ModelError, LayoutError."""
    parameters = build_task(spec).parameters()
    layout = layout_of([(name, parameter.shape) for name, parameter in parameters], block=spec.codec.block)
    check_layout(layout, spec)
    values_D = np.empty(layout.n_values, np.float32)
    flatten_into(parameters, layout, values_D)
    return values_D


def check_layout(layout: Layout, spec: RunSpec) -> None:
    """Raise ModelError where the model built here does not have the run's layout."""
    if (layout.n_values, layout.digest.hex()) != (spec.model.n_values, spec.model.layout_digest):
        raise ModelError(
            f"the model built here, of {layout.n_values} values, has another layout than the run's of "
            f"{spec.model.n_values}: this version of transformers builds it differently"
        )
