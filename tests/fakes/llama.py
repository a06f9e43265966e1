"""A whole run of the smallest Llama, as `init` makes it: for tests of what needs transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from node.training.founding import found, read_wish
from tests.fakes.tiny import TinyRun

WISH: dict[str, Any] = {
    "model": {
        "config": {
            "hidden_size": 16,
            "intermediate_size": 40,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        }
    },
    "data": {"sequence_length": 16},
    "work": {"batch_tokens": 64, "h": 6},
    "codec": {"name": "int8", "block": 64, "chunk_values": 1024, "leaf_values": 1024},
    "inner": {"lr": 0.01, "warmup_steps": 4},
    "evaluation": {"max_tokens": 256},
}


def llama_run(folder: Path) -> TinyRun:
    """Make it in a folder."""
    write_texts(folder / "texts")
    spec, _ = found(read_wish(json.dumps({**WISH, "corpus": str(folder / "texts")}).encode()), folder)
    made = TinyRun(spec, folder)
    made.spec_path.write_bytes(spec.to_bytes())
    return made


def write_texts(folder: Path) -> None:
    """Six short texts."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"line {number} of a text\n" * 100)
