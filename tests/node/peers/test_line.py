"""The leader's line over gRPC: words both ways, its end, and leaders that say or take nothing."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from node.peers.transport import END
from node.ports import PeerFailed
from protos import wire
from protos.messages import Commit, Goodbye, Refusal, Signed
from tests.node.peers.served import LONG_S, calling, never, raw_server, scenario


def test_a_line_carries_messages_both_ways_until_the_leader_ends_it() -> None:
    heard: list[object] = []

    async def leader(context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        for i in range(3):
            heard.append(wire.decode_member_frame(await context.read()))
            await context.write(wire.encode_leader_frame(Commit(b"body %d" % i, bytes(32), i, (), ())))
        await context.write(wire.encode_leader_frame(Goodbye("ended", "the run is over")))

    async def main() -> None:
        async with raw_server(Leader__Line=leader) as (peer, address), calling() as peers:
            line = await peers.open_line(peer, [address])
            for i in range(3):
                await line.send(Refusal(0, i, 0, "because"))
            said = [message async for message in line.messages()]
            assert [type(message) for message in said] == [Commit, Commit, Commit, Goodbye]
            assert heard == [Refusal(0, i, 0, "because") for i in range(3)]
            assert peers.traffic.sent > 0
            assert peers.traffic.received > 0
            assert peers.traffic.exchange_sent == peers.traffic.exchange_received == 0
            with pytest.raises(PeerFailed):
                await line.send(Refusal(0, 9, 0, "too late"))
            await line.close()

    scenario(main)


def test_closing_a_line_first_says_what_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.peers.line.CLOSE_S", LONG_S)
    heard: list[bytes] = []
    ended = asyncio.Event()

    async def leader(context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        while (frame := await context.read()) is not END:
            heard.append(frame)
        ended.set()

    async def main() -> None:
        async with raw_server(Leader__Line=leader) as (peer, address), calling() as peers:
            line = await peers.open_line(peer, [address])
            for _ in range(200):
                await line.send(Signed(bytes(10_000)))
            await line.close()
            await ended.wait()
            assert len(heard) == 200

    scenario(main)


def test_a_line_that_breaks_says_so_to_reader_and_sender() -> None:
    async def leader(context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await context.read()
        await context.write(wire.encode_leader_frame(Goodbye("shutdown", "back soon")))
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "banned")

    async def main() -> None:
        async with raw_server(Leader__Line=leader) as (peer, address), calling() as peers:
            line = await peers.open_line(peer, [address])
            await line.send(Signed(b"hello"))
            messages = line.messages()
            assert await anext(messages) == Goodbye("shutdown", "back soon")
            with pytest.raises(PeerFailed, match="refused: banned"):
                await anext(messages)
            with pytest.raises(PeerFailed):
                await line.send(Signed(b"hello"))
            await line.close()

    scenario(main)


def test_a_leader_that_never_says_a_word_is_given_up() -> None:
    async def main() -> None:
        async with raw_server(Leader__Line=never) as (peer, address), calling(no_progress_s=0.1) as peers:
            line = await peers.open_line(peer, [address])
            with pytest.raises(PeerFailed, match=r"no word in 0\.1 s"):
                await anext(line.messages())
            await line.close()

    scenario(main)


def test_a_line_whose_leader_takes_nothing_makes_the_sender_wait_and_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.peers.line.CLOSE_S", 0.05)

    async def main() -> None:
        async with raw_server(Leader__Line=never) as (peer, address), calling() as peers:
            line = await peers.open_line(peer, [address])

            async def flood() -> None:
                while True:
                    await line.send(Signed(bytes(100_000)))

            flooding = asyncio.create_task(flood())
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await asyncio.shield(flooding)
            await line.close()
            with pytest.raises(PeerFailed):
                await flooding

    scenario(main)
