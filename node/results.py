"""Encoded results on disk: one file with a slot for each chunk, for each attempt or body, found again by their hash.

A reducer keeps here what it combined, a voter what it fetched; both serve others from here.

    results/<key hex>/frames.bin    the slots, each on a 64-byte boundary
    results/<key hex>/index.bin     32 bytes a chunk: the result's chunk root, zeros where it is not here
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from aggregation.digest import chunk_root
from node.files import remove_folder, write_all, writing
from protos.messages import ZERO_HASH

if TYPE_CHECKING:
    from typing_extensions import Buffer

FRAMES, INDEX = "frames.bin", "index.bin"
KEPT = 6
"""Areas beside those that are held: of the running round's attempts, and of proposals that came to nothing."""
HASH_BYTES = 32
_ALIGN = 64

Place = tuple[str, int, int]


class ResultsArea:
    """The results of one attempt or body; made by `ResultsStore.area`. Methods may be called from any thread."""

    def __init__(self, folder: Path, frame_bytes: Sequence[int], leaf_values: int) -> None:
        self.folder = folder
        self._frame_bytes = tuple(frame_bytes)
        self._leaf_values = leaf_values
        self._offsets: list[int] = []
        end = 0
        for n_bytes in frame_bytes:
            self._offsets.append(end)
            end += -(-n_bytes // _ALIGN) * _ALIGN
        with writing(folder, "results", end):
            folder.mkdir(parents=True, exist_ok=True)
            with ExitStack() as opened:  # closed again where one of them can't be had
                self._file = _open(folder / FRAMES, end)
                opened.callback(os.close, self._file)
                self._index = _open(folder / INDEX, HASH_BYTES * len(frame_bytes))
                opened.callback(os.close, self._index)
                self._map = mmap.mmap(self._file, end, prot=mmap.PROT_READ)
                index = os.pread(self._index, HASH_BYTES * len(frame_bytes), 0)
                opened.pop_all()
        self._writing = Lock()
        self._closed = False
        self._chunks: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        self._checked: dict[int, None] = {}
        for chunk in range(len(frame_bytes)):
            hash_ = index[HASH_BYTES * chunk : HASH_BYTES * (chunk + 1)]
            if hash_ != ZERO_HASH:
                self._hashes[chunk], self._chunks[hash_] = hash_, chunk

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._hashes

    def __len__(self) -> int:
        return len(self._hashes)

    def hash(self, chunk: int) -> bytes | None:
        return self._hashes.get(chunk)

    def missing(self, hashes: Sequence[bytes]) -> list[int]:
        """The chunks whose result here isn't the one of this hash."""
        return [chunk for chunk, hash_ in enumerate(hashes) if self._hashes.get(chunk) != hash_]

    def put(self, chunk: int, frame: Buffer, hash_: bytes) -> None:
        """Keep a chunk's frame, whose chunk root the caller has found to be this hash.

        Raises ValueError for a frame of another length than the chunk's, and once the area is closed; DiskFull or
        MachineError.
        """
        view = memoryview(frame).cast("B")
        if len(view) != self._frame_bytes[chunk]:
            raise ValueError(f"the result of chunk {chunk} has {len(view)} bytes, not {self._frame_bytes[chunk]}")
        with self._writing, writing(self.folder, "results", len(view)):
            if self._closed:  # the files' numbers may be others' by now
                raise ValueError("these results are closed")
            write_all(self._file, view, self._offsets[chunk])
            write_all(self._index, hash_, HASH_BYTES * chunk)
        old = self._hashes.get(chunk)
        if old is not None and old != hash_ and self._chunks.get(old) == chunk:
            del self._chunks[old]
        self._checked[chunk] = None
        self._hashes[chunk] = hash_
        self._chunks[hash_] = chunk

    def frame(self, chunk: int) -> memoryview:
        """A chunk's frame, where it lies. Raises KeyError if it isn't here.

        What an earlier process left is checked against its hash at the first use, for that process may have been
        cut off.
        """
        hash_ = self._hashes[chunk]
        start = self._offsets[chunk]
        try:
            view = memoryview(self._map)[start : start + self._frame_bytes[chunk]]
        except ValueError:  # the area was closed just now
            raise KeyError(chunk) from None
        if chunk not in self._checked:
            try:
                whole = chunk_root(view, self._leaf_values) == hash_
            except ValueError:
                whole = False
            if not whole:
                self._hashes.pop(chunk, None)
                self._chunks.pop(hash_, None)
                raise KeyError(chunk)
            self._checked[chunk] = None
        return view

    def locate(self, hash_: bytes) -> Place | None:
        chunk = self._chunks.get(hash_)
        if chunk is None:
            return None
        return str(self.folder / FRAMES), self._offsets[chunk], self._frame_bytes[chunk]

    def find(self, hash_: bytes) -> memoryview | None:
        """The frame with this hash, if it is here."""
        chunk = self._chunks.get(hash_)
        try:
            return None if chunk is None else self.frame(chunk)
        except KeyError:
            return None

    def close(self) -> bool:
        """Give back the files; frames that are still looked at stay readable. Whether there are none of those."""
        with self._writing:
            if not self._closed:
                self._closed = True
                os.close(self._file)
                os.close(self._index)
        try:
            self._map.close()
        except BufferError:
            return False
        return True


class ResultsStore:
    """The areas of a node. An attempt's area is kept by its plan hash until `rekey` makes it its body's.

    Args:
        folder: `results/` of the data folder; made if it is missing.
        frame_bytes: per chunk, the exact length of its encoded frame.
        leaf_values: the run's, for checking what an earlier process left.
        kept: how many areas stay that are not held; the one that is longest unused goes when another one is made.
    """

    def __init__(self, folder: Path, frame_bytes: Sequence[int], leaf_values: int, *, kept: int = KEPT) -> None:
        self.folder = folder
        self._frame_bytes = tuple(frame_bytes)
        self._leaf_values = leaf_values
        self._kept = kept
        self._lock = Lock()
        self._areas: dict[bytes, ResultsArea] = {}  # oldest first
        self._held: tuple[bytes, ...] = ()
        with writing(folder, "results", sum(frame_bytes)):
            folder.mkdir(parents=True, exist_ok=True)
            found = sorted(
                (path for path in folder.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime_ns
            )
        for path in found:
            try:
                self._areas[bytes.fromhex(path.name)] = ResultsArea(path, self._frame_bytes, leaf_values)
            except ValueError:  # of another run's shape, or none of ours
                remove_folder(path)

    def area(self, key: bytes) -> ResultsArea:
        """The area of a plan hash or body hash; made if it is missing.

        Raises DiskFull or MachineError.
        """
        with self._lock:
            area = self._areas.pop(key, None)
            if area is None:
                folder = self.folder / key.hex()
                self._reuse(folder)
                area = ResultsArea(folder, self._frame_bytes, self._leaf_values)
            self._areas[key] = area
            self._prune()
            return area

    def rekey(self, old: bytes, new: bytes) -> ResultsArea:
        """The area of `new`, which the one of `old` becomes: what an attempt combined is not stored twice.

        An area that is there for `new` already stays what it is, and so does the old one; without an old one a new one
        is made. Whoever has the area can go on writing to it. Raises DiskFull or MachineError.
        """
        with self._lock:
            area = self._areas.get(old)
            if area is not None and new not in self._areas:
                folder = self.folder / new.hex()
                with writing(self.folder, "results", 0):
                    area.folder.rename(folder)
                    area.folder = folder
                self._areas[new] = self._areas.pop(old)
                self._held = tuple(new if key == old else key for key in self._held)
        return self.area(new)

    def hold(self, keys: Sequence[bytes]) -> None:
        """Keep the areas of these keys, newest first, where there are any, however long they are unused: from now on
        these and no others."""
        with self._lock:
            self._held = tuple(keys)
            self._prune()

    def relieve(self) -> bool:
        """Drop the oldest results that are held for others, since the disk is full; whether there were any.

        The newest ones stay, which the next round may start from.
        """
        with self._lock:
            for key in reversed(self._held[1:]):
                self._held = self._held[:-1]
                area = self._areas.pop(key, None)
                if area is not None:
                    area.close()
                    remove_folder(area.folder)
                    return True
            return False

    def drop(self, key: bytes) -> None:
        """Forget an area that nobody will ask for."""
        with self._lock:
            area = self._areas.pop(key, None)
            if area is not None:
                area.close()
                remove_folder(area.folder)

    def locate(self, hash_: bytes) -> Place | None:
        """Path, offset and length of the result with this hash, whatever attempt it is of."""
        for area in reversed(tuple(self._areas.values())):
            place = area.locate(hash_)
            if place is not None:
                return place
        return None

    def find(self, hash_: bytes) -> memoryview | None:
        """The frame with this hash, if any area has it."""
        for area in reversed(tuple(self._areas.values())):
            frame = area.find(hash_)
            if frame is not None:
                return frame
        return None

    def close(self) -> None:
        with self._lock:
            for area in self._areas.values():
                area.close()
            self._areas.clear()

    def _reuse(self, folder: Path) -> None:
        """Where an area has to go for another one, that one gets its files: new ones would cost more to write."""
        spare = [key for key in self._areas if key not in self._held]
        if not spare or len(spare) < self._kept:
            return
        going = spare[0]
        area = self._areas.pop(going)
        if not area.close() or folder.exists():
            remove_folder(area.folder)
            return
        with writing(self.folder, "results", 0):
            (area.folder / INDEX).unlink()  # before another process could take its frames for what they no longer are
            area.folder.rename(folder)

    def _prune(self) -> None:
        spare = [key for key in self._areas if key not in self._held]
        for key in spare[: max(0, len(spare) - self._kept)]:
            if key != next(reversed(self._areas)):  # the one that is just asked for
                area = self._areas.pop(key)
                area.close()
                remove_folder(area.folder)


def _open(path: Path, n_bytes: int) -> int:
    """A file of this size, made if it is missing. Raises ValueError for one of another size."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(file).st_size
        if size == 0:
            os.ftruncate(file, n_bytes)  # sparse: a reducer fills few slots, and writes are no mapped ones
        elif size != n_bytes:
            raise ValueError(f"{path} has {size} bytes instead of {n_bytes}")
    except BaseException:
        os.close(file)
        raise
    return file
