"""A trainer that goes on where another process stopped: to the same bytes, and only in the same work."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from node.training import keeping
from node.training.batches import Batches
from node.training.checkpoint import RealDisk
from node.training.link import Encode, Encoded, Load, Progress, Quit, Ready, Remark, Report, Saved, Start, Train
from node.training.loop import TrainerLoop
from node.training.shared import CodesArea
from protos.messages import Range
from tests.fakes.tiny import TinyRun, TinyTask, tiny_run

RUN = "the run"
H = 6
SEATS = {1: (Range(0, H),), 2: (Range(20, 3), Range(40, 3)), 3: (Range(60, H),)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return tiny_run(
        tmp_path_factory.mktemp("run"), width=13, inner={"lr": 0.01, "warmup_steps": 20}, codec={"name": "fp32"}
    )


class Process:
    """One life of a trainer: it keeps checkpoints in a folder, and may end at any step."""

    def __init__(
        self, made: TinyRun, folder: Path, *, spec_path: Path | None = None, now_s: Iterator[float] | None = None
    ):
        self.made, self.folder = made, folder
        self.reports: list[Report] = []
        self.clock = 0.0
        self.loop = TrainerLoop(TinyTask.of, self.reports.append, self.now)
        self.loop.handle(
            Start(
                str(spec_path or made.spec_path),
                str(made.data_dir),
                1,
                run=RUN,
                checkpoints=str(folder / "checkpoints"),
            )
        )

    def now(self) -> float:
        return self.clock

    def begin(
        self, round_: int, *, fresh: bool = False, anchor: str = "", seat: tuple[Range, ...] | None = None
    ) -> None:
        """The anchor is the same vector in each round, under another name."""
        theta, nominal = str(self.made.theta_path), H * (round_ - 1)
        self.loop.handle(Load(theta, round_ - 1, nominal, fresh, anchor or f"{round_:064x}"))
        self.loop.handle(Train(round_, SEATS[round_] if seat is None else seat, H))

    def steps(self, n: int) -> None:
        for _ in range(n):
            self.loop.turn()

    def finish(self, round_: int) -> bytes:
        """Train to the end; the encoded bytes."""
        while self.loop.has_work:
            self.loop.turn()
        spec, grid = self.made.spec.codec, self.made.grid
        path = self.folder / "codes.0"
        CodesArea.create(path, grid, spec.name, spec.block)
        self.loop.handle(Encode(round_, str(path)))
        area = CodesArea(path, grid, spec.name, spec.block)
        return b"".join(area.frame(chunk).tobytes() for chunk in range(grid.n_chunks))

    def leave(self) -> None:
        """End as an agent has it end; without this it was killed."""
        assert not self.loop.handle(Quit())

    @property
    def first_step(self) -> int:
        """Of the newest training: the batches used when it began."""
        return [report.step for report in self.reports if isinstance(report, Progress) and report.tokens_per_s == 0.0][
            -1
        ]

    @property
    def ready(self) -> Ready:
        return next(report for report in self.reports if isinstance(report, Ready))

    @property
    def encoded(self) -> Encoded:
        return [report for report in self.reports if isinstance(report, Encoded)][-1]

    def of(self, kind: type[Report]) -> list[Report]:
        return [report for report in self.reports if isinstance(report, kind)]


@pytest.fixture(scope="module")
def whole(made: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[bytes, Encoded]]:
    """Three rounds in one life: what each of them encodes to."""
    process = Process(made, tmp_path_factory.mktemp("whole"))
    found = {}
    for round_ in SEATS:
        process.begin(round_)
        found[round_] = process.finish(round_), process.encoded
    return found


def same(process: Process, frames: bytes, wanted: tuple[bytes, Encoded]) -> None:
    wanted_frames, encoded = wanted
    assert frames == wanted_frames
    mine = process.encoded
    assert (mine.steps, mine.used, mine.sum_lr, mine.inner_loss) == (
        encoded.steps, encoded.used, encoded.sum_lr, encoded.inner_loss,
    )  # fmt: skip


@pytest.mark.parametrize("how", ["killed", "left"])
@pytest.mark.parametrize("step", range(H + 1))
def test_stopped_at_any_step_it_ends_at_the_same_bytes(
    made: TinyRun, tmp_path: Path, whole: dict[int, tuple[bytes, Encoded]], how: str, step: int
) -> None:
    for round_ in SEATS:
        stopped = Process(made, tmp_path)
        stopped.begin(round_)
        stopped.steps(step)
        if how == "left":
            stopped.leave()
        process = Process(made, tmp_path)
        process.begin(round_)
        assert process.first_step == (step if how == "left" else 0)
        same(process, process.finish(round_), whole[round_])


@pytest.mark.parametrize("how", ["killed", "left"])
@pytest.mark.parametrize("before_the_end", [1, 0, -1])
def test_stopped_around_the_end_of_a_pass_it_goes_on_into_the_next_one(
    made: TinyRun, tmp_path: Path, how: str, before_the_end: int
) -> None:
    """Batches are numbered on over all passes, so there is no end to repeat, nor an empty pass after it."""
    in_this_pass = 3
    seat = (Range(2 * made.spec.n_batches - in_this_pass, H),)
    (tmp_path / "undisturbed").mkdir()
    undisturbed = Process(made, tmp_path / "undisturbed")
    undisturbed.begin(1, seat=seat)
    wanted = undisturbed.finish(1), undisturbed.encoded
    assert wanted[1].used == seat
    stopped = Process(made, tmp_path)
    stopped.begin(1, seat=seat)
    stopped.steps(in_this_pass - before_the_end)
    if how == "left":
        stopped.leave()
    process = Process(made, tmp_path)
    process.begin(1, seat=seat)
    assert process.first_step == (in_this_pass - before_the_end if how == "left" else 0)
    same(process, process.finish(1), wanted)


def test_killed_after_it_has_encoded_it_encodes_the_same_again(
    made: TinyRun, tmp_path: Path, whole: dict[int, tuple[bytes, Encoded]]
) -> None:
    stopped = Process(made, tmp_path)
    for round_ in (1, 2):
        stopped.begin(round_)
        stopped.finish(round_)
    again = Process(made, tmp_path)
    again.begin(2)
    assert not again.loop.has_work
    same(again, again.finish(2), whole[2])
    onwards = Process(made, tmp_path)  # or the round was committed meanwhile
    onwards.begin(3)
    same(onwards, onwards.finish(3), whole[3])


def test_killed_when_it_has_told_it_keeps_the_moments_that_it_told_of(
    made: TinyRun, tmp_path: Path, whole: dict[int, tuple[bytes, Encoded]]
) -> None:
    stopped = Process(made, tmp_path)
    stopped.begin(1)
    stopped.finish(1)
    stopped.begin(2)

    class Killed(Exception):
        pass

    def report(message: Report) -> None:
        if isinstance(message, Encoded):
            raise Killed

    stopped.loop._report = report
    with pytest.raises(Killed):
        stopped.finish(2)
    process = Process(made, tmp_path)
    assert process.ready.moments_round == 2
    process.begin(3)  # the round was committed with what it had told
    same(process, process.finish(3), whole[3])


@pytest.mark.parametrize("slow", ["large", "long"])
def test_where_writing_takes_its_time_nobody_waits_for_it(
    made: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    process = Process(made, tmp_path)
    if slow == "large":
        monkeypatch.setattr(keeping, "QUICK_BYTES", 100)
    else:
        write = RealDisk.write

        def writes(disk: RealDisk, path: Path, parts: Iterable[memoryview]) -> None:
            process.clock += 0.2
            write(disk, path, parts)

        monkeypatch.setattr(RealDisk, "write", writes)
    for round_ in (1, 2):
        process.begin(round_)
        process.finish(round_)
    kinds = [type(report) for report in process.reports if isinstance(report, Encoded | Saved)]
    assert kinds[-2:] == [Encoded, Saved]
    assert kinds[:2] == ([Encoded, Saved] if slow == "large" else [Saved, Encoded])


def test_it_goes_on_over_batches_that_are_skipped(
    made: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fifth in a row gives up the steps before, wherever another process has taken over."""
    batches = Batches(made.spec, made.data_dir)
    bad = {torch.from_numpy(batches.batch(index)).numpy().tobytes() for index in range(1, 7)}
    loss = TinyTask.loss
    monkeypatch.setattr(
        TinyTask, "loss",
        lambda task, ids_BL: loss(task, ids_BL) * (np.nan if ids_BL.numpy().tobytes() in bad else 1.0),
    )  # fmt: skip
    seat = (Range(0, 9),)
    (tmp_path / "undisturbed").mkdir()
    undisturbed = Process(made, tmp_path / "undisturbed")
    undisturbed.begin(1, seat=seat)
    wanted = undisturbed.finish(1), undisturbed.encoded
    assert (wanted[1].steps, wanted[1].skipped_steps) == (2, 7)
    for step in range(1, 9):
        folder = tmp_path / str(step)
        folder.mkdir()
        stopped = Process(made, folder)
        stopped.begin(1, seat=seat)
        stopped.steps(step)
        stopped.leave()
        process = Process(made, folder)
        process.begin(1, seat=seat)
        assert process.first_step == step
        same(process, process.finish(1), wanted)
        assert process.encoded.skipped_steps == wanted[1].skipped_steps


