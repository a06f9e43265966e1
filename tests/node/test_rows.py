"""Received rows on disk while an attempt lasts, and their hashes however they come in parts."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregation import codec
from aggregation.digest import chunk_root
from node import rows
from node.rows import LeafHashes, RowFile, leaf_ends

LEAF = 1024


def frame_of(name: str, n_values: int) -> bytes:
    return codec.encode(name, np.random.default_rng(n_values).standard_normal(n_values), block=256)


@given(
    st.sampled_from(["int8", "fp32"]),
    st.sampled_from([1, 255, 1024, 1025, 5000]),
    st.lists(st.integers(0, 21_000), max_size=6),
)
def test_leaves_hash_to_the_chunks_root_however_they_come(name: str, n_values: int, cuts: list[int]) -> None:
    frame = frame_of(name, n_values)
    hashes = LeafHashes(leaf_ends(name, 256, n_values, LEAF), LEAF)
    at = 0
    for cut in [*sorted(min(cut, len(frame)) for cut in cuts), len(frame)]:
        hashes.update(memoryview(frame)[at:cut])
        at = cut
    assert hashes.root() == chunk_root(frame, LEAF)


def test_too_few_and_too_many_bytes_have_no_root() -> None:
    frame = memoryview(frame_of("int8", 3000))
    hashes = LeafHashes(leaf_ends("int8", 256, 3000, LEAF), LEAF)
    for short in (frame[:3], frame[3:-1]):
        hashes.update(short)
        with pytest.raises(ValueError, match="not the whole frame"):
            hashes.root()
    hashes.update(frame[-1:])
    with pytest.raises(ValueError, match="1 bytes too many"):
        hashes.update(memoryview(b"x"))


def test_slots_are_apart_and_readable_after_the_end(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "rows", 2, 100)
    assert not (tmp_path / "rows").exists()
    first, second = file.slot(), file.slot()
    file.write(second, b"b" * 100)
    file.write(first + 10, memoryview(b"a" * 90))
    view = file.view(first, 100)
    assert (bytes(view[:10]), bytes(view[10:])) == (bytes(10), b"a" * 90)
    assert bytes(file.view(second, 100)) == b"b" * 100
    with pytest.raises(ValueError, match="more rows than"):
        file.slot()
    file.close()
    file.close()
    assert bytes(view[10:]) == b"a" * 90
    assert list(tmp_path.iterdir()) == []
    for use in (file.slot, lambda: file.write(0, b""), lambda: file.view(0, 1)):
        with pytest.raises(ValueError, match="over"):
            use()


def test_a_descriptor_in_use_is_closed_by_its_last_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RowFile(tmp_path / "rows", 1, 100)
    closed: list[int] = []
    used: list[int] = []

    def write(descriptor: int, *_: Any) -> None:
        used.append(descriptor)
        file.close()  # another thread ends the attempt just now
        assert closed == []
        os.fstat(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(rows, "write_all", write)
        real_close = os.close

        def close(descriptor: int) -> None:
            closed.append(descriptor)
            real_close(descriptor)

        patched.setattr(os, "close", close)
        file.write(file.slot(), b"data")
    assert closed == used


def test_a_full_disk_is_an_error_of_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = RowFile(tmp_path / "rows", 1, 100)
    offset = file.slot()
    with monkeypatch.context() as disk:
        disk.setattr(rows, "write_all", full)
        with pytest.raises(OSError, match="No space"):
            file.write(offset, b"data")
    file.write(offset, b"data")
    file.close()
