"""The pieces of the training data on disk: which are here and whole, written, found out about, and given up again.

    data/pieces.bin   the pieces' BLAKE3 hashes, 32 bytes each, train shard then validation shard
    data/train.bin    the shards at their full size, sparse until pieces are there; what `training.batches` maps
    data/val.bin
    data/have.bin     one byte a piece: 1 where it is there and was verified

A folder that was packed here (`pieces.json` and whole shards) is taken as it is, after one look at every piece, and
nothing of it is given up. A piece is written and synced before it is noted in have.bin, and struck out there before its
room is given back. Both change single bytes of have.bin in place, which needs no room on a full disk.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from node.errors import LocalStateError
from node.files import can_punch, punch, replace_file, write_all, writing
from node.spreading import HASH_BYTES
from node.training.shards import PIECES_FILE, TRAIN_FILE, VAL_FILE, DataError, Shards, data_root, read_pieces
from protos.runspec import RunSpec

LIST_FILE = "pieces.bin"
HAVE_FILE = "have.bin"

Place = tuple[str, int, int]
_WHAT = "training data"


class PieceFiles:
    """One run's pieces in one folder. What blocks for the disk says so, and may be called from any thread.

    Args:
        folder: `data/` of the data folder; made if it is missing.
    """

    def __init__(self, folder: Path, spec: RunSpec) -> None:
        self.folder, self._spec = folder, spec
        self.shards = Shards.of(spec.data)
        self.root = bytes.fromhex(spec.data.root)
        self.hashes: tuple[bytes, ...] = ()
        self._index: dict[bytes, int] = {}
        self._have = bytearray(self.shards.n_pieces)
        self._seen = bytearray(self.shards.n_pieces)  # what this process has verified
        self._noting = threading.Lock()  # a task that is cancelled leaves its thread behind
        self._have_is_on_disk = False  # as a whole, so that single bytes of it can be changed

    def open(self) -> None:
        """Find what is here; blocks for the disk. Raises MachineError, or LocalStateError for data of another run."""
        with writing(self.folder, _WHAT, self.list_bytes):
            self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / LIST_FILE).exists():
            self._take_own((self.folder / LIST_FILE).read_bytes())
        elif (self.folder / PIECES_FILE).exists():
            try:
                self._take_own(b"".join(read_pieces((self.folder / PIECES_FILE).read_bytes(), self._spec.data)))
            except DataError as error:
                raise self._foreign(str(error)) from error
        if not self.hashes:
            return
        have = self._read_have()
        if have is None:
            have = self._look_at_all()
            self._seen = bytearray(have)
        self._have, self._have_is_on_disk = have, True

    # -- what is here ----------------------------------------------------------------------------------------------

    @property
    def list_bytes(self) -> int:
        return HASH_BYTES * self.shards.n_pieces

    def have(self, piece: int) -> bool:
        return bool(self._have[piece])

    def have_P(self) -> NDArray[np.bool_]:
        """(P,) which pieces of the train shard are here now; a copy."""
        have_P: NDArray[np.bool_] = np.frombuffer(bytes(self._have[: self.shards.n_train_pieces]), np.uint8) != 0
        return have_P

    @property
    def n_here(self) -> int:
        return sum(self._have)

    def seen(self, piece: int) -> bool:
        """Whether this process has verified it."""
        return bool(self._seen[piece])

    def unseen(self, n_most: int) -> list[int]:
        """Some of the pieces that an earlier process has noted and nobody has looked at since."""
        have, seen = np.frombuffer(bytes(self._have), np.uint8), np.frombuffer(bytes(self._seen), np.uint8)
        found: list[int] = np.flatnonzero((have == 1) & (seen == 0))[:n_most].tolist()
        return found

    def locate(self, hash_: bytes) -> Place | None:
        """Where a piece lies, or, for the data's root, the list of all hashes; None if it isn't here."""
        if hash_ == self.root:
            return (str(self.folder / LIST_FILE), 0, self.list_bytes) if self.hashes else None
        piece = self._index.get(hash_)
        if piece is None or not self._have[piece]:
            return None
        place = self.shards.place(piece)
        return str(self.folder / place.file), place.offset, place.n_bytes

    # -- what comes and goes: all of these block for the disk ------------------------------------------------------

    def take_list(self, raw: bytes) -> bool:
        """Take in the list of all hashes; False, and nothing is done, where it isn't the run's."""
        if len(raw) != self.list_bytes:
            return False
        hashes = tuple(bytes(raw[start : start + HASH_BYTES]) for start in range(0, len(raw), HASH_BYTES))
        if data_root(hashes) != self.root:
            return False
        with self._noting, writing(self.folder, _WHAT, len(raw)):
            if not (self.folder / LIST_FILE).exists():
                replace_file(self.folder / LIST_FILE, raw)
            self._make_files()
            self._index = {hash_: piece for piece, hash_ in enumerate(hashes)}
            self.hashes = hashes
        return True

    def write(self, hash_: bytes, data: bytes, pieces: Sequence[int]) -> bool:
        """Write a piece to its places; False, and nothing is written, if it doesn't have its hash or length."""
        places = [self.shards.place(piece) for piece in pieces]
        if not places or blake3(data).digest() != hash_ or any(place.n_bytes != len(data) for place in places):
            return False
        with writing(self.folder, _WHAT, len(data)):
            for place in places:
                file = os.open(self.folder / place.file, os.O_WRONLY)
                try:
                    write_all(file, data, place.offset)
                finally:
                    os.close(file)
        return True

    def note(self, pieces: Iterable[int]) -> None:
        """Remember that these pieces are here, once they are on disk."""
        pieces = list(pieces)
        if not pieces:
            return
        with self._noting, writing(self.folder, _WHAT, len(self._have)):
            for name in (TRAIN_FILE, VAL_FILE):
                file = os.open(self.folder / name, os.O_WRONLY)
                try:
                    os.fsync(file)
                finally:
                    os.close(file)
            for piece in pieces:
                self._have[piece] = self._seen[piece] = 1
            self._write_have(pieces)

    def strike_out(self, pieces: Iterable[int]) -> None:
        """These are not here any more, as all see at once; `forget` makes a later process see it too."""
        for piece in pieces:
            self._have[piece] = 0

    def forget(self, pieces: Sequence[int]) -> None:
        """Have it on disk that these were struck out, and then give their room back to the disk.

        Who is just being served one gets zeros in its place, sees that by the hash, and asks the next one.
        """
        with self._noting, writing(self.folder, _WHAT, len(self._have)):
            self._write_have(pieces)
            for piece in pieces:
                place = self.shards.place(piece)
                punch(self.folder / place.file, place.offset, place.n_bytes)

    def gives_back(self) -> bool:
        """Whether pieces may go: not where they were packed, nor where a file can't have holes."""
        return not (self.folder / PIECES_FILE).exists() and can_punch(self.folder / TRAIN_FILE)

    def look_at(self, pieces: Sequence[int]) -> list[int]:
        """Hash these pieces, which should be here; those that are damaged are struck out, and returned."""
        torn = [piece for piece in pieces if not self._is_whole(piece)]
        damaged = [
            piece for piece in torn if not self._seen[piece]
        ]  # another look may have been faster, and a fetch too
        for piece in pieces:
            self._seen[piece] = 1
        if damaged:
            self.strike_out(damaged)
            with self._noting, writing(self.folder, _WHAT, len(self._have)):
                self._write_have(damaged)
        return damaged

    # -- small things ----------------------------------------------------------------------------------------------

    def _take_own(self, raw: bytes) -> None:
        if not self.take_list(raw):
            raise self._foreign("the list of pieces is not the run's")

    def _foreign(self, why: str) -> LocalStateError:
        return LocalStateError(
            f"the data in {self.folder} can't be used: {why}", "move the folder away: the data are fetched again"
        )

    def _make_files(self) -> None:
        """Both shards at their full size, where they are not."""
        fresh = not any((self.folder / name).exists() for name in (TRAIN_FILE, VAL_FILE))
        for name in (TRAIN_FILE, VAL_FILE):
            path, n_bytes = self.folder / name, self.shards.file_bytes(name)
            if path.exists() and path.stat().st_size == n_bytes:
                continue
            (self.folder / HAVE_FILE).unlink(missing_ok=True)  # what it says is not about this file
            with path.open("ab") as file:
                file.truncate(n_bytes)
        if fresh:
            replace_file(self.folder / HAVE_FILE, bytes(self.shards.n_pieces))

    def _write_have(self, pieces: Iterable[int]) -> None:
        """Have have.bin say of these pieces what is so now."""
        path = self.folder / HAVE_FILE
        if not self._have_is_on_disk or not path.exists():
            replace_file(path, bytes(self._have))
            self._have_is_on_disk = True
            return
        file = os.open(path, os.O_WRONLY)
        try:
            for piece in pieces:
                write_all(file, bytes(self._have[piece : piece + 1]), piece)
            os.fsync(file)
        finally:
            os.close(file)

    def _read_have(self) -> bytearray | None:
        try:
            have = bytearray((self.folder / HAVE_FILE).read_bytes())
        except OSError:
            return None
        return have if len(have) == self.shards.n_pieces and max(have) <= 1 else None

    def _look_at_all(self) -> bytearray:
        """Hash every piece that could be there."""
        empty = {name for name in (TRAIN_FILE, VAL_FILE) if not (self.folder / name).stat().st_blocks}  # made just now
        places = map(self.shards.place, range(self.shards.n_pieces))
        have = bytearray(place.file not in empty and self._is_whole(piece) for piece, place in enumerate(places))
        with writing(self.folder, _WHAT, len(have)):
            replace_file(self.folder / HAVE_FILE, bytes(have))
        return have

    def _is_whole(self, piece: int) -> bool:
        place = self.shards.place(piece)
        try:
            with (self.folder / place.file).open("rb") as file:
                file.seek(place.offset)
                return blake3(file.read(place.n_bytes)).digest() == self.hashes[piece]
        except OSError:
            return False
