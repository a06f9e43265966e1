"""Results on disk: found by chunk and by hash, also after a restart, and never a damaged one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from aggregation import codec
from aggregation.digest import chunk_root
from node.results import FRAMES as FRAMES_BIN
from node.results import INDEX, KEPT, ResultsArea, ResultsStore

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


def open_below(folder: Path) -> list[str]:
    """What this process has open there; threads of other tests may open and close files elsewhere at any time."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [path for path in found if path.startswith(str(folder.resolve()))]


@pytest.mark.parametrize("fault", ["index", "map", "reading"])
def test_an_area_that_can_not_be_opened_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError(fault)

    if fault == "index":
        (tmp_path / INDEX).write_bytes(b"x")
    else:
        monkeypatch.setattr(*(("node.results.mmap.mmap", refuse) if fault == "map" else ("os.pread", refuse)))
    for _ in range(3):
        with pytest.raises(ValueError, match="bytes instead of" if fault == "index" else fault):
            ResultsArea(tmp_path, [len(frame) for frame in FRAMES], LEAF)
    assert open_below(tmp_path) == []


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


def test_an_attempts_area_becomes_its_bodys(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    plan, body = b"p" * 32, b"b" * 32
    area = store.area(plan)
    area.put(0, FRAMES[0], HASHES[0])
    assert store.rekey(plan, body) is area
    assert store.area(body) is area
    assert {path.name for path in tmp_path.iterdir()} == {body.hex()}
    area.put(1, FRAMES[1], HASHES[1])  # whoever had it goes on with it
    assert store.area(body).missing(HASHES) == [2]
    place = store.locate(HASHES[1])
    assert place is not None
    assert Path(place[0]).read_bytes()[place[1] : place[1] + place[2]] == FRAMES[1]
    assert store.rekey(plan, body) is area  # a second time, or after a restart
    store.close()
    again = new_store(tmp_path)
    assert bytes(again.area(body).frame(1)) == FRAMES[1]
    again.close()


def test_an_area_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.area(b"p" * 32).put(0, FRAMES[0], HASHES[0])
    there = store.area(KEY)
    there.put(2, FRAMES[2], HASHES[2])
    assert store.rekey(b"p" * 32, KEY) is there
    assert there.missing(HASHES) == [0, 1]
    assert store.find(HASHES[0]) is not None
    store.close()


def test_held_areas_stay_however_old(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    keys = [bytes([i]) * 32 for i in range(3 * KEPT)]
    store.area(keys[0]).put(0, FRAMES[0], HASHES[0])
    store.rekey(keys[0], KEY)
    store.area(keys[1]).put(1, FRAMES[1], HASHES[1])
    store.hold([keys[1], KEY, b"not here" * 4])
    for key in keys[2 : 2 * KEPT]:
        store.area(key)
    assert len(list(tmp_path.iterdir())) == KEPT + 2
    assert bytes(store.find(HASHES[0]) or b"") == FRAMES[0]
    store.hold([keys[1]])
    for key in keys[2 * KEPT :]:
        store.area(key)
    assert store.find(HASHES[0]) is None
    assert bytes(store.find(HASHES[1]) or b"") == FRAMES[1]
    store.close()


def test_held_areas_outlive_a_restart(tmp_path: Path) -> None:
    """What is to be held is only known once the chain is: nothing goes before that."""
    store = new_store(tmp_path)
    keys = [bytes([i]) * 32 for i in range(2 * KEPT)]
    for key in keys:
        store.area(key).put(0, FRAMES[0], HASHES[0])
        store.hold(keys)
    store.close()
    again = new_store(tmp_path)
    again.hold(keys)
    assert {path.name for path in tmp_path.iterdir()} == {key.hex() for key in keys}
    again.hold([])
    assert len(list(tmp_path.iterdir())) == KEPT
    again.close()


def test_what_is_held_for_others_gives_way_but_the_newest(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    keys = [bytes([i]) * 32 for i in range(3)]
    for key in keys:
        store.area(key)
    store.hold(keys)  # newest first
    assert [store.relieve(), store.relieve(), store.relieve()] == [True, True, False]
    assert [path.name for path in tmp_path.iterdir()] == [keys[0].hex()]
    store.close()


def test_a_held_area_keeps_its_place_under_another_name(tmp_path: Path) -> None:
    store = ResultsStore(tmp_path, [len(frame) for frame in FRAMES], LEAF, kept=1)
    area = store.area(b"p" * 32)
    store.hold([b"p" * 32])
    store.rekey(b"p" * 32, KEY)
    for i in range(3):
        fresh = store.area(bytes([i]) * 32)
        assert store.area(bytes([i]) * 32) is fresh
    assert store.area(KEY) is area
    store.close()


def test_the_files_of_an_area_that_goes_are_anothers(tmp_path: Path) -> None:
    store = ResultsStore(tmp_path, [len(frame) for frame in FRAMES], LEAF, kept=1)
    old = store.area(KEY)
    old.put(0, FRAMES[0], HASHES[0])
    file = (tmp_path / KEY.hex() / FRAMES_BIN).stat().st_ino
    area = store.area(b"n" * 32)
    assert (tmp_path / (b"n" * 32).hex() / FRAMES_BIN).stat().st_ino == file
    assert [path.name for path in tmp_path.iterdir()] == [(b"n" * 32).hex()]
    assert (len(area), area.missing(HASHES), store.find(HASHES[0])) == (0, [0, 1, 2], None)
    with pytest.raises(ValueError, match="closed"):
        old.put(1, FRAMES[1], HASHES[1])
    with pytest.raises(KeyError):
        old.frame(0)
    area.put(1, FRAMES[1], HASHES[1])
    store.close()
    again = ResultsStore(tmp_path, [len(frame) for frame in FRAMES], LEAF, kept=1)
    assert bytes(again.area(b"n" * 32).frame(1)) == FRAMES[1]
    assert again.find(HASHES[0]) is None
    again.close()


def test_files_that_somebody_looks_at_are_no_others(tmp_path: Path) -> None:
    store = ResultsStore(tmp_path, [len(frame) for frame in FRAMES], LEAF, kept=1)
    store.area(KEY).put(0, FRAMES[0], HASHES[0])
    held = store.area(KEY).frame(0)
    store.area(b"n" * 32).put(0, FRAMES[1], HASHES[1])
    assert bytes(held) == FRAMES[0]
    assert [path.name for path in tmp_path.iterdir()] == [(b"n" * 32).hex()]
    store.close()


def test_what_is_no_area_of_this_run_is_removed_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "junk").mkdir()
    other = ResultsStore(tmp_path, [100], LEAF)
    other.area(KEY)
    other.close()
    store = new_store(tmp_path)
    assert list(tmp_path.iterdir()) == []
    store.close()
