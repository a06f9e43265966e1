from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.training.shards import (
    PIECES_FILE,
    TRAIN_FILE,
    VAL_FILE,
    DataError,
    Shards,
    pieces_of_batches,
    pieces_of_evaluation,
    read_pieces,
)
from protos.messages import Range
from protos.runspec import RunSpec
from tests.fakes.tiny import TinyRun, tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return tiny_run(tmp_path_factory.mktemp("run"), width=5)


def with_data(spec: RunSpec, **fields: object) -> RunSpec:
    return spec.model_copy(update={"data": spec.data.model_copy(update=fields)})


@given(st.integers(1, 5000), st.integers(1, 500), st.integers(1, 64), st.integers(1, 100))
def test_pieces_cover_both_files_without_gap_or_overlap(train: int, val: int, size: int, per_piece: int) -> None:
    shards = Shards(train, val, size, per_piece)
    ends = {TRAIN_FILE: 0, VAL_FILE: 0}
    for piece in range(shards.n_pieces):
        place = shards.place(piece)
        assert place.offset == ends[place.file]
        assert 0 < place.n_bytes <= size * per_piece
        assert place.n_bytes % size == 0
        ends[place.file] += place.n_bytes
    assert ends == {TRAIN_FILE: train * size, VAL_FILE: val * size}
    with pytest.raises(IndexError):
        shards.place(shards.n_pieces)


@pytest.mark.parametrize("numbers", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0), (9, 9, 2**10, 2**11)])
def test_contradictory_numbers_are_refused(numbers: tuple[int, int, int, int]) -> None:
    with pytest.raises(DataError):
        Shards(*numbers)


def test_more_pieces_than_any_run_needs_are_refused() -> None:
    with pytest.raises(DataError, match="pieces"):
        Shards(2**30, 1, 16, 1)


def test_a_lease_needs_the_pieces_of_its_batches(run: TinyRun) -> None:
    spec = with_data(run.spec, n_train_sequences=4000, sequences_per_piece=10)  # a batch is 4 sequences
    assert pieces_of_batches(spec, [Range(0, 2)]) == (0,)
    assert pieces_of_batches(spec, [Range(2, 1)]) == (0, 1)
    assert pieces_of_batches(spec, [Range(5, 2), Range(0, 1), Range(5, 1)]) == (0, 2)
    assert pieces_of_batches(spec, [Range(3, 0)]) == ()
    everything = pieces_of_batches(spec, [Range(1000, 1000)])  # the second pass, in its own order
    assert everything == tuple(range(400))
    assert len(pieces_of_batches(spec, [Range(1000, 5)])) > 2


def test_an_evaluation_needs_the_beginning_of_the_validation_shard(run: TinyRun) -> None:
    spec = with_data(run.spec, n_train_sequences=95, n_val_sequences=40, sequences_per_piece=10)  # 20 are evaluated
    assert pieces_of_evaluation(spec) == (10, 11)


def test_pieces_json_is_read_back(run: TinyRun) -> None:
    raw = (run.data_dir / PIECES_FILE).read_bytes()
    assert len(read_pieces(raw, run.spec.data)) == Shards.of(run.spec.data).n_pieces


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'{"pieces": 3}',
        b'{"pieces": [3]}',
        b'{"pieces": ["00"]}',
        b'{"pieces": ["zz"]}',
        b"\xff",
        b"[" * 200,
        b" " * 10_000,
        json.dumps({"pieces": ["00" * 32] * 2}).encode(),
        json.dumps({"pieces": ["00" * 32] * 3}).encode(),
    ],
)
def test_any_other_pieces_json_is_refused(raw: bytes, run: TinyRun) -> None:
    with pytest.raises(DataError):
        read_pieces(raw, run.spec.data)


def test_pieces_json_of_another_run_is_refused(run: TinyRun, tmp_path: Path) -> None:
    other = tiny_run(tmp_path, width=5, seed=9)
    with pytest.raises(DataError, match="root"):
        read_pieces((run.data_dir / PIECES_FILE).read_bytes(), other.spec.data)
