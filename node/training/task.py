"""The port between what is learnt and how: a task has parameters and a loss; the trainer knows nothing else."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from aggregation.vector import trainable


class Task(Protocol):
    """What is trained. Deterministic: the same parameters and batch give the same loss (no dropout)."""

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Everything that is trained, by name, tied parameters once, always in the same order."""

    def loss(self, ids_BL: Tensor) -> Tensor:
        """Mean loss of a batch, (B, L) int64 tokens, over what it predicts: a scalar with a gradient."""


class CausalLMTask:
    """Predict the next token, with a Hugging Face causal language model."""

    def __init__(self, model: nn.Module) -> None:
        # Not train(): a config may ask for dropout, and then no two nodes' steps could be compared or replayed.
        self.model = model.eval()

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        return trainable(self.model)

    def loss(self, ids_BL: Tensor) -> Tensor:
        """Mean cross entropy in nats over the B · (L - 1) predicted tokens."""
        logits_BLV: Tensor = self.model(input_ids=ids_BL, use_cache=False).logits
        return nn.functional.cross_entropy(
            logits_BLV[:, :-1].flatten(0, 1).to(torch.float32),
            ids_BL[:, 1:].flatten(),
        )
