"""A pause that outlives the process that was told of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.errors import DiskFull
from node.wishes import Wishes


def test_a_pause_is_kept_until_it_is_taken_back(tmp_path: Path) -> None:
    assert not Wishes(tmp_path).paused
    assert Wishes(tmp_path).pause(True) == ""
    assert Wishes(tmp_path).pause(True) == ""
    assert Wishes(tmp_path).paused
    assert Wishes(tmp_path).pause(False) == ""
    assert Wishes(tmp_path).pause(False) == ""
    assert not Wishes(tmp_path).paused
    assert list(tmp_path.iterdir()) == []


def test_one_that_can_not_be_kept_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise DiskFull("a file", str(path.parent), len(content), 0)

    monkeypatch.setattr("node.wishes.replace_file", full)
    assert "a restart will forget it" in Wishes(tmp_path).pause(True)
    assert not Wishes(tmp_path).paused
