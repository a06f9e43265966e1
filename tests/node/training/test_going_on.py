"""The trainer over empty rounds and with larger batches: the same numbers as in one go, each batch used once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from node.training.link import Train
from protos.messages import Range
from tests.fakes.tiny import TinyRun, tiny_run
from tests.node.training.bench import Bench


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    folder: Path = tmp_path_factory.mktemp("run")
    return tiny_run(folder, width=13, inner={"lr": 0.01, "warmup_steps": 20})


def trained(bench: Bench, *trains: Train, encode_between: bool = False, turns: int = 10**6) -> Bench:
    bench.load(nominal_step=4)
    for number, train in enumerate(trains):
        bench.round = train.round
        bench.loop.handle(train)
        left = turns if number < len(trains) - 1 else 10**6
        while left and bench.loop.has_work:
            bench.loop.turn()
            left -= 1
        if encode_between:
            bench.encode()
    return bench


LEASE = (Range(2, 3), Range(9, 2))
GROWN = (Range(2, 3), Range(9, 4))


@pytest.mark.parametrize("encodes", [True, False])
@pytest.mark.parametrize("turns", [0, 2, 4, 99])
def test_a_lease_that_has_grown_goes_on_after_what_was_used_of_it(made: TinyRun, encodes: bool, turns: int) -> None:
    straight = trained(Bench(made), Train(1, GROWN, 5))
    whole = straight.encode()
    whole_D = straight.decoded_D()
    parts = trained(Bench(made), Train(1, LEASE, 5), Train(2, GROWN, 5), encode_between=encodes, turns=turns)
    found = parts.encode()
    assert (found.steps, found.used, found.tokens) == (whole.steps, whole.used, whole.tokens)
    assert found.sum_lr == whole.sum_lr
    assert found.used == GROWN
    np.testing.assert_array_equal(parts.decoded_D(), whole_D)
    assert (parts.progress[-1].step, parts.progress[-1].n_steps) == (7, 7)


def test_the_time_left_is_that_of_what_is_left(made: TinyRun) -> None:
    bench = trained(Bench(made), Train(1, LEASE, 5), Train(2, GROWN, 5), turns=4)
    began = next(report for report in bench.progress if report.round == 2)
    assert (began.step, began.n_steps, began.tokens) == (4, 7, 4 * 44)


def test_a_step_takes_as_many_batches_as_the_seat_asks_for(made: TinyRun) -> None:
    bench = Bench(made)
    bench.load()
    bench.loop.handle(Train(1, (Range(0, 5), Range(8, 4)), 10, batch_scale=4))
    while bench.loop.has_work:
        bench.loop.turn()
    assert [(report.step, report.n_steps, report.tokens) for report in bench.progress][-1] == (2, 2, 8 * 44)
    encoded = bench.encode()
    assert (encoded.steps, encoded.tokens) == (2, 8 * 44)
    assert encoded.used == (Range(0, 5), Range(8, 3))  # whole steps
    assert encoded.sum_lr == pytest.approx(0.01 * (1 + 2) / 20)  # the schedule counts steps, not batches


def test_a_larger_batch_is_the_mean_of_its_batches(made: TinyRun) -> None:
    def delta_D(scale: int, ranges: tuple[Range, ...]) -> NDArray[np.float32]:
        bench = Bench(made)
        bench.load()
        bench.loop.handle(Train(1, ranges, 10, batch_scale=scale))
        bench.loop.turn()
        bench.encode()
        return bench.decoded_D()

    twice_D = delta_D(2, (Range(3, 1), Range(5, 1)))
    once_D, other_D = delta_D(1, (Range(3, 1),)), delta_D(1, (Range(5, 1),))
    assert np.linalg.norm(twice_D) == pytest.approx(np.linalg.norm(once_D), rel=0.2)  # hardly a longer step
    assert not np.array_equal(twice_D, once_D)
    assert not np.array_equal(twice_D, other_D)


def test_a_lease_without_what_was_used_gives_up_what_is_left_of_the_other(made: TinyRun) -> None:
    bench = trained(Bench(made), Train(1, LEASE, 5), Train(2, (Range(20, 2),), 5), turns=2)
    encoded = bench.encode()
    assert encoded.used == (Range(2, 2), Range(20, 2))
    assert encoded.steps == 4
