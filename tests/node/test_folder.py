"""A data folder: one that can't be written is named with a remedy, and what a crash left in it is removed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from node.app import _open_log
from node.config import NodeOptions, read_invite
from node.errors import MachineError
from node.folder import _make, _write_spec, open_folder
from protos.signing import Identity
from tests.coordinator.made import spec

ME = Identity.from_private_bytes(bytes(32)).peer
STAYS = ["codes.0", "residual.bin", "residual.next", "spec.json"]


@pytest.mark.parametrize(
    "write",
    [lambda at: _make(at / "work"), lambda at: _write_spec(at / "spec.json", spec()), lambda at: _open_log(at / "log")],
)
def test_what_the_disk_says_is_an_error_of_this_machine(write: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(MachineError, match=r"can't be written in .*choose another folder"):
        write(tmp_path / "file")


def opened(data: Path) -> list[str]:
    """What is said while this folder is opened, and closed again."""
    said: list[str] = []
    options = NodeOptions(invite=read_invite(f"barnraise://{ME}@127.0.0.1:1"), data=data, threads=1)

    async def main() -> None:
        pool = ThreadPoolExecutor(1)
        async with AsyncExitStack() as stack:
            await open_folder(options, ME, ME, ME, spec(), pool, stack, seconds=lambda: 0.0, say=said.append)

    asyncio.run(main())
    return said


def test_what_a_crash_left_for_nobody_leaves_the_disk(tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "checkpoints").mkdir(parents=True)
    (work / "checkpoints" / "one.new").write_bytes(b"the trainer's own")
    for name in (*STAYS, "rows.0123456789abcdef", "evaluate.7", "evaluate.0-8-0123456789abcdef", "codes.0.new"):
        (work / name).write_bytes(b"left")
    assert opened(tmp_path) == []
    assert set(os.listdir(work)) <= {"checkpoints", *STAYS}
    assert {"codes.0", "spec.json"} <= set(os.listdir(work))
    assert (work / "checkpoints" / "one.new").exists()


def test_what_can_not_be_removed_is_said_and_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "work" / "rows.7").mkdir(parents=True)
    (said,) = opened(tmp_path)
    assert "rows.7 is needed no more and can't be removed" in said
