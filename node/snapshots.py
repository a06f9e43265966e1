"""Frozen snapshots of the state: generations that stand still, for those whose line is too slow for one that moves.

state/frozen-<round>-<head8>/   the files of a generation again, by links where the disk has them
state/freezing/                 one that is being made
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from aggregation.chunks import ChunkGrid
from node.files import remove_folder, replace_file, sync_folder, writing
from node.generations import COMMIT, GENERATION, LEDGER, Held, Served, link_vectors
from node.vectors import VALUE_BYTES

FROZEN, FREEZING = "frozen-", "freezing"
LINGER_S = 60.0
"""A snapshot that was asked for so lately is still being fetched by somebody."""


class Snapshots:
    """The snapshots in a state's folder, newest first. Methods block for the disk, one at a time.

    One that gives way to the next stays for as long as it is asked for, at most one of them.
    """

    def __init__(self, folder: Path, grid: ChunkGrid, pool: Executor | None, seconds: Callable[[], float]) -> None:
        self.served: tuple[Served, ...] = ()
        self._folder, self._grid, self._pool, self._seconds = folder, grid, pool, seconds

    def folders(self) -> list[Path]:
        found = self._folder.glob(f"{FROZEN}*")
        return [path for path in found if path.is_dir() and GENERATION.fullmatch(path.name.removeprefix(FROZEN))]

    def open(self, found: list[Held]) -> None:
        """Serve the newest of those that were found whole; others leave the disk."""
        remove_folder(self._folder / FREEZING)
        found = sorted(found, key=lambda one: (one.ledger.epoch, one.ledger.round), reverse=True)
        self.served = tuple(Served(one, self._grid) for one in found[:1])
        self.reap()

    def freeze(self, served: Served) -> None:
        """Keep a generation as the newest snapshot, switched by one rename. Raises DiskFull or MachineError."""
        held = served.held
        if any(other.held.head == held.head for other in self.served):
            return
        frozen = self.link(held, f"{FROZEN}{held.folder.name}")
        self.served = (served.again(frozen), *self.served)
        self.reap()

    def link(self, held: Held, name: str) -> Held:
        """The same state in another folder. Raises DiskFull or MachineError, and then leaves nothing."""
        part, folder = self._folder / FREEZING, self._folder / name
        remove_folder(part)
        try:
            with writing(self._folder, "the snapshot", 2 * VALUE_BYTES * self._grid.n_values):
                part.mkdir()
                link_vectors(held, part, self._grid, self._pool)
                for file in (COMMIT, LEDGER):
                    replace_file(part / file, (held.folder / file).read_bytes())
                remove_folder(folder)
                part.rename(folder)
                sync_folder(self._folder)
        except BaseException:
            remove_folder(part)
            raise
        return replace(held, folder=folder)

    def reap(self) -> None:
        """Drop what has given way, once nobody fetches it any more."""
        now_s = self._seconds()
        self.served = tuple(
            served
            for number, served in enumerate(self.served[:2])
            if number == 0 or (served.asked_at is not None and now_s - served.asked_at < LINGER_S)
        )
        stay = [served.held.folder for served in self.served]
        for folder in self.folders():
            if folder not in stay:
                remove_folder(folder)

    def drop(self, served: Served) -> None:
        """No longer serve this one; its files stay until the next `reap`."""
        self.served = tuple(other for other in self.served if other is not served)