def test_a_training_without_an_anchor_waits_for_it(
    made: TinyRun, tmp_path: Path, whole: dict[int, tuple[bytes, Encoded]]
) -> None:
    """The Load went to the process before; what that one left is still there for the next Load."""
    stopped = Process(made, tmp_path)
    stopped.begin(1)
    stopped.steps(4)
    stopped.leave()
    process = Process(made, tmp_path)
    process.loop.handle(Train(1, SEATS[1], H))
    assert not process.loop.has_work
    process.begin(1)
    assert process.first_step == 4
    same(process, process.finish(1), whole[1])


def test_within_a_long_round_one_is_written_now_and_then(
    made: TinyRun, tmp_path: Path, whole: dict[int, tuple[bytes, Encoded]]
) -> None:
    stopped = Process(made, tmp_path)
    stopped.begin(1)
    stopped.steps(2)
    assert stopped.of(Saved) == []
    stopped.clock = 61.0
    stopped.steps(2)
    assert stopped.of(Saved) == [Saved(1, 3, 0.0)]
    process = Process(made, tmp_path)
    process.begin(1)
    assert process.first_step == 3
    same(process, process.finish(1), whole[1])


def test_a_torn_newest_one_costs_steps_and_no_bit(
    made: TinyRun, tmp_path: Path, whole: dict[int, tuple[bytes, Encoded]]
) -> None:
    stopped = Process(made, tmp_path)
    stopped.begin(1)
    stopped.finish(1)
    stopped.begin(2)
    stopped.steps(3)
    stopped.leave()
    newest = max((tmp_path / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:-5])
    process = Process(made, tmp_path)
    assert [newest.name in remark.text for remark in process.of(Remark) if isinstance(remark, Remark)] == [True]
    process.begin(2)
    assert process.first_step == 0
    same(process, process.finish(2), whole[2])


