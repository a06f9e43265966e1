from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import pytest

from node.training.link import (
    Command,
    Encode,
    Encoded,
    Evaluate,
    Load,
    Pause,
    Progress,
    Quit,
    Ready,
    Report,
    Resume,
    Start,
    Train,
)
from node.training.loop import TrainerLoop, count, prefix, run
from node.training.shared import CodesArea
from protos.messages import Range
from protos.runspec import RunSpec
from tests.fakes.tiny import TinyRun, TinyTask, tiny_run


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
        self.loop = TrainerLoop(build, self.reports.append, Clock())
        self.loop.handle(Start(str(made.spec_path), str(made.data_dir), 1))

    def load(self, *, nominal_step: int = 0, fresh: bool = True) -> None:
        self.loop.handle(Load(str(self.run.theta_path), 1, nominal_step, fresh))

    def train(self, *ranges: Range, round_: int = 1, h: int = 10, first_k: int = 0, turns: int = 10**6) -> None:
        self.loop.handle(Train(round_, ranges, h, first_k))
        while turns and self.loop.has_work:
            self.loop.turn()
            turns -= 1

    def encode(self) -> Encoded:
        path = self.run.folder / "codes.0"
        CodesArea.create(path, self.run.grid, "int8", 64)
        self.loop.handle(Encode(1, str(path)))
        encoded = self.reports[-1]
        assert isinstance(encoded, Encoded)
        return encoded

    @property
    def progress(self) -> list[Progress]:
        return [report for report in self.reports if isinstance(report, Progress)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return tiny_run(tmp_path_factory.mktemp("run"), width=13, inner={"lr": 0.01, "warmup_steps": 20})


@pytest.fixture
def bench(made: TinyRun) -> Bench:
    return Bench(made)


def test_ready_says_what_was_built_and_how_fast_it_is(bench: Bench) -> None:
    (ready,) = bench.reports
    assert isinstance(ready, Ready)
    assert (ready.n_values, ready.layout_digest) == (bench.run.spec.model.n_values, bench.run.spec.model.layout_digest)
    assert ready.tokens_per_s == pytest.approx(44 / 0.1)


def test_progress_comes_at_both_ends_and_twice_a_second_in_between(bench: Bench) -> None:
    bench.load()
    bench.train(Range(0, 12))
    found = bench.progress
    assert [report.step for report in found] == [0, 3, 6, 9, 12]  # a step reads the clock twice, a report not at all
    assert {report.n_steps for report in found} == {12}
    assert [report.tokens for report in found] == [44 * report.step for report in found]
    assert found[1].tokens_per_s == pytest.approx(440)
    assert [report.time_left_s for report in found] == pytest.approx([0.0, 0.9, 0.6, 0.3, 0.0])
    assert found[0].loss == 0.0
    assert found[-1].loss > 0.0


def test_rates_follow_the_schedule_over_an_empty_round(bench: Bench) -> None:
    bench.load(nominal_step=4)
    bench.train(Range(0, 3), h=5, turns=2)
    bench.train(Range(30, 4), round_=2, h=5)  # k goes on from 2, and stands still at H
    encoded = bench.encode()
    assert encoded.used == (Range(0, 2), Range(30, 4))
    factors = [min((step + 1) / 20, (i + 1) / 10) for i, step in enumerate([4, 5, 6, 7, 8, 9])]
    assert encoded.sum_lr == pytest.approx(0.01 * sum(factors))


def test_first_k_moves_the_schedule_on(bench: Bench) -> None:
    bench.load()
    bench.train(Range(0, 1), first_k=7)
    assert bench.encode().sum_lr == pytest.approx(0.01 * 1 / 10)  # the ramp of cold moments is the smaller factor


def test_the_ramp_is_over_once_the_moments_are_warm(bench: Bench) -> None:
    bench.load()
    bench.train(Range(0, 15))
    bench.load(nominal_step=1000, fresh=False)
    bench.train(Range(0, 1))
    assert bench.encode().sum_lr == pytest.approx(0.01)
    bench.load(nominal_step=1000, fresh=True)
    bench.train(Range(0, 1))
    assert bench.encode().sum_lr == pytest.approx(0.001)


def test_without_a_step_nothing_is_used_and_the_codes_are_zeros(bench: Bench) -> None:
    bench.load()
    encoded = bench.encode()
    assert (encoded.steps, encoded.tokens, encoded.used, encoded.inner_loss) == (0, 0, (), 0.0)
    assert set(encoded.norms_sq) == {0.0}


def test_a_skipped_batch_is_used_and_said(made: TinyRun) -> None:
    class Poisoned(TinyTask):
        calls = 0

        def loss(self, ids_BL):  # type: ignore[no-untyped-def]
            Poisoned.calls += 1
            return super().loss(ids_BL) * (float("nan") if Poisoned.calls == 7 else 1.0)  # three are for measuring

    bench = Bench(made, lambda spec: Poisoned(13, spec.seed))
    bench.load()
    bench.train(Range(0, 6))
    encoded = bench.encode()
    assert (encoded.steps, encoded.skipped_steps, encoded.used) == (5, 1, (Range(0, 6),))
    assert bench.progress[-1].skipped_steps == 1
    assert all(norm < 1e6 for norm in encoded.norms_sq)


def test_after_encode_it_waits_and_another_train_goes_on(bench: Bench) -> None:
    bench.load()
    bench.train(Range(0, 10), turns=4)
    assert bench.encode().used == (Range(0, 4),)
    assert not bench.loop.has_work
    assert bench.encode().used == (Range(0, 4),)
    bench.train(Range(20, 2))
    assert bench.encode().used == (Range(0, 4), Range(20, 2))


def test_a_pause_holds_and_evaluate_ends_the_training(bench: Bench) -> None:
    bench.load()
    bench.train(Range(0, 5), turns=1)
    bench.loop.handle(Pause())
    assert not bench.loop.has_work
    assert bench.progress[-1].paused
    bench.loop.handle(Resume())
    assert bench.loop.has_work
    bench.loop.handle(Evaluate(1, str(bench.run.theta_path)))
    assert not bench.loop.has_work
    bench.loop.handle(Train(1, (Range(0, 2),), 10))
    with pytest.raises(RuntimeError, match="no anchor"):
        bench.loop.turn()


def test_what_can_not_be_done_raises(made: TinyRun, tmp_path: Path) -> None:
    fresh = TrainerLoop(TinyTask.of, print, Clock())
    with pytest.raises(RuntimeError, match="Start"):
        fresh.handle(Train(1, (), 10))
    with pytest.raises(ValueError, match="one rank"):
        fresh.handle(Start(str(made.spec_path), str(made.data_dir), 1, rank=1, ranks=2))
    document = json.loads(made.spec_path.read_text())
    document["model"]["layout_digest"] = "00" * 32
    (tmp_path / "spec.json").write_text(json.dumps(document))
    fresh.handle(Start(str(tmp_path / "spec.json"), str(made.data_dir), 1))
    with pytest.raises(ValueError, match="another layout"):
        fresh.handle(Load(str(made.theta_path), 1, 0, True))


def test_run_takes_commands_between_steps_until_quit(bench: Bench) -> None:
    commands: SimpleQueue[Command] = SimpleQueue()
    for command in (Load(str(bench.run.theta_path), 1, 0, True), Train(1, (Range(0, 10**6),), 10), Pause(), Quit()):
        commands.put(command)
    run(bench.loop, commands)
    assert bench.progress[-1].paused


def test_prefixes_of_ranges() -> None:
    ranges = (Range(5, 2), Range(7, 0), Range(100, 3))
    assert count(ranges) == 5
    assert [prefix(ranges, n) for n in (0, 1, 2, 3, 9)] == [
        (),
        (Range(5, 1),),
        (Range(5, 2),),
        (Range(5, 2), Range(100, 1)),
        (Range(5, 2), Range(100, 3)),
    ]
