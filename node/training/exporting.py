"""Writes a model as a folder that transformers loads offline: weights, tokenizer files and a model card."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from node.training.task import CausalLMTask
from node.training.tokenizer import END_TOKEN
from protos.runspec import RunSpec

_MARK = "barnraise"


class ExportError(ValueError):
    """A folder that can't be written: says why and what to do."""


class Meta(BaseModel):
    """The run's account of itself, for the model card. What is left out is not claimed."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    run_id: str = Field(default="", max_length=200)
    rounds: int | None = None  # committed, with contributions
    tokens: int | None = None  # trained on, summed over the ledger
    contributors: int | None = None
    val_loss: float | None = None
    state_digest: str = Field(default="", max_length=64)
    commit_hash: str = Field(default="", max_length=64)


def write_export(task: CausalLMTask, spec: RunSpec, meta: Meta, to_dir: Path) -> None:
    """Write the folder beside its place and rename it, so that it is whole or not there.

    An earlier export there is replaced; any other folder that isn't empty is refused with an ExportError.
    """
    to_dir = Path(os.path.abspath(to_dir))
    if to_dir.exists() and not _may_replace(to_dir):
        raise ExportError(f"{to_dir} exists and is no export of ours; name another folder")
    to_dir.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (to_dir.with_name(f".{to_dir.name}.{os.getpid()}.{kind}") for kind in ("new", "old"))
    # Here, not above: it takes seconds to load, and whoever exports has loaded it anyway.
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        fresh.mkdir()
        save = task.model.save_pretrained
        save(fresh)  # type: ignore[operator]  # a method of every Hugging Face model, which nn.Module's stubs don't know
        (fresh / "tokenizer.json").write_text(spec.model.tokenizer, encoding="utf-8")
        (fresh / "tokenizer_config.json").write_text(_tokenizer_config(spec), encoding="utf-8")
        (fresh / "README.md").write_text(model_card(spec, meta), encoding="utf-8")
        for path in fresh.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        _swap(fresh, to_dir, old)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def model_card(spec: RunSpec, meta: Meta) -> str:
    """README.md of an export: YAML front matter as model hubs read it, then what the run was."""
    front = {
        "license": spec.licence.lower(),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": [_MARK, "diloco"],
    }
    title = spec.name or meta.run_id or f"a {spec.preset} run"
    facts: list[tuple[str, object]] = [
        ("Run", meta.run_id),
        ("RunSpec revision", spec.revision),
        ("Preset", spec.preset),
        ("Parameters", f"{spec.model.n_parameters:,}"),
        ("Data", f"{spec.data.source} (root {spec.data.root}, seed {spec.data.seed})"),
        ("Tokens trained on", None if meta.tokens is None else f"{meta.tokens:,}"),
        ("Rounds", meta.rounds),
        ("Contributors", meta.contributors),
        ("Inner optimiser", f"{spec.inner.optimiser}, lr {spec.inner.lr:g}, H {spec.work.h}"),
        ("Outer optimiser", f"Nesterov, lr {spec.outer.lr:g}, momentum {spec.outer.momentum:g}"),
        ("Validation loss", None if meta.val_loss is None else f"{meta.val_loss:.4f} nats a token"),
        ("State digest", meta.state_digest),
        ("Commit", meta.commit_hash),
        ("Licence", spec.licence),
    ]
    rows = [f"| {name} | {_cell(value)} |" for name, value in facts if value not in (None, "")]
    # JSON is YAML, and quotes whatever a name or licence may hold.
    yaml = "\n".join(f"{key}: {json.dumps(value)}" for key, value in front.items())
    return "\n".join(
        [
            f"---\n{yaml}\n---\n",
            f"# {_cell(title)}\n",
            "Trained by volunteers' computers together, with Barnraise: each took some optimiser steps by itself, and",
            "the differences were averaged in rounds. The ledger of the run says who contributed to which round.\n",
            "| | |\n| --- | --- |",
            *rows,
            "\nThe tokenizer is byte-level: a token is a byte of UTF-8.\n" if _is_byte_level(spec) else "",
        ]
    )


def _tokenizer_config(spec: RunSpec) -> str:
    return json.dumps(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_TOKEN,
            "eos_token": END_TOKEN,
            "clean_up_tokenization_spaces": False,
            "model_max_length": spec.data.sequence_length,
        },
        indent=2,
    )


def _is_byte_level(spec: RunSpec) -> bool:
    return '"merges":[]' in spec.model.tokenizer.replace(" ", "").replace("\n", "")


def _cell(value: object) -> str:
    """Text that stays in its line and cell of a Markdown table."""
    return " ".join(str(value).replace("|", "\\|").split())


def _swap(fresh: Path, to_dir: Path, old: Path) -> None:
    """Put a folder in its place; what was there goes to `old`, and comes back where that fails."""
    was_there = to_dir.exists()
    if was_there:
        to_dir.rename(old)
    try:
        fresh.rename(to_dir)
    except BaseException:
        if was_there:
            old.rename(to_dir)
        raise


def _may_replace(folder: Path) -> bool:
    """Whether it is a folder that is empty, or an export by this module."""
    if not folder.is_dir():
        return False
    if not any(folder.iterdir()):
        return True
    try:
        head = (folder / "README.md").read_text(encoding="utf-8", errors="replace")[:1000]
    except OSError:
        return False
    return (folder / "config.json").is_file() and f'"{_MARK}"' in head
