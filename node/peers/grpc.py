"""Calls to other nodes over gRPC: rows to reducers, things by hash, offers of state, and the leader's line."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc

from node.peers.dialing import Dialer
from node.peers.line import GrpcLine
from node.peers.stream import Stream
from node.peers.transport import NO_PROGRESS_S, Credentials, IdentityMismatch, Meter, Progress, open_call
from node.ports import PeerFailed, RowSource, Traffic
from protos import limits, services, wire
from protos.calls import Declined, OfferRequest, PingReply, PingRequest
from protos.messages import (
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
        no_progress_s: how long a call may stand still before it is given up.
        traffic: where bytes are counted; the server of this node counts in the same.
        dialer: how connections are made, for tests.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        no_progress_s: float = NO_PROGRESS_S,
        traffic: Traffic | None = None,
        dialer: Dialer | None = None,
    ) -> None:
        self.traffic = traffic if traffic is not None else Traffic()
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
            writer = asyncio.create_task(_write_rows(stream, deal, chunks, source), name=f"rows to {peer}")
            # A fault of ours must not wait for receipts that won't come.
            writer.add_done_callback(lambda task: stream.cancel() if _fault(task) else None)
            try:
                for n_receipts in range(len(chunks)):
                    answer = await stream.read_as(wire.decode_receipt_frame)
                    progress.hold()
                    match answer:
                        case None:
                            raise PeerFailed(peer, f"it ended the call after {n_receipts} of {len(chunks)} receipts")
                        case Declined(reason):
                            raise PeerFailed(peer, f"refused: {reason}")
                        case Signed(envelope):
                            await on_receipt(envelope)
                    progress.moved()
                await writer
            finally:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
                fault = _fault(writer)
                if fault is not None:
                    raise fault

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
        """Fetch things by hash, in order; what the peer lacks is returned. What the sink raises ends the fetch."""
        missing: list[bytes] = []
        for start in range(0, len(hashes), limits.HASHES):
            asked = hashes[start : start + limits.HASHES]
            async with self._stream(peer, addresses, services.EXCHANGE_FETCH_THINGS, exchange=exchange) as (
                stream,
                progress,
            ):
                await stream.write(wire.encode(Fetch(kind, tuple(asked))))
                await stream.done_writing()
                for hash_ in asked:
                    thing = await _read_thing(stream, hash_, max_bytes)
                    if thing is None:
                        missing.append(hash_)
                        continue
                    progress.hold()
                    await sink(hash_, thing)
                    progress.moved()
        return missing

    async def offer(self, peer: PeerId, addresses: Sequence[str]) -> StateOffer:
        """What state the peer holds. Raises PeerFailed, also if it holds none."""
        raw = await self._answer(peer, addresses, services.STATE_OFFER, wire.encode(OfferRequest()))
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
        self, peer: PeerId, addresses: Sequence[str], method: str, *, exchange: bool
    ) -> AsyncIterator[tuple[Stream, Progress]]:
        """A call that ends with the block, and at the latest when nothing moved for a while.

        A unary method looks the same on the wire as a stream with one message each way.
        """
        call = await self._call(peer, addresses, method)
        progress = Progress(self._no_progress_s)
        try:
            async with progress:
                yield Stream(peer, call, Meter(self.traffic, exchange=exchange), progress), progress
        except TimeoutError:
            if not progress.expired:
                raise
            raise PeerFailed(peer, f"nothing moved for {self._no_progress_s:g} s") from None
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
        """An answer in parts, whole."""
        whole = bytearray()
        async with self._stream(peer, addresses, method, exchange=False) as (stream, _):
            await stream.write(question)
            await stream.done_writing()
            while (part := await stream.read_as(lambda raw: wire.decode(Part, raw))) is not None:
                if not part.data or len(whole) + len(part.data) > limits.FRAME_BYTES:
                    raise PeerFailed(peer, f"its answer is longer than {limits.FRAME_BYTES} bytes, or has empty parts")
                whole += part.data
        return bytes(whole)


async def _write_rows(stream: Stream, deal: bytes, chunks: Sequence[int], source: RowSource) -> None:
    await stream.write(wire.encode_chunk_frame(Signed(deal)))
    await stream.wait_accepted()
    for chunk in chunks:
        head, row = source(chunk)
        await stream.write(wire.encode_chunk_frame(head))
        for start in range(0, len(row), limits.PART_BYTES):
            part = Part(bytes(row[start : start + limits.PART_BYTES]))
            await stream.write(wire.encode_chunk_frame(part))
    await stream.done_writing()


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


async def _read_thing(stream: Stream, hash_: bytes, max_bytes: int) -> bytes | None:
    """One thing of a fetch, whole; None if the peer doesn't have it."""
    head = await stream.read_as(wire.decode_fetch_frame)
    if not isinstance(head, FetchHead) or head.hash != hash_:
        raise PeerFailed(stream.peer, "it broke off a fetch, or sent what was not asked for")
    if head.n_bytes < 0:
        return None
    if head.n_bytes > max_bytes:
        raise PeerFailed(stream.peer, f"it announced {head.n_bytes} bytes where at most {max_bytes} are possible")
    thing = bytearray()
    while len(thing) < head.n_bytes:
        part = await stream.read_as(wire.decode_fetch_frame)
        if not isinstance(part, Part) or not part.data or len(thing) + len(part.data) > head.n_bytes:
            raise PeerFailed(stream.peer, f"a thing of {head.n_bytes} bytes came in other parts than announced")
        thing += part.data
    return bytes(thing)
