"""Members that differ in speed by a factor of eight: the slow ones neither get thrown out nor hold the fast ones up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from aggregation.vector import flatten_into, layout_of, load_from
from coordinator.rounds import policy
from node.training.founding import DATA_DIR, found, read_wish
from node.training.inner import InnerLoop, Tally
from node.training.model import build_task
from node.training.schedule import inner_lr
from protos.messages import Commitment, PeerId
from protos.runspec import RunSpec
from tests.reference.diloco import Sequences
from tests.reference.rounds import Rounds, Sent, Settings

N_ROUNDS = 8
N_FAST = 2
WITHIN = 1.03


@dataclass(frozen=True)
class Outcome:
    val_loss: float
    gated: tuple[str, ...]


def train(spec: RunSpec, folder: Path, n_slow: int, slow_steps: int, *, equal_weights: bool = False) -> Outcome:
    """Two members that make H steps a round and some that make fewer, from the run's first parameters on.

    The fast ones have the same batches whoever else is there, so that what differs is what the others do to them.
    """
    task, data, h = build_task(spec), Sequences(spec, folder / DATA_DIR), spec.work.h
    named = task.parameters()
    layout = layout_of([(name, value.shape) for name, value in named], block=spec.codec.block)
    theta_D = np.zeros(layout.n_values, np.float32)
    flatten_into(named, layout, theta_D)
    settings = Settings("default", 1, spec.codec.block, spec.codec.chunk_values, spec.outer.lr, spec.outer.momentum)
    run = Rounds(theta_D, settings)
    steps = [h] * N_FAST + [slow_steps] * n_slow
    loops = [InnerLoop(task, spec.inner, layout) for _ in steps]
    gated: list[str] = []
    for round_ in range(N_ROUNDS):
        deltas: list[NDArray[np.float32]] = []
        for member, (loop, n_steps) in enumerate(zip(loops, steps, strict=True)):
            loop.load(run.theta_D.copy(), fresh_moments=False)
            first = (member * N_ROUNDS + round_) * h
            for k in range(n_steps):
                loop.step(data.batch(first + k), inner_lr(spec.inner, round_ * h, k, h, loop.cold_step))
            delta_D = np.zeros_like(theta_D)
            loop.delta_into(delta_D, 0)
            deltas.append(delta_D)
        tallies = [loop.tally for loop in loops]
        weights = policy.weights({PeerId(f"{i:02}"): _commitment(spec, tally) for i, tally in enumerate(tallies)}, spec)
        sent = [
            Sent(delta_D, 1.0 if equal_weights else weight, tally.sum_lr)
            for delta_D, weight, tally in zip(deltas, weights.values(), tallies, strict=True)
        ]
        gated += [f"round {round_}: {reason}" for reason in run.apply(sent) if reason is not None]
    load_from(named, layout, run.theta_D)
    return Outcome(data.val_loss(task), tuple(gated))


def _commitment(spec: RunSpec, tally: Tally) -> Commitment:
    tokens = tally.steps * spec.work.batch_tokens
    return Commitment(b"", b"", (), tally.steps, tokens, (), tally.sum_lr, tally.mean_loss)


SMALL: dict[str, object] = {
    "corpus": str(Path(asyncio.__file__).parent),
    "model": {
        "config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        }
    },
    "data": {"sequence_length": 32},
    "work": {"batch_tokens": 256, "h": 32},
    "codec": {"block": 64, "chunk_values": 4096, "leaf_values": 1024},
    "inner": {"lr": 0.005, "warmup_steps": 20},
    "evaluation": {"max_tokens": 16384},
    "membership": {"admission": "invite"},
}
"""A sixth of the preset's parameters, on a package of the Python that runs this."""

TINY: dict[str, object] = {
    "codec": {"block": 64, "chunk_values": 8192, "leaf_values": 1024},
    "membership": {"admission": "invite"},
}
"""The preset on its corpus."""


@dataclass(frozen=True)
class Founded:
    spec: RunSpec
    folder: Path
    alone: Outcome

    def with_slow(self, n_slow: int, **changes: bool) -> Outcome:
        return train(self.spec, self.folder, n_slow, self.spec.work.h // 8, **changes)


def founded(folder: Path, wish: dict[str, object]) -> Founded:
    spec, _ = found(read_wish(json.dumps(wish).encode()), folder)
    return Founded(spec, folder, train(spec, folder, 0, 0))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Founded:
    return founded(tmp_path_factory.mktemp("small"), SMALL)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Founded:
    return founded(tmp_path_factory.mktemp("tiny"), TINY)


@pytest.mark.slow
@pytest.mark.parametrize("n_slow", [2, 3])
def test_slow_members_are_kept_and_do_no_harm(small: Founded, n_slow: int) -> None:
    mixed = small.with_slow(n_slow)
    assert mixed.gated == ()
    assert mixed.val_loss < WITHIN * small.alone.val_loss


@pytest.mark.slow
def test_it_is_the_weights_that_keep_them_from_doing_harm(small: Founded) -> None:
    assert small.with_slow(3, equal_weights=True).val_loss > WITHIN * small.alone.val_loss


@pytest.mark.long
@pytest.mark.parametrize("n_slow", [2, 3])
def test_slow_members_of_the_preset_are_kept_and_do_no_harm(tiny: Founded, n_slow: int) -> None:
    mixed = tiny.with_slow(n_slow)
    assert mixed.gated == ()
    assert mixed.val_loss < WITHIN * tiny.alone.val_loss
