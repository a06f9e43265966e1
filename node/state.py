"""The committed state on disk: verified at start, stepped chunk by chunk beside itself, switched by one rename.

    state/CURRENT                   name of the generation that counts
    state/<round>-<head8>/          theta.bin momentum.bin commit.bin ledger.json
    state/candidate-<body hash>/    the state that a body leads to, until it is committed
    state/incoming/                 chunks of a full state that is being fetched

The last two generations are kept, so that donors can finish serving the older one. Methods block for the disk and for
arithmetic and run in worker threads; one change at a time. Properties and `locate` may be used from any thread.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from aggregation.chunks import ChunkGrid
from aggregation.digest import StateDigester, state_chunk_hash, state_digest
from aggregation.outer import nesterov_from_frame
from coordinator.rounds.ledger import Ledger, LedgerError
from node.errors import LocalStateError
from node.files import check_room, remove_folder, replace_file, sync_folder, writing
from node.vectors import VALUE_BYTES, VectorFile, each_chunk
from protos import wire
from protos.hashes import commit_hash
from protos.messages import Body, Commit, Outcome, StateOffer

if TYPE_CHECKING:
    from typing_extensions import Buffer

THETA, MOMENTUM = "theta.bin", "momentum.bin"
CURRENT, INCOMING, CANDIDATE = "CURRENT", "incoming", "candidate-"
KEPT = 2
CANDIDATES = 3
"""Proposals of one round whose next state may stand beside the current one; the oldest gives way."""

Place = tuple[str, int, int]

_GENERATION = re.compile(r"[0-9]+-[0-9a-f]{8}")


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
    def head(self) -> bytes:
        return self.ledger.head


@dataclass(frozen=True, slots=True)
class Candidate:
    folder: Path
    digest: bytes
    theta_hashes: tuple[bytes, ...]
    momentum_hashes: tuple[bytes, ...]


class StateStore:
    """Generations of the state in a folder.

    Args:
        folder: `state/` of the data folder; made if it is missing.
        grid: the run's chunks.
        pool: threads that help with chunks; the calling thread works too, so it may be one of them.
    """

    def __init__(self, folder: Path, grid: ChunkGrid, pool: Executor | None = None) -> None:
        self.folder = folder
        self.grid = grid
        self._pool = pool
        self._changing = Lock()
        self._held: tuple[Held, ...] = ()  # newest first
        self._places: dict[bytes, Place] = {}
        self._candidates: dict[bytes, Candidate] = {}
        with writing(folder, "the state", self.state_bytes):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def state_bytes(self) -> int:
        """Size of θ and momentum on disk."""
        return 2 * VALUE_BYTES * self.grid.n_values

    @property
    def current(self) -> Held | None:
        held = self._held
        return held[0] if held else None

    @property
    def incoming(self) -> Path:
        """Where a fetched state's chunks gather before `adopt`."""
        return self.folder / INCOMING

    def offer(self) -> StateOffer | None:
        """What this node can donate; None while it holds no state."""
        held = self.current
        if held is None:
            return None
        return StateOffer(held.commit, held.ledger.to_bytes(), held.theta_hashes, held.momentum_hashes)

    def locate(self, hash_: bytes) -> Place | None:
        """Path, offset and length of a chunk of a kept generation, by its hash."""
        return self._places.get(hash_)

    # -- start -----------------------------------------------------------------------------------------------------

    def open(self) -> list[str]:
        """Find the newest generation that is whole and consistent, and drop left-overs; says what was wrong.

        A generation counts if its ledger is the one that its body names and its vectors have its commit's digest.
        """
        with self._changing:
            problems: list[str] = []
            for left in self.folder.glob(f"{CANDIDATE}*"):
                remove_folder(left)
            held: list[Held] = []
            for folder in self._generations():
                try:
                    held.append(self._read(folder))
                except (OSError, ValueError) as error:
                    problems.append(f"the state in {folder} is damaged and was dropped: {error}")
                    remove_folder(folder)
            named = self._named()
            held.sort(key=lambda one: (one.ledger.epoch, one.ledger.round, one.folder.name == named), reverse=True)
            if held and named != held[0].folder.name:
                self._name(held[0].folder.name)
            self._keep(tuple(held[:KEPT]))
            return problems

    def _generations(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if path.is_dir() and _GENERATION.fullmatch(path.name)]

    def _named(self) -> str:
        try:
            return (self.folder / CURRENT).read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            return ""

    def _name(self, generation: str) -> None:
        replace_file(self.folder / CURRENT, generation.encode())

    def _read(self, folder: Path) -> Held:
        commit = wire.decode(Commit, (folder / "commit.bin").read_bytes())
        body = wire.decode(Body, commit.body)
        ledger = Ledger.from_bytes((folder / "ledger.json").read_bytes())
        if ledger.hash() != body.ledger_hash:
            raise LedgerError("the ledger is not the one that the commit names")
        head = commit_hash(commit.body, commit.digest)
        if folder.name != _generation(ledger.round, head):
            raise ValueError("the commit is not the one that the folder is named after")
        theta, momentum = self._hashes(folder)
        if state_digest(theta, momentum) != commit.digest:
            raise ValueError("the vectors don't have the commit's digest")
        return Held(folder, commit, ledger.at(head, commit.digest), theta, momentum)

    def _hashes(self, folder: Path) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """The chunk hashes of both vectors in a folder; raises ValueError for another size."""
        hashes: list[tuple[bytes, ...]] = []
        for name in (THETA, MOMENTUM):
            found: list[bytes] = [b""] * self.grid.n_chunks
            with VectorFile(folder / name, self.grid) as vector:

                def work(chunk: int, vector: VectorFile = vector, found: list[bytes] = found) -> None:
                    found[chunk] = state_chunk_hash(vector.read(chunk))

                self._each_chunk(work)
            hashes.append(tuple(found))
        return hashes[0], hashes[1]

    # -- change ----------------------------------------------------------------------------------------------------

    def install_initial(self, theta: Path, momentum: Path | None, commit: Commit, ledger: Ledger) -> Held:
        """Take in a state that lies elsewhere on this machine, as the observer does; momentum None is all zeros.

        Raises LocalStateError if it isn't the state that the commit names.
        """
        with self._changing:
            remove_folder(self.incoming)
            check_room(self.folder, self.state_bytes, "the state")
            with writing(self.folder, "the state", self.state_bytes):
                self.incoming.mkdir()
                for source, name in ((theta, THETA), (momentum, MOMENTUM)):
                    if source is not None:
                        shutil.copyfile(source, self.incoming / name)
                        continue
                    with (self.incoming / name).open("wb") as file:
                        file.truncate(VALUE_BYTES * self.grid.n_values)
            try:
                hashes = self._hashes(self.incoming)
            except (OSError, ValueError) as error:
                raise LocalStateError(f"{theta}: {error}", "restore the run's folder from a copy") from error
            return self._adopt(hashes, commit, ledger)

    def adopt(self, hashes: tuple[tuple[bytes, ...], tuple[bytes, ...]], commit: Commit, ledger: Ledger) -> Held:
        """Make the fetched state in `incoming`, whose chunks have these hashes, the current one.

        Raises LocalStateError if they don't give the commit's digest, or the ledger isn't its.
        """
        with self._changing:
            return self._adopt(hashes, commit, ledger)

    def prepare(self, body_hash: bytes, body: Body, frames: Callable[[int], Buffer]) -> bytes:
        """Step a candidate of the next state beside the current one; its digest.

        Args:
            frames: gives each chunk's encoded result; not asked for an empty round, which keeps the vectors.

        Raises LocalStateError without a state that the body extends, CodecError for a frame that isn't canonical,
        DiskFull or MachineError; then no candidate stands. Repeating it gives the same.
        """
        with self._changing:
            known = self._candidates.get(body_hash)
            if known is not None:
                return known.digest
            held = self._anchor(body)
            while len(self._candidates) >= CANDIDATES:
                remove_folder(self._candidates.pop(next(iter(self._candidates))).folder)
            folder = self.folder / f"{CANDIDATE}{body_hash.hex()[:16]}"
            remove_folder(folder)
            try:
                with writing(self.folder, "the next state", self.state_bytes):
                    folder.mkdir()
                    if body.outcome is Outcome.EMPTY:
                        os.link(held.theta, folder / THETA)
                        os.link(held.momentum, folder / MOMENTUM)
                        candidate = Candidate(folder, held.digest, held.theta_hashes, held.momentum_hashes)
                    else:
                        candidate = self._step(held, body, frames, folder)
            except BaseException:
                remove_folder(folder)
                raise
            self._candidates[body_hash] = candidate
            return candidate.digest

    def apply(self, body_hash: bytes, commit: Commit, ledger: Ledger) -> Held:
        """Switch to the prepared candidate; all others are dropped. Doing it again changes nothing.

        Raises LocalStateError if no candidate of this body stands, or it has another digest than the commit.
        """
        with self._changing:
            head = commit_hash(commit.body, commit.digest)
            if self.current is not None and self.current.head == head:
                return self.current
            candidate = self._candidates.get(body_hash)
            if candidate is None or candidate.digest != commit.digest:
                found = "nothing was prepared" if candidate is None else f"ours is {candidate.digest.hex()[:12]}"
                raise LocalStateError(
                    f"the state with digest {commit.digest.hex()[:12]} is not here: {found}", "fetch it from others"
                )
            hashes = candidate.theta_hashes, candidate.momentum_hashes
            held = self._switch(candidate.folder, hashes, commit, ledger)
            for other in self._candidates.values():
                remove_folder(other.folder)
            self._candidates.clear()
            return held

    def _anchor(self, body: Body) -> Held:
        held = self.current
        if held is None or held.digest != body.anchor_digest:
            ours = "none" if held is None else held.digest.hex()[:12]
            raise LocalStateError(
                f"round {body.round} starts from state {body.anchor_digest.hex()[:12]}, ours is {ours}",
                "fetch the state from others",
            )
        return held

    def _step(self, held: Held, body: Body, frames: Callable[[int], Buffer], folder: Path) -> Candidate:
        digester = StateDigester(self.grid.n_chunks)
        theta_hashes: list[bytes] = [b""] * self.grid.n_chunks
        momentum_hashes: list[bytes] = [b""] * self.grid.n_chunks
        with (
            VectorFile(held.theta, self.grid) as old_theta,
            VectorFile(held.momentum, self.grid) as old_momentum,
            VectorFile(folder / THETA, self.grid, new=True) as theta,
            VectorFile(folder / MOMENTUM, self.grid, new=True) as momentum,
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

            self._each_chunk(work)
            theta.sync()
            momentum.sync()
        return Candidate(folder, digester.digest(), tuple(theta_hashes), tuple(momentum_hashes))

    def _adopt(self, hashes: tuple[tuple[bytes, ...], tuple[bytes, ...]], commit: Commit, ledger: Ledger) -> Held:
        body = wire.decode(Body, commit.body)
        if state_digest(*hashes) != commit.digest or ledger.hash() != body.ledger_hash:
            raise LocalStateError("a state and its commit don't belong together", "fetch the state again")
        with writing(self.folder, "the state", self.state_bytes):
            for name in (THETA, MOMENTUM):
                with VectorFile(self.incoming / name, self.grid) as vector:
                    vector.sync()
        held = self._switch(self.incoming, hashes, commit, ledger)
        for candidate in self._candidates.values():
            remove_folder(candidate.folder)
        self._candidates.clear()
        return held

    def _switch(
        self, folder: Path, hashes: tuple[tuple[bytes, ...], tuple[bytes, ...]], commit: Commit, ledger: Ledger
    ) -> Held:
        """Complete a folder whose vectors are on disk and make it the current generation."""
        head = commit_hash(commit.body, commit.digest)
        generation = self.folder / _generation(ledger.round, head)
        with writing(self.folder, "the state", self.state_bytes):
            replace_file(folder / "commit.bin", wire.encode(commit))
            replace_file(folder / "ledger.json", ledger.to_bytes())
            remove_folder(generation)  # of a crash between the two renames
            folder.rename(generation)
            sync_folder(self.folder)
            self._name(generation.name)
        held = Held(generation, commit, ledger.at(head, commit.digest), *hashes)
        self._keep((held, *(old for old in self._held if old.folder != generation))[:KEPT])
        return held

    def _keep(self, held: tuple[Held, ...]) -> None:
        """Serve these generations; others leave the disk."""
        places: dict[bytes, Place] = {}
        for generation in reversed(held):
            for path, hashes in (
                (generation.theta, generation.theta_hashes), (generation.momentum, generation.momentum_hashes),
            ):  # fmt: skip
                for chunk, hash_ in enumerate(hashes):
                    start, stop = self.grid.bounds(chunk)
                    places[hash_] = (str(path), VALUE_BYTES * start, VALUE_BYTES * (stop - start))
        self._held, self._places = held, places
        for folder in self._generations():
            if folder not in (generation.folder for generation in held):
                remove_folder(folder)

    def _each_chunk(self, work: Callable[[int], None]) -> None:
        each_chunk(range(self.grid.n_chunks), work, self._pool)


def _generation(round_: int, head: bytes) -> str:
    return f"{round_}-{head.hex()[:8]}"
