"""A head and the first part of what it announces share a message, on rows' way in and on things' way out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from node.peers.flight import InFlight
from node.peers.server import NodeServer
from node.peers.transport import ACCEPTED, END, open_call
from node.ports import PeerFailed
from protos import limits, services, wire
from protos.messages import ChunkHead, Fetch, FetchHead, Part, Signed
from tests.fakes.holder import FakeHolder
from tests.fakes.loop import until
from tests.node.peers.served import AUTHORITY, calling, drop, ignore, new_peer, patient, raw_server, scenario

LONG = limits.PART_BYTES + 100


def part(data: bytes) -> Any:
    return Part(data)


@pytest.mark.parametrize("n_bytes", [0, 3, LONG])
def test_a_row_travels_in_no_more_messages_than_it_has_parts(n_bytes: int) -> None:
    frames: list[Any] = []

    async def take(context: Any) -> None:
        await context.read()
        await context.send_initial_metadata((ACCEPTED,))
        while (raw := await context.read()) is not END:
            frames.append(wire.decode_chunk_frame(raw))
        await context.write(wire.encode_receipt_frame(Signed(b"receipt")))

    async def main() -> None:
        head, row = ChunkHead(bytes(32), 4, n_bytes, ()), bytes(n_bytes)
        async with raw_server(Exchange__Send=take) as (peer, address), calling() as peers:
            await peers.send_rows(peer, [address], b"deal", [4], lambda _: (head, memoryview(row)), ignore)
        first = row[: limits.PART_BYTES]
        begun = [head] if not n_bytes else [wire.Begun(head, part(first))]
        assert frames == begun + ([part(row[limits.PART_BYTES :])] if n_bytes == LONG else [])

    scenario(main)


@pytest.mark.parametrize("n_bytes", [0, 3, LONG])
def test_a_thing_travels_in_no_more_messages_than_it_has_parts(tmp_path: Path, n_bytes: int) -> None:
    async def main() -> None:
        holder = FakeHolder(tmp_path)
        thing, name = bytes(n_bytes), bytes(32)
        holder.put("piece", name, thing)
        peer = new_peer()
        server = NodeServer(AUTHORITY.issue(peer), holder, allowed=lambda _: "")
        address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
        dialer = patient(AUTHORITY.issue(new_peer()))
        call = open_call(await dialer.channel(peer, [address]), services.EXCHANGE_FETCH_THINGS)
        await call.write(wire.encode(Fetch("piece", (name,))))
        await call.done_writing()
        frames: list[Any] = []
        while (raw := await call.read()) is not END:
            assert isinstance(raw, bytes)
            frames.append(wire.decode_fetch_frame(raw))
        head, first = FetchHead(name, n_bytes), thing[: limits.PART_BYTES]
        begun = [head] if not n_bytes else [wire.Begun(head, part(first))]
        assert frames == begun + ([part(thing[limits.PART_BYTES :])] if n_bytes == LONG else [])
        async with calling() as peers:
            got: list[bytes] = []

            async def sink(_: bytes, data: bytes) -> None:
                got.append(data)

            assert await peers.fetch(peer, [address], "piece", [name], LONG, sink, exchange=False) == []
            assert got == [thing]
            assert peers.fetching.n_bytes == 0
        await dialer.close()
        await server.stop()

    scenario(main)


def test_a_stream_has_room_for_a_first_part_before_it_comes(tmp_path: Path) -> None:
    async def main() -> None:
        holder, peer, me = FakeHolder(tmp_path, checking=asyncio.Event()), new_peer(), new_peer()
        assert holder.checking is not None
        server = NodeServer(AUTHORITY.issue(peer), holder, allowed=lambda _: "")
        server.receiving = InFlight(2 * limits.PART_BYTES)
        address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
        dialer = patient(AUTHORITY.issue(me))
        call = open_call(await dialer.channel(peer, [address]), services.EXCHANGE_SEND)
        await call.write(wire.encode_chunk_frame(Signed(b"deal")))
        await until(lambda: server.receiving.n_bytes == limits.PART_BYTES)
        await call.write(wire.encode_part(memoryview(b"abc"), ChunkHead(bytes(32), 1, 3, ())))
        await until(lambda: server.receiving.n_bytes == limits.PART_BYTES + 3)  # and for the next one
        holder.checking.set()
        await until(lambda: holder.whole == [(me, 1)])
        await call.done_writing()
        await until(lambda: server.receiving.n_bytes == 0)
        assert holder.rows[(me, 1)] == b"abc"
        await dialer.close()
        await server.stop()

    scenario(main)


@pytest.mark.parametrize(
    ("head", "data", "why"),
    [
        (ChunkHead(bytes(32), 1, 3, ()), b"abcd", "too long"),
        (ChunkHead(bytes(32), 1, 3, ()), b"", "too short"),
    ],
)
def test_a_first_part_that_does_not_fit_is_refused(tmp_path: Path, head: ChunkHead, data: bytes, why: str) -> None:
    async def main() -> None:
        holder, peer, me = FakeHolder(tmp_path), new_peer(), new_peer()
        server = NodeServer(AUTHORITY.issue(peer), holder, allowed=lambda _: "")
        address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
        dialer = patient(AUTHORITY.issue(me))
        call = open_call(await dialer.channel(peer, [address]), services.EXCHANGE_SEND)
        await call.write(wire.encode_chunk_frame(Signed(b"deal")))
        await call.write(wire.encode_part(memoryview(data), head))
        raw = await call.read()
        assert isinstance(raw, bytes)
        assert why in str(wire.decode_receipt_frame(raw))
        assert holder.broken == [(me, 1)]
        assert server.receiving.n_bytes == 0
        call.cancel()
        await dialer.close()
        await server.stop()

    scenario(main)


def test_a_thing_whose_first_part_is_longer_than_announced_is_refused() -> None:
    async def announce(context: Any) -> None:
        await context.read()
        await context.write(wire.encode_part(memoryview(b"abcd"), FetchHead(bytes(32), 3)))

    async def main() -> None:
        async with raw_server(Exchange__FetchThings=announce) as (peer, address), calling() as peers:
            with pytest.raises(PeerFailed, match="in other parts than announced"):
                await peers.fetch(peer, [address], "state", [bytes(32)], 100, drop, exchange=False)
            assert peers.fetching.n_bytes == 0

    scenario(main)
