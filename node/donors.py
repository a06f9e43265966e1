"""Fetching the whole committed state from several donors: verified chunk by chunk, resumed, all or nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aggregation.digest import results_root, state_chunk_hash, state_digest
from coordinator.rounds.ledger import Ledger, LedgerError
from node.files import check_room, read_exactly, write_all, writing
from node.ports import PeerFailed, Peers
from node.state import MOMENTUM, THETA, StateStore
from node.vectors import VALUE_BYTES, each_chunk
from protos.hashes import commit_hash
from protos.messages import Body, Commit, PeerId, StateOffer

OFFERS_AT_ONCE = 8
STREAMS_PER_DONOR = 2
ASK_BYTES = 16 * 2**20
"""About how much one request asks a donor for."""

Donor = tuple[PeerId, Sequence[str]]
VerifyCommit = Callable[[Commit], Body]
"""The body of a commit that a quorum (or the run key) signed and that is new enough; else a ValueError says why."""


class StateUnavailable(Exception):
    """No donor could give the state: says what each of them said. Worth another try; what was fetched is kept."""


@dataclass(slots=True)
class _Target:
    """The state to fetch: what it must be, and who has it."""

    commit: Commit
    ledger: Ledger
    theta: tuple[bytes, ...]
    momentum: tuple[bytes, ...]
    donors: dict[PeerId, Sequence[str]] = field(default_factory=dict)

    def wanted(self) -> dict[bytes, list[tuple[str, int]]]:
        """Where each chunk goes, by its hash: file name and chunk. Momenta of a young run are one hash, many times."""
        places: dict[bytes, list[tuple[str, int]]] = {}
        for name, hashes in ((THETA, self.theta), (MOMENTUM, self.momentum)):
            for chunk, hash_ in enumerate(hashes):
                places.setdefault(hash_, []).append((name, chunk))
        return places


async def fetch_state(
    peers: Peers,
    donors: Sequence[Donor],
    store: StateStore,
    verify: VerifyCommit,
    *,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Ledger:
    """Fetch the newest state that donors hold and make it the store's current one; its ledger.

    Args:
        donors: whom to ask, with addresses. Each has at most `STREAMS_PER_DONOR` requests of ours at a time.
        verify: decides on a donor's commit.
        progress: told the chunks that are there and of how many.

    Chunks that are verified stay in `incoming` when it fails, and are not fetched again. Raises StateUnavailable,
    DiskFull or MachineError.
    """
    said: dict[PeerId, str] = {}
    target = await _choose(peers, donors, store, verify, said)
    wanted = target.wanted()
    await asyncio.to_thread(_make_files, store)
    kept = await asyncio.to_thread(_already_there, store, target)
    todo = {
        hash_: [place for place in places if place not in kept]
        for hash_, places in wanted.items()
        if any(place not in kept for place in places)
    }
    progress(len(wanted) - len(todo), len(wanted))
    work = _Work(peers, store, target, todo, said, lambda left: progress(len(wanted) - left, len(wanted)))
    await work.run()
    if work.todo:
        raise StateUnavailable(f"{len(work.todo)} of {len(wanted)} chunks were not to be had: {_words(said)}")
    await asyncio.to_thread(store.adopt, (target.theta, target.momentum), target.commit, target.ledger)
    held = store.current
    if held is None:
        raise StateUnavailable("the state was replaced while it was adopted")
    return held.ledger


class _Work:
    """The chunks still to fetch, shared by one task for each stream to a donor."""

    def __init__(
        self,
        peers: Peers,
        store: StateStore,
        target: _Target,
        todo: dict[bytes, list[tuple[str, int]]],
        said: dict[PeerId, str],
        left: Callable[[int], None],
    ) -> None:
        self.todo = todo
        self._peers = peers
        self._store = store
        self._target = target
        self._said = said
        self._left = left
        self._taken: dict[bytes, None] = {}
        self._lacking: dict[PeerId, dict[bytes, None]] = {}
        self._chunk_bytes = VALUE_BYTES * store.grid.chunk_values
        self._changed = asyncio.Event()

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for peer, addresses in self._target.donors.items():
                    for _ in range(STREAMS_PER_DONOR):
                        group.create_task(self._from(peer, addresses), name=f"state from {peer}")
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # ours alone: what a donor does is not raised

    async def _from(self, peer: PeerId, addresses: Sequence[str]) -> None:
        lacking = self._lacking.setdefault(peer, {})
        while self.todo and peer not in self._said:
            hashes = self._take(lacking)
            if not hashes:
                if not any(hash_ in self._taken and hash_ not in lacking for hash_ in self.todo):
                    return
                self._changed.clear()
                await self._changed.wait()  # another donor may give back what it took
                continue
            try:
                missing = await self._peers.fetch(
                    peer, addresses, "state", hashes, self._chunk_bytes, self._sink(peer), exchange=False
                )
                lacking.update(dict.fromkeys(missing))
                if len(missing) == len(hashes):
                    self._said.setdefault(peer, "it holds this state no longer")
            except PeerFailed as error:
                self._said.setdefault(peer, error.why)
            finally:
                for hash_ in hashes:
                    self._taken.pop(hash_, None)
                self._changed.set()

    def _take(self, lacking: Mapping[bytes, None]) -> list[bytes]:
        n_most = max(1, min(ASK_BYTES // self._chunk_bytes, -(-len(self.todo) // (2 * len(self._target.donors)))))
        free = (hash_ for hash_ in self.todo if hash_ not in self._taken and hash_ not in lacking)
        hashes = [hash_ for hash_, _ in zip(free, range(n_most), strict=False)]
        self._taken.update(dict.fromkeys(hashes))
        return hashes

    def _sink(self, peer: PeerId) -> Callable[[bytes, bytes], Awaitable[None]]:
        async def sink(hash_: bytes, data: bytes) -> None:
            places = self.todo.get(hash_)
            if places is None:
                return
            if not await asyncio.to_thread(_write_chunk, self._store, places, hash_, data):
                raise PeerFailed(peer, "it sent a chunk that doesn't have its hash")
            self.todo.pop(hash_, None)
            self._left(len(self.todo))

        return sink


async def _choose(
    peers: Peers, donors: Sequence[Donor], store: StateStore, verify: VerifyCommit, said: dict[PeerId, str]
) -> _Target:
    """The newest state that a donor offers and that holds up, with all who offer it."""
    slots = asyncio.Semaphore(OFFERS_AT_ONCE)
    targets: dict[bytes, _Target] = {}

    async def ask(peer: PeerId, addresses: Sequence[str]) -> None:
        async with slots:
            try:
                offer = await peers.offer(peer, addresses)
                body = verify(offer.commit)
                target = await asyncio.to_thread(_check_offer, offer, body, store)
            except PeerFailed as error:
                said[peer] = error.why
            except ValueError as error:
                said[peer] = f"its offer doesn't hold: {error}"
            else:
                known = targets.setdefault(target.ledger.head, target)
                known.donors[peer] = addresses
                if not known.commit.result_hashes:
                    known.commit = target.commit  # the first one may have come without what the next round starts from

    async with asyncio.TaskGroup() as group:
        for peer, addresses in donors:
            group.create_task(ask(peer, addresses), name=f"offer of {peer}")
    if not targets:
        raise StateUnavailable(f"no donor offers the state: {_words(said)}")
    return max(targets.values(), key=lambda target: (target.ledger.epoch, target.ledger.round, len(target.donors)))


def _check_offer(offer: StateOffer, body: Body, store: StateStore) -> _Target:
    """Raises ValueError where the offer isn't the state after its commit."""
    n_chunks = store.grid.n_chunks
    if (len(offer.theta_hashes), len(offer.momentum_hashes)) != (n_chunks, n_chunks):
        raise ValueError(f"it has {len(offer.theta_hashes)} and {len(offer.momentum_hashes)} chunks, not {n_chunks}")
    if state_digest(offer.theta_hashes, offer.momentum_hashes) != offer.commit.digest:
        raise ValueError("its chunks don't have the commit's digest")
    if offer.commit.result_hashes and results_root(offer.commit.result_hashes) != body.results_root:
        raise ValueError("its result hashes are not those that its commit names")
    ledger = Ledger.from_bytes(offer.ledger)
    if ledger.hash() != body.ledger_hash:
        raise LedgerError("its ledger is not the one that the commit names")
    head = commit_hash(offer.commit.body, offer.commit.digest)
    return _Target(offer.commit, ledger.at(head, offer.commit.digest), offer.theta_hashes, offer.momentum_hashes)


def _make_files(store: StateStore) -> None:
    """The two files of `incoming`, at their size; what an earlier try left in them stays."""
    n_bytes = VALUE_BYTES * store.grid.n_values
    with writing(store.folder, "the state", store.state_bytes):
        store.incoming.mkdir(exist_ok=True)
        on_disk = 0
        for name in (THETA, MOMENTUM):
            file = os.open(store.incoming / name, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                os.ftruncate(file, n_bytes)
                on_disk += min(n_bytes, 512 * os.fstat(file).st_blocks)
            finally:
                os.close(file)
    check_room(store.folder, store.state_bytes - on_disk, "the state")


def _already_there(store: StateStore, target: _Target) -> dict[tuple[str, int], None]:
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


def _write_chunk(store: StateStore, places: Sequence[tuple[str, int]], hash_: bytes, data: bytes) -> bool:
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


def _words(said: Mapping[PeerId, str]) -> str:
    return "; ".join(f"{peer[-6:]}: {why}" for peer, why in said.items()) or "nobody was asked"
