"""Flat fp32 vectors in files, read and written by chunks, and work on chunks spread over threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from pathlib import Path
from threading import Lock

import numpy as np

from aggregation.chunks import ChunkGrid
from node.files import read_exactly, reserve, write_all

VALUE_BYTES = 4

Floats = np.ndarray[tuple[int], np.dtype[np.float32]]


class VectorFile:
    """A flat fp32 vector in a file, read and written by chunks. Raises ValueError for a file of another size."""

    def __init__(self, path: Path, grid: ChunkGrid, *, new: bool = False) -> None:
        self._grid = grid
        n_bytes = VALUE_BYTES * grid.n_values
        self._file = os.open(path, (os.O_RDWR | os.O_CREAT | os.O_EXCL) if new else os.O_RDWR, 0o644)
        try:
            if new:
                reserve(self._file, n_bytes)
            elif (found := os.fstat(self._file).st_size) != n_bytes:
                raise ValueError(f"{path} has {found} bytes instead of {n_bytes}")
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> VectorFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def read(self, chunk: int) -> Floats:
        """The (P,) values of a chunk, a copy."""
        start, stop = self._grid.bounds(chunk)
        values_P = np.empty(stop - start, np.float32)
        read_exactly(self._file, values_P.data.cast("B"), VALUE_BYTES * start)
        return values_P

    def write(self, chunk: int, values_P: Floats) -> None:
        start, _ = self._grid.bounds(chunk)
        write_all(self._file, values_P.data.cast("B"), VALUE_BYTES * start)

    def sync(self) -> None:
        """Put what was written on disk."""
        os.fsync(self._file)


def each_chunk(chunks: Iterable[int], work: Callable[[int], None], pool: Executor | None, n_helpers: int = 8) -> None:
    """Do the work for each chunk once, in this thread and in those of the pool that are free. Raises what it raises.

    Because this thread works too, a pool whose threads all wait here can't come to a stand.
    """
    remaining, taking = iter(chunks), Lock()
    stopped: list[BaseException] = []

    def take_turns() -> None:
        while not stopped:
            with taking:
                chunk = next(remaining, None)
            if chunk is None:
                return
            try:
                work(chunk)
            except BaseException as error:
                stopped.append(error)
                raise

    helpers: list[Future[None]] = [pool.submit(take_turns) for _ in range(n_helpers)] if pool is not None else []
    try:
        take_turns()
    finally:
        waiting = [helper for helper in helpers if not helper.cancel()]
        for helper in waiting:
            helper.exception()
    if stopped:
        raise stopped[0]
