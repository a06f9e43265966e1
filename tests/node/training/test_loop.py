"""The trainer's loop: what it does by its agent's commands, what it reports, and what is gone before it comes to it."""

from __future__ import annotations

import json
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from node.training import loop
from node.training.link import (
    Command,
    Declined,
    Encode,
    Evaluate,
    Evaluated,
    Evaluating,
    Load,
    Pause,
    Quit,
    Ready,
    Remark,
    Resume,
    Start,
    Train,
)
from node.training.loop import TrainerLoop, run
from node.training.shared import AreaError, CodesArea
from node.training.work import count, prefix
from protos.messages import Range
from tests.fakes.tiny import TinyRun, TinyTask, tiny_run
from tests.node.training.bench import Bench, Clock


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
    assert not bench.decoded_D().any()


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
    assert np.abs(bench.decoded_D()).max() < 1e3


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
    assert not bench.loop.has_work


def test_an_evaluation_says_that_it_goes_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.loop.handle(Evaluate(3, str(bench.run.theta_path)))
    last = bench.reports[-1]
    assert isinstance(last, Evaluated)
    assert last.n_tokens == 20 * 10
    monkeypatch.setattr(loop, "PROGRESS_S", 0.05)  # each of the five batches takes longer by this clock
    bench.loop.handle(Evaluate(4, str(bench.run.theta_path)))
    found = [report for report in bench.reports if isinstance(report, Evaluating) and report.round == 4]
    assert found == [Evaluating(4, 40 * n) for n in range(1, 6)]


def test_an_anchor_that_is_gone_is_said_and_waited_over(made: TinyRun, bench: Bench, tmp_path: Path) -> None:
    """The state was replaced while the trainer was at a step: the next Load is on its way."""
    bench.load()
    bench.train(Range(0, 3))
    before = len(bench.progress)
    gone = tmp_path / "generation.1" / "theta.bin"
    assert bench.loop.handle(Load(str(gone), 1, 10, False))
    (remark,) = [report for report in bench.reports if isinstance(report, Remark)]
    assert "round 1" in remark.text
    bench.train(Range(20, 3), round_=2)
    assert len(bench.progress) == before
    assert bench.loop.handle(Encode(2, str(tmp_path / "codes.0")))
    assert bench.reports[-1] == Declined(2, "no anchor is loaded")
    bench.loop.handle(Load(str(made.theta_path), 2, 20, False))
    bench.train(Range(40, 3), round_=3)
    encoded = bench.encode()
    assert (encoded.round, encoded.steps, encoded.used) == (3, 3, (Range(40, 3),))


def test_an_anchor_of_another_size_is_an_error(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "theta.bin").write_bytes(b"short")
    with pytest.raises(AreaError, match="5 bytes"):
        bench.loop.handle(Load(str(tmp_path / "theta.bin"), 1, 10, False))


def test_a_gone_anchor_with_fresh_moments_leaves_none(made: TinyRun, bench: Bench, tmp_path: Path) -> None:
    bench.load()
    bench.train(Range(0, 15))
    bench.loop.handle(Load(str(tmp_path / "gone"), 9, 10, True))
    bench.loop.handle(Load(str(made.theta_path), 10, 1000, False))
    bench.train(Range(0, 1), round_=11)
    assert bench.encode().sum_lr == pytest.approx(0.001)  # the first of the ramp


def test_a_state_that_is_gone_is_not_evaluated(bench: Bench, tmp_path: Path) -> None:
    bench.load()
    bench.train(Range(0, 2))
    assert bench.loop.handle(Evaluate(1, str(tmp_path / "gone")))
    last = bench.reports[-1]
    assert isinstance(last, Declined)
    assert (last.round, "No such file" in last.reason) == (1, True)
    assert bench.encode().steps == 2


def test_a_late_encode_ends_no_later_rounds_training(bench: Bench, tmp_path: Path) -> None:
    bench.load()
    bench.train(Range(0, 3))
    bench.loop.handle(Load(str(bench.run.theta_path), 1, 10, False))
    bench.loop.handle(Encode(1, str(tmp_path / "codes.0")))
    assert bench.reports[-1] == Declined(1, "round 2 has begun")
    bench.train(Range(20, 5), round_=2, turns=2)
    bench.loop.handle(Encode(1, str(tmp_path / "codes.0")))
    assert bench.reports[-1] == Declined(1, "round 2 has begun")
    bench.train(Range(20, 5), round_=2)
    assert bench.encode().used == (Range(20, 5),)
    bench.train(Range(20, 7), round_=3, turns=0)  # an empty round: the same anchor
    bench.loop.handle(Encode(2, str(tmp_path / "codes.0")))
    assert bench.reports[-1] == Declined(2, "round 3 has begun")
    assert bench.loop.has_work


def test_an_encode_whose_residual_is_gone_changes_nothing(bench: Bench, tmp_path: Path) -> None:
    """The round was committed without this node while the trainer was at a step: what it would write to is removed."""
    bench.load()
    bench.train(Range(0, 3))
    path, spec = bench.run.folder / "codes.0", bench.run.spec.codec
    CodesArea.create(path, bench.run.grid, spec.name, spec.block)
    assert bench.loop.handle(Encode(1, str(path), "", str(tmp_path / "residual.next")))
    last = bench.reports[-1]
    assert isinstance(last, Declined)
    assert (last.round, "residual.next" in last.reason) == (1, True)
    encoded = bench.encode()
    assert (encoded.steps, encoded.used) == (3, (Range(0, 3),))


def test_a_state_without_a_finite_loss_has_no_figure_and_ends_no_trainer(bench: Bench, tmp_path: Path) -> None:
    theta_D = bench.run.theta_D.copy()
    theta_D[:] = np.nan
    theta_D.tofile(tmp_path / "theta.bin")
    assert bench.loop.handle(Evaluate(1, str(tmp_path / "theta.bin")))
    assert bench.reports[-1] == Evaluated(1, 0.0, 0)
    bench.loop.handle(Evaluate(2, str(bench.run.theta_path)))
    last = bench.reports[-1]
    assert isinstance(last, Evaluated)
    assert (last.round, last.n_tokens > 0) == (2, True)


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
