"""What gRPC adds to the port: TLS identities, several addresses, limits on standing still, lines, back-pressure."""

from __future__ import annotations

import asyncio
import datetime
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from node.errors import MachineError, PortTaken
from node.peers import dialing
from node.peers.dialing import Dialer
from node.peers.flight import InFlight
from node.peers.grpc import Credentials, GrpcPeers, IdentityMismatch
from node.peers.pacing import Direction, Rates, StreamPace, TokenBucket
from node.peers.receiving import CHECKS_AT_ONCE
from node.peers.server import CALLS_AT_ONCE, NodeServer
from node.peers.transport import ACCEPTED, END, open_call
from node.ports import PeerBusy, PeerFailed
from protos import services, wire
from protos.messages import ChunkHead, Commit, FetchHead, Goodbye, PeerId, Refusal, Signed
from protos.signing import Identity
from tests.fakes.certificates import Authority
from tests.fakes.holder import FakeHolder
from tests.fakes.loop import SkippingLoop, play, until
from tests.node.peers.test_transport import LIMIT_S

AUTHORITY = Authority()
ROW = bytes(5_000_000)
LONG_S = 1000.0
"""Longer than any test: how long something takes on this machine is nobody's fault."""
Handler = Callable[["grpc.aio.ServicerContext[bytes, bytes]"], Awaitable[None]]


def scenario(main: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(limited())


def new_peer() -> PeerId:
    return Identity.generate().peer


def patient(credentials: Credentials) -> Dialer:
    return Dialer(credentials, connect_s=LONG_S)


@asynccontextmanager
async def serving(
    holder: FakeHolder, peer: PeerId | None = None, no_progress_s: float = LONG_S
) -> AsyncIterator[tuple[PeerId, str]]:
    peer = peer or new_peer()
    server = NodeServer(AUTHORITY.issue(peer), holder, allowed=lambda _: "", no_progress_s=no_progress_s)
    port = await server.start("127.0.0.1:0")
    try:
        yield peer, f"127.0.0.1:{port}"
    finally:
        await server.stop()


@asynccontextmanager
async def calling(
    credentials: Credentials | None = None, no_progress_s: float = LONG_S, dialer: Dialer | None = None
) -> AsyncIterator[GrpcPeers]:
    credentials = credentials or AUTHORITY.issue(new_peer())
    peers = GrpcPeers(credentials, no_progress_s=no_progress_s, dialer=dialer or patient(credentials))
    try:
        yield peers
    finally:
        await peers.close()


@asynccontextmanager
async def raw_server(**handlers: Handler) -> AsyncIterator[tuple[PeerId, str]]:
    """A peer that does what a test wants, one handler a method (its name, a dot as two underscores)."""
    peer = new_peer()
    credentials = AUTHORITY.issue(peer)
    server = grpc.aio.server()
    for name, handler in handlers.items():
        service, method = name.split("__")

        async def handle(
            _: object, context: grpc.aio.ServicerContext[bytes, bytes], handler: Handler = handler
        ) -> None:
            await handler(context)

        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    f"barnraise.v1.{service}", {method: grpc.stream_stream_rpc_method_handler(handle, None, None)}
                ),
            )
        )
    tls = grpc.ssl_server_credentials([(credentials.key, credentials.certificate)], credentials.ca, True)
    port = server.add_secure_port("127.0.0.1:0", tls)
    await server.start()
    try:
        yield peer, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def source(chunk: int) -> tuple[ChunkHead, memoryview]:
    return ChunkHead(bytes(32), chunk, len(ROW), ()), memoryview(ROW)


async def ignore(_: bytes) -> None:
    pass


async def drop(_: bytes, __: bytes) -> None:
    pass


