"""The port `Peers`: one suite for the network in memory and for gRPC over mutual TLS on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from node.peers.dialing import Dialer
from node.peers.grpc import GrpcPeers
from node.peers.server import NodeServer
from node.ports import Holder, PeerFailed, Peers
from protos.hashes import tagged_hash
from protos.messages import ChunkHead, Commit, PeerId, StateOffer
from protos.signing import Identity
from tests.fakes.certificates import Authority
from tests.fakes.holder import FakeHolder
from tests.fakes.peers import FakeNetwork

LONG_S = 1000.0
"""Longer than any test: how long something takes on this machine is nobody's fault."""
ROW = bytes(range(256)) * 12_000  # 3 MB: several parts


@dataclass
class Node:
    peer: PeerId
    peers: Peers
    holder: FakeHolder
    addresses: tuple[str, ...]


class World:
    """Makes nodes; `deny[caller]` is why that caller may not call anybody."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.deny: dict[PeerId, str] = {}

    async def node(self) -> Node:
        peer = Identity.generate().peer
        holder = FakeHolder(self.folder)
        peers, addresses = await self.connect(peer, holder)
        return Node(peer, peers, holder, addresses)

    async def connect(self, peer: PeerId, holder: Holder) -> tuple[Peers, tuple[str, ...]]:
        raise NotImplementedError

    async def close(self) -> None:
        pass


class FakeWorld(World):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.network = FakeNetwork(allowed=lambda caller, to: self.deny.get(caller, ""))

    async def connect(self, peer: PeerId, holder: Holder) -> tuple[Peers, tuple[str, ...]]:
        return self.network.join(peer, holder), ()


class GrpcWorld(World):
    authority = Authority()

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._opened: list[tuple[GrpcPeers, NodeServer]] = []

    async def connect(self, peer: PeerId, holder: Holder) -> tuple[Peers, tuple[str, ...]]:
        credentials = self.authority.issue(peer)
        peers = GrpcPeers(credentials, no_progress_s=LONG_S, dialer=Dialer(credentials, connect_s=LONG_S))
        server = NodeServer(
            credentials,
            holder,
            allowed=lambda caller: self.deny.get(caller, ""),
            no_progress_s=LONG_S,
            traffic=peers.traffic,
        )
        port = await server.start("127.0.0.1:0")
        self._opened.append((peers, server))
        return peers, (f"127.0.0.1:{port}",)

    async def close(self) -> None:
        for peers, server in self._opened:
            await peers.close()
            await server.stop()


@pytest.fixture(params=[FakeWorld, GrpcWorld])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Callable[[World], Awaitable[None]]], None]:
    """Runs a scenario in a world."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[World]:
        world: World = request.param(tmp_path)
        try:
            yield world
        finally:
            await world.close()

    def run(scenario: Callable[[World], Awaitable[None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(60), opened() as world:
                await scenario(world)

        asyncio.run(main())

    return run


Play = Callable[[Callable[[World], Awaitable[None]]], None]
PLAN = tagged_hash("plan", b"some plan")


def row_source(rows: dict[int, bytes]) -> Callable[[int], tuple[ChunkHead, memoryview]]:
    return lambda chunk: (ChunkHead(PLAN, chunk, len(rows[chunk]), ()), memoryview(rows[chunk]))


async def ignore(_: bytes) -> None:
    pass


async def drop(_: bytes, __: bytes) -> None:
    pass


def test_rows_arrive_whole_and_every_one_is_receipted(play: Play) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(), await world.node()
        rows = {3: ROW, 7: ROW[:10], 8: ROW[5:-5]}
        receipts: list[bytes] = []

        async def keep(receipt: bytes) -> None:
            receipts.append(receipt)

        await a.peers.send_rows(b.peer, b.addresses, b"the deal", [3, 7, 8], row_source(rows), keep)
        assert b.holder.deals == [(a.peer, b"the deal")]
        assert {chunk: bytes(row) for (_, chunk), row in b.holder.rows.items()} == rows
        chunks = [chunk for receipt in receipts for chunk in receipt.removeprefix(b"receipt ").split()]
        assert sorted(chunks) == [b"3", b"7", b"8"]
        assert b.holder.broken == []

    play(scenario)


def test_receipts_come_while_later_rows_travel(play: Play) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(), await world.node()
        chunks = list(range(40))
        seen: list[int] = []
        receipted, row_done = asyncio.Event(), b.holder.row_done

        async def keep(_: bytes) -> None:
            seen.append(len(b.holder.whole))
            receipted.set()

        async def last_after_a_receipt(caller: PeerId, head: ChunkHead) -> str:
            if head.chunk == chunks[-1]:
                await receipted.wait()
            return await row_done(caller, head)

        b.holder.row_done = last_after_a_receipt  # type: ignore[method-assign]

        await a.peers.send_rows(
            b.peer, b.addresses, b"deal", chunks, row_source(dict.fromkeys(chunks, ROW[:200_000])), keep
        )
        assert seen[0] < len(chunks)
        assert seen[-1] == len(chunks)

    play(scenario)


def test_a_refused_deal_and_a_refused_row_say_why(play: Play) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(), await world.node()
        b.holder.deal_refusal = "plan is over"
        with pytest.raises(PeerFailed, match="plan is over"):
            await a.peers.send_rows(b.peer, b.addresses, b"deal", [1], row_source({1: ROW}), ignore)
        assert b.holder.rows == {}
        b.holder.deal_refusal = ""
        b.holder.row_refusals = {2: "chunk 2 is not dealt to this reducer"}
        with pytest.raises(PeerFailed, match="not dealt"):
            await a.peers.send_rows(b.peer, b.addresses, b"deal", [1, 2], row_source({1: ROW, 2: ROW}), ignore)
        assert (a.peer, 2) not in b.holder.rows
        b.holder.verdicts = {4: "not canonical"}
        with pytest.raises(PeerFailed, match="not canonical"):
            await a.peers.send_rows(b.peer, b.addresses, b"deal", [4], row_source({4: ROW}), ignore)

    play(scenario)


@pytest.mark.parametrize("n_extra", [-1, 1, -2_000_000, 2_000_000])
def test_a_row_of_another_length_than_announced_is_refused(play: Play, n_extra: int) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(), await world.node()

        def source(chunk: int) -> tuple[ChunkHead, memoryview]:
            return ChunkHead(PLAN, chunk, len(ROW) - n_extra, ()), memoryview(ROW)

        with pytest.raises(PeerFailed):
            await a.peers.send_rows(b.peer, b.addresses, b"deal", [0, 1], source, ignore)
        assert (a.peer, 1) not in b.holder.whole
        if n_extra < 0:
            assert b.holder.broken == [(a.peer, 0)]

    play(scenario)


def test_things_are_fetched_by_hash_and_missing_ones_named(play: Play) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(), await world.node()
        names = [bytes([i]) * 32 for i in range(4)]
        b.holder.put("state", names[0], ROW)
        b.holder.put("state", names[2], b"")
        b.holder.put("state", names[3], ROW[:70_000])
        found: dict[bytes, bytes] = {}

        async def sink(hash_: bytes, data: bytes) -> None:
            found[hash_] = data

        missing = await a.peers.fetch(b.peer, b.addresses, "state", names, len(ROW), sink, exchange=False)
        assert missing == [names[1]]
        assert found == {names[0]: ROW, names[2]: b"", names[3]: ROW[:70_000]}

    play(scenario)


def test_things_in_memory_are_served_like_those_on_disk(play: Play) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(), await world.node()
        views = {bytes([1]) * 32: memoryview(ROW), bytes([2]) * 32: memoryview(ROW)[7:7], bytes([3]) * 32: None}
        b.holder.views.update({name: view for name, view in views.items() if view is not None})
        found: dict[bytes, bytes] = {}

        async def sink(hash_: bytes, data: bytes) -> None:
            found[hash_] = data

        missing = await a.peers.fetch(b.peer, b.addresses, "result", list(views), len(ROW), sink, exchange=True)
        assert missing == [bytes([3]) * 32]
        assert found == {bytes([1]) * 32: ROW, bytes([2]) * 32: b""}

    play(scenario)


def test_a_thing_longer_than_allowed_is_not_taken(play: Play) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(), await world.node()
        b.holder.put("piece", bytes(32), ROW)
        with pytest.raises(PeerFailed, match=str(len(ROW))):
            await a.peers.fetch(b.peer, b.addresses, "piece", [bytes(32)], len(ROW) - 1, drop, exchange=False)

    play(scenario)


def test_what_the_sink_raises_comes_out(play: Play) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(), await world.node()
        b.holder.put("piece", bytes(32), ROW)

        async def sink(_: bytes, __: bytes) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await a.peers.fetch(b.peer, b.addresses, "piece", [bytes(32)], len(ROW), sink, exchange=False)

    play(scenario)


def test_a_fault_of_our_source_comes_out(play: Play) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(), await world.node()

        def source(chunk: int) -> tuple[ChunkHead, memoryview]:
            if chunk:
                raise ZeroDivisionError
            return ChunkHead(PLAN, chunk, len(ROW), ()), memoryview(ROW)

        with pytest.raises(ZeroDivisionError):
            await a.peers.send_rows(b.peer, b.addresses, b"deal", [0, 1], source, ignore)

    play(scenario)


def test_offers_commits_and_pings(play: Play) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(), await world.node()
        with pytest.raises(PeerFailed, match="holds no state"):
            await a.peers.offer(b.peer, b.addresses)
        commits = [Commit(bytes([i]) * 1_500_000, bytes(32), i, (b"vote",), ()) for i in range(3)]
        b.holder.offer = StateOffer(commits[0], b"ledger", (bytes(32),) * 300, (bytes(32),) * 300)
        b.holder.commits = commits
        assert await a.peers.offer(b.peer, b.addresses) == b.holder.offer
        assert await a.peers.commits_after(b.peer, b.addresses, 0, 0, 2) == commits[:2]
        await a.peers.ping(b.peer, b.addresses)

    play(scenario)


def test_who_is_not_allowed_is_told_why(play: Play) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(), await world.node()
        world.deny[a.peer] = "banned in round 3"
        with pytest.raises(PeerFailed, match="banned in round 3"):
            await a.peers.offer(b.peer, b.addresses)
        with pytest.raises(PeerFailed, match="banned in round 3"):
            await a.peers.send_rows(b.peer, b.addresses, b"deal", [1], row_source({1: ROW}), ignore)
        assert b.holder.deals == []

    play(scenario)


def test_exchange_traffic_is_counted_apart(play: Play) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(), await world.node()
        b.holder.put("state", bytes(32), ROW)
        b.holder.put("result", bytes(32), ROW)
        await a.peers.fetch(b.peer, b.addresses, "state", [bytes(32)], len(ROW), drop, exchange=False)
        traffic = a.peers.traffic
        assert traffic.exchange_received == traffic.exchange_sent == 0
        assert len(ROW) < traffic.received < len(ROW) * 1.05
        await a.peers.fetch(b.peer, b.addresses, "result", [bytes(32)], len(ROW), drop, exchange=True)
        assert len(ROW) < traffic.exchange_received < len(ROW) * 1.05
        await a.peers.send_rows(b.peer, b.addresses, b"deal", [1], row_source({1: ROW}), ignore)
        assert len(ROW) < traffic.exchange_sent < len(ROW) * 1.05
        assert traffic.exchange_sent <= traffic.sent < len(ROW) * 1.05

    play(scenario)
