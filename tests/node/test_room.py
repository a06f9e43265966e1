"""Too small a disk: found at the start, whatever lies in the folder already."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from node.errors import DiskFull
from node.room import check_room_for, least_bytes, used_bytes
from protos.runspec import CodecSpec
from tests.sim.options import sim_spec

SPEC = sim_spec(n_chunks=3)
N_VALUES = SPEC.model.n_values


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that the disk says are free; a test changes them."""
    said = [0]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=said[0]))
    return said


def test_a_round_takes_two_states_and_what_is_encoded() -> None:
    """States of fp32 θ and momentum; a contribution and two rounds' results of int8 with a scale a block."""
    states = 2 * 2 * 4 * N_VALUES
    assert states + 3 * N_VALUES < least_bytes(SPEC) < states + 3.1 * N_VALUES
    plain = sim_spec(n_chunks=3, codec=CodecSpec(name="fp32", block=1024, chunk_values=1024, leaf_values=1024))
    assert least_bytes(plain) >= states + 3 * 4 * N_VALUES


def test_too_little_room_is_refused_with_the_need(tmp_path: Path, free: list[int]) -> None:
    free[0] = least_bytes(SPEC)
    check_room_for(SPEC, tmp_path)
    free[0] -= 1
    need = f"{least_bytes(SPEC) / 1024:.1f} KiB"
    with pytest.raises(DiskFull, match=rf"this run.* needs {need} in {tmp_path}, .* are free; .*--data") as error:
        check_room_for(SPEC, tmp_path)
    assert error.value.exit_code == 3


def test_who_comes_back_to_a_full_disk_has_its_own_files(tmp_path: Path, free: list[int]) -> None:
    """Each is counted once, by whatever number of names: a frozen snapshot is a link."""
    state = tmp_path / "state"
    state.mkdir()
    (state / "theta.bin").write_bytes(b"x" * (least_bytes(SPEC) // 2))
    os.link(state / "theta.bin", state / "frozen.bin")
    with pytest.raises(DiskFull):
        check_room_for(SPEC, tmp_path)
    (tmp_path / "more.bin").write_bytes(b"x" * (least_bytes(SPEC) // 2 + 4096))
    assert used_bytes(tmp_path) >= least_bytes(SPEC)
    check_room_for(SPEC, tmp_path)
