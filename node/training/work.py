"""What a started trainer holds, task, data and its position since the anchor, and what each command does to that."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from aggregation.vector import layout_of, load_from
from node.training.batches import Batches
from node.training.checkpoint import CheckpointError, Position, joined
from node.training.delta import DeltaWriter
from node.training.evaluation import evaluate
from node.training.inner import InnerLoop, Tally
from node.training.keeping import Keeper
from node.training.link import Encode, Encoded, Evaluate, Evaluated, Load, Progress, Train
from node.training.model import check_layout
from node.training.schedule import inner_lr
from node.training.shared import map_vector
from node.training.task import Task
from protos.messages import Range
from protos.runspec import RunSpec

MEASURE_MOST_S = 2.0
"""A full batch is timed only if it should not take longer; else one sequence has to do."""


class Work:
    """What a started trainer holds: the task, the data, and the position since the anchor."""

    def __init__(self, spec: RunSpec, task: Task, data_dir: Path) -> None:
        self.train_s = 0.0
        self.reported_at = -math.inf
        self._spec = spec
        self._task = task
        self._batches = Batches(spec, data_dir)
        self.layout = layout_of([(name, value.shape) for name, value in task.parameters()], block=spec.codec.block)
        self._inner = InnerLoop(task, spec.inner, self.layout)
        self._round = 0
        self._encodes_from = 0  # the first round whose Δ is not out of date
        self._nominal_step = 0
        self._h = spec.work.h
        self._first_k = 0
        self._used: tuple[Range, ...] = ()  # of earlier Trains since the anchor
        self._ranges: tuple[Range, ...] = ()
        self._indices: Iterator[int] = iter(())
        self._position = 0  # batches used of `_ranges`
        self._scale = 1  # batches of a step
        self._recent: list[float] = []
        self._last_loss = 0.0
        self.keeper: Keeper | None = None
        self._anchor = ""
        self._n_kept = 0  # of `_position`, what a checkpoint brought

    @property
    def n_left(self) -> int:
        """Steps of this Train that are still to be made."""
        return (count(self._ranges) - self._position) // self._scale

    @property
    def is_unloaded(self) -> bool:
        """Whether it has no anchor to train from."""
        return self._inner.is_unloaded

    def load(self, command: Load) -> None:
        check_layout(self.layout, self._spec)
        theta_D = map_vector(Path(command.theta_path), self.layout.n_values)
        self._inner.load(theta_D, fresh_moments=command.fresh_moments)
        self._round, self._nominal_step, self._anchor = command.round, command.nominal_step, command.anchor
        self._encodes_from = command.round + 1
        self._forget()
        self._warm(command)

    def unload(self, command: Load) -> None:
        """In place of a `load` whose file is gone."""
        self._inner.unload(fresh_moments=command.fresh_moments)
        self._forget()
        if self.keeper is not None and command.fresh_moments:
            self.keeper.drop()

    def why_not(self, command: Encode) -> str:
        """Why there is no Δ of this round; empty if there is one."""
        if self.is_unloaded:
            return "no anchor is loaded"
        return "" if command.round >= self._encodes_from else f"round {self._encodes_from} has begun"

    def amend(self, spec: RunSpec) -> None:
        self._spec = spec
        self._inner.amend(spec.inner)
        self._batches.amend(spec)
        if self.keeper is not None:
            self.keeper.amend(spec.to_bytes())

    def train(self, command: Train) -> None:
        used = joined((*self._used, *prefix(self._ranges, self._position)))
        n_used = count(used)
        self._round, self._ranges, self._scale = command.round, command.ranges, max(command.batch_scale, 1)
        self._encodes_from = command.round
        goes_on = joined(prefix(command.ranges, n_used)) == used  # the same lease, which may have grown
        self._used, self._position = ((), n_used) if goes_on else (used, 0)
        n_made, n_before = self._position // self._scale, count(self._used) // self._scale
        self._h, self._first_k = command.h, max(command.first_k - n_made, n_before)
        self._indices = (span.start + i for span in command.ranges for i in range(span.count))
        self._indices = islice(self._indices, self._position, None)
        self._n_kept, self.train_s = self._position, 0.0
        if self.keeper is not None:
            self.keeper.begin()
            self._go_on(self.keeper)

    def save(self) -> None:
        """Write a checkpoint, if they are kept and there is anything new since the last one."""
        if self.keeper is None or not self.keeper.n_unsaved or self._inner.is_unloaded:
            return
        tally = self._inner.tally
        used = joined((*self._used, *prefix(self._ranges, self._position)))
        position = Position(
            self.keeper.belongs,
            self._anchor,
            self._round,
            used,
            tally.steps,
            tally.skipped,
            tally.sum_lr,
            tally.sum_loss,
            self._inner.cold_step,
            self._scale,
            tally.skipped_in_a_row,
        )
        self.keeper.save(position, self._inner.tensors())

    def _warm(self, command: Load) -> None:
        """In a fresh process: the moments that the last one left, unless they are to be fresh."""
        keeper = self.keeper
        if keeper is None:
            return
        if command.fresh_moments:
            keeper.drop()
        elif (kept := keeper.moments_for(command.round)) is not None:
            try:
                self._inner.warm(kept.tensors, kept.position.cold_step)
            except CheckpointError as error:
                keeper.drop(str(error))

    def _go_on(self, keeper: Keeper) -> None:
        """In a fresh process: from where the last one stood, if that was in this very work."""
        kept = keeper.progress_for(self._anchor, self._ranges, self._scale)
        if kept is None:
            return
        was = kept.position
        try:
            tally = Tally(was.steps, was.skipped, was.sum_lr, was.sum_loss, was.skipped_in_a_row)
            self._inner.go_on(kept.tensors, tally)
        except CheckpointError as error:
            keeper.drop(str(error))
            return
        self._position = self._n_kept = count(was.used)
        for _ in range(self._position):
            next(self._indices)

    def step(self) -> None:
        batches = [self._batches.batch(index) for index in islice(self._indices, self._scale)]
        ids_BL = torch.from_numpy(np.concatenate(batches) if self._scale > 1 else batches[0])
        k = self._first_k + self._position // self._scale
        lr = inner_lr(self._spec.inner, self._nominal_step, k, self._h, self._inner.cold_step)
        loss = self._inner.step(ids_BL, lr)
        self._position += self._scale
        if self.keeper is not None:
            self.keeper.n_unsaved += self._scale
        if loss is not None:
            self._recent.append(loss)

    def progress(self, *, paused: bool) -> Progress:
        if self._recent:
            self._last_loss = sum(self._recent) / len(self._recent)
            self._recent.clear()
        n_used = count(self._used) + self._position
        step = n_used // self._scale
        tokens_per_s = (
            (self._position - self._n_kept) * self._spec.work.batch_tokens / self.train_s if self.train_s > 0 else 0.0
        )
        step_tokens = self._scale * self._spec.work.batch_tokens
        return Progress(
            round=self._round,
            step=step,
            n_steps=step + self.n_left,
            tokens=n_used * self._spec.work.batch_tokens,
            loss=self._last_loss,
            tokens_per_s=tokens_per_s,
            time_left_s=self.n_left * step_tokens / tokens_per_s if tokens_per_s else 0.0,
            skipped_steps=self._inner.tally.skipped,
            paused=paused,
        )

    def encode(
        self, command: Encode, written: Callable[[int], None], clock: Callable[[], float]
    ) -> tuple[Encoded, str]:
        """Write Δ; what came of it, and why there is nothing to contribute, where steps were given up.

        `written` is told after each chunk how many there are now.
        """
        began_at = clock()
        writer = DeltaWriter(self._inner, self._spec.codec, command, self.layout.n_values)  # nothing has changed if not
        self._used += prefix(self._ranges, self._position)
        self._ranges, self._position, self._n_kept = (), 0, 0
        problem = writer.write(written)
        tally = self._inner.tally
        # Without a single good step there is nothing to weigh: the batches count as unused.
        used = self._used if tally.steps else ()
        encoded = Encoded(
            round=command.round,
            steps=tally.steps,
            tokens=count(used) * self._spec.work.batch_tokens,
            sum_lr=tally.sum_lr,
            inner_loss=tally.mean_loss,
            used=used,
            skipped_steps=tally.skipped,
            encode_s=clock() - began_at,
        )
        return encoded, problem

    def evaluate(self, command: Evaluate, said: Callable[[int], None]) -> Evaluated:
        theta_D = map_vector(Path(command.theta_path), self.layout.n_values)
        self._forget()
        self._inner.unload()
        load_from(self._task.parameters(), self.layout, theta_D)
        try:
            val_loss, n_tokens = evaluate(self._task, self._batches, said)
        except ArithmeticError:  # not finite, by what the run has come to: no tokens stand for no figure
            return Evaluated(command.round, 0.0, 0)
        return Evaluated(command.round, val_loss, n_tokens)

    def measure(self, clock: Callable[[], float]) -> float:
        """Tokens a second of forward and backward, on tokens that are none of the run's; changes nothing."""
        length, n_sequences = self._spec.data.sequence_length, self._spec.batch_sequences
        self._timed(clock, 1)
        one_s = self._timed(clock, 1)
        if n_sequences == 1 or one_s * n_sequences > MEASURE_MOST_S:
            return length / one_s
        return n_sequences * length / self._timed(clock, n_sequences)

    def _timed(self, clock: Callable[[], float], n_sequences: int) -> float:
        ids_BL = torch.ones((n_sequences, self._spec.data.sequence_length), dtype=torch.int64)
        began_at = clock()
        self._task.loss(ids_BL).backward()  # type: ignore[no-untyped-call]
        for _, parameter in self._task.parameters():
            parameter.grad = None
        return max(clock() - began_at, 1e-6)

    def _forget(self) -> None:
        self._used, self._ranges, self._indices = (), (), iter(())
        self._position, self._n_kept, self._first_k, self.train_s = 0, 0, 0, 0.0
        self._recent.clear()


def count(ranges: tuple[Range, ...]) -> int:
    """Batches in these ranges."""
    return sum(span.count for span in ranges)


def prefix(ranges: tuple[Range, ...], n_batches: int) -> tuple[Range, ...]:
    """The first so many batches of these ranges, without empty ranges."""
    taken: list[Range] = []
    for span in ranges:
        here = min(span.count, n_batches)
        if here:
            taken.append(Range(span.start, here))
        n_batches -= here
    return tuple(taken)
