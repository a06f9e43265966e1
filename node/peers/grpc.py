"""Calls to other nodes over gRPC: rows to reducers, things by hash, offers of state, and the leader's line."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc

from node.peers.dialing import Dialer
from node.peers.flight import IN_FLIGHT_BYTES, InFlight
from node.peers.line import GrpcLine
from node.peers.pacing import UNLIMITED, Direction, StreamPace
from node.peers.stream import Stream
from node.peers.transport import (
    LEAST_PART_BYTES,
    NO_PROGRESS_S,
    Credentials,
    IdentityMismatch,
    Meter,
    Progress,
    open_call,
)
from node.ports import PeerFailed, RowSource, Traffic
from node.stages import Stages
from protos import limits, services, wire
from protos.calls import Declined, OfferRequest, PingReply, PingRequest
from protos.messages import (
    ChunkHead,
    Commit,
    CommitsAfter,
    Fetch,
    FetchHead,
    Part,
    PeerId,
    Signed,
    StateOffer,
)

__all__ = ["Credentials", "GrpcLine", "GrpcPeers", "IdentityMismatch"]

T = TypeVar("T")


class GrpcPeers:
    """The port `Peers` over gRPC and mutual TLS.

    Args:
        credentials: this node's, from admission.
        no_progress_s: how long a call may stand still before it is given up; what comes must come at a least rate, too.
        traffic: where bytes are counted; the server of this node counts in the same.
        dialer: how connections are made, for tests.
        up, down: how fast bytes may go out and come in, with those of this node's server.
        stages: where bytes, seconds and copies are counted.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        no_progress_s: float = NO_PROGRESS_S,
        traffic: Traffic | None = None,
        dialer: Dialer | None = None,
        up: Direction = UNLIMITED,
        down: Direction = UNLIMITED,
        stages: Stages | None = None,
    ) -> None:
        self.traffic = traffic if traffic is not None else Traffic()
        self.sending, self.fetching = InFlight(IN_FLIGHT_BYTES), InFlight(IN_FLIGHT_BYTES)
        self._up, self._down = up, down
        self._stages = stages if stages is not None else Stages()
        self._no_progress_s = no_progress_s
        self._dialer = dialer if dialer is not None else Dialer(credentials)

    async def open_line(self, leader: PeerId, addresses: Sequence[str]) -> GrpcLine:
        """Open the stream to the leader. Raises PeerFailed."""
        call = await self._call(leader, addresses, services.LEADER_LINE)
        return GrpcLine(Stream(leader, call, Meter(self.traffic), None), self._no_progress_s)

    async def send_rows(
        self,
        peer: PeerId,
        addresses: Sequence[str],
        deal: bytes,
        chunks: Sequence[int],
        source: RowSource,
        on_receipt: Callable[[bytes], Awaitable[None]],
    ) -> None:
        """Stream chunks one after the other; receipts come while later chunks are on their way. Raises PeerFailed."""
        async with self._stream(peer, addresses, services.EXCHANGE_SEND, exchange=True) as (stream, progress):
            writing = self._write_rows(stream, progress, deal, chunks, source)
            writer = asyncio.create_task(writing, name=f"rows to {peer}")
            # A fault of ours must not wait for receipts that won't come.
            writer.add_done_callback(lambda task: stream.cancel() if _fault(task) else None)
            n_receipts = 0
            try:
                while (answer := await stream.read_as(wire.decode_receipt_frame)) is not None:
                    if isinstance(answer, Declined):
                        raise PeerFailed(peer, f"refused: {answer.reason}")
                    n_receipts += 1
                    if n_receipts > len(chunks):
                        raise PeerFailed(peer, f"it sent more than {len(chunks)} receipts")
                    progress.moved()
                    with progress.ours():
                        await on_receipt(answer.envelope)
                if chunks and not n_receipts:
                    raise PeerFailed(peer, "it ended the call without a receipt")
                await writer
            finally:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
                fault = _fault(writer)
                if fault is not None:
                    raise fault

    async def _write_rows(
        self, stream: Stream, progress: Progress, deal: bytes, chunks: Sequence[int], source: RowSource
    ) -> None:
        pace, most_bytes = self._up.stream(), min(limits.PART_BYTES, self._up.part_bytes)
        await stream.write(wire.encode_chunk_frame(Signed(deal)))
        await stream.wait_accepted()
        for chunk in chunks:
            head, row = source(chunk)
            if not row:
                await stream.write(wire.encode_chunk_frame(head))
            for start in range(0, len(row), most_bytes):
                part = row[start : start + most_bytes]
                await self._write_part(stream, progress, pace, part, None if start else head)
        await stream.done_writing()

    async def _write_part(
        self, stream: Stream, progress: Progress, pace: StreamPace, data: memoryview, head: ChunkHead | None
    ) -> None:
        taken = self.sending.take_now(len(data))
        if taken is None:
            with progress.ours():
                taken = await self.sending.take(len(data))
        try:
            if pace.limited:
                with progress.ours():
                    await pace.wait(len(data))
            with self._stages.timed("send", len(data), copied_bytes=len(data)):
                await stream.write(wire.encode_part(data, head))
        finally:
            self.sending.give_back(taken)

    async def fetch(
        self,
        peer: PeerId,
        addresses: Sequence[str],
        kind: str,
        hashes: Sequence[bytes],
        max_bytes: int,
        sink: Callable[[bytes, bytes], Awaitable[None]],
        *,
        exchange: bool,
    ) -> list[bytes]:
        """Fetch things by hash, in order; what the peer lacks is returned. What the sink raises ends the fetch.

        While the sink is busy with one thing, the next one is read.
        """
        missing: list[bytes] = []
        for start in range(0, len(hashes), limits.HASHES):
            asked = hashes[start : start + limits.HASHES]
            async with self._stream(peer, addresses, services.EXCHANGE_FETCH_THINGS, exchange=exchange) as (
                stream,
                progress,
            ):
                await stream.write(wire.encode(Fetch(kind, tuple(asked))))
                await stream.done_writing()
                async with _Sinking(sink, progress, self.fetching) as sinking:
                    for hash_ in asked:
                        thing = await self._read_thing(stream, progress, hash_, max_bytes)
                        if thing is None:
                            missing.append(hash_)
                        else:
                            await sinking.put(hash_, *thing)
        return missing

    async def _read_thing(
        self, stream: Stream, progress: Progress, hash_: bytes, max_bytes: int
    ) -> tuple[bytes, int] | None:
        """One thing of a fetch, whole, and its bytes in flight; None if the peer doesn't have it."""
        began = time.perf_counter()
        head, first = await self._read_head(stream, hash_)
        n_bytes = head.n_bytes
        if n_bytes < 0:
            progress.came(len(hash_))
            return None
        if n_bytes > max_bytes:
            raise PeerFailed(stream.peer, f"it announced {n_bytes} bytes where at most {max_bytes} are possible")
        # A first part is here without room of its own: one for each stream that we opened.
        taken = self.fetching.take_now(n_bytes)
        if taken is None:
            with progress.ours():
                taken = await self.fetching.take(n_bytes)
        try:
            thing = await self._read_parts(stream, progress, n_bytes, first)
            progress.moved()
            self._stages.add("fetch", n_bytes, time.perf_counter() - began, copied_bytes=n_bytes)
            return thing, taken
        except BaseException:
            self.fetching.give_back(taken)
            raise

    async def _read_head(self, stream: Stream, hash_: bytes) -> tuple[FetchHead, Part | None]:
        """What is announced, and the first part where it came with that."""
        frame = await stream.read_as(wire.decode_fetch_frame)
        head, first = (frame.head, frame.part) if isinstance(frame, wire.Begun) else (frame, None)
        if not isinstance(head, FetchHead) or head.hash != hash_:
            raise PeerFailed(stream.peer, "it broke off a fetch, or sent what was not asked for")
        return head, first

    async def _read_parts(self, stream: Stream, progress: Progress, n_bytes: int, first: Part | None) -> bytes:
        parts: list[bytes] = []
        left, unpaid, pace = n_bytes, 0, self._down.stream()
        while left:
            part = await stream.read_as(wire.decode_fetch_frame) if first is None else first
            first = None
            if not isinstance(part, Part) or not part.data or len(part.data) > left:
                raise PeerFailed(stream.peer, f"a thing of {n_bytes} bytes came in other parts than announced")
            progress.came(len(part.data))
            parts.append(part.data)
            left -= len(part.data)
            unpaid += len(part.data)
            # Small parts wait together: the wait behind others is ours, and a peer could have one for each byte.
            if pace.limited and (unpaid >= LEAST_PART_BYTES or not left):
                with progress.ours():
                    await pace.wait(unpaid)
                unpaid = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def offer(self, peer: PeerId, addresses: Sequence[str], *, frozen: bool = False) -> StateOffer:
        """What state the peer holds. Raises PeerFailed, also if it holds none."""
        raw = await self._answer(peer, addresses, services.STATE_OFFER, wire.encode(OfferRequest(frozen)))
        return _decoded(peer, lambda: wire.decode(StateOffer, raw))

    async def commits_after(
        self, peer: PeerId, addresses: Sequence[str], epoch: int, round_: int, n_most: int
    ) -> list[Commit]:
        """Commits after a round, oldest first, unverified. Raises PeerFailed."""
        question = wire.encode(CommitsAfter(epoch, round_, n_most))
        raw = await self._answer(peer, addresses, services.STATE_COMMITS, question)
        return list(_decoded(peer, lambda: wire.decode_commits(raw)))[:n_most]

    async def ping(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Whether the peer can be reached there and answers under its name. Raises PeerFailed."""
        nonce = os.urandom(16)
        async with self._stream(peer, addresses, services.STATE_PING, exchange=False) as (stream, _):
            await stream.write(wire.encode(PingRequest(nonce)))
            await stream.done_writing()
            if await stream.read_as(lambda raw: wire.decode(PingReply, raw)) != PingReply(nonce, peer):
                raise PeerFailed(peer, "its answer is not to our ping")

    async def close(self) -> None:
        await self._dialer.close()

    @asynccontextmanager
    async def _stream(
        self,
        peer: PeerId,
        addresses: Sequence[str],
        method: str,
        *,
        exchange: bool,
        least_bytes: int = LEAST_PART_BYTES,
    ) -> AsyncIterator[tuple[Stream, Progress]]:
        """A call that ends with the block, and at the latest when nothing, or too little, moved for a while.

        A unary method looks the same on the wire as a stream with one message each way.
        """
        call = await self._call(peer, addresses, method)
        progress = Progress(self._no_progress_s, least_bytes)
        try:
            async with progress:
                yield Stream(peer, call, Meter(self.traffic, exchange=exchange), progress), progress
        except TimeoutError:
            if not progress.expired:
                raise
            raise PeerFailed(peer, progress.why) from None
        finally:
            call.cancel()

    async def _call(
        self, peer: PeerId, addresses: Sequence[str], method: str
    ) -> grpc.aio.StreamStreamCall[bytes, bytes]:
        channel = await self._dialer.channel(peer, addresses)
        try:
            return open_call(channel, method)
        except grpc.aio.UsageError as error:  # another call's failure closed the channel just now
            raise PeerFailed(peer, "the connection broke") from error

    async def _answer(self, peer: PeerId, addresses: Sequence[str], method: str, question: bytes) -> bytes:
        """An answer in parts, whole. It may be long, but all of them but the last are as long as a part can be."""
        whole, least_bytes = bytearray(), limits.PART_BYTES
        async with self._stream(peer, addresses, method, exchange=False, least_bytes=least_bytes) as (
            stream,
            progress,
        ):
            await stream.write(question)
            await stream.done_writing()
            while (part := await stream.read_as(lambda raw: wire.decode(Part, raw))) is not None:
                if not part.data or len(whole) + len(part.data) > limits.FRAME_BYTES:
                    raise PeerFailed(peer, f"its answer is longer than {limits.FRAME_BYTES} bytes, or has empty parts")
                progress.came(len(part.data))
                whole += part.data
        return bytes(whole)


def _decoded(peer: PeerId, decode: Callable[[], T]) -> T:
    try:
        return decode()
    except wire.WireError as error:
        raise PeerFailed(peer, f"it sent nonsense: {error}") from error


def _fault(task: asyncio.Task[None]) -> BaseException | None:
    """What went wrong on our side in a writer; that the stream ended is for its reader to explain."""
    if not task.done() or task.cancelled():
        return None
    error = task.exception()
    return None if isinstance(error, PeerFailed) else error


class _Sinking:
    """Hands things to a sink one after the other, each while the next one is read; a context manager."""

    def __init__(
        self, sink: Callable[[bytes, bytes], Awaitable[None]], progress: Progress, in_flight: InFlight
    ) -> None:
        self._sink, self._progress, self._in_flight = sink, progress, in_flight
        self._running: asyncio.Task[None] | None = None

    async def put(self, hash_: bytes, thing: bytes, taken: int) -> None:
        """Take a thing and its bytes in flight, once the one before is done with. Raises what the sink has raised."""
        try:
            await self._done()
        except BaseException:
            self._in_flight.give_back(taken)
            raise
        self._running = asyncio.create_task(self._hand(hash_, thing, taken))

    async def __aenter__(self) -> _Sinking:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self._done()
        elif self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _done(self) -> None:
        if self._running is not None:
            with self._progress.ours():
                await self._running
            self._running = None

    async def _hand(self, hash_: bytes, thing: bytes, taken: int) -> None:
        try:
            await self._sink(hash_, thing)
        finally:
            self._in_flight.give_back(taken)
