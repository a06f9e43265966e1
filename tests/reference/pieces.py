"""The same algorithm as `diloco.py`, put together from the project's own pieces in place of torch's."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from aggregation import outer, rules
from aggregation.vector import flatten_into, layout_of, load_from
from node.training.inner import InnerLoop
from node.training.schedule import inner_lr
from node.training.task import Task
from protos.runspec import InnerSpec
from tests.reference.diloco import Round, Sequences

Floats = NDArray[np.float32]

BLOCK = 64


def diloco(
    learner: Task, inner: InnerSpec, rounds: Iterable[Round], data: Sequences, *, chunk_values: int = 1024
) -> int:
    """Train the learner's parameters in place; the number of rounds. A member never misses a round here."""
    named = learner.parameters()
    layout = layout_of([(name, tuple(value.shape)) for name, value in named], block=BLOCK)
    theta_D = np.zeros(layout.n_values, np.float32)
    flatten_into(named, layout, theta_D)
    momentum_D = np.zeros_like(theta_D)
    centre_D: Floats | None = None
    loops: dict[str, InnerLoop] = {}
    nominal_step = n_rounds = 0
    for round_ in rounds:
        deltas_ND = np.zeros((len(round_.members), layout.n_values), np.float32)
        for delta_D, member in zip(deltas_ND, round_.members, strict=True):
            loop = loops.setdefault(member.peer, InnerLoop(learner, inner, layout))
            loop.load(theta_D.copy(), fresh_moments=False)
            for k, index in enumerate(member.batches):
                loop.step(data.batch(index), inner_lr(inner, nominal_step, k, round_.h, loop.cold_step))
            loop.delta_into(delta_D, 0)
        result_D = rules.aggregate(
            round_.rule,
            deltas_ND,
            weights_N=[member.weight for member in round_.members],
            previous_D=None if round_.after_empty else centre_D,
            chunk_values=chunk_values,
        )
        centre_D = np.float32(round_.clip_factor) * result_D
        outer.nesterov(theta_D, momentum_D, centre_D, lr=round_.outer_lr, momentum=round_.outer_momentum)
        nominal_step += round_.h
        n_rounds += 1
    load_from(named, layout, theta_D)
    return n_rounds
