"""The validation loss of a task's parameters."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from node.training.batches import Batches
from node.training.inner import MICRO_TOKENS
from node.training.task import Task


def _nobody(_: int) -> None:
    """It is not asked how far it is."""


@torch.no_grad()
def evaluate(
    task: Task, batches: Batches, said: Callable[[int], None] = _nobody, *, micro_tokens: int = MICRO_TOKENS
) -> tuple[float, int]:
    """(mean loss in nats, predicted tokens) over the validation sequences that the run evaluates.

    `said` is told after each part how many tokens there are by now.
    Raises DataError where they are not there, ArithmeticError where the loss is not finite.
    """
    sums: list[float] = []
    n_tokens = 0
    for ids_BL in batches.evaluation():
        for part in torch.split(torch.from_numpy(ids_BL), max(1, micro_tokens // ids_BL.shape[1])):
            n_predicted = len(part) * (part.shape[1] - 1)
            sums.append(float(task.loss(part)) * n_predicted)
            n_tokens += n_predicted
            said(n_tokens)
    loss = math.fsum(sums) / n_tokens
    if not math.isfinite(loss):
        raise ArithmeticError("the validation loss is not finite")
    return loss, n_tokens
