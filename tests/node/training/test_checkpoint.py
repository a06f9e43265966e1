"""Checkpoint files: whole or not at all, few, verified, and no file does more harm than being passed over."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from node.training import checkpoint
from node.training.checkpoint import (
    KEPT,
    Belonging,
    Checkpoint,
    CheckpointError,
    Checkpoints,
    Position,
    RealDisk,
    _read,
    joined,
    resumes,
)
from protos.messages import Range

BELONGS = Belonging("run", "ab" * 32, "cd" * 32)
POSITION = Position(BELONGS, "ef" * 32, 5, (Range(10, 4), Range(30, 2)), 4, 2, 0.1, 12.5, 25, 1, 2)
RNG = np.random.default_rng(1)
TENSORS = {
    "parameter/a": RNG.standard_normal((3, 5)).astype(np.float32),
    "step/a": np.asarray(7.0, np.float32),
    "parameter/b": RNG.standard_normal(2).astype(np.float32),
}


class ScriptedDisk(RealDisk):
    """A disk that is full after so many bytes, or has so much room left; it notes what lies there while it writes."""

    def __init__(self, *, full_after: int | None = None, free: int = 2**40) -> None:
        self.full_after, self.free = full_after, free
        self.seen: list[list[str]] = []

    def free_bytes(self, folder: Path) -> int:
        return self.free

    def write(self, path: Path, parts: Iterable[memoryview]) -> None:
        def limited() -> Iterable[memoryview]:
            n_bytes = 0
            for part in parts:
                n_bytes += len(part)
                if self.full_after is not None and n_bytes > self.full_after:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                yield part

        super().write(path, limited())
        self.seen.append(sorted(each.name for each in path.parent.iterdir()))


def at_round(round_: int) -> Position:
    return replace(POSITION, round=round_)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def newest_round(folder: Path) -> tuple[int | None, list[str]]:
    found, remarks = Checkpoints(folder).newest(BELONGS.run, BELONGS.layout)
    return (found.position.round if found else None), remarks


def test_it_comes_back_as_it_was_and_anybody_can_read_it(tmp_path: Path) -> None:
    Checkpoints(tmp_path / "in" / "here").save(POSITION, TENSORS)
    found, remarks = Checkpoints(tmp_path / "in" / "here").newest(BELONGS.run, BELONGS.layout)
    assert remarks == []
    assert found is not None
    assert found.position == POSITION
    assert found.tensors.keys() == TENSORS.keys()
    (path,) = files(tmp_path / "in" / "here")
    for name, values in load_file(path).items():
        assert np.array_equal(values, TENSORS[name])
        assert values.shape == found.tensors[name].shape == TENSORS[name].shape
        assert np.array_equal(found.tensors[name], TENSORS[name])


def test_the_newest_is_used_and_there_are_never_more_than_a_few(tmp_path: Path) -> None:
    disk = ScriptedDisk()
    for round_ in range(1, 13):
        Checkpoints(tmp_path, disk=disk).save(at_round(round_), TENSORS)
        assert newest_round(tmp_path) == (round_, [])
    assert len(files(tmp_path)) == KEPT
    assert max(map(len, disk.seen)) == KEPT


@given(st.data())
def test_a_torn_or_damaged_one_is_said_and_the_one_before_it_is_used(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    for round_ in (1, 2):
        Checkpoints(folder).save(at_round(round_), TENSORS)
    path = files(folder)[-1]
    raw = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        del raw[at:]
    else:
        raw[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    round_found, remarks = newest_round(folder)
    assert round_found == 1
    assert len(remarks) == 1
    assert path.name in remarks[0]
    assert newest_round(folder) == (1, []), "said once"


@pytest.mark.parametrize("foreign", [replace(BELONGS, run="another"), replace(BELONGS, layout="00" * 32)])
def test_one_of_another_run_or_model_is_said_and_not_used(tmp_path: Path, foreign: Belonging) -> None:
    Checkpoints(tmp_path).save(at_round(1), TENSORS)
    Checkpoints(tmp_path).save(replace(at_round(2), belongs=foreign), TENSORS)
    round_found, remarks = newest_round(tmp_path)
    assert round_found == 1
    assert "another run or model" in remarks[0]


def test_what_an_interrupted_write_left_is_removed_and_other_files_are_let_alone(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(at_round(1), TENSORS)
    (tmp_path / "0000000002.part").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    assert newest_round(tmp_path) == (1, [])
    assert [path.suffix for path in files(tmp_path)] == [".safetensors", ".txt"]


def test_a_part_left_by_the_same_name_does_not_stop_the_next_write(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    (tmp_path / "0000000001.part").write_bytes(b"half")
    store.save(at_round(3), TENSORS)
    assert newest_round(tmp_path) == (3, [])


def test_folders_in_the_way_cost_no_checkpoint(tmp_path: Path) -> None:
    """Half-filled ones, by the names of those that are there and of the next one."""
    store = Checkpoints(tmp_path)
    store.save(at_round(1), TENSORS)
    for name in ("0000000002.part", "0000000003.part", f"0000000002-{'0' * 32}.safetensors"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.bin").write_bytes(b"half")
    store.save(at_round(2), TENSORS)
    assert newest_round(tmp_path) == (2, [])
    assert not list(tmp_path.glob("*.part"))


def test_one_that_the_disk_can_not_read_any_more_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for round_ in (1, 2):
        Checkpoints(tmp_path).save(at_round(round_), TENSORS)
    bad = files(tmp_path)[-1]

    def reads(path: Path) -> Checkpoint:
        if path == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return _read(path)

    monkeypatch.setattr(checkpoint, "_read", reads)
    found, (remark,) = newest_round(tmp_path)
    assert found == 1
    assert remark == f"the checkpoint {bad.name} can't be read: Input/output error"


@pytest.mark.parametrize("full_after", [0, 500, 520])
def test_a_full_disk_costs_the_new_one_only(tmp_path: Path, full_after: int) -> None:
    for round_ in (1, 2):
        Checkpoints(tmp_path).save(at_round(round_), TENSORS)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            Checkpoints(tmp_path, disk=ScriptedDisk(full_after=full_after)).save(at_round(3), TENSORS)
        assert newest_round(tmp_path) == (2, [])
        assert not list(tmp_path.glob("*.part"))


def test_room_is_left_for_what_matters_more(tmp_path: Path) -> None:
    disk = ScriptedDisk(free=10_000)
    Checkpoints(tmp_path, reserve_bytes=5_000, disk=disk).save(at_round(1), TENSORS)
    with pytest.raises(OSError, match="No space"):
        Checkpoints(tmp_path, reserve_bytes=9_990, disk=disk).save(at_round(2), TENSORS)
    assert newest_round(tmp_path) == (1, [])


def test_no_folder_is_no_checkpoint(tmp_path: Path) -> None:
    assert newest_round(tmp_path / "nowhere") == (None, [])


def named_by_hash(folder: Path, raw: bytes) -> Path:
    path = folder / f"0000000001-{blake3(raw).hexdigest()[:32]}.safetensors"
    path.write_bytes(raw)
    return path


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(
    st.binary(max_size=100)
    | JSON.map(lambda value: (b := json.dumps(value).encode()) and struct.pack("<Q", len(b)) + b)
)
def test_any_bytes_by_a_right_name_are_a_checkpoint_error(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    with pytest.raises(CheckpointError):
        _read(named_by_hash(tmp_path_factory.mktemp("any"), raw))


def wrong_tensor(document: dict[str, Any], **entry: Any) -> None:
    document["parameter/a"] |= entry


@pytest.mark.parametrize(
    "change",
    [
        lambda document: wrong_tensor(document, dtype="F64"),
        lambda document: wrong_tensor(document, shape=[3, 6]),
        lambda document: wrong_tensor(document, shape=[-3, -5]),
        lambda document: wrong_tensor(document, data_offsets=[60, 0]),
        lambda document: wrong_tensor(document, data_offsets=[10**9, 10**9 + 60]),
        lambda document: wrong_tensor(document, data_offsets=[0]),
        lambda document: document["__metadata__"].update(version="3"),
        lambda document: document["__metadata__"].update(round="-1"),
        lambda document: document["__metadata__"].update(skipped_in_a_row="-1"),
        lambda document: document["__metadata__"].pop("skipped_in_a_row"),
        lambda document: document["__metadata__"].update(round="1" * 5000),
        lambda document: document["__metadata__"].update(sum_lr="nan"),
        lambda document: document["__metadata__"].update(used="[[1]]"),
        lambda document: document["__metadata__"].update(used=json.dumps([[0, 1]] * 70_000)),
        lambda document: document.pop("__metadata__"),
    ],
)
def test_a_header_that_lies_is_a_checkpoint_error(tmp_path: Path, change: Any) -> None:
    with pytest.raises(CheckpointError):
        _read(changed(tmp_path, change))


def test_one_of_the_version_before_is_read_with_nothing_skipped_in_a_row(tmp_path: Path) -> None:
    def older(document: dict[str, Any]) -> None:
        document["__metadata__"]["version"] = "1"
        del document["__metadata__"]["skipped_in_a_row"]

    found = _read(changed(tmp_path, older))
    assert found.position == replace(POSITION, skipped_in_a_row=0)
    assert np.array_equal(found.tensors["parameter/a"], TENSORS["parameter/a"])


def changed(folder: Path, change: Any) -> Path:
    """A checkpoint whose header is another."""
    Checkpoints(folder).save(POSITION, TENSORS)
    (path,) = files(folder)
    raw = path.read_bytes()
    (n_head,) = struct.unpack("<Q", raw[:8])
    document = json.loads(raw[8 : 8 + n_head])
    change(document)
    head = json.dumps(document).encode()
    return named_by_hash(folder, struct.pack("<Q", len(head)) + head + raw[8 + n_head :])


def test_training_goes_on_only_in_the_very_same_work() -> None:
    ranges = (Range(10, 4), Range(30, 6))
    assert resumes(POSITION, BELONGS, POSITION.anchor, ranges, 1) == ""
    assert resumes(POSITION, BELONGS, POSITION.anchor, (Range(10, 2), Range(12, 2), Range(30, 2)), 1) == ""
    assert "amended" in resumes(POSITION, replace(BELONGS, spec="00" * 32), POSITION.anchor, ranges, 1)
    assert "anchor" in resumes(POSITION, BELONGS, "00" * 32, ranges, 1)
    assert "step" in resumes(POSITION, BELONGS, POSITION.anchor, ranges, 2)
    for others in ((Range(10, 4), Range(31, 6)), (Range(10, 4), Range(30, 1)), (Range(30, 2), Range(10, 4)), ()):
        assert "batches" in resumes(POSITION, BELONGS, POSITION.anchor, others, 1)


@given(st.lists(st.builds(Range, st.integers(0, 20), st.integers(0, 4)), max_size=6))
def test_joined_ranges_name_the_same_batches_in_order(ranges: list[Range]) -> None:
    def batches(spans: Iterable[Range]) -> list[int]:
        return [span.start + i for span in spans for i in range(span.count)]

    found = joined(ranges)
    assert batches(found) == batches(ranges)
    assert all(span.count for span in found)
    assert all(a.start + a.count != b.start for a, b in pairwise(found))
