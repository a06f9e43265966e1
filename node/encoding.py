"""This node's contribution as it lies in the area of codes: its root, its chunks' paths to it and norms.

The trainer writes one chunk after the other, and each is hashed and measured here while the next ones are encoded.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from aggregation import codec
from aggregation.codec import HEADER_BYTES
from aggregation.digest import (
    chunk_root,
    chunk_root_of,
    contribution_root,
    leaf_hash,
    leaf_segments,
    merkle_paths,
)
from coordinator.rounds import policy
from node.files import writing
from node.stages import Stages
from node.training.shared import CodesArea, frame_sizes
from node.vectors import each_chunk
from protos.runspec import RunSpec

READERS = 8
"""Chunks that are read at the same time at most; the pool may have fewer threads."""
PARALLEL_BYTES = 4 * 2**20
"""A frame from this size on is hashed leaf by leaf in several threads, so that the last chunk takes no longer."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """An encoded Δ. What is committed to is what lies on disk, not what the trainer says that it wrote."""

    area: CodesArea
    paths: tuple[tuple[bytes, ...], ...]  # of each chunk's root to `root`
    root: bytes
    norms: tuple[float, ...]  # ‖·‖² of each decoded chunk


def make_area(path: Path, spec: RunSpec) -> None:
    """A fresh file for the codes, in place of any other. Raises DiskFull or MachineError."""
    grid = policy.grid(spec)
    sizes = frame_sizes(grid, spec.codec.name, spec.codec.block)
    with writing(path.parent, "this node's contribution", sum(sizes)):
        CodesArea.create(path, grid, spec.codec.name, spec.codec.block)


class Reading:
    """Reads the area while it is written: told how far it is, it hashes and measures what is there in the pool.

    Args:
        stages: where the work is counted.
    """

    def __init__(self, path: Path, spec: RunSpec, pool: Executor, stages: Stages | None = None) -> None:
        self._spec, self._pool = spec, pool
        self._stages = stages if stages is not None else Stages()
        self._grid = policy.grid(spec)
        self._area = CodesArea(path, self._grid, spec.codec.name, spec.codec.block)
        self._roots: list[bytes] = [b""] * self._grid.n_chunks
        self._norms: list[float] = [0.0] * self._grid.n_chunks
        self._lock = Lock()
        self._n_written = 0  # chunks that lie in the area
        self._n_taken = 0  # of them, those that are read or being read
        self._n_readers = 0
        self._readers: list[Future[None]] = []
        self._stopped = False

    def written(self, n_chunks: int) -> None:
        """So many chunks, from the first on, lie in the area and change no more."""
        with self._lock:
            self._n_written = max(self._n_written, min(n_chunks, self._grid.n_chunks))
            n_more = min(READERS - self._n_readers, self._n_written - self._n_taken)
            self._n_readers += n_more
        self._readers += [self._pool.submit(self._read) for _ in range(n_more)]

    async def contribution(self) -> Contribution:
        """All chunks are written: the whole of it. Raises CodecError for a frame that reducers would refuse."""
        self.written(self._grid.n_chunks)
        try:
            await asyncio.gather(*(asyncio.wrap_future(reader) for reader in self._readers))
        finally:
            self.stop()
        return Contribution(self._area, merkle_paths(self._roots), contribution_root(self._roots), tuple(self._norms))

    def stop(self) -> None:
        """Read no further."""
        self._stopped = True

    def _read(self) -> None:
        try:
            while True:
                with self._lock:
                    if self._stopped or self._n_taken >= self._n_written:
                        self._n_readers -= 1  # in the same breath as the look: `written` counts on who still looks
                        return
                    chunk = self._n_taken
                    self._n_taken += 1
                frame = self._area.frame(chunk).data
                with self._stages.timed("hash", len(frame)):
                    self._roots[chunk], self._norms[chunk] = _measured(
                        frame, self._spec, self._grid.size(chunk), self._pool
                    )
        except BaseException:
            self._stopped = True
            raise


def read_contribution(path: Path, spec: RunSpec) -> Contribution:
    """Hash and measure an area that is written, in this thread; raises CodecError as `Reading` does."""
    grid = policy.grid(spec)
    area = CodesArea(path, grid, spec.codec.name, spec.codec.block)
    found = [_measured(area.frame(chunk).data, spec, grid.size(chunk), None) for chunk in range(grid.n_chunks)]
    roots = [root for root, _ in found]
    return Contribution(area, merkle_paths(roots), contribution_root(roots), tuple(norm for _, norm in found))


def _measured(frame: memoryview, spec: RunSpec, n_values: int, pool: Executor | None) -> tuple[bytes, float]:
    """A chunk's root and ‖·‖²; raises CodecError for a frame that is not canonical."""
    norm_sq = codec.measure(frame, codec=spec.codec.name, block=spec.codec.block, n_values=n_values)
    return _root(frame, spec.codec.leaf_values, pool), norm_sq


def _root(frame: memoryview, leaf_values: int, pool: Executor | None) -> bytes:
    if pool is None or len(frame) < PARALLEL_BYTES:
        return chunk_root(frame, leaf_values)
    segments = leaf_segments(frame, leaf_values)
    hashes: list[bytes] = [b""] * len(segments)

    def work(leaf: int) -> None:
        hashes[leaf] = leaf_hash(segments[leaf])

    each_chunk(range(len(segments)), work, pool)
    return chunk_root_of(bytes(frame[:HEADER_BYTES]), leaf_values, hashes)
