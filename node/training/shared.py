"""Mapped files that the agent and its trainer share: the anchor, the area of encoded chunks, residuals.

The agent makes a file at its exact size; whoever opens it compares that size first. A mapping stays valid when the file
is replaced or unlinked, so a state may be switched by a rename while a trainer still reads the old one.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aggregation import codec
from aggregation.chunks import ChunkGrid
from aggregation.digest import state_chunk_hash

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

FRAME_ALIGNMENT = 64
RESIDUAL_HEAD_BYTES = 4096
"""In front of a residual's values, for the agent's own words about it."""


class AreaError(ValueError):
    """A shared file that is not what it should be: says which and how."""


class AreaGone(AreaError):
    """A shared file that is not there."""


def create(path: Path, n_bytes: int) -> None:
    """Make a file of exactly so many zero bytes, whatever was there before; its disk space is taken now.

    Raises OSError where the disk is too full, which here is an error and in a mapping would be a SIGBUS.
    """
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, n_bytes)
        else:
            os.ftruncate(descriptor, n_bytes)
    except OSError:
        fresh.unlink()
        raise
    finally:
        os.close(descriptor)
    fresh.replace(path)


def map_vector(path: Path, n_values: int, *, writable: bool = False) -> Floats:
    """(D,) the values of a file of little-endian fp32, mapped; raises AreaError where its size is another.

    AreaGone where it is not there.
    """
    values = np.frombuffer(_map(path, 4 * n_values, writable=writable), "<f4")
    return values


def map_residual(path: Path, n_values: int, *, writable: bool = False) -> Floats:
    """(D,) what encoding left over: the values of a file behind its head, mapped; raises AreaError as `map_vector`."""
    raw = _map(path, RESIDUAL_HEAD_BYTES + 4 * n_values, writable=writable)
    return np.frombuffer(raw[RESIDUAL_HEAD_BYTES:], "<f4")


def codes_name(rank: int) -> str:
    """Name of a rank's area of codes in a folder."""
    return f"codes.{rank}"


class CodesArea:
    """One mapped file with a place for each chunk's encoded frame, at an offset that all can compute.

    The trainer writes frames and says when; the agent reads them afterwards, as often as it likes.
    """

    def __init__(self, path: Path, grid: ChunkGrid, codec_name: str, block: int, *, writable: bool = False) -> None:
        self.grid = grid
        self.frame_bytes = frame_sizes(grid, codec_name, block)
        self._offsets, n_bytes = _offsets(self.frame_bytes)
        self._bytes = _map(path, n_bytes, writable=writable)

    @staticmethod
    def create(path: Path, grid: ChunkGrid, codec_name: str, block: int) -> None:
        """Make the file, in place of any other."""
        create(path, _offsets(frame_sizes(grid, codec_name, block))[1])

    def frame(self, chunk: int) -> Bytes:
        """(n,) the bytes of a chunk's frame, a view; raises IndexError."""
        self.grid.bounds(chunk)
        offset = self._offsets[chunk]
        return self._bytes[offset : offset + self.frame_bytes[chunk]]


def frame_sizes(grid: ChunkGrid, codec_name: str, block: int) -> tuple[int, ...]:
    """Bytes of each chunk's frame."""
    return tuple(codec.frame_bytes(codec_name, grid.size(chunk), block) for chunk in range(grid.n_chunks))


def chunk_hashes(values_D: Floats, grid: ChunkGrid) -> tuple[bytes, ...]:
    """The state hashes of a vector's chunks, in order."""
    bounds = [grid.bounds(chunk) for chunk in range(grid.n_chunks)]
    return tuple(state_chunk_hash(values_D[start:stop]) for start, stop in bounds)


def _offsets(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Where each frame begins, and the size of the whole."""
    offsets: list[int] = []
    end = 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // FRAME_ALIGNMENT) * FRAME_ALIGNMENT
    return tuple(offsets), end


def _map(path: Path, n_bytes: int, *, writable: bool) -> Bytes:
    try:
        found = path.stat().st_size
        if found != n_bytes:
            raise AreaError(f"{path} has {found} bytes instead of {n_bytes}")
        return np.asarray(np.memmap(path, np.uint8, "r+" if writable else "r"))
    except FileNotFoundError as error:
        raise AreaGone(f"{path} can't be mapped: {error.strerror}") from error
    except OSError as error:
        raise AreaError(f"{path} can't be mapped: {error.strerror or error}") from error
