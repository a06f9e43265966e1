"""What the trainer's loop encodes: what was learnt, with what was left over, in each codec, and nothing too far."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from aggregation import codec
from aggregation.codec import feedback
from node.training.link import Remark, Written
from node.training.shared import RESIDUAL_HEAD_BYTES, create, map_residual
from protos.messages import Range
from tests.fakes.tiny import TinyRun, tiny_run
from tests.node.training.bench import Bench


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return tiny_run(tmp_path_factory.mktemp("run"), width=13, inner={"lr": 0.01, "warmup_steps": 20})


@pytest.fixture
def bench(made: TinyRun) -> Bench:
    return Bench(made)


def test_while_it_encodes_it_says_how_far_it_is(bench: Bench) -> None:
    bench.load()
    bench.train(Range(0, 2))
    bench.encode()
    found = [report.n_chunks for report in bench.reports if isinstance(report, Written)]
    assert found == list(range(1, bench.run.grid.n_chunks + 1))  # this clock goes on by more than a pause each time


CODECS = ("fp32", "fp16", "int8", "int4", "topk")


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bench]:
    """For each codec a loop that has trained the same steps."""
    benches = {}
    for name in CODECS:
        made = tiny_run(tmp_path_factory.mktemp(name), width=121, codec={"name": name})
        benches[name] = bench = Bench(made)
        bench.load()
        bench.train(Range(0, 4))
    return benches


def residual(folder: Path, name: str, n_values: int) -> Path:
    create(folder / name, RESIDUAL_HEAD_BYTES + 4 * n_values)
    return folder / name


@pytest.mark.parametrize("name", CODECS)
def test_each_codec_encodes_what_was_learnt(learnt: dict[str, Bench], tmp_path: Path, name: str) -> None:
    learnt["fp32"].encode()
    delta_D, bench = learnt["fp32"].decoded_D(), learnt[name]
    grid = bench.run.grid
    assert grid.n_chunks == 2
    paths: tuple[Path | None, ...] = ()
    if codec.feedback_decay(name) is not None:
        paths = (None, residual(tmp_path, "next", grid.n_values))
    bench.encode(*paths)
    for chunk, frame in enumerate(bench.frames()):
        delta_P = delta_D[slice(*grid.bounds(chunk))]
        assert frame == codec.encode(name, delta_P, block=64)  # nothing was left over of earlier rounds
    if paths:
        left_D = map_residual(tmp_path / "next", grid.n_values)
        assert left_D.any()
        assert np.array_equal(bench.decoded_D() + left_D, delta_D)


@pytest.mark.parametrize("name", ["int4", "topk"])
def test_what_is_left_over_goes_along_the_next_time(learnt: dict[str, Bench], tmp_path: Path, name: str) -> None:
    bench, n_values = learnt[name], learnt[name].run.grid.n_values
    first, second = (residual(tmp_path, each, n_values) for each in ("first", "second"))
    bench.encode(None, first)
    plain, before = bench.frames(), first.read_bytes()
    bench.encode(first, second)
    assert first.read_bytes() == before
    assert bench.frames() != plain
    learnt["fp32"].encode()
    delta_D, grid = learnt["fp32"].decoded_D(), bench.run.grid
    for chunk, frame in enumerate(bench.frames()):
        start, stop = grid.bounds(chunk)
        out, left_P = bytearray(len(frame)), np.zeros(stop - start, np.float32)
        left_before_P = map_residual(first, n_values)[start:stop]
        feedback.encode(name, delta_D[start:stop], left_before_P, out, left_P, block=64)
        assert frame == out
        assert np.array_equal(map_residual(second, n_values)[start:stop], left_P)
    bench.encode(first, second)  # a round that was not counted: the same residual again, to the same bytes
    assert bench.frames()[0] == bytes(codec_frame(name, delta_D, first, grid.bounds(0)))


@pytest.mark.parametrize("rotten", [np.nan, np.inf, 3e38])
def test_a_residual_that_rotted_costs_what_its_chunk_held_and_no_more(
    learnt: dict[str, Bench], tmp_path: Path, rotten: float
) -> None:
    bench, n_values = learnt["int4"], learnt["int4"].run.grid.n_values
    first, second = (residual(tmp_path, each, n_values) for each in ("first", "second"))
    bench.encode(None, first)
    plain = bench.frames()
    bench.encode(first, second)
    fed = bench.frames()
    map_residual(first, n_values, writable=True)[1] = rotten
    bench.encode(first, second)
    assert bench.frames() == [plain[0], *fed[1:]]
    assert np.isfinite(map_residual(second, n_values)).all()


@pytest.mark.parametrize("far", [1e13, 3e38])
@pytest.mark.parametrize("name", CODECS)
def test_steps_that_went_too_far_for_the_codec_do_not_count(
    learnt: dict[str, Bench], tmp_path: Path, name: str, far: float
) -> None:
    """Finite, and beyond what any codec holds: in the second chunk, when the first one has been read."""
    bench = Bench(learnt[name].run)
    grid = bench.run.grid
    paths: tuple[Path | None, ...] = ()
    if codec.feedback_decay(name) is not None:
        first, second = (residual(tmp_path, each, grid.n_values) for each in ("first", "second"))
        map_residual(first, grid.n_values, writable=True)[:] = 0.001
        paths = (first, second)
    bench.load()
    bench.train(Range(0, 4))
    work = bench.loop._work
    assert work is not None
    with torch.no_grad():
        bias = work._task.parameters()[-1][1]
        bias[0] = far
    encoded = bench.encode(*paths)
    assert (encoded.steps, encoded.used, encoded.tokens, encoded.skipped_steps) == (0, (), 0, 4)
    (remark,) = [report for report in bench.reports if isinstance(report, Remark)]
    assert "round 1 went too far" in remark.text
    assert np.isfinite(bench.decoded_D()).all(), "reducers would take these frames"
    bench.train(Range(20, 2), round_=2)
    again = bench.encode(*paths)
    assert (again.steps, again.used) == (2, (Range(0, 4), Range(20, 2)))
    assert np.abs(bench.decoded_D()).max() < 1.0


def codec_frame(name: str, delta_D: NDArray[np.float32], left: Path, bounds: tuple[int, int]) -> bytearray:
    start, stop = bounds
    out = bytearray(codec.frame_bytes(name, stop - start, 64))
    left_P = map_residual(left, delta_D.size)[start:stop]
    feedback.encode(name, delta_D[start:stop], left_P, out, np.zeros(stop - start, np.float32), block=64)
    return out
