"""The tools that the coordinator runs as processes (`node tool …`): make a run, evaluate a state, export a model.

Each is a function of values whose result its process prints as one JSON document. A ToolError says what is wrong with
what was asked for; anything else that is raised is a fault of ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from aggregation.errors import LayoutError
from aggregation.vector import layout_of, load_from
from node.training import founding
from node.training.batches import Batches
from node.training.corpus import CorpusError
from node.training.evaluation import evaluate as evaluate_task
from node.training.exporting import ExportError, Meta, write_export
from node.training.model import ModelError, build_task, check_layout
from node.training.packing import PackError
from node.training.shards import DataError
from node.training.shared import AreaError, map_vector
from node.training.task import CausalLMTask
from node.training.tokenizer import TokenizerError
from protos.runspec import RunSpec, SpecError


class ToolError(ValueError):
    """What was asked for can't be done: names cause and remedy."""


def init(config_json_path: Path, to_dir: Path) -> dict[str, Any]:
    """Make a run's `data/` and `state/` in a folder from a partial RunSpec; the result is `{"spec", "packed"}`.

    The config is JSON with fields of a RunSpec (of the sections that are computed: what of `model.config` differs from
    the preset's, and `data.sequence_length`), and `corpus`: a file, a folder or `stdlib`. `spec` is the whole RunSpec;
    `packed` counts texts, skipped files and tokens. Raises ToolError; again is safe.
    """
    with _explained():
        spec, packed = founding.found(founding.read_wish(config_json_path.read_bytes()), to_dir)
    return {
        "spec": spec.model_dump(mode="json"),
        "packed": {
            "n_texts": packed.n_texts,
            "n_skipped": packed.n_skipped,
            "n_train_tokens": packed.n_train_tokens,
            "n_val_tokens": packed.n_val_tokens,
        },
    }


def evaluate(spec_path: Path, data_dir: Path, theta_path: Path) -> dict[str, Any]:
    """`{"val_loss", "n_tokens"}`: mean cross entropy in nats for each predicted token of the validation shard.

    `spec_path` is a RunSpec as JSON, `theta_path` the flat vector. Raises ToolError.
    """
    with _explained():
        spec, task = _loaded(spec_path, theta_path)
        val_loss, n_tokens = evaluate_task(task, Batches(spec, data_dir))
    return {"val_loss": val_loss, "n_tokens": n_tokens}


def export(spec_path: Path, theta_path: Path, to_dir: Path, meta_json: str) -> dict[str, Any]:
    """Write a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads offline; `{"export", …}`.

    `meta_json` is the run's account of itself for the model card, the fields of `exporting.Meta`. Raises ToolError.
    """
    with _explained():
        meta = Meta.model_validate_json(meta_json)
        spec, task = _loaded(spec_path, theta_path)
        write_export(task, spec, meta, to_dir)
    return {"export": str(to_dir), "n_parameters": spec.model.n_parameters}


def main_tool(name: str, arguments: Mapping[str, str], *, n_threads: int = 1) -> str:
    """Run a tool by name with its arguments by name; the JSON document to print. Raises ToolError."""
    torch.set_num_threads(max(1, n_threads))
    match name, dict(arguments):
        case "init", {"config": config, "to": to, **rest} if not rest:
            result = init(Path(config), Path(to))
        case "evaluate", {"spec": spec, "data": data, "theta": theta, **rest} if not rest:
            result = evaluate(Path(spec), Path(data), Path(theta))
        case "export", {"spec": spec, "theta": theta, "to": to, "meta": meta, **rest} if not rest:
            result = export(Path(spec), Path(theta), Path(to), meta)
        case _:
            raise ToolError(f"no tool {name} takes {', '.join(sorted(arguments)) or 'nothing'}")
    return json.dumps(result, allow_nan=False)


def _loaded(spec_path: Path, theta_path: Path) -> tuple[RunSpec, CausalLMTask]:
    """A run and its model with the parameters of a flat vector."""
    spec = RunSpec.from_bytes(spec_path.read_bytes())
    task = build_task(spec)
    layout = layout_of([(name, parameter.shape) for name, parameter in task.parameters()], block=spec.codec.block)
    check_layout(layout, spec)
    load_from(task.parameters(), layout, map_vector(theta_path, layout.n_values))
    return spec, task


@contextmanager
def _explained() -> Iterator[None]:
    """What is wrong with the words, files or data that a tool was given becomes a ToolError."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        raise ToolError(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from error
    except (
        AreaError,
        ArithmeticError,
        CorpusError,
        DataError,
        ExportError,
        LayoutError,
        ModelError,
        OSError,
        PackError,
        SpecError,
        TokenizerError,
        founding.FoundingError,
    ) as error:
        raise ToolError(str(error)) from error