async def never(context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
    await asyncio.Event().wait()


# -- standing still ----------------------------------------------------------------------------------------------


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


# -- nonsense ----------------------------------------------------------------------------------------------------


def test_nonsense_ends_the_call_and_not_the_server(tmp_path: Path) -> None:
    async def main() -> None:
        dialer = patient(AUTHORITY.issue(new_peer()))
        async with serving(FakeHolder(tmp_path)) as (peer, address), calling() as peers:
            channel = await dialer.channel(peer, [address])
            for method in (services.EXCHANGE_SEND, services.EXCHANGE_FETCH_THINGS, services.STATE_COMMITS):
                call = open_call(channel, method)
                await call.write(b"\xff\xff\xff")
                assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT, method
            await peers.ping(peer, [address])
            await dialer.close()

    scenario(main)


def test_one_caller_has_so_many_calls_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        holder = FakeHolder(tmp_path, checking=asyncio.Event())
        async with serving(holder) as (peer, address), calling() as peers:
            sending = [
                asyncio.create_task(peers.send_rows(peer, [address], b"deal", [i], source, ignore))
                for i in range(CALLS_AT_ONCE)
            ]
            await until(lambda: holder.n_checks == CALLS_AT_ONCE)
            with pytest.raises(PeerFailed, match="busy"):
                await peers.ping(peer, [address])
            assert holder.checking is not None
            holder.checking.set()
            await asyncio.gather(*sending)
            await peers.ping(peer, [address])

    scenario(main)


def test_a_caller_that_dies_and_comes_back_again_and_again_gets_its_calls_back(tmp_path: Path) -> None:
    """What its former lives had open holds no place for long, or it would shut itself out."""

    async def main() -> None:
        me, holder = AUTHORITY.issue(new_peer()), FakeHolder(tmp_path, checking=asyncio.Event())
        peer = new_peer()
        server = NodeServer(AUTHORITY.issue(peer), holder, allowed=lambda _: "", no_progress_s=LONG_S)
        address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
        for n_lives in range(1, 4):
            async with calling(me) as peers:
                sending = [
                    asyncio.create_task(peers.send_rows(peer, [address], b"deal", [i], source, ignore))
                    for i in range(CALLS_AT_ONCE)
                ]
                await until(lambda n=n_lives * CALLS_AT_ONCE: holder.n_checks == n)  # type: ignore[misc]
            ended = await asyncio.gather(*sending, return_exceptions=True)
            assert all(isinstance(each, PeerFailed) for each in ended)
            async with calling(me) as peers:
                await until_it_answers(peers, peer, address)
            await until(lambda: not server._calls)  # an answer shows one free place, the next life takes all
        await server.stop()

    scenario(main)


async def until_it_answers(peers: GrpcPeers, peer: PeerId, address: str) -> None:
    while True:
        try:
            return await peers.ping(peer, [address])
        except PeerBusy:
            await asyncio.sleep(0.001)


# -- who answers -------------------------------------------------------------------------------------------------


def test_another_peer_at_the_address_is_an_identity_mismatch(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(FakeHolder(tmp_path)) as (_, address), calling() as peers:
            with pytest.raises(IdentityMismatch, match="identity mismatch"):
                await peers.ping(new_peer(), [address])

    scenario(main)


@pytest.mark.parametrize("case", ["another run", "expired", "no peer id"])
def test_a_caller_without_a_good_certificate_gets_nowhere(tmp_path: Path, case: str) -> None:
    credentials = {
        "another run": lambda: Authority().issue(new_peer()),
        "expired": lambda: AUTHORITY.issue(new_peer(), valid_for=-datetime.timedelta(hours=1)),
        "no peer id": lambda: AUTHORITY.issue("localhost"),
    }[case]()
    ours = Credentials(credentials.certificate, credentials.key, AUTHORITY.pem)

    async def main() -> None:
        holder = FakeHolder(tmp_path)
        async with serving(holder) as (peer, address), calling(ours) as peers:
            with pytest.raises(PeerFailed):
                await peers.send_rows(peer, [address], b"deal", [1], source, ignore)
            assert holder.deals == []

    scenario(main)


def test_a_server_of_another_run_is_told_apart_from_an_unreachable_one(tmp_path: Path) -> None:
    async def main() -> None:
        stranger = Authority()
        credentials = stranger.issue(new_peer())
        async with serving(FakeHolder(tmp_path)) as (peer, address), calling(credentials) as peers:
            with pytest.raises(PeerFailed, match="TLS failed"):
                await peers.ping(peer, [address])

    scenario(main)


# -- addresses ---------------------------------------------------------------------------------------------------


def test_each_address_that_fails_says_why() -> None:
    async def main() -> None:
        me = AUTHORITY.issue(new_peer())
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))  # and doesn't listen: it is nobody else's meanwhile
            await refused(me, closed.getsockname()[1])

    async def refused(me: Credentials, port: int) -> None:
        async with calling(me, dialer=Dialer(me, connect_s=10.0)) as peers:
            with pytest.raises(PeerFailed) as failed:
                await peers.ping(new_peer(), [f"127.0.0.1:{port}", "unix:7", "nonsense", "host.invalid:80"])
            why = failed.value.why
            assert f"127.0.0.1:{port}: connection refused" in why
            assert "nonsense: " in why
            assert re.search(r"host\.invalid:80: (name not found|no answer)", why)
            with pytest.raises(PeerFailed, match="no address is known"):
                await peers.ping(new_peer(), [])

    scenario(main)


