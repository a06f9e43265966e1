"""The port `Records`: one suite for the table in memory and for the real DHT with its helper processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from node.ports import Records
from protos.messages import PeerId, Record
from protos.records import dht_key, seal_record
from protos.signing import Identity, SignatureError
from protos.wire import WireError
from tests.fakes.records import FakeTable

RUN = Identity.from_private_bytes(b"r" * 32).peer


class World:
    """Makes nodes of one DHT; `write` puts an envelope under a key as a stranger would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[Records] = []

    async def node(self, identity: Identity, *, dial_out: bool = False) -> Records:
        raise NotImplementedError

    async def write(self, key: PeerId, sequence: int, envelope: bytes) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        for node in self.nodes:
            await node.close()


class FakeWorld(World):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.table = FakeTable(RUN)

    async def node(self, identity: Identity, *, dial_out: bool = False) -> Records:
        self.nodes.append(self.table.join(identity))
        return self.nodes[-1]

    async def write(self, key: PeerId, sequence: int, envelope: bytes) -> None:
        self.table.write(key, envelope)


class DhtWorld(World):
    async def node(self, identity: Identity, *, dial_out: bool = False) -> Records:
        from node.peers.dht import Dht  # hivemind takes its time

        folder = self.folder / str(len(self.nodes))
        folder.mkdir()
        node = await Dht.start(
            identity,
            RUN,
            listen=None if dial_out else "127.0.0.1:0",
            bootstrap=self.nodes[0].addresses() if self.nodes else (),
            clock=time.monotonic,
            folder=folder,
        )
        self.nodes.append(node)
        return node

    async def write(self, key: PeerId, sequence: int, envelope: bytes) -> None:
        for node in self.nodes:
            hivemind_node = cast(Any, node)._node
            for subkey in (sequence, None, "other"):
                await hivemind_node.store(dht_key(RUN, key), envelope, time.monotonic() + 500, subkey=subkey)


@pytest.fixture(params=[FakeWorld, pytest.param(DhtWorld, marks=pytest.mark.slow)])
def play(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[World], Awaitable[None]]], None]:
    if request.param is DhtWorld:  # a query that this machine is too slow for looks like one that finds nothing
        monkeypatch.setattr("node.peers.dht.FIND_S", 30.0)

    def run(scenario: Callable[[World], Awaitable[None]]) -> None:
        async def main() -> None:
            world: World = request.param(tmp_path)
            try:
                async with asyncio.timeout(100):
                    await scenario(world)
            finally:
                await world.close()

        asyncio.run(main())

    return run


Play = Callable[[Callable[[World], Awaitable[None]]], None]


def record(peer: PeerId, sequence: int, port: int = 7000) -> Record:
    return Record(peer, sequence, (f"192.0.2.1:{port}",), (), 0, 3, bytes(32))


def test_what_one_publishes_all_find_and_the_newest_counts(play: Play) -> None:
    async def scenario(world: World) -> None:
        a, b, c = (Identity.generate() for _ in range(3))
        nodes = [await world.node(a), await world.node(b), await world.node(c, dial_out=True)]
        for identity, node in zip((a, b, c), nodes, strict=True):
            await node.publish(record(identity.peer, 1))
        for node in nodes:
            for identity in (a, b, c):
                assert await node.find(identity.peer, 1) == record(identity.peer, 1)
        for sequence in (3, 2, 7, 5):
            await nodes[1].publish(record(b.peer, sequence, 7000 + sequence))
        for node in nodes:
            assert await node.find(b.peer, 0) == record(b.peer, 7, 7007)
            assert await node.find(b.peer, 8) is None
            assert await node.find(Identity.generate().peer, 0) is None

    play(scenario)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # hivemind's own, where the start of its helper is cut off
def test_who_only_dials_out_tells_no_address_and_is_still_found(play: Play) -> None:
    async def scenario(world: World) -> None:
        a, b = (Identity.generate() for _ in range(2))
        nodes = [await world.node(a), await world.node(b)]
        assert nodes[1].addresses()
        await nodes[1].dial_out_only()
        await nodes[1].dial_out_only()  # once more changes nothing
        assert not nodes[1].addresses()
        found = None
        while found is None:  # its helper process is another one now
            await nodes[1].publish(record(b.peer, 2))
            found = await nodes[0].find(b.peer, 2)
        assert found == record(b.peer, 2)

    play(scenario)


def test_what_others_write_under_a_key_does_not_count(play: Play) -> None:
    async def scenario(world: World) -> None:
        a, b, mallory = (Identity.generate() for _ in range(3))
        nodes = [await world.node(a), await world.node(b)]
        await nodes[0].publish(record(a.peer, 4))
        other_run = Identity.generate().peer
        for envelope in (
            b"nonsense",
            seal_record(mallory, RUN, record(mallory.peer, 9)),
            seal_record(a, other_run, record(a.peer, 9)),
            bytes(byte ^ (at == 90) for at, byte in enumerate(seal_record(a, RUN, record(a.peer, 9)))),
        ):
            await world.write(a.peer, 9, envelope)
        await world.write(a.peer, 3, seal_record(a, RUN, record(a.peer, 3, 666)))  # replayed, and expires later
        for node in nodes:
            assert await node.find(a.peer, 0) == record(a.peer, 4)

    play(scenario)


def test_only_ones_own_record_below_a_kilobyte_can_be_published(play: Play) -> None:
    async def scenario(world: World) -> None:
        a = Identity.generate()
        node = await world.node(a)
        with pytest.raises(SignatureError):
            await node.publish(record(Identity.generate().peer, 1))
        long = Record(a.peer, 1, tuple(f"{'x' * 60}{i}.example:80" for i in range(16)), (), 0, 0, bytes(32))
        with pytest.raises(WireError, match="1024"):
            await node.publish(long)

    play(scenario)


def test_addresses_name_the_node(play: Play) -> None:
    async def scenario(world: World) -> None:
        a = Identity.generate()
        node = await world.node(a)
        assert node.addresses()
        assert all(address.endswith(f"/p2p/{a.peer}") for address in node.addresses())

    play(scenario)
