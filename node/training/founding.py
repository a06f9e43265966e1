"""Makes a new run: packs its data, draws its first parameters, and fills in what a RunSpec says of both."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aggregation.chunks import ChunkGrid
from aggregation.digest import state_digest
from aggregation.vector import flatten_into, layout_of
from node.training import corpus, packing, shared
from node.training.model import build
from node.training.presets import PRESETS
from node.training.task import CausalLMTask
from node.training.tokenizer import ByteTokenizer, byte_level
from protos.runspec import CodecSpec, DataSpec, ModelSpec, RunSpec, WorkSpec

DATA_DIR = "data"
STATE_DIR = "state"
THETA_FILE = "theta.bin"
MOMENTUM_FILE = "momentum.bin"


class FoundingError(ValueError):
    """A run that can't be made as asked: names the field or the text."""


class ModelWish(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    config: dict[str, Any] = {}
    """Keys that differ from the preset's."""


class DataWish(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    sequence_length: int | None = Field(default=None, ge=2, le=2**20)


class Wish(BaseModel):
    """A partial RunSpec: its fields and sections, and where the text is.

    The preset gives the model; of other sections what is left out is the RunSpec's default.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    preset: str = "tiny"
    corpus: str = corpus.STDLIB
    """A file, a folder, or `stdlib`."""
    seed: int = Field(default=0, ge=0, le=2**53)
    model: ModelWish = ModelWish()
    data: DataWish = DataWish()


def read_wish(raw: bytes) -> Wish:
    """The wish in a JSON document; raises FoundingError."""
    try:
        return Wish.model_validate_json(raw)
    except ValidationError as error:
        raise FoundingError(_first(error)) from error


def found(wish: Wish, to_dir: Path) -> tuple[RunSpec, packing.Packed]:
    """Write `data/` and `state/` into a folder; the RunSpec that they belong to. Safe to repeat.

    `state/theta.bin` holds the first parameters as the flat vector, `state/momentum.bin` as many zeros. Raises
    FoundingError, and what packing and building raise.
    """
    preset = PRESETS.get(wish.preset)
    if preset is None:
        raise FoundingError(f"preset: there is no {wish.preset!r}; there are {', '.join(PRESETS)}")
    sections = wish.model_extra or {}
    length = wish.data.sequence_length or preset.sequence_length
    try:
        work = WorkSpec.model_validate(sections.get("work", {}))
        codec = CodecSpec.model_validate(sections.get("codec", {}))
    except ValidationError as error:
        raise FoundingError(_first(error)) from error
    if work.batch_tokens % length:
        raise FoundingError(f"work.batch_tokens: {work.batch_tokens} is no multiple of {length}, the sequence's length")
    tokenizer = byte_level()
    # The model first: building it takes memory, packing only time.
    config = preset.config | {"max_position_embeddings": length} | wish.model.config
    model = _first_state(config, tokenizer, wish.seed, codec, to_dir / STATE_DIR)
    packed = packing.pack(
        corpus.find(wish.corpus),
        tokenizer,
        length,
        wish.seed,
        to_dir / DATA_DIR,
        batch_sequences=work.batch_tokens // length,
    )
    return _spec(wish, sections, model, packed.data), packed


def _first_state(
    config: dict[str, Any], tokenizer: ByteTokenizer, seed: int, codec: CodecSpec, to_dir: Path
) -> ModelSpec:
    """Write θ and momentum; what the RunSpec says of the model."""
    if int(config.get("vocab_size", 0)) < tokenizer.vocab_size:
        raise FoundingError(f"model.config.vocab_size: the tokenizer has {tokenizer.vocab_size} tokens")
    parameters = CausalLMTask(build(config, seed)).parameters()
    layout = layout_of([(name, parameter.shape) for name, parameter in parameters], block=codec.block)
    grid = ChunkGrid(layout.n_values, codec.chunk_values)
    to_dir.mkdir(parents=True, exist_ok=True)
    hashes: list[tuple[bytes, ...]] = []
    for file in (THETA_FILE, MOMENTUM_FILE):
        part = to_dir / f"{file}.part"
        shared.create(part, 4 * layout.n_values)
        if file == THETA_FILE:
            flatten_into(parameters, layout, shared.map_vector(part, layout.n_values, writable=True))
            _sync(part)
        hashes.append(shared.chunk_hashes(shared.map_vector(part, layout.n_values), grid))
        part.replace(to_dir / file)
    return ModelSpec(
        config=config,
        tokenizer=tokenizer.json_text,
        tokenizer_hash=tokenizer.hash,
        n_parameters=sum(parameter.numel() for _, parameter in parameters),
        n_values=layout.n_values,
        layout_digest=layout.digest.hex(),
        initial_digest=state_digest(*hashes).hex(),
    )


def _spec(wish: Wish, sections: Mapping[str, Any], model: ModelSpec, data: DataSpec) -> RunSpec:
    document = {
        **sections,
        "preset": wish.preset,
        "seed": wish.seed,
        "model": model.model_dump(),
        "data": data.model_dump(),
    }
    try:
        return RunSpec.model_validate(document)
    except ValidationError as error:
        raise FoundingError(_first(error)) from error


def _first(error: ValidationError) -> str:
    found = error.errors()[0]
    where = ".".join(str(part) for part in found["loc"]) or "config"
    return f"{where}: {found['msg']}"


def _sync(path: Path) -> None:
    """Have what was written through a mapping on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
