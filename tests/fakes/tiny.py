"""A regression on token sequences, small, odd-sized and quick, and a whole run of it: data, state and RunSpec."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from aggregation.chunks import ChunkGrid
from aggregation.digest import state_digest
from aggregation.vector import Layout, flatten_into, layout_of
from node.training import shared
from node.training.corpus import Corpus, Text
from node.training.packing import pack
from node.training.tokenizer import byte_level
from protos.runspec import ModelSpec, RunSpec

SEQUENCE_LENGTH = 11
N_OUTPUTS = 3
WIDTH = 301


class TinyTask:
    """Two layers that learn three numbers of a sequence: (B, 11) tokens to (B, 3)."""

    def __init__(self, width: int, seed: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = nn.Sequential(nn.Linear(SEQUENCE_LENGTH, width), nn.Tanh(), nn.Linear(width, N_OUTPUTS))

    @classmethod
    def of(cls, spec: RunSpec) -> TinyTask:
        """The task of a run made by `tiny_run`."""
        return cls(int(spec.model.config["width"]), spec.seed)

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())

    def layout(self, block: int) -> Layout:
        return layout_of([(name, tuple(value.shape)) for name, value in self.parameters()], block=block)

    def loss(self, ids_BL: Tensor) -> Tensor:
        inputs_BL = ids_BL.to(torch.float32) / 128.0 - 0.75
        wanted_BO = torch.stack([inputs_BL.mean(1), inputs_BL[:, 0] * inputs_BL[:, 1], inputs_BL[:, -1]], dim=1)
        return nn.functional.mse_loss(self.model(inputs_BL), wanted_BO)


@dataclass(frozen=True)
class TinyRun:
    """A run on disk as `init` leaves it, and as a node's trainer wants it."""

    spec: RunSpec
    folder: Path

    @property
    def spec_path(self) -> Path:
        return self.folder / "spec.json"

    @property
    def data_dir(self) -> Path:
        return self.folder / "data"

    @property
    def theta_path(self) -> Path:
        return self.folder / "state" / "theta.bin"

    @property
    def momentum_path(self) -> Path:
        return self.folder / "state" / "momentum.bin"

    @property
    def theta_D(self) -> NDArray[np.float32]:
        return np.fromfile(self.theta_path, "<f4")

    @property
    def grid(self) -> ChunkGrid:
        return ChunkGrid(self.spec.model.n_values, self.spec.codec.chunk_values)


def tiny_run(folder: Path, *, width: int = WIDTH, seed: int = 1, n_texts: int = 40, **sections: Any) -> TinyRun:
    """Make a run of `TinyTask` in a folder. `sections` are laid over its own: `outer={"lr": 1}`, `name="x"`."""
    texts = _write_texts(folder / "texts", n_texts)
    packed = pack(Corpus("made up", texts), byte_level(), SEQUENCE_LENGTH, seed, folder / "data", batch_sequences=4)
    codec = {"name": "int8", "block": 64, "chunk_values": 1024, "leaf_values": 1024} | sections.pop("codec", {})
    task = TinyTask(width, seed)
    layout = task.layout(codec["block"])
    theta_D = np.zeros(layout.n_values, np.float32)
    flatten_into(task.parameters(), layout, theta_D)
    momentum_D = np.zeros_like(theta_D)
    grid = ChunkGrid(layout.n_values, codec["chunk_values"])
    model = ModelSpec(
        config={"model_type": "tiny_regression", "width": width},
        tokenizer=byte_level().json_text,
        tokenizer_hash=byte_level().hash,
        n_parameters=sum(value.numel() for _, value in task.parameters()),
        n_values=layout.n_values,
        layout_digest=layout.digest.hex(),
        initial_digest=state_digest(*(shared.chunk_hashes(values, grid) for values in (theta_D, momentum_D))).hex(),
    )
    document: dict[str, Any] = {
        "seed": seed,
        "model": model,
        "data": packed.data,
        "inner": {"lr": 0.02, "warmup_steps": 10} | sections.pop("inner", {}),
        "work": {"batch_tokens": 4 * SEQUENCE_LENGTH, "h": 10} | sections.pop("work", {}),
        "codec": codec,
        "evaluation": {"max_tokens": 20 * SEQUENCE_LENGTH} | sections.pop("evaluation", {}),
        **sections,
    }
    run = TinyRun(RunSpec.model_validate(document), folder)
    run.spec_path.write_bytes(run.spec.to_bytes())
    run.theta_path.parent.mkdir(exist_ok=True)
    theta_D.tofile(run.theta_path)
    momentum_D.tofile(run.momentum_path)
    return run


def _write_texts(folder: Path, n_texts: int) -> tuple[Text, ...]:
    """Texts of printable characters that are the same everywhere."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = []
    for number in range(n_texts):
        path = folder / f"{number:03d}.txt"
        path.write_text("".join(hashlib.sha256(b"%d %d" % (number, line)).hexdigest() + "\n" for line in range(20)))
        texts.append(Text(path.name, path))
    return tuple(texts)
