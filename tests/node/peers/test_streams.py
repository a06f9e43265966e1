"""Rows and things as they travel: who stands still, whose checks lag, what is paced."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from node.peers.dialing import Dialer
from node.peers.flight import InFlight
from node.peers.grpc import GrpcPeers
from node.peers.pacing import Direction, Rates, StreamPace, TokenBucket
from node.peers.receiving import CHECKS_AT_ONCE
from node.peers.server import NodeServer
from node.peers.transport import ACCEPTED, END, open_call
from node.ports import PeerFailed
from protos import services, wire
from protos.messages import ChunkHead, FetchHead, PeerId, Signed
from tests.fakes.holder import FakeHolder
from tests.fakes.loop import SkippingLoop, play, until
from tests.node.peers.served import (
    AUTHORITY,
    LONG_S,
    ROW,
    calling,
    drop,
    ignore,
    never,
    new_peer,
    patient,
    raw_server,
    scenario,
    serving,
    source,
)
from tests.node.peers.test_transport import LIMIT_S


def test_a_holder_that_stops_in_the_middle_is_given_up_in_time() -> None:
    async def announce(context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await context.read()
        await context.write(wire.encode_fetch_frame(FetchHead(bytes(32), 100)))
        await never(context)

    async def main() -> None:
        async with raw_server(Exchange__FetchThings=announce) as (peer, address), calling(no_progress_s=0.1) as peers:
            with pytest.raises(PeerFailed, match=r"nothing moved for 0\.1 s"):
                await peers.fetch(peer, [address], "state", [bytes(32)], 100, drop, exchange=False)

    scenario(main)


@pytest.mark.parametrize("reads", [0, 1])
def test_a_reducer_that_takes_nothing_is_given_up_in_time(reads: int) -> None:
    async def take_little(context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        for _ in range(reads):
            await context.read()
            await context.send_initial_metadata((ACCEPTED,))
        await never(context)

    async def main() -> None:
        async with raw_server(Exchange__Send=take_little) as (peer, address), calling(no_progress_s=0.1) as peers:
            with pytest.raises(PeerFailed, match=r"nothing moved for 0\.1 s"):
                await peers.send_rows(peer, [address], b"deal", range(20), source, ignore)

    scenario(main)


def test_a_sender_that_stops_in_the_middle_is_given_up_by_the_server(tmp_path: Path) -> None:
    async def main(loop: SkippingLoop) -> None:
        holder = FakeHolder(tmp_path)
        me = new_peer()
        dialer = Dialer(AUTHORITY.issue(me))
        async with serving(holder, no_progress_s=LIMIT_S) as (peer, address):
            channel = await dialer.channel(peer, [address])
            call = open_call(channel, services.EXCHANGE_SEND)
            await call.write(wire.encode_chunk_frame(Signed(b"deal")))
            await call.write(wire.encode_chunk_frame(ChunkHead(bytes(32), 4, 100, ())))
            await until(lambda: (me, 4) in holder.rows)
            await loop.skip(1.1 * LIMIT_S)
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert holder.broken == [(me, 4)]
            await dialer.close()

    play(main)


def test_a_sender_that_goes_away_leaves_no_half_row_and_its_whole_rows_are_checked(tmp_path: Path) -> None:
    async def main() -> None:
        holder = FakeHolder(tmp_path, checking=asyncio.Event())
        assert holder.checking is not None
        me = new_peer()
        dialer = patient(AUTHORITY.issue(me))
        async with serving(holder) as (peer, address):
            channel = await dialer.channel(peer, [address])
            call = open_call(channel, services.EXCHANGE_SEND)
            await call.write(wire.encode_chunk_frame(Signed(b"deal")))
            await call.write(wire.encode_chunk_frame(ChunkHead(bytes(32), 1, 3, ())))
            await call.write(b"\x12\x03abc")
            await call.write(wire.encode_chunk_frame(ChunkHead(bytes(32), 2, 3, ())))
            await until(lambda: holder.n_checks == 1 and (me, 2) in holder.rows)
            call.cancel()
            await until(lambda: holder.broken == [(me, 2)])
            holder.checking.set()
            await until(lambda: holder.whole == [(me, 1)])
            await dialer.close()

    scenario(main)


def test_checks_that_lag_hold_the_sender_back(tmp_path: Path) -> None:
    async def main(loop: SkippingLoop) -> None:
        holder = FakeHolder(tmp_path, checking=asyncio.Event())
        assert holder.checking is not None
        async with serving(holder, no_progress_s=LIMIT_S) as (peer, address), calling() as peers:
            small = memoryview(bytes(10))
            sending = asyncio.create_task(
                peers.send_rows(
                    peer,
                    [address],
                    b"deal",
                    range(50),
                    lambda chunk: (ChunkHead(bytes(32), chunk, 10, ()), small),
                    ignore,
                )
            )
            # One more row is let in, and when it is whole the server waits for its checks.
            await until(lambda: sum(len(row) == 10 for row in holder.rows.values()) > CHECKS_AT_ONCE)
            assert holder.n_checks == CHECKS_AT_ONCE
            await loop.skip(2 * LIMIT_S)  # our own slowness is not the sender's
            assert len(holder.rows) <= CHECKS_AT_ONCE + 2
            holder.checking.set()
            await sending
            assert len(holder.whole) == 50

    play(main)


def test_all_senders_together_are_held_back_by_checks_that_lag(tmp_path: Path) -> None:
    row = memoryview(bytes(1_000_000))

    def small(chunk: int) -> tuple[ChunkHead, memoryview]:
        return ChunkHead(bytes(32), chunk, len(row), ()), row

    async def main() -> None:
        holder = FakeHolder(tmp_path, checking=asyncio.Event())
        assert holder.checking is not None
        peer = new_peer()
        server = NodeServer(AUTHORITY.issue(peer), holder, allowed=lambda _: "", no_progress_s=LONG_S)
        server.receiving = InFlight(3_500_000)
        address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
        async with calling() as one, calling() as two:
            sending = [
                asyncio.create_task(peers.send_rows(peer, [address], b"deal", range(start, start + 4), small, ignore))
                for peers, start in ((one, 0), (one, 4), (two, 0), (two, 4))
            ]
            await until(lambda: holder.n_checks == 3)
            await asyncio.sleep(0.1)
            assert holder.n_checks == 3  # a fourth one has no room
            assert server.receiving.n_bytes == 3_000_000
            holder.checking.set()
            await asyncio.gather(*sending)
            assert len(holder.whole) == 16
            assert server.receiving.n_bytes == 0
            assert server.receiving.most_bytes <= 3_500_000
            assert one.sending.n_bytes == two.sending.n_bytes == 0
        await server.stop()

    scenario(main)


@pytest.mark.parametrize("n_rows", [3, CHECKS_AT_ONCE])
def test_rows_whose_checks_end_together_share_a_receipt(tmp_path: Path, n_rows: int) -> None:
    async def main() -> None:
        holder = FakeHolder(tmp_path, checking=asyncio.Event())
        assert holder.checking is not None
        receipts: list[bytes] = []

        async def keep(envelope: bytes) -> None:
            receipts.append(envelope)

        async with serving(holder) as (peer, address), calling() as peers:
            sending = asyncio.create_task(peers.send_rows(peer, [address], b"deal", range(n_rows), source, keep))
            await until(lambda: holder.n_checks == n_rows)
            holder.checking.set()
            await sending
            assert receipts == [b"receipt " + b" ".join(b"%d" % row for row in range(n_rows))]

    scenario(main)


def test_a_row_that_comes_while_the_attempt_ends_is_declined(tmp_path: Path) -> None:
    class Over(FakeHolder):
        def receipt(self, caller: PeerId, plan: bytes, chunks: tuple[int, ...]) -> bytes:
            return b""

    async def main() -> None:
        async with serving(Over(tmp_path)) as (peer, address), calling() as peers:
            with pytest.raises(PeerFailed, match="refused: the attempt is over"):
                await peers.send_rows(peer, [address], b"deal", [1], source, ignore)

    scenario(main)


def test_where_the_deal_is_refused_no_row_is_sent(tmp_path: Path) -> None:
    class Elsewhere(FakeHolder):
        def admit_deal(self, caller: PeerId, deal: bytes) -> str:
            return "no exchange runs here now"

    async def main() -> None:
        rows: list[int] = []

        def watched(chunk: int) -> tuple[ChunkHead, memoryview]:
            rows.append(chunk)
            return source(chunk)

        async with serving(Elsewhere(tmp_path)) as (peer, address), calling() as peers:
            for _ in range(3):
                with pytest.raises(PeerFailed, match="refused: no exchange runs here now"):
                    await peers.send_rows(peer, [address], b"deal", [1, 2], watched, ignore)
            assert not rows
            assert 0 < peers.traffic.exchange_sent < 100

    scenario(main)


@pytest.mark.parametrize(("n_receipts", "why"), [(0, "without a receipt"), (3, "more than 2 receipts")])
def test_a_reducer_with_too_few_or_too_many_receipts_has_failed(n_receipts: int, why: str) -> None:
    async def answer(context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await context.read()
        await context.send_initial_metadata((ACCEPTED,))
        while await context.read() is not END:
            pass
        for _ in range(n_receipts):
            await context.write(wire.encode_receipt_frame(Signed(b"receipt")))

    async def main() -> None:
        async with raw_server(Exchange__Send=answer) as (peer, address), calling() as peers:
            with pytest.raises(PeerFailed, match=why):
                await peers.send_rows(peer, [address], b"deal", [1, 2], source, ignore)

    scenario(main)


def test_the_next_thing_is_read_while_the_sink_is_busy_and_no_further(tmp_path: Path) -> None:
    async def main(loop: SkippingLoop) -> None:
        holder = FakeHolder(tmp_path)
        names = [bytes([i]) * 32 for i in range(4)]
        for name in names:
            holder.put("piece", name, name * 100)
        busy, go_on, seen = asyncio.Event(), asyncio.Event(), list[bytes]()

        async def sink(hash_: bytes, data: bytes) -> None:
            busy.set()
            await go_on.wait()
            assert data == hash_ * 100
            seen.append(hash_)

        async with serving(holder) as (peer, address), calling(no_progress_s=LIMIT_S) as peers:
            fetching = asyncio.create_task(peers.fetch(peer, [address], "piece", names, 10_000, sink, exchange=False))
            await busy.wait()
            await until(lambda: peers.fetching.n_bytes == 6_400)
            await loop.skip(2 * LIMIT_S)  # the sink's slowness is not the peer's
            assert peers.fetching.most_bytes == 6_400
            go_on.set()
            assert await fetching == []
            assert seen == names
            assert peers.fetching.n_bytes == 0

    play(main)


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_a_sink_that_fails_leaves_nothing_in_flight(tmp_path: Path, fails_at: int) -> None:
    async def main() -> None:
        holder = FakeHolder(tmp_path)
        names = [bytes([i]) * 32 for i in range(4)]
        for name in names:
            holder.put("piece", name, name)

        async def sink(hash_: bytes, _: bytes) -> None:
            if hash_ == names[fails_at]:
                raise ZeroDivisionError

        async with serving(holder) as (peer, address), calling() as peers:
            with pytest.raises(ZeroDivisionError):
                await peers.fetch(peer, [address], "piece", names, 100, sink, exchange=False)
            assert peers.fetching.n_bytes == 0

    scenario(main)


# -- rates -------------------------------------------------------------------------------------------------------


class Watched(Direction):
    """A direction whose streams tell what went through them, and wait for nothing."""

    def __init__(self) -> None:
        super().__init__(Rates(total_bytes_s=100_000.0))
        self.n_bytes = 0

    def stream(self) -> StreamPace:
        line = self

        class Pace(StreamPace):
            async def wait(self, n_bytes: int, **_: object) -> None:
                line.n_bytes += n_bytes

        return Pace(TokenBucket(1.0, 1.0), None)


def test_every_byte_of_rows_and_things_is_paced_both_ways(tmp_path: Path) -> None:
    async def main() -> None:
        holder, peer = FakeHolder(tmp_path), new_peer()
        holder.put("state", bytes(32), ROW)
        there_up, there_down, here_up, here_down = (Watched() for _ in range(4))
        server = NodeServer(AUTHORITY.issue(peer), holder, allowed=lambda _: "", up=there_up, down=there_down)
        address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
        me = AUTHORITY.issue(new_peer())
        peers = GrpcPeers(me, dialer=patient(me), up=here_up, down=here_down)
        await peers.send_rows(peer, [address], b"deal", [1], source, ignore)
        assert here_up.n_bytes == there_down.n_bytes == len(ROW)
        await peers.fetch(peer, [address], "state", [bytes(32)], len(ROW), drop, exchange=False)
        assert there_up.n_bytes == here_down.n_bytes == len(ROW)
        assert bytes(holder.rows[next(iter(holder.rows))]) == ROW
        await peers.close()
        await server.stop()

    scenario(main)
