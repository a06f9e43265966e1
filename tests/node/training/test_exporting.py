"""A folder that transformers would load: put in its place whole, and never at the cost of the one before."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from node.training.exporting import ExportError, Meta, write_export
from node.training.task import CausalLMTask
from protos.runspec import RunSpec
from tests.fakes.tiny import tiny_run


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    return tiny_run(tmp_path_factory.mktemp("run"), width=13).spec


def task(weights: str) -> CausalLMTask:
    """A model that saves these."""

    def save_pretrained(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "weights").write_text(weights)

    return cast(CausalLMTask, SimpleNamespace(model=SimpleNamespace(save_pretrained=save_pretrained)))


def test_an_earlier_export_is_replaced_and_nothing_else_is(spec: RunSpec, tmp_path: Path) -> None:
    to_dir = tmp_path / "export"
    for weights in ("first", "second"):
        write_export(task(weights), spec, Meta(), to_dir)
        assert (to_dir / "weights").read_text() == weights
        assert [path.name for path in tmp_path.iterdir()] == ["export"]
    (to_dir / "README.md").write_text("mine")
    with pytest.raises(ExportError, match="no export of ours"):
        write_export(task("third"), spec, Meta(), to_dir)
    assert (to_dir / "weights").read_text() == "second"


def test_an_error_in_between_costs_no_earlier_export(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_dir = tmp_path / "export"
    write_export(task("first"), spec, Meta(), to_dir)
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if path.name.endswith(".new"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="No space"):
        write_export(task("second"), spec, Meta(), to_dir)
    assert (to_dir / "weights").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
