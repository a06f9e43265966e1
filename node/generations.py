"""One state on disk, a folder of θ and momentum with commit and ledger: read and verified, and found by chunk hash."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from aggregation.chunks import ChunkGrid
from aggregation.digest import state_chunk_hash, state_digest
from coordinator.rounds.ledger import Ledger, LedgerError
from node.vectors import VALUE_BYTES, VectorFile, each_chunk
from protos import wire
from protos.hashes import commit_hash
from protos.messages import Body, Commit, StateOffer

THETA, MOMENTUM = "theta.bin", "momentum.bin"
COMMIT, LEDGER = "commit.bin", "ledger.json"
GENERATION = re.compile(r"[0-9]+-[0-9a-f]{8}")

Place = tuple[str, int, int]
Hashes = tuple[tuple[bytes, ...], tuple[bytes, ...]]
"""Of θ's chunks and of the momentum's."""


@dataclass(frozen=True, slots=True)
class Held:
    """One generation: the state after a commit. `ledger` is at its head and digest."""

    folder: Path
    commit: Commit
    ledger: Ledger
    theta_hashes: tuple[bytes, ...]
    momentum_hashes: tuple[bytes, ...]

    @property
    def theta(self) -> Path:
        return self.folder / THETA

    @property
    def momentum(self) -> Path:
        return self.folder / MOMENTUM

    @property
    def digest(self) -> bytes:
        return self.commit.digest

    @property
    def number(self) -> tuple[int, int]:
        """Epoch and round."""
        return self.ledger.epoch, self.ledger.round

    @property
    def head(self) -> bytes:
        return self.ledger.head

    def offer(self) -> StateOffer:
        """How a donor offers it."""
        return StateOffer(self.commit, self.ledger.to_bytes(), self.theta_hashes, self.momentum_hashes)


class Served:
    """A generation whose chunks others may fetch by their hashes. Methods may be called from any thread."""

    def __init__(self, held: Held, grid: ChunkGrid, index: Mapping[bytes, int] | None = None) -> None:
        self.held = held
        self.asked_at: float | None = None
        self._grid = grid
        self._n_bytes = VALUE_BYTES * grid.n_values
        # One number a chunk, θ's then the momentum's: there may be a hundred thousand.
        self._index = (
            {h: n for n, h in enumerate((*held.theta_hashes, *held.momentum_hashes))} if index is None else index
        )

    def again(self, held: Held) -> Served:
        """The same state in another folder."""
        return Served(held, self._grid, self._index)

    def locate(self, hash_: bytes) -> Place | None:
        number = self._index.get(hash_)
        if number is None:
            return None
        momentum, chunk = divmod(number, self._grid.n_chunks)
        start, stop = self._grid.bounds(chunk)
        path = self.held.momentum if momentum else self.held.theta
        return str(path), VALUE_BYTES * start, VALUE_BYTES * (stop - start)

    def fault(self) -> str:
        """Why it can't be served, as far as a look at its files tells: one is gone or has another size."""
        for path in (self.held.theta, self.held.momentum):
            try:
                found = path.stat().st_size
            except OSError as error:
                return f"{path.name}: {error.strerror or error}"
            if found != self._n_bytes:
                return f"{path.name} has {found} bytes instead of {self._n_bytes}"
        return ""


def name_of(round_: int, head: bytes) -> str:
    return f"{round_}-{head.hex()[:8]}"


def read_held(folder: Path, name: str, grid: ChunkGrid, pool: Executor | None) -> Held:
    """Read a generation whose name is `name`, all of it, and see that it is whole and consistent.

    Raises OSError or ValueError.
    """
    commit = wire.decode(Commit, (folder / COMMIT).read_bytes())
    body = wire.decode(Body, commit.body)
    ledger = Ledger.from_bytes((folder / LEDGER).read_bytes())
    if ledger.hash() != body.ledger_hash:
        raise LedgerError("the ledger is not the one that the commit names")
    head = commit_hash(commit.body, commit.digest)
    if name != name_of(ledger.round, head):
        raise ValueError("the commit is not the one that the folder is named after")
    theta, momentum = hashes_of(folder, grid, pool)
    if state_digest(theta, momentum) != commit.digest:
        raise ValueError("the vectors don't have the commit's digest")
    return Held(folder, commit, ledger.at(head, commit.digest), theta, momentum)


def hashes_of(folder: Path, grid: ChunkGrid, pool: Executor | None) -> Hashes:
    """The chunk hashes of both vectors in a folder; raises OSError, or ValueError for another size."""
    hashes: list[tuple[bytes, ...]] = []
    for name in (THETA, MOMENTUM):
        found: list[bytes] = [b""] * grid.n_chunks
        with VectorFile(folder / name, grid) as vector:

            def work(chunk: int, vector: VectorFile = vector, found: list[bytes] = found) -> None:
                found[chunk] = state_chunk_hash(vector.read(chunk))

            each_chunk(range(grid.n_chunks), work, pool)
        hashes.append(tuple(found))
    return hashes[0], hashes[1]


def same_files(one: Path, other: Path) -> bool:
    """Whether both folders hold the very same two vectors, by links: what is known of one holds for the other."""
    try:
        return all((one / name).samefile(other / name) for name in (THETA, MOMENTUM))
    except OSError:
        return False


def link_vectors(held: Held, folder: Path, grid: ChunkGrid, pool: Executor | None) -> None:
    """Have a generation's vectors in another folder too: by links, which cost nothing, where the disk has them.

    A vector is never written to again, so a link is as good as a copy. Raises OSError, or ValueError where a copy came
    out other than the vectors should be.
    """
    copied = False
    for name in (THETA, MOMENTUM):
        try:
            os.link(held.folder / name, folder / name)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV):
                raise
            copied = True
            shutil.copyfile(held.folder / name, folder / name)
            with VectorFile(folder / name, grid) as vector:
                vector.sync()
    if copied and hashes_of(folder, grid, pool) != (held.theta_hashes, held.momentum_hashes):
        raise ValueError("the copy is not what was copied")
