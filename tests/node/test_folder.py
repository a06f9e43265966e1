"""A data folder that can't be written is named with a remedy, whatever of it is tried first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from node.app import _open_log
from node.errors import MachineError
from node.folder import _make, _write_spec
from tests.coordinator.made import spec


@pytest.mark.parametrize(
    "write",
    [lambda at: _make(at / "work"), lambda at: _write_spec(at / "spec.json", spec()), lambda at: _open_log(at / "log")],
)
def test_what_the_disk_says_is_an_error_of_this_machine(write: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(MachineError, match=r"can't be written in .*choose another folder"):
        write(tmp_path / "file")
