"""Results on disk: found by chunk and by hash, also after a restart, and never a damaged one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aggregation import codec
from aggregation.digest import chunk_root
from node.results import KEPT, ResultsStore

SIZES = [2048, 2048, 100]
LEAF = 1024
FRAMES = [codec.encode("int8", np.random.default_rng(i).standard_normal(n)) for i, n in enumerate(SIZES)]
HASHES = [chunk_root(frame, LEAF) for frame in FRAMES]
KEY = b"k" * 32


def new_store(folder: Path) -> ResultsStore:
    return ResultsStore(folder, [len(frame) for frame in FRAMES], LEAF)


def test_frames_are_found_by_chunk_and_by_hash(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    area = store.area(KEY)
    assert area.missing(HASHES) == [0, 1, 2]
    area.put(2, FRAMES[2], HASHES[2])
    area.put(0, memoryview(FRAMES[0]), HASHES[0])
    assert area.missing(HASHES) == [1]
    assert bytes(area.frame(0)) == FRAMES[0]
    assert bytes(store.find(HASHES[2]) or b"") == FRAMES[2]
    place = store.locate(HASHES[2])
    assert place is not None
    path, offset, n_bytes = place
    assert Path(path).read_bytes()[offset : offset + n_bytes] == FRAMES[2]
    assert store.locate(HASHES[1]) is None
    assert store.find(HASHES[1]) is None
    with pytest.raises(KeyError):
        area.frame(1)
    store.close()


def test_a_frame_of_another_length_is_refused(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    with pytest.raises(ValueError, match="bytes"):
        store.area(KEY).put(2, FRAMES[0], HASHES[0])
    assert store.locate(HASHES[0]) is None
    store.close()


def test_another_result_of_a_chunk_replaces_the_first(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    area = store.area(KEY)
    area.put(0, FRAMES[0], HASHES[0])
    area.put(0, FRAMES[1], HASHES[1])
    assert store.locate(HASHES[0]) is None
    assert bytes(area.frame(0)) == FRAMES[1]
    store.close()


def test_results_outlive_a_restart_but_damaged_ones_do_not(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    for chunk, (frame, hash_) in enumerate(zip(FRAMES, HASHES, strict=True)):
        store.area(KEY).put(chunk, frame, hash_)
    place = store.locate(HASHES[1])
    assert place is not None
    store.close()
    with open(place[0], "r+b") as file:
        file.seek(place[1] + 500)
        file.write(b"\x55")
    again = new_store(tmp_path)
    assert bytes(again.find(HASHES[0]) or b"") == FRAMES[0]
    assert again.find(HASHES[1]) is None
    with pytest.raises(KeyError):
        again.area(KEY).frame(1)
    assert again.area(KEY).missing(HASHES) == [1]
    again.close()


def test_old_areas_go_and_used_ones_stay(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    keys = [bytes([i]) * 32 for i in range(KEPT + 2)]
    for key in keys[:KEPT]:
        store.area(key).put(0, FRAMES[0], HASHES[0])
    store.area(keys[0])
    held = store.area(keys[1]).frame(0)
    for key in keys[KEPT:]:
        store.area(key)
    assert {path.name for path in tmp_path.iterdir()} == {key.hex() for key in keys if key not in (keys[2], keys[3])}
    store.drop(keys[1])
    assert bytes(held) == FRAMES[0]  # whoever looks at it still can
    assert not (tmp_path / keys[1].hex()).exists()
    store.close()


def test_what_is_no_area_of_this_run_is_removed_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "junk").mkdir()
    other = ResultsStore(tmp_path, [100], LEAF)
    other.area(KEY)
    other.close()
    store = new_store(tmp_path)
    assert list(tmp_path.iterdir()) == []
    store.close()
