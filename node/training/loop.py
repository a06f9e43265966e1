"""The trainer's loop: a command changes what it does, a turn makes one step of it, reports go to whoever listens.

It reads no pipe and owns no process, so that a thread can run it as well. Between two steps it looks for commands and
never waits for one while there is something to train.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import assert_never

import numpy as np
import torch

from aggregation import codec
from aggregation.chunks import ChunkGrid
from aggregation.codec import feedback
from aggregation.errors import CodecError
from aggregation.vector import layout_of, load_from
from node.training.batches import Batches
from node.training.checkpoint import CheckpointError, Position, joined
from node.training.device import peak_flops_of
from node.training.evaluation import evaluate
from node.training.inner import InnerLoop, Tally
from node.training.keeping import Keeper
from node.training.link import (
    Amend,
    Command,
    Encode,
    Encoded,
    Evaluate,
    Evaluated,
    Load,
    Pause,
    Progress,
    Quit,
    Ready,
    Report,
    Resume,
    Start,
    Train,
    Written,
)
from node.training.model import check_layout
from node.training.schedule import inner_lr
from node.training.shared import CodesArea, Floats, map_residual, map_vector
from node.training.task import Task
from protos.messages import Range
from protos.runspec import RunSpec

PROGRESS_S = 0.5
WRITTEN_S = 0.01
"""While it encodes: so often at most it says how far it is, so that the agent hashes at the same time."""
MEASURE_MOST_S = 2.0
"""A full batch is timed only if it should not take longer; else one sequence has to do."""


class TrainerLoop:
    """One rank's trainer.

    Args:
        build: makes the task of a RunSpec.
        report: takes each report; called from the thread that runs the loop.
        clock: seconds that only go forward.
    """

    def __init__(
        self, build: Callable[[RunSpec], Task], report: Callable[[Report], None], clock: Callable[[], float]
    ) -> None:
        self._build = build
        self._report = report
        self._clock = clock
        self._work: _Work | None = None
        self._paused = False

    @property
    def has_work(self) -> bool:
        """Whether a turn would make a step."""
        return self._work is not None and not self._paused and self._work.n_left > 0

    def turn(self) -> None:
        """One inner step."""
        work = self._started()
        began_at = self._clock()
        work.step()
        ended_at = self._clock()
        work.train_s += ended_at - began_at
        if work.keeper is not None and work.keeper.is_due(ended_at):
            work.save()
        if work.n_left == 0 or ended_at - work.reported_at >= PROGRESS_S:
            self._say_progress(work, ended_at)

    def handle(self, command: Command) -> bool:
        """Carry a command out; False when the process should end. Raises whatever makes going on impossible."""
        match command:
            case Start():
                self._start(command)
            case Load():
                self._started().load(command)
            case Train():
                work = self._started()
                work.train(command)
                self._say_progress(work, self._clock())
            case Encode():
                self._encode(self._started(), command)
            case Evaluate():
                self._report(self._started().evaluate(command))
            case Amend(spec_path):
                self._started().amend(RunSpec.from_bytes(Path(spec_path).read_bytes()))
            case Pause() | Resume():
                self._paused = isinstance(command, Pause)
                if self._work is not None:
                    self._say_progress(self._work, self._clock())
            case Quit():
                if self._work is not None:
                    self._work.save()
                return False
            case _:
                assert_never(command)
        return True

    def _start(self, command: Start) -> None:
        if command.rank != 0 or command.ranks != 1:
            raise ValueError(f"rank {command.rank} of {command.ranks}: a node has one rank in this version")
        spec = RunSpec.from_bytes(Path(command.spec_path).read_bytes())
        task = self._build(spec)
        self._work = _Work(spec, task, Path(command.data_dir))
        tokens_per_s = self._work.measure(self._clock)
        layout = self._work.layout
        ready = Ready(
            layout.n_values, layout.digest.hex(), tokens_per_s, peak_flops=peak_flops_of(task.parameters()[0][1])
        )
        if not command.checkpoints:
            self._report(ready)
            return
        keeper = self._work.keeper = Keeper(
            Path(command.checkpoints),
            run=command.run,
            layout=layout.digest.hex(),
            spec=spec.to_bytes(),
            n_values=layout.n_values,
            n_moments=0 if spec.inner.optimiser == "sgd" else 2,
            report=self._report,
            clock=self._clock,
        )
        self._report(replace(ready, moments_round=keeper.moments_round))
        keeper.say()

    def _encode(self, work: _Work, command: Encode) -> None:
        said_at = self._clock()

        def written(n_chunks: int) -> None:
            nonlocal said_at
            now = self._clock()
            if now - said_at >= WRITTEN_S:
                said_at = now
                self._report(Written(command.round, n_chunks))

        self._report(work.encode(command, written, self._clock))
        work.save()  # the others' turn now: the moments are those that the next round begins with

    def _started(self) -> _Work:
        if self._work is None:
            raise RuntimeError("the first command is Start")
        return self._work

    def _say_progress(self, work: _Work, now: float) -> None:
        work.reported_at = now
        self._report(work.progress(paused=self._paused))


def run(loop: TrainerLoop, commands: SimpleQueue[Command]) -> None:
    """Commands as they come, steps in between, until a Quit."""
    while True:
        try:
            command = commands.get(block=not loop.has_work)
        except Empty:
            loop.turn()
            continue
        if not loop.handle(command):
            return


class _Work:
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

    def load(self, command: Load) -> None:
        check_layout(self.layout, self._spec)
        theta_D = map_vector(Path(command.theta_path), self.layout.n_values)
        self._inner.load(theta_D, fresh_moments=command.fresh_moments)
        self._round, self._nominal_step, self._anchor = command.round, command.nominal_step, command.anchor
        self._forget()
        self._warm(command)

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
            self._inner.go_on(kept.tensors, Tally(was.steps, was.skipped, was.sum_lr, was.sum_loss))
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

    def encode(self, command: Encode, written: Callable[[int], None], clock: Callable[[], float]) -> Encoded:
        """Write anchor minus parameters, chunk by chunk; it never stands in memory as a whole.

        With error feedback, what earlier rounds left over goes along, and what this one leaves over is written down.
        `written` is told after each chunk how many there are now.
        """
        began_at = clock()
        codec_spec = self._spec.codec
        self._inner.restore_if_broken()
        self._used += prefix(self._ranges, self._position)
        self._ranges, self._position, self._n_kept = (), 0, 0
        grid = ChunkGrid(self.layout.n_values, codec_spec.chunk_values)
        area = CodesArea(Path(command.codes_path), grid, codec_spec.name, codec_spec.block, writable=True)
        leftovers = _Leftovers(command, grid) if command.next_path else None
        delta_P = np.empty(min(grid.chunk_values, grid.n_values), np.float32)
        for chunk in range(grid.n_chunks):
            start, stop = grid.bounds(chunk)
            part_P, frame = delta_P[: stop - start], area.frame(chunk)
            self._inner.delta_into(part_P, start)
            if leftovers is None:
                codec.encode_into(codec_spec.name, part_P, frame, block=codec_spec.block)
            else:
                residual_P, next_P = leftovers.parts(start, stop)
                try:
                    feedback.encode(codec_spec.name, part_P, residual_P, frame, next_P, block=codec_spec.block)
                except CodecError:
                    # A file that rotted costs what it held; else it would stop every encoding from now on.
                    zeros_P = np.zeros_like(residual_P)
                    feedback.encode(codec_spec.name, part_P, zeros_P, frame, next_P, block=codec_spec.block)
            written(chunk + 1)
        tally = self._inner.tally
        # Without a single good step there is nothing to weigh: the batches count as unused.
        used = self._used if tally.steps else ()
        return Encoded(
            round=command.round,
            steps=tally.steps,
            tokens=count(used) * self._spec.work.batch_tokens,
            sum_lr=tally.sum_lr,
            inner_loss=tally.mean_loss,
            used=used,
            skipped_steps=tally.skipped,
            encode_s=clock() - began_at,
        )

    def evaluate(self, command: Evaluate) -> Evaluated:
        self._forget()
        theta_D = map_vector(Path(command.theta_path), self.layout.n_values)
        self._inner.unload()
        load_from(self._task.parameters(), self.layout, theta_D)
        try:
            val_loss, n_tokens = evaluate(self._task, self._batches)
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


class _Leftovers:
    """What encoding leaves over, in two mapped files: of earlier rounds, to read, and of this one, to write."""

    def __init__(self, command: Encode, grid: ChunkGrid) -> None:
        self._residual_D = map_residual(Path(command.residual_path), grid.n_values) if command.residual_path else None
        self._next_D = map_residual(Path(command.next_path), grid.n_values, writable=True)
        self._zeros_P = np.zeros(grid.size(0) if self._residual_D is None else 0, np.float32)

    def parts(self, start: int, stop: int) -> tuple[Floats, Floats]:
        """(P,) and (P,): the values [start, stop) of both."""
        residual_D = self._residual_D
        if residual_D is None:
            return self._zeros_P[: stop - start], self._next_D[start:stop]
        return residual_D[start:stop], self._next_D[start:stop]


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
