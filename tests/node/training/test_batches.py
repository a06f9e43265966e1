from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from node.training.batches import Batches
from node.training.evaluation import evaluate
from node.training.schedule import locate
from node.training.shards import TRAIN_FILE, VAL_FILE, DataError
from tests.fakes.tiny import SEQUENCE_LENGTH, TinyRun, TinyTask, tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return tiny_run(tmp_path_factory.mktemp("run"), width=5)


@pytest.fixture
def copied(run: TinyRun, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run.data_dir, tmp_path / "data"))


def test_a_batch_is_its_sequences_in_the_shard(run: TinyRun) -> None:
    stored = np.fromfile(run.data_dir / TRAIN_FILE, "<u2").reshape(-1, SEQUENCE_LENGTH)
    batches = Batches(run.spec, run.data_dir)
    for index in (0, 3, run.spec.n_batches - 1):
        assert batches.batch(index).dtype == np.int64
        np.testing.assert_array_equal(batches.batch(index), stored[4 * index : 4 * index + 4])


def test_a_later_pass_reads_in_its_own_order(run: TinyRun) -> None:
    batches = Batches(run.spec, run.data_dir)
    _, stored = locate(run.spec.n_batches + 5, run.spec.n_batches, run.spec.data.seed)
    assert stored != 5
    np.testing.assert_array_equal(batches.batch(run.spec.n_batches + 5), batches.batch(stored))


def test_a_batch_that_was_never_fetched_is_an_error_and_no_zeros(run: TinyRun, copied: Path) -> None:
    with (copied / TRAIN_FILE).open("r+b") as file:
        file.seek(9 * 2 * SEQUENCE_LENGTH)  # sequence 9, of batch 2
        file.write(bytes(2 * SEQUENCE_LENGTH))
    batches = Batches(run.spec, copied)
    batches.batch(1)
    with pytest.raises(DataError, match="not been fetched"):
        batches.batch(2)


@pytest.mark.parametrize("file", [TRAIN_FILE, VAL_FILE])
def test_a_shard_of_another_size_or_none_is_an_error(run: TinyRun, copied: Path, file: str) -> None:
    def read() -> object:
        batches = Batches(run.spec, copied)
        return batches.batch(0) if file == TRAIN_FILE else list(batches.evaluation())

    read()
    with (copied / file).open("ab") as out:
        out.write(b"\0\0")
    with pytest.raises(DataError, match="bytes"):
        read()
    (copied / file).unlink()
    with pytest.raises(DataError, match="can't be mapped"):
        read()


def test_an_evaluation_is_the_mean_over_the_first_sequences(run: TinyRun) -> None:
    task = TinyTask.of(run.spec)
    loss, n_tokens = evaluate(task, Batches(run.spec, run.data_dir))
    assert n_tokens == 20 * (SEQUENCE_LENGTH - 1)
    in_parts, _ = evaluate(task, Batches(run.spec, run.data_dir), micro_tokens=1)
    assert in_parts == pytest.approx(loss, rel=1e-6)
    rows = [row for part in Batches(run.spec, run.data_dir).evaluation() for row in part]
    assert len(rows) == 20


def test_an_evaluation_that_is_not_finite_is_an_error(run: TinyRun) -> None:
    task = TinyTask.of(run.spec)
    for _, parameter in task.parameters():
        parameter.data.fill_(float("nan"))
    with pytest.raises(ArithmeticError):
        evaluate(task, Batches(run.spec, run.data_dir))
