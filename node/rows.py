"""Where received rows lie until they are combined, and the hashes of their leaves as they come."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from blake3 import blake3

from aggregation import codec
from aggregation.codec import HEADER_BYTES
from aggregation.digest import chunk_root_of
from node.files import write_all

ROWS_IN_MEMORY_BYTES = 128 * 2**20
"""Received rows that wait in memory to be combined; those beyond it wait in the file."""


class RowMemory:
    """How much of the rows may lie in memory; for one thread."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.n_bytes = 0

    def take(self, n_bytes: int) -> bool:
        """Hold room for so many bytes, if there is."""
        if self.n_bytes + n_bytes > self._limit_bytes:
            return False
        self.n_bytes += n_bytes
        return True

    def give_back(self, n_bytes: int) -> None:
        self.n_bytes -= n_bytes


class RowFile:
    """A file of equal slots, made at the first one. Methods may be called from any thread.

    What is written through a descriptor and not the mapping: a disk without room then is an error and no SIGBUS, and
    the file is read where it lies.
    """

    def __init__(self, path: Path, n_slots: int, slot_bytes: int) -> None:
        self._path, self._n_bytes, self._slot_bytes = path, max(1, n_slots) * slot_bytes, slot_bytes
        self._lock = Lock()
        self._descriptor = -1
        self._map: mmap.mmap | None = None
        self._n_users = 0
        self._n_taken = 0
        self._closed = False

    def slot(self) -> int:
        """The offset of another slot. Raises OSError, and ValueError where there is none, or the file is closed."""
        with self._using():
            offset = self._n_taken * self._slot_bytes
            if offset >= self._n_bytes:
                raise ValueError("more rows than the attempt has")
            self._n_taken += 1
            return offset

    def write(self, offset: int, data: memoryview | bytes) -> None:
        """Raises OSError, and ValueError once the file is closed."""
        with self._using() as descriptor:
            write_all(descriptor, data, offset)

    def view(self, offset: int, n_bytes: int) -> memoryview:
        """What lies there; stays readable after `close`. Raises ValueError once the file is closed."""
        with self._using():
            if self._map is None:
                raise ValueError("nothing was written")
            return memoryview(self._map)[offset : offset + n_bytes]

    def close(self) -> None:
        """Remove the file; its room on the disk is free once nobody looks at it any more."""
        with self._lock:
            self._closed = True
            self._map = None
            self._path.unlink(missing_ok=True)
            self._let_go()

    @contextmanager
    def _using(self) -> Iterator[int]:
        """The descriptor, which is not closed (and its number not another file's) while it is used."""
        with self._lock:
            if self._closed:
                raise ValueError("the attempt is over")
            if self._map is None:
                self._open()
            self._n_users += 1
        try:
            yield self._descriptor
        finally:
            with self._lock:
                self._n_users -= 1
                if self._closed:
                    self._let_go()

    def _let_go(self) -> None:
        if self._n_users == 0 and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, self._n_bytes)  # sparse: what is not dealt here takes no room
            self._map = mmap.mmap(descriptor, self._n_bytes, prot=mmap.PROT_READ)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor


class LeafHashes:
    """The chunk root of a frame whose bytes come one after the other: each leaf is hashed as soon as it is there.

    Args:
        ends: where each leaf ends, in bytes of the frame; the header is before the first one.
        leaf_values: the run's.
    """

    def __init__(self, ends: Sequence[int], leaf_values: int) -> None:
        self._ends, self._leaf_values = ends, leaf_values
        self._header = bytearray()
        self._hashes: list[bytes] = []
        self._hasher: Any = None
        self._at = 0

    def update(self, data: memoryview) -> None:
        """The next bytes; raises ValueError for more than the frame has."""
        if self._at == 0 and self._ends and len(data) == self._ends[-1]:  # all of it, as mostly
            self._header += data[:HEADER_BYTES]
            starts = (HEADER_BYTES, *self._ends)
            self._hashes = [blake3(data[start:end]).digest() for start, end in zip(starts, self._ends, strict=False)]
            self._at = len(data)
            return
        taken = min(max(0, HEADER_BYTES - self._at), len(data))
        self._header += data[:taken]
        self._at += taken
        while taken < len(data):
            if len(self._hashes) == len(self._ends):
                raise ValueError(f"{len(data) - taken} bytes too many")
            piece = data[taken : taken + self._ends[len(self._hashes)] - self._at]
            self._hasher = blake3(piece) if self._hasher is None else self._hasher.update(piece)
            self._at += len(piece)
            taken += len(piece)
            if self._at == self._ends[len(self._hashes)]:
                self._hashes.append(self._hasher.digest())
                self._hasher = None

    def root(self) -> bytes:
        """The chunk's root; raises ValueError while bytes are missing."""
        if len(self._hashes) != len(self._ends) or len(self._header) != HEADER_BYTES:
            raise ValueError(f"{self._at} bytes are not the whole frame")
        return chunk_root_of(bytes(self._header), self._leaf_values, self._hashes)


def leaf_ends(name: str, block: int, n_values: int, leaf_values: int) -> tuple[int, ...]:
    """Where the leaves of a chunk's frame end, in bytes."""
    stops = [min(start + leaf_values, n_values) for start in range(0, n_values, leaf_values)]
    return tuple(codec.frame_bytes(name, stop, block) for stop in stops)
