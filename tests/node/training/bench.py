"""A trainer's loop, and what it reported; its clock goes on whenever it is looked at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aggregation import codec
from node.training.link import Encode, Encoded, Load, Progress, Report, Start, Train
from node.training.loop import TrainerLoop
from node.training.shared import CodesArea
from protos.messages import Range
from protos.runspec import RunSpec
from tests.fakes.tiny import TinyRun, TinyTask


class Clock:
    """Goes on by 0.1 s whenever it is looked at."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


class Bench:
    """A loop, and what it reported."""

    def __init__(self, made: TinyRun, build: Callable[[RunSpec], TinyTask] = TinyTask.of) -> None:
        self.run = made
        self.reports: list[Report] = []
        self.round = 1
        self.loop = TrainerLoop(build, self.reports.append, Clock())
        self.loop.handle(Start(str(made.spec_path), str(made.data_dir), 1))

    def load(self, *, nominal_step: int = 0, fresh: bool = True) -> None:
        self.loop.handle(Load(str(self.run.theta_path), 0, nominal_step, fresh))

    def train(self, *ranges: Range, round_: int = 1, h: int = 10, first_k: int = 0, turns: int = 10**6) -> None:
        self.round = round_
        self.loop.handle(Train(round_, ranges, h, first_k))
        while turns and self.loop.has_work:
            self.loop.turn()
            turns -= 1

    def encode(self, *paths: Path | None) -> Encoded:
        """`paths` are the residual's and the next one's."""
        spec = self.run.spec.codec
        path = self.run.folder / "codes.0"
        CodesArea.create(path, self.run.grid, spec.name, spec.block)
        self.loop.handle(Encode(self.round, str(path), *("" if each is None else str(each) for each in paths)))
        encoded = self.reports[-1]
        assert isinstance(encoded, Encoded)
        return encoded

    def frames(self) -> list[bytes]:
        spec, grid = self.run.spec.codec, self.run.grid
        area = CodesArea(self.run.folder / "codes.0", grid, spec.name, spec.block)
        return [area.frame(chunk).tobytes() for chunk in range(grid.n_chunks)]

    def decoded_D(self) -> NDArray[np.float32]:
        frames, grid = self.frames(), self.run.grid
        return np.concatenate([codec.decode(frame, grid.size(chunk)) for chunk, frame in enumerate(frames)])

    @property
    def progress(self) -> list[Progress]:
        return [report for report in self.reports if isinstance(report, Progress)]
