"""What every trainer does, whether it is a process or a thread: one suite for both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from aggregation import codec
from aggregation.vector import layout_of
from node.training.batches import Batches
from node.training.inner import InnerLoop
from node.training.link import (
    Command,
    Encode,
    Encoded,
    Evaluate,
    Evaluated,
    Failed,
    Load,
    Pause,
    Progress,
    Quit,
    Ready,
    Report,
    Resume,
    Start,
    Train,
    Trainer,
)
from node.training.model import build_task
from node.training.process import TrainerProcess
from node.training.schedule import inner_lr
from node.training.shared import CodesArea
from protos.messages import Range
from protos.runspec import RunSpec
from tests.fakes.llama import llama_run
from tests.fakes.tiny import TinyRun
from tests.fakes.trainer import ThreadTrainer

pytestmark = pytest.mark.slow


@dataclass
class Session:
    """A started trainer with the loop that it lives in."""

    trainer: Trainer
    runner: asyncio.Runner
    run: TinyRun
    reports: AsyncIterator[Report]

    def say(self, *commands: Command) -> None:
        async def send() -> None:
            for command in commands:
                self.trainer.send(command)

        self.runner.run(send())

    def hear(self, wanted: Callable[[Report], bool]) -> Report:
        """The next report that is wanted; those before it are dropped, but not a Failed."""

        async def next_one() -> Report:
            async with asyncio.timeout(100):
                async for report in self.reports:
                    if wanted(report) or isinstance(report, Failed):
                        return report
            raise AssertionError("the reports ended")

        return self.runner.run(next_one())

    def codes(self, name: str) -> Path:
        """A fresh area of codes."""
        path = self.run.folder / name
        CodesArea.create(path, self.run.grid, "int8", 64)
        return path

    def load(self, *, fresh: bool = True) -> Load:
        return Load(str(self.run.theta_path), round=0, nominal_step=0, fresh_moments=fresh)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return llama_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module", params=["process", "thread"])
def session(request: pytest.FixtureRequest, run: TinyRun) -> Iterator[Session]:
    trainer: Trainer = TrainerProcess() if request.param == "process" else ThreadTrainer(build_task)
    with asyncio.Runner() as runner:
        runner.run(trainer.start())
        started = Session(trainer, runner, run, trainer.reports())
        started.say(Start(str(run.spec_path), str(run.data_dir), threads=1))
        try:
            ready = started.hear(lambda report: isinstance(report, Ready))
            assert ready == Ready(run.spec.model.n_values, run.spec.model.layout_digest, ready.tokens_per_s)  # type: ignore[union-attr]
            yield started
        finally:
            runner.run(trainer.stop())


def expected(spec: RunSpec, run: TinyRun, batches: list[int]) -> tuple[NDArray[np.float32], InnerLoop]:
    """The pseudo-gradient of these batches from the anchor with empty moments, and the loop that made it."""
    learner = build_task(spec)
    layout = layout_of([(name, value.shape) for name, value in learner.parameters()], block=spec.codec.block)
    loop = InnerLoop(learner, spec.inner, layout)
    loop.load(run.theta_D, fresh_moments=True)
    data = Batches(spec, run.data_dir)
    for k, index in enumerate(batches):
        loop.step(torch.from_numpy(data.batch(index)), inner_lr(spec.inner, 0, k, spec.work.h, loop.cold_step))
    delta_D = np.zeros(layout.n_values, np.float32)
    loop.delta_into(delta_D, 0)
    return delta_D, loop


def frames(session: Session, path: Path) -> list[bytes]:
    area = CodesArea(path, session.run.grid, "int8", 64)
    return [area.frame(chunk).tobytes() for chunk in range(session.run.grid.n_chunks)]


def at_end(report: Report) -> bool:
    return isinstance(report, Progress) and report.step == report.n_steps and not report.paused


def test_it_trains_its_ranges_and_encodes_the_pseudo_gradient_of_exactly_them(session: Session) -> None:
    path = session.codes("whole")
    session.say(session.load(), Train(1, (Range(4, 2), Range(20, 4)), h=6))
    end = session.hear(at_end)
    session.say(Encode(1, str(path)))
    encoded = session.hear(lambda report: isinstance(report, Encoded))
    assert isinstance(end, Progress)
    assert isinstance(encoded, Encoded)
    delta_D, loop = expected(session.run.spec, session.run, [4, 5, 20, 21, 22, 23])
    assert (end.round, end.step, end.tokens, end.time_left_s) == (1, 6, 6 * 64, 0.0)
    assert end.tokens_per_s > 0
    assert (encoded.round, encoded.steps, encoded.tokens, encoded.skipped_steps) == (1, 6, 6 * 64, 0)
    assert encoded.used == (Range(4, 2), Range(20, 4))
    assert encoded.sum_lr == pytest.approx(loop.tally.sum_lr)
    assert encoded.inner_loss == pytest.approx(loop.tally.mean_loss, rel=1e-4)
    found = frames(session, path)
    assert len(found) == session.run.grid.n_chunks > 5
    for chunk, frame in enumerate(found):
        start, stop = session.run.grid.bounds(chunk)
        assert frame == codec.encode("int8", delta_D[start:stop], block=64)


def test_the_same_again_gives_the_same_bytes(session: Session) -> None:
    found = []
    for name in ("first", "second"):
        path = session.codes(name)
        session.say(session.load(), Train(1, (Range(0, 6),), h=6))
        session.hear(at_end)
        session.say(Encode(1, str(path)))
        session.hear(lambda report: isinstance(report, Encoded))
        found.append(frames(session, path))
    assert found[0] == found[1]


def test_encode_stops_it_in_mid_round_and_only_a_prefix_counts_as_used(session: Session) -> None:
    path = session.codes("part")
    endless = Range(100_000, 10**9)  # however late the Encode comes
    session.say(session.load(), Train(1, (Range(0, 5), endless), h=6), Encode(1, str(path)))
    encoded = session.hear(lambda report: isinstance(report, Encoded))
    assert isinstance(encoded, Encoded)
    assert encoded.steps < 5 + endless.count
    assert encoded.tokens == 64 * encoded.steps == 64 * sum(span.count for span in encoded.used)
    assert [span.start for span in encoded.used] == [0, 100_000][: len(encoded.used)]


def test_moments_outlive_a_load_unless_it_asks_for_fresh_ones(session: Session) -> None:
    found: list[list[bytes]] = []
    for fresh in (True, False, True):
        path = session.codes(f"moments{len(found)}")
        session.say(session.load(fresh=fresh), Train(1, (Range(0, 3),), h=6))
        session.hear(at_end)
        session.say(Encode(1, str(path)))
        session.hear(lambda report: isinstance(report, Encoded))
        found.append(frames(session, path))
    assert found[0] == found[2] != found[1]


def test_a_second_train_without_a_load_adds_up(session: Session) -> None:
    path = session.codes("added")
    session.say(session.load(), Train(1, (Range(0, 3),), h=6))
    session.hear(at_end)
    session.say(Train(2, (Range(50, 4),), h=6, first_k=3))
    end = session.hear(lambda report: at_end(report) and isinstance(report, Progress) and report.round == 2)
    session.say(Encode(2, str(path)))
    encoded = session.hear(lambda report: isinstance(report, Encoded))
    assert isinstance(end, Progress)
    assert isinstance(encoded, Encoded)
    assert end.step == 7
    assert (encoded.steps, encoded.used) == (7, (Range(0, 3), Range(50, 4)))
    delta_D, _ = expected(session.run.spec, session.run, [0, 1, 2, 50, 51, 52, 53])
    assert frames(session, path)[0] == codec.encode("int8", delta_D[: session.run.grid.size(0)], block=64)


def test_a_pause_holds_it_and_resume_lets_it_go_on(session: Session) -> None:
    session.say(Pause(), session.load(), Train(9, (Range(0, 4),), h=6))  # a round that no other test has had
    held = session.hear(lambda report: isinstance(report, Progress) and report.round == 9 and report.paused)
    assert isinstance(held, Progress)
    assert (held.step, held.n_steps) == (0, 4)
    session.say(Resume())
    end = session.hear(at_end)
    assert isinstance(end, Progress)
    assert end.step == 4


def test_it_evaluates_outer_parameters(session: Session) -> None:
    session.say(Evaluate(3, str(session.run.theta_path)))
    evaluated = session.hear(lambda report: isinstance(report, Evaluated))
    assert isinstance(evaluated, Evaluated)
    assert (evaluated.round, evaluated.n_tokens) == (3, 16 * 15)
    assert evaluated.val_loss == pytest.approx(5.5, abs=0.2)  # near ln 257, for nothing is learnt yet


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_fault_is_its_last_report_and_it_starts_again_afterwards(kind: str, run: TinyRun) -> None:
    trainer: Trainer = TrainerProcess() if kind == "process" else ThreadTrainer(build_task)

    async def main() -> None:
        async with asyncio.timeout(100):
            await trainer.start()
            trainer.send(Load(str(run.theta_path), 0, 0, True))
            heard = [report async for report in trainer.reports()]
            assert len(heard) == 1
            assert isinstance(heard[0], Failed)
            assert "Start" in heard[0].reason
            trainer.send(Pause())  # to one that has ended: dropped
            await trainer.start()
            trainer.send(Quit())
            assert not [report async for report in trainer.reports()]
            await trainer.stop()
            await trainer.stop()

    asyncio.run(main())