def test_a_later_address_is_tried_beside_one_that_does_not_answer(tmp_path: Path) -> None:
    async def main() -> None:
        with socket.socket() as mute:  # takes connections and never says a word
            mute.bind(("127.0.0.1", 0))
            mute.listen()
            silent = f"127.0.0.1:{mute.getsockname()[1]}"
            me = AUTHORITY.issue(new_peer())
            ended: list[tuple[str, type[BaseException]]] = []

            class Watched(Dialer):
                async def _connect(self, peer: PeerId, address: str) -> grpc.aio.Channel:
                    try:
                        return await super()._connect(peer, address)
                    except BaseException as error:
                        ended.append((address, type(error)))
                        raise

            dialer = Watched(me, connect_s=LONG_S, overlap_s=0.02)
            async with serving(FakeHolder(tmp_path)) as (peer, address), calling(me, dialer=dialer) as peers:
                await peers.ping(peer, [silent, address])
                assert ended == [(silent, asyncio.CancelledError)]  # it was still tried, and not given up before

    scenario(main)


def test_an_address_that_never_answers_is_given_up() -> None:
    async def main() -> None:
        with socket.socket() as mute:
            mute.bind(("127.0.0.1", 0))
            mute.listen()
            silent = f"127.0.0.1:{mute.getsockname()[1]}"
            me = AUTHORITY.issue(new_peer())
            async with calling(me, dialer=Dialer(me, connect_s=0.1)) as peers:
                with pytest.raises(PeerFailed, match=r"no answer in 0\.1 s"):
                    await peers.ping(new_peer(), [silent])

    scenario(main)


def test_a_peer_that_comes_back_elsewhere_is_found_there(tmp_path: Path) -> None:
    async def main() -> None:
        peer, me = new_peer(), AUTHORITY.issue(new_peer())
        dialer = patient(me)
        async with calling(me, dialer=dialer) as peers:
            async with serving(FakeHolder(tmp_path), peer) as (_, address):
                await peers.ping(peer, [address])
                left = dialer._channels[peer]
            await until(lambda: left.get_state() is not grpc.ChannelConnectivity.READY)
            with pytest.raises(PeerFailed):
                await peers.ping(peer, [address])
            async with serving(FakeHolder(tmp_path), peer) as (_, elsewhere):
                await peers.ping(peer, [address, elsewhere])

    scenario(main)


def test_connections_to_peers_that_left_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialing, "CHANNELS_SWEPT", 2)

    async def main() -> None:
        me = AUTHORITY.issue(new_peer())
        dialer = patient(me)
        async with serving(FakeHolder(tmp_path)) as (stays, there), calling(me, dialer=dialer) as peers:
            await peers.ping(stays, [there])
            async with serving(FakeHolder(tmp_path)) as (leaves, address):
                await peers.ping(leaves, [address])
                left = dialer._channels[leaves]
            await until(lambda: left.get_state() is not grpc.ChannelConnectivity.READY)
            async with serving(FakeHolder(tmp_path)) as (comes, address):
                await peers.ping(comes, [address])
            assert set(dialer._channels) == {stays, comes}
            assert set(dialer._locks) == {stays, comes}

    scenario(main)


# -- listening ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_taken_port_is_an_error_that_names_port_and_option(tmp_path: Path, host: str) -> None:
    async def main() -> None:
        async with serving(FakeHolder(tmp_path)) as (_, address):
            port = address.rpartition(":")[2]
            second = NodeServer(AUTHORITY.issue(new_peer()), FakeHolder(tmp_path), allowed=lambda _: "")
            with pytest.raises(PortTaken, match=rf"{host}:{port} is in use.*--listen"):
                await second.start(f"{host}:{port}")
            await second.stop()

    scenario(main)


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", "203.0.113.9:0", ":5", ""])
def test_an_address_that_is_not_ours_is_an_error(tmp_path: Path, listen: str) -> None:
    async def main() -> None:
        server = NodeServer(AUTHORITY.issue(new_peer()), FakeHolder(tmp_path), allowed=lambda _: "")
        with pytest.raises(MachineError, match=r"can't listen.*--listen"):
            await server.start(listen)

    scenario(main)


# -- the leader's line -------------------------------------------------------------------------------------------


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
