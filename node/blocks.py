"""Training data: pieces by their hashes from other nodes or the coordinator, verified, kept, and served to others.

    data/pieces.bin   the pieces' BLAKE3 hashes, 32 bytes each, train shard then validation shard
    data/train.bin    the shards at their full size, sparse until pieces are there; what `training.batches` maps
    data/val.bin
    data/have.bin     one byte a piece: 1 where it is there and was verified

A folder that was packed here (`pieces.json` and whole shards) is taken as it is, after one look at every piece.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import aiohttp
from blake3 import blake3

from node.errors import LocalStateError, Unreachable
from node.files import check_room, replace_file, write_all, writing
from node.ports import PeerFailed, Peers
from node.training.shards import (
    PIECES_FILE,
    TRAIN_FILE,
    VAL_FILE,
    DataError,
    Shards,
    data_root,
    pieces_of_batches,
    read_pieces,
)
from protos.messages import PeerId, Range
from protos.runspec import RunSpec

LIST_FILE = "pieces.bin"
HAVE_FILE = "have.bin"
HASH_BYTES = 32
HTTP_AT_ONCE = 4
HTTP_CONNECT_S = 5.0

Place = tuple[str, int, int]
Sink = Callable[[bytes, bytes], Awaitable[None]]


class Source(Protocol):
    """Somewhere pieces can be had."""

    async def fetch(self, hashes: Sequence[bytes], max_bytes: int, sink: Sink) -> None:
        """Give what is there of these hashes to the sink. Raises PeerFailed or what the sink raises."""


class PeerSource:
    """Other nodes, one after the other: `donors` gives whom to ask now, with addresses, the likeliest first."""

    def __init__(self, peers: Peers, donors: Callable[[], Sequence[tuple[PeerId, Sequence[str]]]]) -> None:
        self._peers = peers
        self._donors = donors

    async def fetch(self, hashes: Sequence[bytes], max_bytes: int, sink: Sink) -> None:
        said: list[str] = []
        left = list(hashes)
        for peer, addresses in self._donors():
            got: dict[bytes, None] = {}

            async def take(hash_: bytes, data: bytes, got: dict[bytes, None] = got) -> None:
                await sink(hash_, data)
                got[hash_] = None

            try:
                await self._peers.fetch(peer, addresses, "piece", left, max_bytes, take, exchange=False)
            except PeerFailed as error:
                said.append(str(error))
            left = [hash_ for hash_ in left if hash_ not in got]
            if not left:
                return
        raise PeerFailed("other nodes", "; ".join(said) or f"{len(left)} pieces are nowhere")


class HttpSource:
    """The coordinator's `GET /v1/data/HASH`, at each HOST:PORT in turn."""

    def __init__(self, hosts: Sequence[str], *, no_progress_s: float = 30.0) -> None:
        self._hosts = tuple(hosts)
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=HTTP_CONNECT_S, sock_read=no_progress_s)

    async def fetch(self, hashes: Sequence[bytes], max_bytes: int, sink: Sink) -> None:
        said: list[str] = []
        left = dict.fromkeys(hashes)
        async with aiohttp.ClientSession(timeout=self._timeout, auto_decompress=False) as session:
            for host in self._hosts:
                try:
                    await self._from(session, host, left, max_bytes, sink)
                    return
                except PeerFailed as error:
                    said.append(str(error))
        raise PeerFailed("the coordinator", "; ".join(said) or "no address is known")

    async def _from(
        self, session: aiohttp.ClientSession, host: str, left: dict[bytes, None], max_bytes: int, sink: Sink
    ) -> None:
        waiting = iter(list(left))

        async def work() -> None:
            for hash_ in waiting:
                data = await self._get(session, host, hash_, max_bytes)
                await sink(hash_, data)
                left.pop(hash_, None)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(HTTP_AT_ONCE, len(left))):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _get(self, session: aiohttp.ClientSession, host: str, hash_: bytes, max_bytes: int) -> bytes:
        try:
            async with session.get(f"http://{host}/v1/data/{hash_.hex()}", allow_redirects=False) as response:
                if response.status != 200:
                    raise PeerFailed(host, f"answered {response.status} to a piece of data")
                data = bytearray()
                async for part in response.content.iter_any():
                    data += part
                    if len(data) > max_bytes:
                        raise PeerFailed(host, f"sent more than the {max_bytes} bytes that are possible")
                return bytes(data)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PeerFailed(host, str(error) or "no answer in time") from error


