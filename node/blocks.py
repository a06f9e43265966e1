"""Training data: pieces by their hashes from other nodes or the coordinator, verified, kept, and served to others."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from node.errors import NodeError, Unreachable
from node.files import check_room
from node.piece_files import PieceFiles, Place
from node.ports import PeerFailed
from node.sources import Sink, Source
from node.training.shards import pieces_of_batches
from protos.messages import Range
from protos.runspec import RunSpec

GAVE_WAY = "what is leased goes first"
LEASES_KEPT = 2
"""The pieces of so many leases stay: the trainer may still be at the one before."""


class PieceStore:
    """The pieces of one run's data that are here, and how more are had: for a lease, and beyond it what can wait.

    Args:
        folder: `data/` of the data folder; made if it is missing.
        spec: the RunSpec.
        sources: where pieces are to be had, in the order in which they are asked.
    """

    def __init__(self, folder: Path, spec: RunSpec, sources: Sequence[Source]) -> None:
        self.files = PieceFiles(folder, spec)
        self._spec, self._sources = spec, tuple(sources)
        self._leases: deque[tuple[int, ...]] = deque(maxlen=LEASES_KEPT)
        self._fetching = asyncio.Lock()
        self._laying_in: asyncio.Task[None] | None = None
        self._n_leases_wait = 0
        self.n_damaged = 0
        """Pieces of an earlier process that turned out not to be whole."""

    def open(self) -> None:
        """Find what is here; blocks for the disk. Raises MachineError, or LocalStateError for data of another run."""
        self.files.open()

    @property
    def n_here(self) -> int:
        return self.files.n_here

    @property
    def busy(self) -> bool:
        """Whether something is being fetched."""
        return self._fetching.locked()

    @property
    def leased(self) -> frozenset[int]:
        """The pieces of the lease in force and of the one before."""
        return frozenset(chain.from_iterable(self._leases))

    def locate(self, hash_: bytes) -> Place | None:
        """Where a piece lies, or, for the data's root, the list of all hashes; None if it isn't here."""
        return self.files.locate(hash_)

    async def ensure(self, ranges: Iterable[Range]) -> None:
        """Have the pieces of these batches, a lease, on disk. Raises as `ensure_pieces`."""
        pieces = await asyncio.to_thread(pieces_of_batches, self._spec, tuple(ranges))
        if pieces in self._leases:
            self._leases.remove(pieces)
        self._leases.append(pieces)
        await self.ensure_pieces(pieces)

    async def ensure_pieces(self, pieces: Iterable[int]) -> None:
        """Have these pieces on disk, verified. One call works at a time, and what is laid in gives way to it.

        Raises Unreachable, which says what each source answered, DiskFull or MachineError. What was fetched stays.
        """
        pieces, files = tuple(pieces), self.files
        await self.look_at([piece for piece in pieces if files.have(piece) and not files.seen(piece)])
        if files.hashes and all(map(files.have, pieces)):
            return
        if self._laying_in is not None:
            self._laying_in.cancel()
        self._n_leases_wait += 1
        try:
            await self._fetching.acquire()
        finally:
            self._n_leases_wait -= 1
        try:
            await self._fetch(pieces, urgent=True)
        finally:
            self._fetching.release()

    async def lay_in(self, pieces: Sequence[int]) -> str:
        """Have these pieces too, until a leased one is missing. Why some did not come, or an empty string.

        Raises DiskFull or MachineError. What was fetched stays.
        """
        async with self._fetching:
            if self._n_leases_wait:  # it came while this one waited
                return GAVE_WAY
            self._laying_in = asyncio.create_task(self._fetch(pieces, urgent=False), name="data to lay in")
            try:
                await self._laying_in
            except asyncio.CancelledError:
                if (this := asyncio.current_task()) is not None and this.cancelling():
                    raise
                return GAVE_WAY
            except Unreachable as error:
                return "; ".join(error.tried) or "nobody is known who could have it"
            finally:
                self._laying_in = None
        return ""

    async def look_at(self, pieces: Sequence[int]) -> None:
        """See whether what an earlier process has noted is whole; what is not counts as never fetched."""
        if pieces:
            self.n_damaged += len(await asyncio.to_thread(self.files.look_at, pieces))

    async def drop(self, pieces: Iterable[int]) -> int:
        """Give up these pieces, but none that is leased, where that gives their room back. How many went."""
        if not await asyncio.to_thread(self.files.gives_back):
            return 0
        async with self._fetching:
            leased = self.leased
            gone = [piece for piece in pieces if self.files.have(piece) and piece not in leased]
            self.files.strike_out(gone)  # before anything is awaited: no lease that begins now counts on them
            if gone:
                await asyncio.to_thread(self.files.forget, gone)
            return len(gone)

    # -- fetching --------------------------------------------------------------------------------------------------

    async def _fetch(self, pieces: Sequence[int], *, urgent: bool) -> None:
        files = self.files
        if not files.hashes:
            await self._fetch_list(urgent)
        wanted: dict[bytes, list[int]] = {}
        for piece in pieces:
            if not files.have(piece):
                wanted.setdefault(files.hashes[piece], []).append(piece)
        if not wanted:
            return
        sizes = [files.shards.place(piece).n_bytes for piece in chain.from_iterable(wanted.values())]
        await asyncio.to_thread(check_room, files.folder, sum(sizes), "training data")
        came: list[int] = []

        async def sink(hash_: bytes, data: bytes) -> None:
            places = wanted.get(hash_, ())
            if not await asyncio.to_thread(files.write, hash_, data, places):
                raise PeerFailed("a source", "sent a piece that doesn't have its hash")
            came.extend(places)
            wanted.pop(hash_, None)

        try:
            said = await self._ask(wanted, max(sizes), sink, urgent)
        except BaseException:
            with suppress(NodeError):  # the first fault tells, and who is told to end does, whatever the disk says
                await asyncio.to_thread(files.note, came)
            raise
        await asyncio.to_thread(files.note, came)
        if wanted:
            raise Unreachable(f"{len(wanted)} pieces of the training data", said)

    async def _ask(self, wanted: dict[bytes, list[int]], max_bytes: int, sink: Sink, urgent: bool) -> list[str]:
        """Ask one source after the other for what is still wanted; what those said that failed."""
        said: list[str] = []
        for source in self._sources:
            try:
                await source.fetch(list(wanted), max_bytes, sink, urgent=urgent)
            except PeerFailed as error:
                said.append(str(error))
            if not wanted:
                break
        return said

    async def _fetch_list(self, urgent: bool) -> None:
        files = self.files
        said: list[str] = []

        async def sink(_: bytes, raw: bytes) -> None:
            if not await asyncio.to_thread(files.take_list, raw):
                raise PeerFailed("a source", "sent a list of pieces that isn't the run's")

        for source in self._sources:
            try:
                await source.fetch([files.root], files.list_bytes, sink, urgent=urgent)
            except PeerFailed as error:
                said.append(str(error))
            if files.hashes:
                return
        raise Unreachable("the list of the training data's pieces", said)
