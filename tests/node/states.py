"""Stores of a state of three chunks, and the rounds that step it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from aggregation import codec
from aggregation.chunks import ChunkGrid
from aggregation.digest import state_chunk_hash, state_digest
from coordinator.rounds.ledger import Ledger
from node.state import StateStore
from protos import wire
from protos.hashes import body_hash
from protos.messages import Body, Commit, Outcome
from tests.node.chain import body_after, commit_of, commit_zero

GRID = ChunkGrid(5000, 2048)  # three chunks, the last one shorter
RNG = np.random.default_rng(7)
THETA = RNG.standard_normal(GRID.n_values).astype(np.float32)


def digest_of(theta: np.ndarray, momentum: np.ndarray) -> bytes:
    cut = [GRID.bounds(chunk) for chunk in range(GRID.n_chunks)]
    return state_digest(
        [state_chunk_hash(theta[a:b]) for a, b in cut], [state_chunk_hash(momentum[a:b]) for a, b in cut]
    )


def new_store(folder: Path, theta: np.ndarray = THETA) -> tuple[StateStore, Ledger]:
    source = folder / "initial.bin"
    theta.tofile(source)
    commit, ledger = commit_zero(digest_of(theta, np.zeros_like(theta)))
    store = StateStore(folder / "state", GRID)
    assert store.open() == []
    store.install_initial(source, None, commit, ledger)
    return store, ledger


def frames_of(delta: np.ndarray) -> list[bytes]:
    return [codec.encode("int8", delta[slice(*GRID.bounds(chunk))]) for chunk in range(GRID.n_chunks)]


def advance(
    store: StateStore, ledger: Ledger, outcome: Outcome = Outcome.COMMITTED, seed: int = 1, **changes: object
) -> tuple[bytes, Body, Commit, Ledger]:
    """Prepare the next round's body; what is needed to apply it."""
    body, folded = body_after(ledger, outcome, **changes)
    name = body_hash(wire.encode(body))
    frames = frames_of(np.random.default_rng(seed).standard_normal(GRID.n_values).astype(np.float32))
    digest = store.prepare(name, body, frames.__getitem__)
    return name, body, *commit_of(body, folded, digest)


class Crash(BaseException):
    pass
