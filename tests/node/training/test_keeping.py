"""When a checkpoint is due: often enough to be of use, and never so often that writing it is what takes the time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from node.training.checkpoint import EVERY_S, SHARE_MOST, Position, RealDisk
from node.training.keeping import STATE_BYTES_PER_VALUE, Keeper
from node.training.link import Report, Saved
from protos.messages import Range

N_VALUES = 10_000
FULL = "No space left on device: one takes 0.1 MB, beside 0.2 for the state"
TENSORS = {"parameter/a": np.zeros(N_VALUES, np.float32)}


class SlowDisk(RealDisk):
    """One that takes its time, and has so much room."""

    def __init__(self) -> None:
        self.now = 0.0
        self.write_s = 0.0
        self.free = 2**40

    def free_bytes(self, folder: Path) -> int:
        return self.free

    def write(self, path: Path, parts: Iterable[memoryview]) -> None:
        self.now += self.write_s
        super().write(path, parts)


class Desk:
    def __init__(self, folder: Path) -> None:
        self.disk = SlowDisk()
        self.reports: list[Report] = []
        self.keeper = Keeper(
            folder, run="run", layout="layout", spec=b"spec", n_values=N_VALUES, n_moments=2,
            report=self.reports.append, clock=lambda: self.disk.now, disk=self.disk,
        )  # fmt: skip
        self.position = Position(self.keeper.belongs, "anchor", 1, (Range(0, 6),), 6, 0, 0.1, 1.0, 6, 2)

    def is_due(self) -> bool:
        return self.keeper.is_due(self.disk.now)

    def save(self) -> None:
        self.keeper.save(self.position, TENSORS)


def test_one_is_due_after_a_while_if_there_is_anything_new(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.disk.now += 10 * EVERY_S
    assert not desk.is_due()
    desk.save()
    assert desk.reports == []
    desk.keeper.n_unsaved = 6
    assert desk.is_due()
    desk.save()
    assert desk.reports == [Saved(1, 3, 0.0)]
    desk.keeper.n_unsaved = 1
    assert not desk.is_due()
    desk.disk.now += EVERY_S
    assert desk.is_due()
    desk.keeper.begin()
    assert not desk.is_due()


def test_where_writing_takes_long_it_is_done_rarely(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.disk.write_s, desk.keeper.n_unsaved = 30.0, 1
    desk.save()
    desk.keeper.n_unsaved = 1
    desk.disk.now += 30.0 / SHARE_MOST - 1.0
    assert not desk.is_due()
    desk.disk.now += 1.0
    assert desk.is_due()


def test_the_states_room_is_left_to_it(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.keeper.n_unsaved = 1
    desk.disk.free = STATE_BYTES_PER_VALUE * N_VALUES + 4 * N_VALUES
    desk.save()
    assert desk.reports == [Saved(1, 3, 0.0, FULL)]
    assert desk.keeper.n_unsaved == 1
    assert list(tmp_path.iterdir()) == []


def test_an_amended_runs_checkpoints_are_of_the_amended_run(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    before = desk.keeper.belongs
    desk.keeper.amend(b"amended")
    assert desk.keeper.belongs == replace(before, spec=desk.keeper.belongs.spec)
    assert desk.keeper.belongs != before


def test_a_disk_that_is_too_small_is_said_before_the_first_one_is_due(tmp_path: Path) -> None:
    """With parameters and two moments; what the next one would take the place of counts as room."""
    each = 3 * 4 * N_VALUES
    desk = Desk(tmp_path / "not" / "there")
    desk.disk.free = STATE_BYTES_PER_VALUE * N_VALUES + each
    desk.keeper.say()
    assert desk.reports == []
    desk.disk.free -= 1
    desk.keeper.say()
    assert desk.reports == [Saved(0, 0, 0.0, FULL)]
    assert list(tmp_path.iterdir()) == []

    desk = Desk(tmp_path)
    tensors = {name: np.zeros(N_VALUES, np.float32) for name in ("parameter/a", "exp_avg/a", "exp_avg_sq/a")}
    for _ in range(2):
        desk.keeper.n_unsaved = 1
        desk.keeper.save(desk.position, tensors)
    desk.reports.clear()
    desk.disk.free = STATE_BYTES_PER_VALUE * N_VALUES
    desk.keeper.say()
    assert desk.reports == []


def test_a_folder_that_can_not_be_read_is_said_and_nothing_more(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    desk = Desk(tmp_path / "file" / "checkpoints")
    desk.keeper.say()
    desk.keeper.n_unsaved = 1
    desk.save()
    assert [report.problem for report in desk.reports if isinstance(report, Saved)][-1:] == ["Not a directory"]


def test_the_disk_of_a_folder_that_is_to_come_is_that_of_the_one_above(tmp_path: Path) -> None:
    assert RealDisk().free_bytes(tmp_path / "not" / "there") > 0
