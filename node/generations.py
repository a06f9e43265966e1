"""One state on disk, a folder of θ and momentum with commit and ledger: read and verified, and found by chunk hash."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aggregation.chunks import ChunkGrid
from aggregation.digest import StateDigester, state_chunk_hash, state_digest
from aggregation.outer import nesterov_from_frame
from coordinator.rounds.ledger import Ledger, LedgerError
from node.files import remove_folder
from node.vectors import VALUE_BYTES, VectorFile, each_chunk
from protos import wire
from protos.hashes import commit_hash
from protos.messages import Body, Commit, StateOffer

if TYPE_CHECKING:
    from typing_extensions import Buffer

THETA, MOMENTUM = "theta.bin", "momentum.bin"
COMMIT, LEDGER = "commit.bin", "ledger.json"
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)
"""What a file system says that can't have a file under another name, too."""
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


@dataclass(frozen=True, slots=True)
class Candidate:
    """The vectors of a state that a body leads to, in a folder without commit and ledger as yet."""

    folder: Path
    digest: bytes
    theta_hashes: tuple[bytes, ...]
    momentum_hashes: tuple[bytes, ...]


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


def step(
    held: Held, body: Body, frames: Callable[[int], Buffer], folder: Path, grid: ChunkGrid, pool: Executor | None
) -> Candidate:
    """The outer optimiser's step from a state by a body's results, chunk by chunk, into an empty folder.

    Args:
        frames: gives each chunk's encoded result.

    Raises OSError, CodecError for a frame that isn't canonical, or whatever `frames` raises.
    """
    digester = StateDigester(grid.n_chunks)
    theta_hashes: list[bytes] = [b""] * grid.n_chunks
    momentum_hashes: list[bytes] = [b""] * grid.n_chunks
    with (
        VectorFile(held.theta, grid) as old_theta,
        VectorFile(held.momentum, grid) as old_momentum,
        VectorFile(folder / THETA, grid, new=True) as theta,
        VectorFile(folder / MOMENTUM, grid, new=True) as momentum,
    ):

        def work(chunk: int) -> None:
            theta_P, momentum_P = old_theta.read(chunk), old_momentum.read(chunk)
            nesterov_from_frame(
                theta_P, momentum_P, frames(chunk), lr=body.outer_lr, momentum=body.outer_momentum,
                scale=body.clip_factor,
            )  # fmt: skip
            theta.write(chunk, theta_P)
            momentum.write(chunk, momentum_P)
            theta_hashes[chunk] = state_chunk_hash(theta_P)
            momentum_hashes[chunk] = state_chunk_hash(momentum_P)
            digester.add_theta(chunk, theta_hashes[chunk])
            digester.add_momentum(chunk, momentum_hashes[chunk])

        each_chunk(range(grid.n_chunks), work, pool)
        theta.sync()
        momentum.sync()
    return Candidate(folder, digester.digest(), tuple(theta_hashes), tuple(momentum_hashes))


def drop_folder(folder: Path) -> str:
    """Remove a folder that nobody needs any more; why it stays, which stops nobody, or an empty string."""
    try:
        remove_folder(folder)
    except OSError as error:
        return f"{folder} is needed no more and can't be removed: {error.strerror or error}"
    return ""


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
            if error.errno not in NO_LINKS:
                raise
            copied = True
            shutil.copyfile(held.folder / name, folder / name)
            with VectorFile(folder / name, grid) as vector:
                vector.sync()
    if copied and hashes_of(folder, grid, pool) != (held.theta_hashes, held.momentum_hashes):
        raise ValueError("the copy is not what was copied")
