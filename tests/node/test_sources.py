"""Where pieces come from: who is asked for what, in which order, and what it costs that some can't be reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web

from node.blocks import PieceStore
from node.errors import Unreachable
from node.peers.pacing import Direction
from node.ports import PeerFailed, Traffic
from node.sources import AVOIDED_S, SAID_MOST, Donors, HttpSource, PeerSource
from node.spreading import COPIES, likeliest
from protos.messages import PeerId
from tests.fakes.holder import FakeHolder
from tests.fakes.loop import SkippingLoop, play, until
from tests.fakes.peers import FakeNetwork, FakePeers, Fault
from tests.node.chain import peer
from tests.node.peers.test_transport import LIMIT_S
from tests.node.pieces import ME, OBSERVER, Run, cut, new_store, now, packed_run, whole
from tests.node.runs import N_PIECES

MEMBERS = tuple(peer(n) for n in range(10, 15))
PIECES = [bytes([n]) * 32 for n in range(1, 7)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = tmp_path / "packed"
    folder.mkdir()
    return packed_run(folder)


class Asked(FakeHolder):
    """A node that notes what it is asked for."""

    def __init__(self, folder: Path, network: Members) -> None:
        super().__init__(folder)
        self.network = network

    def locate(self, caller: PeerId, kind: str, hash_: bytes) -> tuple[str, int, int] | memoryview | None:
        name = next(name for name, holder in self.network.network.holders.items() if holder is self)
        self.network.asked.append((name, hash_))
        return super().locate(caller, kind, hash_)


@dataclass
class Members:
    """The observer and some members on a network in memory; `asked` is who was asked for what, in order."""

    folder: Path
    network: FakeNetwork = field(default_factory=FakeNetwork)
    asked: list[tuple[PeerId, bytes]] = field(default_factory=list)
    got: list[bytes] = field(default_factory=list)
    now_s: float = 1000.0

    def __post_init__(self) -> None:
        for name in (OBSERVER, *MEMBERS):
            self.network.join(name, Asked(self.folder, self))
        self.peers = self.network.join(ME, FakeHolder(self.folder))
        self.source = PeerSource(self.peers, self._donors, lambda: OBSERVER, lambda: self.now_s)

    async def _donors(self) -> Donors:
        return [(name, ()) for name in (*MEMBERS, OBSERVER)]

    def give(self, name: PeerId, *hashes: bytes) -> None:
        holder = self.network.holders[name]
        assert isinstance(holder, FakeHolder)
        for hash_ in hashes:
            holder.put("piece", hash_, hash_)

    def fetch(self, *hashes: bytes, urgent: bool) -> str:
        """What it says that went wrong; `asked` and `got` are of this fetch alone."""
        self.asked.clear()
        self.got.clear()

        async def sink(hash_: bytes, data: bytes) -> None:
            self.got.append(hash_)

        try:
            asyncio.run(self.source.fetch(hashes, 100, sink, urgent=urgent))
        except PeerFailed as error:
            return str(error)
        return ""


@pytest.fixture
def members(tmp_path: Path) -> Members:
    return Members(tmp_path)


def test_a_lease_asks_the_observer_first_and_then_who_likeliest_has_it(members: Members) -> None:
    members.give(OBSERVER, PIECES[0])
    line = likeliest(PIECES[1:2], MEMBERS)[0]
    members.give(line[2], PIECES[1])
    assert members.fetch(*PIECES[:2], urgent=True) == ""
    assert members.asked[:2] == [(OBSERVER, PIECES[0]), (OBSERVER, PIECES[1])]
    assert members.asked[2:] == [(name, PIECES[1]) for name in line[:3]]
    assert sorted(members.got) == PIECES[:2]


def test_what_can_wait_asks_who_lays_it_in_first_before_the_observer(members: Members) -> None:
    members.give(OBSERVER, PIECES[0])
    assert members.fetch(PIECES[0], urgent=False) == ""
    assert members.asked == [(name, PIECES[0]) for name in (*likeliest(PIECES[:1], MEMBERS)[0][:COPIES], OBSERVER)]


def test_who_cannot_be_reached_is_asked_last_for_a_lease_and_not_at_all_for_what_can_wait(members: Members) -> None:
    line = likeliest(PIECES[:1], MEMBERS)[0]
    members.give(line[3], PIECES[0])
    members.network.faults = {OBSERVER: Fault(drop=True), line[0]: Fault(drop=True)}
    assert members.fetch(PIECES[0], urgent=True) == ""
    assert members.asked == [(name, PIECES[0]) for name in line[1:4]]
    members.network.faults.clear()
    members.asked.clear()
    members.fetch(PIECES[1], urgent=False)
    assert {name for name, _ in members.asked} == {*MEMBERS} - {line[0]}
    members.fetch(PIECES[1], urgent=True)
    assert {name for name, _ in members.asked[-2:]} == {OBSERVER, line[0]}  # after all others, and they answer again
    members.fetch(PIECES[2], urgent=False)
    assert {name for name, _ in members.asked} == {*MEMBERS, OBSERVER}


def test_who_lacks_a_piece_is_asked_again_after_a_while_or_by_a_lease(members: Members) -> None:
    assert "1 pieces are nowhere" in members.fetch(PIECES[0], urgent=False)
    assert len(members.asked) == 6
    members.fetch(PIECES[0], urgent=False)
    assert members.asked == []
    members.fetch(PIECES[0], urgent=True)
    assert len(members.asked) == 6
    members.now_s += AVOIDED_S
    members.give(MEMBERS[0], PIECES[0])
    assert members.fetch(PIECES[0], urgent=False) == ""


def test_a_piece_whose_holder_dies_in_the_middle_comes_from_the_next_one(members: Members) -> None:
    for name in (OBSERVER, *MEMBERS):
        members.give(name, *PIECES)
    members.network.faults = {OBSERVER: Fault(break_at_byte=150)}
    assert members.fetch(*PIECES, urgent=True) == ""
    assert sorted(members.got) == PIECES
    assert [name for name, _ in members.asked].count(OBSERVER) < len(PIECES)


def test_what_the_sink_raises_ends_the_fetch(members: Members) -> None:
    members.give(OBSERVER, *PIECES)

    async def sink(hash_: bytes, data: bytes) -> None:
        raise Unreachable("the disk", [])

    with pytest.raises(Unreachable, match="the disk"):
        asyncio.run(members.source.fetch(PIECES, 100, sink))


def test_what_nobody_has_costs_a_crowd_few_calls_and_what_one_has_is_found(tmp_path: Path) -> None:
    network = FakeNetwork()
    crowd, pieces, calls = [peer(n) for n in range(20, 60)], [bytes([n]) * 32 for n in range(32)], []
    holders = [FakeHolder(tmp_path) for _ in crowd]
    for name, holder in zip(crowd, holders, strict=True):
        network.join(name, holder)
    rarest = likeliest(pieces[:1], crowd)[0][-1]
    holders[crowd.index(rarest)].put("piece", pieces[0], pieces[0])
    got: list[bytes] = []

    class Counted(FakePeers):
        async def fetch(self, peer: PeerId, *args: Any, **kwargs: Any) -> list[bytes]:
            calls.append(peer)
            await asyncio.sleep(0)
            return await super().fetch(peer, *args, **kwargs)

    async def donors() -> Donors:
        return [(name, ()) for name in crowd]

    async def sink(hash_: bytes, data: bytes) -> None:
        got.append(hash_)

    source = PeerSource(Counted(network, ME), donors, lambda: PeerId(""), now)
    with pytest.raises(PeerFailed, match="31 pieces are nowhere"):
        asyncio.run(source.fetch(pieces, 100, sink))
    assert got == pieces[:1]
    assert {*calls} == {*crowd}
    assert len(calls) < len(crowd) * len(pieces) / 4


def test_a_crowd_that_cannot_be_reached_is_told_of_in_few_words(tmp_path: Path) -> None:
    network = FakeNetwork()
    crowd = [peer(n) for n in range(20, 60)]

    async def donors() -> Donors:
        return [(name, ()) for name in crowd]

    async def sink(hash_: bytes, data: bytes) -> None:
        raise AssertionError

    source = PeerSource(network.join(ME, FakeHolder(tmp_path)), donors, lambda: PeerId(""), now)
    with pytest.raises(PeerFailed, match=f"and {40 - SAID_MOST} more"):
        asyncio.run(source.fetch(PIECES[:1], 100, sink))


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
            store = new_store(tmp_path / "mine", spec, HttpSource(["127.0.0.1:1", host], now, no_progress_s=30.0))
            await store.ensure_pieces(range(N_PIECES))
            assert whole(store.files.folder) == whole(packed.files.folder)
            assert len(asked) == N_PIECES + 1

    asyncio.run(main())


@pytest.mark.parametrize(("options", "why"), [({"status": 503}, "answered 503"), ({"extra": b"!"}, "sent more than")])
def test_what_http_says_wrong_is_named(run: Run, tmp_path: Path, options: dict[str, object], why: str) -> None:
    spec, packed = run

    async def main() -> None:
        async with coordinator(packed, **options) as (host, _):  # type: ignore[arg-type]
            store = new_store(tmp_path / "mine", spec, HttpSource([host], now, no_progress_s=30.0))
            with pytest.raises(Unreachable, match=why):
                await store.ensure_pieces([0])

    asyncio.run(main())


def test_a_host_that_stops_in_the_middle_of_a_piece_is_given_up(run: Run, tmp_path: Path) -> None:
    spec, packed = run

    async def main(loop: SkippingLoop) -> None:
        traffic = Traffic()

        async def stops(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            before = traffic.received
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 80\r\n\r\nhalf")
            await until(lambda: traffic.received == before + 4)
            await loop.skip(1.1 * LIMIT_S)
            await reader.read()  # until it hangs up
            writer.close()

        async with await asyncio.start_server(stops, "127.0.0.1", 0) as server:
            stalled = "{}:{}".format(*server.sockets[0].getsockname())
            source = HttpSource([stalled], now, no_progress_s=LIMIT_S, traffic=traffic)
            with pytest.raises(Unreachable, match=stalled):
                await new_store(tmp_path / "mine", spec, source).ensure_pieces([0])
            async with coordinator(packed) as (host, _):
                source = HttpSource([stalled, host], now, no_progress_s=LIMIT_S, traffic=traffic)
                await new_store(tmp_path / "other", spec, source).ensure_pieces([0])

    play(main)


def test_a_host_that_trickles_a_piece_is_given_up(run: Run, tmp_path: Path) -> None:
    spec, packed = run

    async def main(loop: SkippingLoop) -> None:
        traffic = Traffic()

        async def trickles(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            hung_up = asyncio.create_task(reader.read())
            while not hung_up.done():
                before = traffic.received
                writer.write(b"x")
                await until(lambda before=before: hung_up.done() or traffic.received > before)  # type: ignore[misc]
                await loop.skip(LIMIT_S / 10)
            writer.close()

        async with await asyncio.start_server(trickles, "127.0.0.1", 0) as server:
            slow = "{}:{}".format(*server.sockets[0].getsockname())
            async with coordinator(packed) as (host, _):
                source = HttpSource([slow, host], now, no_progress_s=LIMIT_S, traffic=traffic)
                await new_store(tmp_path / "mine", spec, source).ensure_pieces([0])

    play(main)


def test_a_source_without_addresses_is_no_crash() -> None:
    async def main() -> None:
        async def sink(_: bytes, __: bytes) -> None:
            pass

        with pytest.raises(PeerFailed, match="no address"):
            await HttpSource([], now, no_progress_s=30.0).fetch([bytes(32)], 10, sink)

    asyncio.run(main())


class Pace:
    """A limit that counts what it is asked to let through."""

    def __init__(self) -> None:
        self.waited: list[int] = []

    def stream(self) -> Pace:
        return self

    async def wait(self, n_bytes: int) -> None:
        self.waited.append(n_bytes)


def test_over_http_bytes_are_counted_and_paced_and_a_host_that_failed_is_left_alone_for_what_can_wait(
    run: Run, tmp_path: Path
) -> None:
    spec, packed = run
    clock = [0.0]

    async def main() -> None:
        async with coordinator(packed) as (host, asked):
            traffic, pace = Traffic(), Pace()
            source = HttpSource(
                [host], lambda: clock[0], no_progress_s=30.0, down=cast(Direction, pace), traffic=traffic
            )
            store = new_store(tmp_path / "mine", spec, source)
            await store.ensure_pieces([0])
            assert traffic.received == sum(pace.waited) == 32 * N_PIECES + 80
            (packed.files.folder / "train.bin").unlink()
            n_asked = len(asked)
            assert "answered" in await store.lay_in([2])
            assert "none that answers" in await store.lay_in([2])
            assert len(asked) == n_asked + 1
            clock[0] += AVOIDED_S
            assert "answered" in await store.lay_in([2])

    asyncio.run(main())
