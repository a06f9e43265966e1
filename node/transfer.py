"""Fetching the whole committed state from several donors: verified chunk by chunk, resumed, all or nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aggregation.digest import state_chunk_hash, tagged_hash
from coordinator.rounds.ledger import Ledger
from node.donors import Donor, StateUnavailable, Target, VerifyCommit, Wish, choose, words
from node.files import check_room, read_exactly, replace_file, write_all, writing
from node.ports import PeerBusy, PeerFailed, Peers
from node.state import MOMENTUM, THETA, StateStore
from node.vectors import VALUE_BYTES, each_chunk
from protos.messages import PeerId

DONORS_AT_ONCE = 8
STREAMS_PER_DONOR = 2
ASK_BYTES = 16 * 2**20
"""About how much one request asks a donor for, at most."""
BUSY_FIRST_S = 0.5
BUSY_MAX_S = 8.0
BUSY_TIRES_S = 120.0
"""A donor that has had no turn for us for so long is given up."""
BEGUN = "incoming.head"

Places = list[tuple[str, int]]
"""Where a chunk goes: file name and chunk. Momenta of a young run are one chunk, many times."""


class StateMoves(StateUnavailable):
    """The state moves on faster than it comes: a frozen snapshot is needed."""


class DonorLied(PeerFailed):
    """A donor sent something else than it said."""


@dataclass(slots=True)
class Manners:
    """How to go about a fetch.

    Attributes:
        progress: told the chunks that are there and of how many.
        moves: whether a current state of which this share is here will be gone before the rest of it is.
        lied: told of donors that sent something else than they said, and what.
        patience_s: after so long a donor without work takes over what another one is at.
        sleep: waits until a busy donor is asked again.
    """

    progress: Callable[[int, int], None] = lambda done, of: None
    moves: Callable[[float], bool] = lambda share: False
    lied: Callable[[PeerId, str], None] = lambda peer, why: None
    patience_s: float = 8.0
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


async def fetch_state(
    peers: Peers,
    donors: Sequence[Donor],
    store: StateStore,
    verify: VerifyCommit,
    wish: Wish | None = None,
    manners: Manners | None = None,
) -> Ledger:
    """Fetch the best state that donors hold and make it the store's current one; its ledger.

    Args:
        donors: whom to ask, with addresses, in this order.
        verify: decides on a donor's commit.

    Chunks that are verified stay in `incoming` when it fails or the process ends, and are not fetched again. Raises
    StateUnavailable (StateMoves where that is why), DiskFull or MachineError.
    """
    manners = manners or Manners()
    said: dict[PeerId, str] = {}
    begun = await asyncio.to_thread(_begun, store)
    target = await choose(peers, donors, store.grid, verify, replace(wish or Wish(), begun=begun), said)
    await asyncio.to_thread(_make_files, store, target)
    wanted = _wanted(target)
    kept = await asyncio.to_thread(_already_there, store, target)
    todo: dict[bytes, Places] = {}
    for hash_, places in wanted.items():
        if left := [place for place in places if place not in kept]:
            todo[hash_] = left
    said = {peer: why for peer, why in said.items() if peer not in target.donors}  # it may have had but one kind
    work = _Work(peers, store, target, todo, len(wanted), said, manners)
    await work.run()
    if work.todo:
        why = f"{len(work.todo)} of {len(wanted)} chunks were not to be had: {words(said)}"
        raise StateMoves(why) if work.outrun and not target.frozen else StateUnavailable(why)
    held = await asyncio.to_thread(store.adopt, (target.theta, target.momentum), target.commit, target.ledger)
    await asyncio.to_thread((store.folder / BEGUN).unlink, missing_ok=True)
    return held.ledger


class _Work:
    """The chunks still to fetch, shared by all streams to all donors."""

    def __init__(
        self,
        peers: Peers,
        store: StateStore,
        target: Target,
        todo: dict[bytes, Places],
        n_chunks: int,
        said: dict[PeerId, str],
        manners: Manners,
    ) -> None:
        self.todo = todo
        self.outrun = False  # a donor has moved on from what it offered
        self._peers, self._store, self._target = peers, store, target
        self._n_chunks, self._said, self._manners = n_chunks, said, manners
        self._taken: dict[bytes, list[PeerId]] = {}
        self._lacking: dict[PeerId, dict[bytes, None]] = {}
        self._chunk_bytes = VALUE_BYTES * store.grid.chunk_values
        self._changed = asyncio.Event()
        self._finished = asyncio.Event()
        self._moved = False
        self._donors: Iterator[Donor] = iter(target.donors.items())
        self._n_slots = min(DONORS_AT_ONCE, len(target.donors))

    async def run(self) -> None:
        """Until all is here or nobody can give more. Raises StateMoves, or what is our own fault."""
        self._told()
        if not self.todo:
            return
        slots = [asyncio.create_task(self._slot(), name="state") for _ in range(self._n_slots)]
        finished = asyncio.create_task(self._finished.wait())
        running = {finished, *slots}
        try:
            while running - {finished} and not finished.done():
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in (finished, *slots):
                task.cancel()
            await asyncio.gather(finished, *slots, return_exceptions=True)
        if self._moved:
            raise StateMoves(f"{len(self.todo)} of {self._n_chunks} chunks are missing, and the state has moved on")

    async def _slot(self) -> None:
        """One donor after the other, each until it has nothing more for us."""
        for peer, addresses in self._donors:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(STREAMS_PER_DONOR):
                        group.create_task(self._from(peer, addresses), name=f"state from {peer}")
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None  # ours alone: what a donor does is not raised

    async def _from(self, peer: PeerId, addresses: Sequence[str]) -> None:
        lacking = self._lacking.setdefault(peer, {})
        busy_s, n_busy, idle = 0.0, 0, False
        while self.todo and peer not in self._said:
            hashes = self._take(peer, lacking, doubled=idle)
            if not hashes:
                if not any(hash_ in self._taken and hash_ not in lacking for hash_ in self.todo):
                    return
                idle = not await self._change()  # another donor may give back what it took, or dawdle
                continue
            idle = False
            try:
                missing = await self._peers.fetch(
                    peer, addresses, "state", hashes, self._chunk_bytes, self._sink(peer), exchange=False
                )
                busy_s, n_busy = 0.0, 0
                lacking.update(dict.fromkeys(missing))
                if len(missing) == len(hashes):
                    self._said.setdefault(peer, "it holds this state no longer")
                    self.outrun = True
            except PeerBusy as error:
                pause_s = _busy_pause(peer, n_busy)
                busy_s, n_busy = busy_s + pause_s, n_busy + 1
                self._give_back(peer, hashes)
                if busy_s > BUSY_TIRES_S:
                    self._said.setdefault(peer, error.why)
                else:
                    await self._manners.sleep(pause_s)
            except DonorLied as error:
                self._said[peer] = error.why
                self._manners.lied(peer, error.why)
            except PeerFailed as error:
                self._said.setdefault(peer, error.why)
            finally:
                self._give_back(peer, hashes)

    async def _change(self) -> bool:
        """Wait until somebody has come to an end with something; False if that takes long."""
        self._changed.clear()
        try:
            async with asyncio.timeout(self._manners.patience_s):
                await self._changed.wait()
            return True
        except TimeoutError:
            return False

    def _take(self, peer: PeerId, lacking: Mapping[bytes, None], *, doubled: bool) -> list[bytes]:
        """Chunks for a donor: few enough that others have their share; at the end also what one other is at."""
        share = -(-len(self.todo) // (2 * STREAMS_PER_DONOR * self._n_slots))
        n_most = max(1, min(ASK_BYTES // self._chunk_bytes, share))
        most_takers = 1 if doubled else 0
        hashes: list[bytes] = []
        for hash_ in self.todo:
            takers = self._taken.get(hash_, [])
            if len(takers) <= most_takers and peer not in takers and hash_ not in lacking:
                hashes.append(hash_)
                if len(hashes) == n_most:
                    break
        for hash_ in hashes:
            self._taken.setdefault(hash_, []).append(peer)
        return hashes

    def _give_back(self, peer: PeerId, hashes: Sequence[bytes]) -> None:
        for hash_ in hashes:
            takers = self._taken.get(hash_, [])
            if peer in takers:
                takers.remove(peer)
            if not takers:
                self._taken.pop(hash_, None)
        self._changed.set()

    def _sink(self, peer: PeerId) -> Callable[[bytes, bytes], Awaitable[None]]:
        async def sink(hash_: bytes, data: bytes) -> None:
            places = self.todo.get(hash_)
            if places is None:
                return
            if not await asyncio.to_thread(_write_chunk, self._store, places, hash_, data):
                raise DonorLied(peer, "it sent a chunk that doesn't have its hash")
            if self.todo.pop(hash_, None) is not None:
                self._told()

        return sink

    def _told(self) -> None:
        n_done = self._n_chunks - len(self.todo)
        self._manners.progress(n_done, self._n_chunks)
        if self.todo and not self._target.frozen and self._manners.moves(n_done / self._n_chunks):
            self._moved = True
        if self._moved or not self.todo:
            self._finished.set()


def _busy_pause(peer: PeerId, n_before: int) -> float:
    """Longer each time, and not the same for all who were turned away together."""
    jitter = tagged_hash("busy", peer.encode(), str(n_before).encode())[0] / 256
    return min(BUSY_MAX_S, BUSY_FIRST_S * 2.0 ** min(n_before, 10)) * (0.5 + jitter)


def _wanted(target: Target) -> dict[bytes, Places]:
    places: dict[bytes, Places] = {}
    for name, hashes in ((THETA, target.theta), (MOMENTUM, target.momentum)):
        for chunk, hash_ in enumerate(hashes):
            places.setdefault(hash_, []).append((name, chunk))
    return places


def _begun(store: StateStore) -> bytes:
    """The head of the state that is partly in `incoming`."""
    try:
        return bytes.fromhex((store.folder / BEGUN).read_text("ascii"))
    except (OSError, ValueError):
        return b""


def _make_files(store: StateStore, target: Target) -> None:
    """The two files of `incoming`, at their size; what an earlier try left in them stays."""
    n_bytes = VALUE_BYTES * store.grid.n_values
    with writing(store.folder, "the state", store.state_bytes):
        store.incoming.mkdir(exist_ok=True)
        if _begun(store) != target.ledger.head:
            replace_file(store.folder / BEGUN, target.ledger.head.hex().encode())
        on_disk = 0
        for name in (THETA, MOMENTUM):
            file = os.open(store.incoming / name, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                os.ftruncate(file, n_bytes)
                on_disk += min(n_bytes, 512 * os.fstat(file).st_blocks)
            finally:
                os.close(file)
    check_room(store.folder, store.state_bytes - on_disk, "the state")


def _already_there(store: StateStore, target: Target) -> dict[tuple[str, int], None]:
    """The chunks in `incoming` that have the wanted hash already."""
    kept: dict[tuple[str, int], None] = {}
    for name, hashes in ((THETA, target.theta), (MOMENTUM, target.momentum)):
        file = os.open(store.incoming / name, os.O_RDONLY)
        try:

            def work(chunk: int, name: str = name, hashes: tuple[bytes, ...] = hashes, file: int = file) -> None:
                start, stop = store.grid.bounds(chunk)
                values = bytearray(VALUE_BYTES * (stop - start))
                read_exactly(file, memoryview(values), VALUE_BYTES * start)
                if state_chunk_hash(values) == hashes[chunk]:
                    kept[name, chunk] = None

            each_chunk(range(store.grid.n_chunks), work, None)
        finally:
            os.close(file)
    return kept


def _write_chunk(store: StateStore, places: Places, hash_: bytes, data: bytes) -> bool:
    """Write a chunk to all its places; False, and nothing is written, if it doesn't have its hash or length."""
    if state_chunk_hash(data) != hash_:
        return False
    if any(len(data) != VALUE_BYTES * store.grid.size(chunk) for _, chunk in places):
        return False
    with writing(store.folder, "the state", len(data)):
        for name, chunk in places:
            _write_at(store.incoming / name, data, VALUE_BYTES * store.grid.bounds(chunk)[0])
    return True


def _write_at(path: Path, data: bytes, offset: int) -> None:
    file = os.open(path, os.O_WRONLY)
    try:
        write_all(file, data, offset)
    finally:
        os.close(file)
