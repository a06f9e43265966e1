"""The outer step at the end of a benchmark's all-reduce: θ and momentum in a node's own state store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import numpy as np

from aggregation.chunks import ChunkGrid
from aggregation.digest import state_chunk_hash, state_digest
from node.state import StateStore
from node.training.shared import create
from node.vectors import VectorFile, each_chunk
from protos import wire
from protos.hashes import body_hash
from tests.node.chain import body_after, commit_of, commit_zero

SEED = 20231


class OuterState:
    """θ of seeded values and no momentum, the same on every member; each round steps and commits it.

    Args:
        folder: where the state and its first θ are made.
        pool: threads that help.
    """

    def __init__(self, folder: Path, grid: ChunkGrid, pool: Executor) -> None:
        self._store = StateStore(folder / "state", grid, pool)
        first = folder / "first"
        theta: list[bytes] = [b""] * grid.n_chunks
        momentum: list[bytes] = [b""] * grid.n_chunks
        create(first, 4 * grid.n_values)
        with VectorFile(first, grid) as vector:

            def work(chunk: int) -> None:
                values_P = np.random.default_rng((SEED, chunk)).standard_normal(grid.size(chunk), np.float32)
                vector.write(chunk, values_P)
                theta[chunk] = state_chunk_hash(values_P)
                momentum[chunk] = state_chunk_hash(np.zeros_like(values_P))

            each_chunk(range(grid.n_chunks), work, pool)
        commit, ledger = commit_zero(state_digest(theta, momentum))
        self._store.open()
        self._store.install_initial(first, None, commit, ledger)
        first.unlink()

    def step(self, results_root: bytes, frame: Callable[[int], memoryview]) -> bytes:
        """Take one outer step by these results, switch to the state after it, and say its digest."""
        held = self._store.current
        assert held is not None
        body, folded = body_after(held.ledger, results_root=results_root)
        name = body_hash(wire.encode(body))
        digest = self._store.prepare(name, body, frame)
        self._store.apply(name, *commit_of(body, folded, digest))
        return digest
