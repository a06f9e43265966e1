"""A trainer whose run's settings change while it works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from node.training.link import Amend
from protos.messages import Range
from protos.runspec import RunSpec
from tests.fakes.tiny import tiny_run
from tests.node.training.bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tiny_run(tmp_path, width=13, inner={"lr": 0.01, "warmup_steps": 0}))


def amend(bench: Bench, **inner: Any) -> None:
    content = bench.run.spec.model_dump(mode="json")
    content["inner"] |= inner
    content["revision"] += 1
    bench.run.spec_path.write_bytes(RunSpec.model_validate(content).to_bytes())
    bench.loop.handle(Amend(str(bench.run.spec_path)))


def test_the_next_step_is_by_the_new_settings(bench: Bench) -> None:
    bench.load(nominal_step=0)
    bench.train(Range(0, 12))  # the moments are warm
    bench.load(nominal_step=100, fresh=False)
    amend(bench, lr=0.002)
    bench.train(Range(20, 2))
    assert bench.encode().sum_lr == pytest.approx(0.004)


def test_a_decay_that_is_ordered_takes_the_rate_to_zero(bench: Bench) -> None:
    bench.load(nominal_step=0)
    bench.train(Range(0, 12))
    amend(bench, decay_start=100, decay_steps=10)
    bench.load(nominal_step=105, fresh=False)
    bench.train(Range(20, 1))
    assert bench.encode().sum_lr == pytest.approx(0.005)
    bench.load(nominal_step=200, fresh=False)
    bench.train(Range(30, 1))
    assert bench.encode().sum_lr == 0.0


def test_weight_decay_and_clipping_are_the_new_ones_where_they_apply(bench: Bench) -> None:
    bench.load()
    bench.train(Range(0, 2))
    amend(bench, weight_decay=0.03, clip_norm=0.5)
    work = bench.loop._work
    assert work is not None
    decays = [group["weight_decay"] for group in work._inner._optimiser.param_groups]
    assert decays == [0.03, 0.0]
    assert work._inner._inner.clip_norm == 0.5
