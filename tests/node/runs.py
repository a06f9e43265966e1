"""A RunSpec over a few random bytes of data, without a model: for what moves data and reads specs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from blake3 import blake3

from node.training.shards import PIECES_FILE, TRAIN_FILE, VAL_FILE, data_root, write_pieces
from protos.runspec import DataSpec, MembershipSpec, ModelSpec, RunSpec, WorkSpec

SEQUENCE_LENGTH = 10
SEQUENCES_PER_PIECE = 8
N_TRAIN, N_VAL = 100, 11
N_PIECES = 13 + 2


def make_run(folder: Path, *, revision: int = 1) -> RunSpec:
    """Write the data into a folder, as `init` does; the spec."""
    rng = np.random.default_rng(3)
    hashes: list[bytes] = []
    for name, n_sequences in ((TRAIN_FILE, N_TRAIN), (VAL_FILE, N_VAL)):
        raw = rng.integers(1, 256, n_sequences * SEQUENCE_LENGTH, dtype=np.uint8).tobytes()
        (folder / name).write_bytes(raw)
        size = SEQUENCE_LENGTH * SEQUENCES_PER_PIECE
        hashes += [blake3(raw[start : start + size]).digest() for start in range(0, len(raw), size)]
    (folder / PIECES_FILE).write_bytes(write_pieces(hashes))
    zeros = "0" * 64
    return RunSpec(
        name="a test",
        revision=revision,
        model=ModelSpec(
            config={}, tokenizer="{}", tokenizer_hash=zeros, n_parameters=1, n_values=1, layout_digest=zeros,
            initial_digest=zeros,
        ),
        data=DataSpec(
            root=data_root(hashes).hex(), sequence_length=SEQUENCE_LENGTH, token_bytes=1, n_train_sequences=N_TRAIN,
            n_val_sequences=N_VAL, piece_bytes=SEQUENCE_LENGTH * SEQUENCES_PER_PIECE,
            sequences_per_piece=SEQUENCES_PER_PIECE, seed=1, source="random",
        ),
        work=WorkSpec(batch_tokens=4 * SEQUENCE_LENGTH),
        membership=MembershipSpec(),
    )  # fmt: skip
