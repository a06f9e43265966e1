"""Training data: fetched by hash from nodes or the coordinator, verified, remembered, served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from node.blocks import HAVE_FILE, LIST_FILE, HttpSource, PeerSource, PieceStore, Sink
from node.errors import LocalStateError, Unreachable
from node.ports import PeerFailed
from node.training.shards import PIECES_FILE, TRAIN_FILE, VAL_FILE, pieces_of_batches
from protos.messages import PeerId, Range
from protos.runspec import RunSpec
from tests.fakes.holder import FakeHolder
from tests.fakes.peers import FakeNetwork, Fault
from tests.node.chain import peer
from tests.node.runs import N_PIECES, make_run

ME, OBSERVER, OTHER = peer(1), peer(2), peer(3)


def cut(path: str, offset: int, n_bytes: int) -> bytes:
    return Path(path).read_bytes()[offset : offset + n_bytes]


class Serving(FakeHolder):
    """A node that serves what its store holds."""

    def __init__(self, store: PieceStore) -> None:
        super().__init__(store.folder)
        self.store = store
        self.asked: list[bytes] = []

    def locate(self, caller: PeerId, kind: str, hash_: bytes) -> tuple[str, int, int] | None:
        self.asked.append(hash_)
        return self.store.locate(hash_) if kind == "piece" else None


class Counting:
    """A source that counts what it is asked for."""

    def __init__(self, inner: PieceStore) -> None:
        self.inner = inner
        self.asked: list[bytes] = []

    async def fetch(self, hashes: Sequence[bytes], max_bytes: int, sink: Sink) -> None:
        for hash_ in hashes:
            self.asked.append(hash_)
            place = self.inner.locate(hash_)
            if place is not None:
                path, offset, n_bytes = place
                await sink(hash_, cut(path, offset, n_bytes))


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunSpec, PieceStore]:
    """A run and the store of a node that packed its data."""
    folder = tmp_path / "packed"
    folder.mkdir()
    spec = make_run(folder)
    store = PieceStore(folder, spec, ())
    store.open()
    return spec, store


Run = tuple[RunSpec, PieceStore]


def new_store(folder: Path, spec: RunSpec, *sources: object) -> PieceStore:
    store = PieceStore(folder, spec, sources)  # type: ignore[arg-type]
    store.open()
    return store


def whole(folder: Path) -> tuple[bytes, bytes]:
    return (folder / TRAIN_FILE).read_bytes(), (folder / VAL_FILE).read_bytes()


def test_a_packed_folder_is_taken_as_it_is_and_served(run: Run) -> None:
    spec, store = run
    assert store.n_here == N_PIECES
    place = store.locate(bytes.fromhex(spec.data.root))
    assert place == (str(store.folder / LIST_FILE), 0, 32 * N_PIECES)
    asyncio.run(store.ensure([Range(0, 100)]))
    assert store.locate(bytes(32)) is None


def test_only_the_pieces_of_the_lease_are_fetched_and_remembered(run: Run, tmp_path: Path) -> None:
    spec, packed = run
    source = Counting(packed)
    store = new_store(tmp_path / "mine", spec, source)
    ranges = [Range(3, 2), Range(30, 4)]  # the second runs over the end of the first pass
    asyncio.run(store.ensure(ranges))
    wanted = pieces_of_batches(spec, ranges)
    assert [piece for piece in range(N_PIECES) if store.have(piece)] == list(wanted)
    assert len(source.asked) == len(wanted) + 1  # and the list
    for piece in wanted:
        place, theirs = store._shards.place(piece), (packed.folder / TRAIN_FILE).read_bytes()
        mine = (store.folder / place.file).read_bytes()
        assert len(mine) == len(theirs)
        assert mine[place.offset :][: place.n_bytes] == theirs[place.offset :][: place.n_bytes]
    asyncio.run(store.ensure(ranges))
    again = new_store(store.folder, spec, source)
    asyncio.run(again.ensure(ranges))
    assert len(source.asked) == len(wanted) + 1
    assert again.locate(store._hashes[wanted[0]]) is not None


def test_everything_fetched_is_everything_packed(run: Run, tmp_path: Path) -> None:
    spec, packed = run
    store = new_store(tmp_path / "mine", spec, Counting(packed))
    asyncio.run(store.ensure_pieces(range(N_PIECES)))
    assert whole(store.folder) == whole(packed.folder)


def test_other_nodes_are_asked_first_and_fill_in_for_each_other(run: Run, tmp_path: Path) -> None:
    spec, packed = run
    half = new_store(tmp_path / "half", spec, Counting(packed))
    asyncio.run(half.ensure_pieces(range(0, N_PIECES, 2)))
    network = FakeNetwork()
    observer, other, last = Serving(half), Serving(packed), Counting(packed)
    network.join(OBSERVER, observer)
    network.join(OTHER, other)
    peers = network.join(ME, FakeHolder(tmp_path))
    source = PeerSource(peers, lambda: [(OBSERVER, ()), (OTHER, ())])
    store = new_store(tmp_path / "mine", spec, source, last)
    asyncio.run(store.ensure_pieces(range(N_PIECES)))
    assert whole(store.folder) == whole(packed.folder)
    assert len(other.asked) == N_PIECES // 2
    assert last.asked == []
    assert peers.traffic.exchange_received == 0


def test_who_breaks_off_or_lies_is_made_up_for_by_the_next_source(run: Run, tmp_path: Path) -> None:
    spec, packed = run
    network = FakeNetwork()
    network.join(OBSERVER, Serving(packed))
    network.faults[OBSERVER] = Fault(break_at_byte=1200)
    peers = network.join(ME, FakeHolder(tmp_path))

    class Liar:
        async def fetch(self, hashes: Sequence[bytes], max_bytes: int, sink: Sink) -> None:
            for hash_ in hashes:
                await sink(hash_, b"x" * max_bytes)

    store = new_store(tmp_path / "mine", spec, Liar(), PeerSource(peers, lambda: [(OBSERVER, ())]), Counting(packed))
    asyncio.run(store.ensure_pieces(range(N_PIECES)))
    assert whole(store.folder) == whole(packed.folder)


def test_nobody_having_it_says_what_each_said_and_keeps_what_came(run: Run, tmp_path: Path) -> None:
    spec, packed = run
    half = new_store(tmp_path / "half", spec, Counting(packed))
    asyncio.run(half.ensure_pieces(range(5)))
    network = FakeNetwork()
    network.join(OBSERVER, Serving(half))
    peers = network.join(ME, FakeHolder(tmp_path))
    donors = [(OBSERVER, ()), (OTHER, ())]
    store = new_store(tmp_path / "mine", spec, PeerSource(peers, lambda: donors))
    with pytest.raises(Unreachable, match=f"10 pieces of the training data.*{OTHER}: connection refused"):
        asyncio.run(store.ensure_pieces(range(N_PIECES)))
    assert new_store(store.folder, spec).n_here == 5
    alone = new_store(tmp_path / "alone", spec)
    with pytest.raises(Unreachable, match="list of the training data's pieces"):
        asyncio.run(alone.ensure([Range(0, 1)]))


def test_a_damaged_packed_folder_gives_only_what_is_whole(run: Run) -> None:
    spec, store = run
    (store.folder / HAVE_FILE).unlink()
    with (store.folder / TRAIN_FILE).open("r+b") as file:
        file.seek(85)
        file.write(b"\0")
    again = new_store(store.folder, spec)
    assert [piece for piece in range(N_PIECES) if not again.have(piece)] == [1]
    (store.folder / HAVE_FILE).write_bytes(b"\x07" * N_PIECES)  # damaged: looked at again
    assert new_store(store.folder, spec).n_here == N_PIECES - 1


def test_data_of_another_run_are_refused(run: Run, tmp_path: Path) -> None:
    spec, store = run
    other = spec.model_copy(update={"data": spec.data.model_copy(update={"root": "1" * 64})})
    with pytest.raises(LocalStateError, match="move the folder away"):
        new_store(store.folder, other)
    (store.folder / LIST_FILE).unlink()
    (store.folder / PIECES_FILE).write_text("{}")
    with pytest.raises(LocalStateError, match="no list of hashes"):
        new_store(store.folder, spec)


# -- over HTTP ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def coordinator(
    store: PieceStore, *, status: int = 200, extra: bytes = b""
) -> AsyncIterator[tuple[str, list[str]]]:
    asked: list[str] = []

    async def data(request: web.Request) -> web.Response:
        asked.append(request.match_info["hash"])
        place = store.locate(bytes.fromhex(asked[-1]))
        if status != 200 or place is None:
            return web.Response(status=status if status != 200 else 404)
        path, offset, n_bytes = place
        return web.Response(body=cut(path, offset, n_bytes) + extra)

    app = web.Application()
    app.router.add_get("/v1/data/{hash}", data)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield "{}:{}".format(*runner.addresses[0]), asked
    finally:
        await runner.cleanup()


def test_pieces_come_from_the_coordinator_over_http(run: Run, tmp_path: Path) -> None:
    spec, packed = run

    async def main() -> None:
        async with coordinator(packed) as (host, asked):
            store = new_store(tmp_path / "mine", spec, HttpSource(["127.0.0.1:1", host]))
            await store.ensure_pieces(range(N_PIECES))
            assert whole(store.folder) == whole(packed.folder)
            assert len(asked) == N_PIECES + 1

    asyncio.run(main())


@pytest.mark.parametrize(("options", "why"), [({"status": 503}, "answered 503"), ({"extra": b"!"}, "sent more than")])
def test_what_http_says_wrong_is_named(run: Run, tmp_path: Path, options: dict[str, object], why: str) -> None:
    spec, packed = run

    async def main() -> None:
        async with coordinator(packed, **options) as (host, _):  # type: ignore[arg-type]
            store = new_store(tmp_path / "mine", spec, HttpSource([host]))
            with pytest.raises(Unreachable, match=why):
                await store.ensure_pieces([0])

    asyncio.run(main())


def test_a_source_without_addresses_is_no_crash() -> None:
    async def main() -> None:
        async def sink(_: bytes, __: bytes) -> None:
            pass

        with pytest.raises(PeerFailed, match="no address"):
            await HttpSource([]).fetch([bytes(32)], 10, sink)

    asyncio.run(main())
