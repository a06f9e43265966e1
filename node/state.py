"""The committed state on disk: verified at start, stepped chunk by chunk beside itself, switched by one rename.

    state/CURRENT                   name of the generation that counts; CURRENT.next: of the one that a switch leads to
    state/<round>-<head8>/          theta.bin momentum.bin commit.bin ledger.json
    state/candidate-<body hash>/    the state that a body leads to, until it is committed
    state/frozen-<round>-<head8>/   the frozen snapshot
    state/incoming/                 chunks of a full state that is being fetched

The last two generations are kept, so that donors can finish serving the older one, and a frozen snapshot. Where the
disk is full these give way to the next state, and that is noted. Methods block for the disk and for arithmetic and run
in worker threads; one change at a time. Properties, `offer` and `locate` may be used from any thread.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

from aggregation.chunks import ChunkGrid
from aggregation.digest import state_digest
from coordinator.rounds.ledger import Ledger
from node.errors import DiskFull, LocalStateError
from node.files import check_room, remove_folder, replace_file, sync_folder, writing
from node.generations import (
    COMMIT,
    GENERATION,
    LEDGER,
    MOMENTUM,
    THETA,
    Candidate,
    Hashes,
    Held,
    Place,
    Served,
    drop_folder,
    hashes_of,
    link_vectors,
    name_of,
    read_held,
    same_files,
    step,
)
from node.snapshots import FROZEN, Snapshots
from node.vectors import VALUE_BYTES, VectorFile
from protos import wire
from protos.hashes import commit_hash
from protos.messages import Body, Commit, Outcome, StateOffer

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["MOMENTUM", "THETA", "Held", "Place", "StateStore"]

CURRENT, NEXT, INCOMING, CANDIDATE = "CURRENT", "CURRENT.next", "incoming", "candidate-"
KEPT = 2
CANDIDATES = 3
"""Proposals of one round whose next state may stand beside the current one; the oldest gives way."""

T = TypeVar("T")


class StateStore:
    """Generations of the state in a folder.

    Args:
        folder: `state/` of the data folder; made if it is missing.
        grid: the run's chunks.
        pool: threads that help with chunks; the calling thread works too, so it may be one of them.
        seconds: a clock, for when a snapshot was asked for last.
    """

    def __init__(
        self,
        folder: Path,
        grid: ChunkGrid,
        pool: Executor | None = None,
        *,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.grid = grid
        self._pool, self._seconds = pool, seconds
        self._changing = Lock()
        self._held: tuple[Served, ...] = ()  # newest first
        self._snapshots = Snapshots(folder, grid, pool, seconds)
        self._notes: list[str] = []
        self._bad: dict[Path, None] = {}
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
        return held[0].held if held else None

    @property
    def frozen(self) -> Held | None:
        """The newest frozen snapshot."""
        frozen = self._snapshots.served
        return frozen[0].held if frozen else None

    def books(self) -> dict[bytes, Ledger]:
        """The books of all kept states by their heads: what the run could go back to from here."""
        return {served.held.head: served.held.ledger for served in (*self._held, *self._snapshots.served)}

    @property
    def incoming(self) -> Path:
        """Where a fetched state's chunks gather before `adopt`."""
        return self.folder / INCOMING

    def take_notes(self) -> list[str]:
        """What a contributor would want to read of what happened to the files since the last time."""
        notes, self._notes = self._notes, []
        return notes

    def offer(self, *, frozen: bool = False) -> StateOffer | None:
        """What this node can donate: the current state or the frozen snapshot. None while it holds none, or its files
        are not what they were: nobody is offered what is damaged."""
        served = self._snapshots.served if frozen else self._held
        return served[0].held.offer() if served and not self._damaged(served[0]) else None

    def locate(self, hash_: bytes) -> Place | None:
        """Path, offset and length of a chunk of a kept state, by its hash."""
        for served in (*self._held, *self._snapshots.served):
            place = served.locate(hash_)
            if place is not None and not self._damaged(served):
                served.asked_at = self._seconds()
                return place
        return None

    def _damaged(self, served: Served) -> bool:
        fault = served.fault()
        if not fault:
            return False
        self._snapshots.drop(served)
        held = served.held
        if held.folder not in self._bad:
            self._bad[held.folder] = None
            self._notes.append(f"the state after round {held.ledger.round} is damaged, and not served: {fault}")
        return True

    # -- start -----------------------------------------------------------------------------------------------------

    def open(self) -> list[str]:
        """Find the generation that counts, drop left-overs, and say what was wrong.

        It is the one to which a switch was cut off, if the switch came that far, or else the one that CURRENT names,
        whatever the numbers of others: a branch that was given up may have gone further. Without those it is the newest
        that is whole and consistent: its ledger is the one that its body names, its vectors have its commit's digest.
        Raises DiskFull or MachineError.
        """
        with self._changing, writing(self.folder, "the state", self.state_bytes):
            problems = [why for left in self.folder.glob(f"{CANDIDATE}*") if (why := drop_folder(left))]
            held = self._read_all(self._generations(), "", problems)
            switched, named = self._named(NEXT), self._named(CURRENT)
            held.sort(key=lambda one: (one.folder.name == switched, one.folder.name == named, one.number), reverse=True)
            self._snapshots.open(self._read_all(self._snapshots.folders(), FROZEN, problems, known=held))
            if not held and (frozen := self.frozen) is not None:
                held = [self._snapshots.link(frozen, frozen.folder.name.removeprefix(FROZEN))]
                problems.append(f"going on from the snapshot after round {frozen.ledger.round}")
            if held and named != held[0].folder.name:
                replace_file(self.folder / CURRENT, held[0].folder.name.encode())
            (self.folder / NEXT).unlink(missing_ok=True)
            self._keep(_kept(held))
            return problems

    def _read_all(
        self, folders: list[Path], prefix: str, problems: list[str], known: list[Held] | None = None
    ) -> list[Held]:
        """The whole ones of these generations; others leave the disk and are told of."""
        found: list[Held] = []
        for folder in folders:
            name = folder.name.removeprefix(prefix)
            twin = next((one for one in known or () if one.folder.name == name), None)
            try:
                if twin is not None and same_files(twin.folder, folder):
                    found.append(Held(folder, twin.commit, twin.ledger, twin.theta_hashes, twin.momentum_hashes))
                else:
                    found.append(read_held(folder, name, self.grid, self._pool))
            except (OSError, ValueError) as error:
                problems.append(f"the state in {folder} is damaged and was dropped: {error}")
                self._drop(folder)
        return found

    def _generations(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if path.is_dir() and GENERATION.fullmatch(path.name)]

    def _named(self, file: str) -> str:
        try:
            return (self.folder / file).read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            return ""

    # -- change ----------------------------------------------------------------------------------------------------

    def install_initial(self, theta: Path, momentum: Path | None, commit: Commit, ledger: Ledger) -> Held:
        """Take in a state that lies elsewhere on this machine, as the observer does; momentum None is all zeros.

        Raises LocalStateError if it isn't the state that the commit names.
        """
        with self._changing:
            with writing(self.folder, "the state", self.state_bytes):
                remove_folder(self.incoming)
                check_room(self.folder, self.state_bytes, "the state")
                self.incoming.mkdir()
                for source, name in ((theta, THETA), (momentum, MOMENTUM)):
                    if source is not None:
                        shutil.copyfile(source, self.incoming / name)
                        continue
                    with (self.incoming / name).open("wb") as file:
                        file.truncate(VALUE_BYTES * self.grid.n_values)
            try:
                hashes = hashes_of(self.incoming, self.grid, self._pool)
            except (OSError, ValueError) as error:
                raise LocalStateError(f"{theta}: {error}", "restore the run's folder from a copy") from error
            return self._adopt(hashes, commit, ledger)

    def adopt(self, hashes: Hashes, commit: Commit, ledger: Ledger) -> Held:
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
        DiskFull or MachineError; then no candidate stands. Repeating it gives the same. What is kept for others gives
        way where the disk has no room.
        """
        with self._changing:
            known = self._candidates.get(body_hash)
            if known is not None:
                return known.digest
            held = self._anchor(body)
            self._drop_candidates(CANDIDATES - 1)
            candidate = self._with_room(lambda: self._candidate(held, body, frames, body_hash))
            self._candidates[body_hash] = candidate
            return candidate.digest

    def _candidate(self, held: Held, body: Body, frames: Callable[[int], Buffer], body_hash: bytes) -> Candidate:
        folder = self.folder / f"{CANDIDATE}{body_hash.hex()[:16]}"
        try:
            with writing(self.folder, "the next state", self.state_bytes):
                remove_folder(folder)
                folder.mkdir()
                if body.outcome is not Outcome.EMPTY:
                    return step(held, body, frames, folder, self.grid, self._pool)
                link_vectors(held, folder, self.grid, self._pool)
                return Candidate(folder, held.digest, held.theta_hashes, held.momentum_hashes)
        except BaseException:
            self._drop(folder)
            raise

    def _drop_candidates(self, n_left: int = 0) -> None:
        """Drop the oldest ones until so many are left."""
        while len(self._candidates) > n_left:
            self._drop(self._candidates.pop(next(iter(self._candidates))).folder)

    def freeze(self) -> None:
        """Keep the current state as the frozen snapshot, beside what becomes of it; switched by one rename.

        Nothing happens without a state, or once it is frozen. Raises DiskFull or MachineError, and leaves the snapshot
        that there was.
        """
        with self._changing:
            if self._held:
                with writing(self.folder, "the snapshot", self.state_bytes):
                    self._snapshots.freeze(self._held[0])

    def tidy(self) -> None:
        """Drop a snapshot that has given way to the next one, once nobody fetches it any more. Raises MachineError."""
        with self._changing, writing(self.folder, "the snapshot", 0):
            self._snapshots.reap()

    def relieve(self) -> bool:
        """Drop something that is kept for others, since the disk is full; whether there was anything."""
        with self._changing:
            return self._relieve()

    def _relieve(self) -> bool:
        if self._snapshots.served:
            what, gone = "the snapshot", self._snapshots.served[-1]
            self._snapshots.drop(gone)
        elif len(self._held) > 1:
            what, gone = "the older state", self._held[-1]
            self._held = self._held[:-1]
        else:
            return False
        self._drop(gone.held.folder)
        self._notes.append(
            f"the disk is full: {what} after round {gone.held.ledger.round}, kept for others, was dropped"
        )
        return True

    def _with_room(self, work: Callable[[], T]) -> T:
        """Do what needs room on the disk, to which all that is kept for others gives way, one after the other."""
        while True:
            try:
                return work()
            except DiskFull:
                if not self._relieve():
                    raise

    def _drop(self, folder: Path) -> None:
        if problem := drop_folder(folder):
            self._notes.append(problem)

    def restore(self, head: bytes, body_hash: bytes) -> Ledger | None:
        """Have a kept state, the one after the commit with this hash, as the candidate of a body that goes back to it.

        Its ledger; None if it isn't kept. Raises DiskFull, MachineError or LocalStateError.
        """
        with self._changing:
            kept = [served.held for served in (*self._held, *self._snapshots.served) if served.held.head == head]
            if not kept:
                return None
            held = kept[0]
            self._drop_candidates(CANDIDATES - 1)
            folder = self.folder / f"{CANDIDATE}{body_hash.hex()[:16]}"
            try:
                with writing(self.folder, "the state to go back to", self.state_bytes):
                    remove_folder(folder)
                    folder.mkdir()
                    link_vectors(held, folder, self.grid, self._pool)
            except BaseException as error:
                self._drop(folder)
                if isinstance(error, ValueError):
                    what = f"the state after round {held.ledger.round}: {error}"
                    raise LocalStateError(what, "fetch it from others") from error
                raise
            self._candidates[body_hash] = Candidate(folder, held.digest, held.theta_hashes, held.momentum_hashes)
            return held.ledger

    def apply(self, body_hash: bytes, commit: Commit, ledger: Ledger) -> Held:
        """Switch to the prepared candidate; all others are dropped. Doing it again changes nothing, or
        ends what was begun.

        Raises LocalStateError if no candidate of this body stands, or it has another digest than the commit; DiskFull
        where nothing that is kept for others is left to give way; MachineError.
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
            self._drop_candidates()
            self._drop(self.incoming)  # of a fetch that was given up, for this was a step
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

    def _adopt(self, hashes: Hashes, commit: Commit, ledger: Ledger) -> Held:
        body = wire.decode(Body, commit.body)
        if state_digest(*hashes) != commit.digest or ledger.hash() != body.ledger_hash:
            raise LocalStateError("a state and its commit don't belong together", "fetch the state again")
        with writing(self.folder, "the state", self.state_bytes):
            for name in (THETA, MOMENTUM):
                with VectorFile(self.incoming / name, self.grid) as vector:
                    vector.sync()
        held = self._switch(self.incoming, hashes, commit, ledger)
        self._drop_candidates()
        return held

    def _switch(self, folder: Path, hashes: Hashes, commit: Commit, ledger: Ledger) -> Held:
        """Complete a folder whose vectors are on disk and make it the current generation."""
        head = commit_hash(commit.body, commit.digest)
        generation = self.folder / name_of(ledger.round, head)
        self._with_room(lambda: self._complete(folder, generation, commit, ledger))
        held = Held(generation, commit, ledger.at(head, commit.digest), *hashes)
        self._keep(_kept([held, *(served.held for served in self._held)]))
        return held

    def _complete(self, folder: Path, generation: Path, commit: Commit, ledger: Ledger) -> None:
        """The folder's renaming is the switch: the word of what it leads to is on disk before, and then only moved."""
        with writing(self.folder, "the state", self.state_bytes):
            if folder.exists() or not generation.exists():  # else a try before this one came as far as the renaming
                replace_file(folder / COMMIT, wire.encode(commit))
                replace_file(folder / LEDGER, ledger.to_bytes())
                replace_file(self.folder / NEXT, generation.name.encode())
                remove_folder(generation)  # of a state that was dropped, and could not be removed
                folder.rename(generation)
            with suppress(FileNotFoundError):  # that try came further
                (self.folder / NEXT).replace(self.folder / CURRENT)
            sync_folder(self.folder)

    def _keep(self, held: tuple[Held, ...]) -> None:
        """Serve these generations; others leave the disk."""
        known = {served.held.folder: served for served in self._held}
        same = (known.get(one.folder) for one in held)
        self._held = tuple(
            served if served is not None and served.held == one else Served(one, self.grid)
            for one, served in zip(held, same, strict=True)
        )
        for folder in self._generations():
            if folder not in (one.folder for one in held):
                self._drop(folder)


def _kept(held: list[Held]) -> tuple[Held, ...]:
    """Which of these stay beside the first one, which counts. One that is newer is of a branch that was given up: it
    would be taken for the newest where CURRENT is lost."""
    return (*held[:1], *(one for one in held[1:] if one.number < held[0].number))[:KEPT]
