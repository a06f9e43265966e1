"""The inner optimisation of one node: from an anchor, some steps of AdamW or SGD, and what they add up to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from aggregation.vector import Layout, delta_into, load_from, plain_name
from node.training.checkpoint import CheckpointError
from node.training.task import Task
from protos.runspec import InnerSpec

MICRO_TOKENS = 2**14
"""Tokens of one forward and backward pass; a larger batch is accumulated."""

SKIPS_IN_A_ROW = 5
"""After so many skipped batches it is the parameters that are broken, finite or not, and no longer the data."""

_NORM_MAX = math.sqrt(torch.finfo(torch.float32).max)
"""Of a gradient as the optimiser sees it: the square of a larger one may overflow in AdamW's moments, for ever."""

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps of each parameter; the inner SGD keeps nothing."""


@dataclass(slots=True)
class Tally:
    """What the steps since the anchor add up to."""

    steps: int = 0
    skipped: int = 0  # batches that moved nothing, or whose steps were undone
    sum_lr: float = 0.0
    sum_loss: float = 0.0
    skipped_in_a_row: int = 0  # since the last step, or since parameters were given up

    @property
    def mean_loss(self) -> float:
        """Over the steps; 0 without any."""
        return self.sum_loss / self.steps if self.steps else 0.0


class InnerLoop:
    """A task's parameters between two anchors. fp32, on the CPU.

    Moments outlive a Load, and `cold_step` counts the steps since they were empty. A batch whose loss or gradient is
    not finite, or is too large for moments in fp32, changes nothing: neither parameters nor moments.
    """

    def __init__(self, task: Task, inner: InnerSpec, layout: Layout, *, micro_tokens: int = MICRO_TOKENS) -> None:
        self.tally = Tally()
        self.cold_step = 0
        self._task = task
        self._inner = inner
        self._layout = layout
        self._micro_tokens = micro_tokens
        self._named = task.parameters()
        self._parameters = [parameter for _, parameter in self._named]
        self._optimiser = optimiser_of(self._parameters, inner)
        self._anchor: NDArray[np.float32] | None = None

    def load(self, theta_D: NDArray[np.float32], *, fresh_moments: bool) -> None:
        """Start from this anchor, which is kept (a mapping, not a copy) until the next. Raises LayoutError."""
        load_from(self._named, self._layout, theta_D)
        self._anchor = theta_D
        self.tally = Tally()
        if fresh_moments:
            self._empty_moments()

    def amend(self, inner: InnerSpec) -> None:
        """Other settings are in force from the next step on; moments and progress stay."""
        self._inner = inner
        for group in self._optimiser.param_groups:
            if group["weight_decay_tuned"]:
                group["weight_decay"] = inner.weight_decay

    def unload(self, *, fresh_moments: bool = False) -> None:
        """Forget the anchor: the parameters are about to become something else."""
        self._anchor = None
        if fresh_moments:
            self._empty_moments()

    @property
    def is_unloaded(self) -> bool:
        """Whether the parameters are no round's."""
        return self._anchor is None

    def step(self, ids_BL: Tensor, lr: float) -> float | None:
        """One optimiser step on a batch of tokens: its mean loss, or None where the batch was skipped."""
        self._required_anchor()
        loss = self._backward(ids_BL)
        norm = _clip(self._parameters, self._inner.clip_norm) if math.isfinite(loss) else math.nan
        if not (math.isfinite(loss) and math.isfinite(norm) and self._clipped(norm) <= _NORM_MAX):
            self._optimiser.zero_grad(set_to_none=True)
            self.tally.skipped += 1
            self.tally.skipped_in_a_row += 1
            if self.tally.skipped_in_a_row >= SKIPS_IN_A_ROW or not self._is_finite():
                self.restore()
            return None
        for group in self._optimiser.param_groups:
            group["lr"] = lr
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self.cold_step += 1
        self.tally.skipped_in_a_row = 0
        self.tally.steps += 1
        self.tally.sum_lr += lr
        self.tally.sum_loss += loss
        return loss

    def restore_if_broken(self) -> None:
        """Go back to the anchor where a parameter is not finite, so that what is encoded is. Called before encoding.

        Gradients are looked at before each step, so this takes a step that is too far for fp32.
        """
        if not self._is_finite():
            self.restore()

    def restore(self) -> None:
        """The last good parameters, which are the anchor's, with empty moments; the steps since then do not count."""
        skipped = self.tally.skipped + self.tally.steps
        self.load(self._required_anchor(), fresh_moments=True)
        self.tally.skipped = skipped

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """Parameters and moments as views, by name: what a checkpoint holds. No wrapper of the module is in a name."""
        found: dict[str, NDArray[np.float32]] = {}
        for name, parameter in self._named:
            plain = plain_name(name)
            found[f"parameter/{plain}"] = parameter.detach().numpy()
            for key, value in sorted(self._optimiser.state.get(parameter, {}).items()):
                found[f"{key}/{plain}"] = value.detach().numpy()
        return found

    def warm(self, tensors: Mapping[str, NDArray[np.float32]], cold_step: int) -> None:
        """Take the moments of a checkpoint. Raises CheckpointError, and then changes nothing."""
        state: dict[Tensor, dict[str, Tensor]] = {}
        for name, parameter in self._named:
            plain = plain_name(name)
            moments = {key: tensors[f"{key}/{plain}"] for key in _MOMENTS if f"{key}/{plain}" in tensors}
            shapes = {key: () if key == "step" else tuple(parameter.shape) for key in moments}
            if any(values.shape != shapes[key] for key, values in moments.items()):
                raise CheckpointError(f"the moments of {plain} have another shape")
            if len(moments) not in (0, len(_MOMENTS)) or (moments and self._inner.optimiser == "sgd"):
                raise CheckpointError(f"the moments of {plain} are another optimiser's")
            if moments:
                state[parameter] = {key: torch.from_numpy(np.array(values)) for key, values in moments.items()}
        self._optimiser.state.clear()
        self._optimiser.state.update(state)
        self.cold_step = cold_step

    def go_on(self, tensors: Mapping[str, NDArray[np.float32]], tally: Tally) -> None:
        """Take the parameters of a checkpoint made since this anchor. Raises CheckpointError, and changes nothing."""
        self._required_anchor()
        for name, parameter in self._named:
            values = tensors.get(f"parameter/{plain_name(name)}")
            if values is None or values.shape != tuple(parameter.shape):
                raise CheckpointError(f"the parameter {plain_name(name)} is missing or has another shape")
        with torch.no_grad():
            for name, parameter in self._named:
                parameter.copy_(torch.from_numpy(np.array(tensors[f"parameter/{plain_name(name)}"])))
        self.tally = tally

    def delta_into(self, out_P: NDArray[np.float32], start: int) -> None:
        """Write anchor minus parameters, values [start, start + P) of the flat vector."""
        delta_into(self._named, self._layout, self._required_anchor(), out_P, start=start)

    def _is_finite(self) -> bool:
        return all(_is_finite(parameter.detach()) for parameter in self._parameters)

    def _clipped(self, norm: float) -> float:
        """Of the gradients after clipping, where their norm before it was this."""
        return min(norm, self._inner.clip_norm) if self._inner.clip_norm else norm

    def _empty_moments(self) -> None:
        self._optimiser.state.clear()
        self.cold_step = 0

    def _required_anchor(self) -> NDArray[np.float32]:
        if self._anchor is None:
            raise RuntimeError("no anchor is loaded")
        return self._anchor

    def _backward(self, ids_BL: Tensor) -> float:
        """Leave the gradient of the batch's mean loss on the parameters; the loss."""
        n_sequences, length = ids_BL.shape
        loss_sum = 0.0
        for part in torch.split(ids_BL, max(1, self._micro_tokens // length)):
            share = len(part) / n_sequences
            loss = self._task.loss(part)
            (loss * share).backward()  # type: ignore[no-untyped-call]
            loss_sum += float(loss.detach()) * share
        return loss_sum


def optimiser_of(parameters: Iterable[nn.Parameter], inner: InnerSpec) -> torch.optim.Optimizer:
    """The run's inner optimiser over these parameters; the learning rate is set at each step.

    Weight decay is AdamW's (decoupled) or SGD's (added to the gradient), and leaves out parameters of less than two
    dimensions where the run says so.
    """
    decayed: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    for parameter in parameters:
        is_exempt = inner.decay_exempt == "one_dimensional" and parameter.ndim < 2
        (exempt if is_exempt else decayed).append(parameter)
    groups = [
        {"params": params, "weight_decay": decay, "weight_decay_tuned": params is decayed}
        for params, decay in ((decayed, inner.weight_decay), (exempt, 0.0))
        if params
    ]
    if inner.optimiser == "sgd":
        return torch.optim.SGD(groups, lr=0.0)
    return torch.optim.AdamW(groups, lr=0.0, betas=(inner.beta1, inner.beta2), eps=inner.eps)


def _is_finite(values: Tensor) -> bool:
    """Whether all values are. No sum with a value that isn't can be, and a sum takes a fifth of the time."""
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def _clip(parameters: list[nn.Parameter], clip_norm: float) -> float:
    """Scale all gradients so that their norm together is at most `clip_norm` (0: as they are); the norm before.

    The factor is `torch.nn.utils.clip_grad_norm_`'s, min(1, clip / (norm + 1e-6)). The norm is summed in fp64, where
    the square of no finite fp32 number overflows; one that is not finite comes back as it is and changes no gradient.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total_sq = sum(float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2 for gradient in gradients)
    norm = math.sqrt(total_sq)
    factor = clip_norm / (norm + 1e-6)
    if clip_norm and math.isfinite(norm) and factor < 1.0:
        for gradient in gradients:
            gradient.mul_(factor)
    return norm