def test_over_an_empty_round_the_progress_stays(made: TinyRun, tmp_path: Path) -> None:
    """The anchor is the same, and the seat has grown at its end."""
    stopped = Process(made, tmp_path)
    stopped.begin(1)
    stopped.steps(4)
    stopped.leave()
    process = Process(made, tmp_path)
    process.begin(2, anchor=f"{1:064x}", seat=(Range(0, H), Range(90, 2)))
    assert process.first_step == 4
    process.finish(2)
    assert process.encoded.used == (Range(0, H), Range(90, 2))


@pytest.mark.parametrize("change", ["anchor", "seat", "spec"])
def test_other_work_begins_at_its_anchor_with_the_moments_kept(made: TinyRun, tmp_path: Path, change: str) -> None:
    stopped = Process(made, tmp_path)
    stopped.begin(1)
    stopped.steps(4)
    stopped.leave()
    spec_path = tmp_path / "spec.json"
    amended = made.spec.model_copy(update={"name": "amended"}) if change == "spec" else made.spec
    spec_path.write_bytes(amended.to_bytes())
    process = Process(made, tmp_path, spec_path=spec_path)
    assert process.ready.moments_round == 1
    process.begin(
        1, anchor="ff" * 32 if change == "anchor" else "", seat=(Range(100, H),) if change == "seat" else None
    )
    assert process.first_step == 0
    process.finish(1)
    assert process.encoded.steps == H
    # The ramp of cold moments goes on at the fifth step of ten.
    factors = [min((k + 1) / 20, (4 + k + 1) / 10) for k in range(H)]
    assert process.encoded.sum_lr == pytest.approx(0.01 * sum(factors))


def test_fresh_moments_are_fresh(made: TinyRun, tmp_path: Path, whole: dict[int, tuple[bytes, Encoded]]) -> None:
    stopped = Process(made, tmp_path)
    stopped.begin(1)
    stopped.finish(1)
    process = Process(made, tmp_path)
    process.begin(1, fresh=True)
    assert process.first_step == 0
    same(process, process.finish(1), whole[1])


def test_a_checkpoint_of_a_later_round_is_not_used(
    made: TinyRun, tmp_path: Path, whole: dict[int, tuple[bytes, Encoded]]
) -> None:
    stopped = Process(made, tmp_path)
    for round_ in (1, 2, 3):
        stopped.begin(round_)
        stopped.finish(round_)
    process = Process(made, tmp_path)
    process.begin(1)  # the run was rolled back
    assert any("at round 1" in remark.text for remark in process.of(Remark) if isinstance(remark, Remark))
    same(process, process.finish(1), whole[1])


def test_a_full_disk_is_said_and_training_goes_on(
    made: TinyRun, tmp_path: Path, whole: dict[int, tuple[bytes, Encoded]], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(made, tmp_path)
    process.begin(1)
    process.finish(1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(RealDisk, "write", full)
        process.begin(2)
        same(process, process.finish(2), whole[2])
    last = process.of(Saved)[-1]
    assert isinstance(last, Saved)
    assert (last.round, last.step) == (2, H)
    assert last.problem.startswith("No space left on device: ")
    process.begin(3)
    same(process, process.finish(3), whole[3])
    assert process.of(Saved)[-1] == Saved(3, H, 0.0)


def test_an_agent_that_wants_none_gets_none(made: TinyRun, tmp_path: Path) -> None:
    loop = TrainerLoop(TinyTask.of, lambda _: None, lambda: 0.0)
    loop.handle(Start(str(made.spec_path), str(made.data_dir), 1))
    loop.handle(Load(str(made.theta_path), 0, 0, False))
    loop.handle(Train(1, SEATS[1], H))
    loop.turn()
    loop.handle(Quit())
    assert list(tmp_path.iterdir()) == []