class PieceStore:
    """The pieces of one run's data that are here, and how more are had.

    Args:
        folder: `data/` of the data folder; made if it is missing.
        spec: the RunSpec.
        sources: where pieces are to be had, in the order in which they are asked.
    """

    def __init__(self, folder: Path, spec: RunSpec, sources: Sequence[Source]) -> None:
        self.folder = folder
        self._spec = spec
        self._shards = Shards.of(spec.data)
        self._root = bytes.fromhex(spec.data.root)
        self._sources = tuple(sources)
        self._hashes: tuple[bytes, ...] = ()
        self._index: dict[bytes, int] = {}
        self._have = bytearray(self._shards.n_pieces)
        self._fetching = asyncio.Lock()

    def open(self) -> None:
        """Find what is here; blocks for the disk. Raises MachineError, or LocalStateError for data of another run."""
        with writing(self.folder, "training data", self._n_bytes):
            self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / LIST_FILE).exists():
            self._know((self.folder / LIST_FILE).read_bytes())
        elif (self.folder / PIECES_FILE).exists():
            try:
                self._know(b"".join(read_pieces((self.folder / PIECES_FILE).read_bytes(), self._spec.data)))
            except DataError as error:
                raise self._foreign(str(error)) from error
        if not self._hashes:
            return
        have = self._read_have()
        self._have = have if have is not None else self._look_at_all()
        self._make_files()

    def have(self, piece: int) -> bool:
        return bool(self._have[piece])

    @property
    def n_here(self) -> int:
        return sum(self._have)

    def locate(self, hash_: bytes) -> Place | None:
        """Where a piece lies, or, for the data's root, the list of all hashes; None if it isn't here."""
        if hash_ == self._root:
            return (str(self.folder / LIST_FILE), 0, HASH_BYTES * len(self._hashes)) if self._hashes else None
        piece = self._index.get(hash_)
        if piece is None or not self._have[piece]:
            return None
        place = self._shards.place(piece)
        return str(self.folder / place.file), place.offset, place.n_bytes

    async def ensure(self, ranges: Iterable[Range]) -> None:
        """Have the pieces of these batches on disk. Raises as `ensure_pieces`."""
        await self.ensure_pieces(await asyncio.to_thread(pieces_of_batches, self._spec, tuple(ranges)))

    async def ensure_pieces(self, pieces: Iterable[int]) -> None:
        """Have these pieces on disk, verified. One call works at a time.

        Raises Unreachable, which says what each source answered, DiskFull or MachineError. What was fetched stays.
        """
        async with self._fetching:
            if not self._hashes:
                await self._fetch_list()
            await self._fetch([piece for piece in pieces if not self._have[piece]])

    # -- fetching --------------------------------------------------------------------------------------------------

    async def _fetch_list(self) -> None:
        n_bytes = HASH_BYTES * self._shards.n_pieces
        said: list[str] = []
        found: list[bytes] = []

        async def sink(_: bytes, raw: bytes) -> None:
            if len(raw) != n_bytes or data_root(_cut(raw)) != self._root:
                raise PeerFailed("a source", "sent a list of pieces that isn't the run's")
            found.append(raw)

        for source in self._sources:
            try:
                await source.fetch([self._root], n_bytes, sink)
            except PeerFailed as error:
                said.append(str(error))
            if found:
                await asyncio.to_thread(self._take_list, found[0])
                return
        raise Unreachable("the list of the training data's pieces", said)

    async def _fetch(self, pieces: Sequence[int]) -> None:
        wanted: dict[bytes, list[int]] = {}
        for piece in pieces:
            wanted.setdefault(self._hashes[piece], []).append(piece)
        if not wanted:
            return
        max_bytes = max(self._shards.place(piece).n_bytes for piece in pieces)
        await asyncio.to_thread(
            check_room, self.folder, sum(self._shards.place(piece).n_bytes for piece in pieces), "training data"
        )

        async def sink(hash_: bytes, data: bytes) -> None:
            if not await asyncio.to_thread(self._write, hash_, data, wanted.get(hash_, ())):
                raise PeerFailed("a source", "sent a piece that doesn't have its hash")
            wanted.pop(hash_, None)

        said: list[str] = []
        try:
            for source in self._sources:
                try:
                    await source.fetch(list(wanted), max_bytes, sink)
                except PeerFailed as error:
                    said.append(str(error))
                if not wanted:
                    return
        finally:
            await asyncio.to_thread(self._save, [piece for piece in pieces if self._hashes[piece] not in wanted])
        raise Unreachable(f"{len(wanted)} pieces of the training data", said)

    # -- the disk --------------------------------------------------------------------------------------------------

    @property
    def _n_bytes(self) -> int:
        return self._shards.file_bytes(TRAIN_FILE) + self._shards.file_bytes(VAL_FILE)

    def _know(self, raw: bytes) -> None:
        hashes = _cut(raw)
        if len(raw) != HASH_BYTES * self._shards.n_pieces or data_root(hashes) != self._root:
            raise self._foreign("the list of pieces is not the run's")
        with writing(self.folder, "training data", len(raw)):
            if not (self.folder / LIST_FILE).exists():
                replace_file(self.folder / LIST_FILE, raw)
        self._hashes = hashes
        self._index = {hash_: piece for piece, hash_ in enumerate(hashes)}

    def _foreign(self, why: str) -> LocalStateError:
        return LocalStateError(
            f"the data in {self.folder} can't be used: {why}", "move the folder away: the data are fetched again"
        )

    def _take_list(self, raw: bytes) -> None:
        self._know(raw)
        self._make_files()

    def _make_files(self) -> None:
        """Both shards at their full size, where they are not."""
        with writing(self.folder, "training data", self._n_bytes):
            for name in (TRAIN_FILE, VAL_FILE):
                path, n_bytes = self.folder / name, self._shards.file_bytes(name)
                if path.exists() and path.stat().st_size == n_bytes:
                    continue
                with path.open("ab") as file:
                    file.truncate(n_bytes)

    def _read_have(self) -> bytearray | None:
        try:
            have = bytearray((self.folder / HAVE_FILE).read_bytes())
            sizes = [(self.folder / name).stat().st_size for name in (TRAIN_FILE, VAL_FILE)]
        except OSError:
            return None
        whole = sizes == [self._shards.file_bytes(name) for name in (TRAIN_FILE, VAL_FILE)]
        return have if whole and len(have) == self._shards.n_pieces and max(have) <= 1 else None

    def _look_at_all(self) -> bytearray:
        """Hash every piece that could be there."""
        have = bytearray(self._shards.n_pieces)
        for name in (TRAIN_FILE, VAL_FILE):
            path = self.folder / name
            if not path.exists() or path.stat().st_size != self._shards.file_bytes(name):
                continue
            with path.open("rb") as file:
                for piece, hash_ in enumerate(self._hashes):
                    place = self._shards.place(piece)
                    if place.file == name:
                        file.seek(place.offset)
                        have[piece] = blake3(file.read(place.n_bytes)).digest() == hash_
        with writing(self.folder, "training data", len(have)):
            replace_file(self.folder / HAVE_FILE, bytes(have))
        return have

    def _write(self, hash_: bytes, data: bytes, pieces: Sequence[int]) -> bool:
        """Write a piece to its places; False, and nothing is written, if it doesn't have its hash or length."""
        places = [self._shards.place(piece) for piece in pieces]
        if not places or blake3(data).digest() != hash_ or any(place.n_bytes != len(data) for place in places):
            return False
        with writing(self.folder, "training data", len(data)):
            for place in places:
                file = os.open(self.folder / place.file, os.O_WRONLY)
                try:
                    write_all(file, data, place.offset)
                finally:
                    os.close(file)
        return True

    def _save(self, pieces: Sequence[int]) -> None:
        """Remember that these pieces are here, once they are on disk."""
        if not pieces:
            return
        with writing(self.folder, "training data", len(self._have)):
            for name in (TRAIN_FILE, VAL_FILE):
                file = os.open(self.folder / name, os.O_WRONLY)
                try:
                    os.fsync(file)
                finally:
                    os.close(file)
            for piece in pieces:
                self._have[piece] = 1
            replace_file(self.folder / HAVE_FILE, bytes(self._have))


def _cut(raw: bytes) -> tuple[bytes, ...]:
    return tuple(bytes(raw[start : start + HASH_BYTES]) for start in range(0, len(raw), HASH_BYTES))
