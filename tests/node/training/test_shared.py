from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aggregation import codec
from aggregation.chunks import ChunkGrid
from aggregation.digest import state_chunk_hash
from node.training.shared import AreaError, CodesArea, chunk_hashes, codes_name, create, frame_sizes, map_vector

GRID = ChunkGrid(2500, 1024)


@pytest.mark.parametrize("name", ["int8", "fp32"])
def test_frames_are_written_on_one_side_and_read_on_the_other(tmp_path: Path, name: str) -> None:
    path = tmp_path / codes_name(0)
    CodesArea.create(path, GRID, name, 64)
    writer = CodesArea(path, GRID, name, 64, writable=True)
    reader = CodesArea(path, GRID, name, 64)
    values_D = np.random.default_rng(0).standard_normal(2500).astype(np.float32)
    wanted = []
    for chunk in range(3):
        start, stop = GRID.bounds(chunk)
        codec.encode_into(name, values_D[start:stop], writer.frame(chunk), block=64)
        wanted.append(codec.encode(name, values_D[start:stop], block=64))
    assert [reader.frame(chunk).tobytes() for chunk in range(3)] == wanted
    assert reader.frame_bytes == frame_sizes(GRID, name, 64) == tuple(map(len, wanted))
    assert not reader.frame(0).flags.writeable
    with pytest.raises(IndexError):
        reader.frame(3)


def test_an_area_of_another_size_is_refused(tmp_path: Path) -> None:
    CodesArea.create(tmp_path / "codes.0", GRID, "int8", 64)
    with pytest.raises(AreaError, match="instead of"):
        CodesArea(tmp_path / "codes.0", ChunkGrid(2501, 1024), "fp32", 64)
    with pytest.raises(AreaError, match="can't be mapped"):
        CodesArea(tmp_path / "codes.1", GRID, "int8", 64)


def test_create_replaces_what_was_there_and_a_mapping_of_it_stays(tmp_path: Path) -> None:
    path = tmp_path / "theta.bin"
    np.arange(8, dtype="<f4").tofile(path)
    before = map_vector(path, 8)
    create(path, 16)
    assert before.tolist() == list(range(8))
    assert map_vector(path, 4).tolist() == [0.0] * 4
    assert [entry.name for entry in tmp_path.iterdir()] == ["theta.bin"]


def test_a_vector_is_read_only_unless_asked(tmp_path: Path) -> None:
    create(tmp_path / "theta.bin", 16)
    with pytest.raises(ValueError, match="read-only"):
        map_vector(tmp_path / "theta.bin", 4)[0] = 1.0
    map_vector(tmp_path / "theta.bin", 4, writable=True)[2] = 1.0
    assert map_vector(tmp_path / "theta.bin", 4).tolist() == [0.0, 0.0, 1.0, 0.0]
    with pytest.raises(AreaError):
        map_vector(tmp_path / "theta.bin", 5)


def test_a_full_disk_is_an_error_now_and_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "theta.bin"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="Errno"):
        create(path, 2**60)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["theta.bin"]


def test_chunk_hashes_are_those_of_the_state() -> None:
    values_D = np.arange(2500, dtype=np.float32)
    hashes = chunk_hashes(values_D, GRID)
    assert hashes == (state_chunk_hash(values_D[:1024]), state_chunk_hash(values_D[1024:2048]), hashes[2])
    assert hashes[2] == state_chunk_hash(values_D[2048:])
