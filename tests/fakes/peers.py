"""A network in memory: calls go straight to the other node's holder, addresses are ignored, faults are injected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from node.ports import Holder, PeerBusy, PeerFailed, RowSource, Traffic
from protos import wire
from protos.messages import (
    ChunkHead,
    Commit,
    FetchHead,
    LeaderMessage,
    MemberMessage,
    Part,
    PeerId,
    Signed,
    StateOffer,
)

PART_BYTES = 4096


@dataclass
class Fault:
    """What happens to calls to a peer: it can't be reached, nothing moves, or streams break after so many bytes."""

    drop: bool = False
    stall: bool = False
    break_at_byte: int | None = None


@dataclass
class FakeNetwork:
    no_progress_s: float = 0.05
    holders: dict[PeerId, Holder] = field(default_factory=dict)
    leaders: dict[PeerId, asyncio.Queue[LeaderEnd]] = field(default_factory=dict)
    faults: dict[PeerId, Fault] = field(default_factory=dict)
    allowed: Callable[[PeerId, PeerId], str] = lambda caller, to: ""

    def join(self, peer: PeerId, holder: Holder) -> FakePeers:
        self.holders[peer] = holder
        return FakePeers(self, peer)

    def lead(self, peer: PeerId) -> asyncio.Queue[LeaderEnd]:
        """Accept lines as a leader: each one that is opened comes out of the queue."""
        return self.leaders.setdefault(peer, asyncio.Queue())


class LeaderEnd:
    """The leader's end of one line."""

    def __init__(self, member: PeerId, heard: asyncio.Queue[Any], said: asyncio.Queue[Any]) -> None:
        self.member = member
        self._heard = heard
        self._said = said

    async def hear(self) -> MemberMessage | Signed | None:
        """The member's next message; None once it has closed the line."""
        message: MemberMessage | Signed | None = await self._heard.get()
        return message

    def say(self, message: LeaderMessage | Signed) -> None:
        self._said.put_nowait(wire.decode_leader_frame(wire.encode_leader_frame(message)))

    def close(self) -> None:
        self._said.put_nowait(None)

    def break_off(self) -> None:
        self._said.put_nowait(PeerFailed("leader", "it broke off"))


class FakeLine:
    def __init__(self, leader: PeerId, heard: asyncio.Queue[Any], said: asyncio.Queue[Any]) -> None:
        self._leader = leader
        self._heard = heard
        self._said = said
        self._broken: PeerFailed | None = None

    async def send(self, message: MemberMessage | Signed) -> None:
        frame = wire.encode_member_frame(message)
        if self._broken is not None:
            raise self._broken
        self._heard.put_nowait(wire.decode_member_frame(frame))

    async def messages(self) -> AsyncIterator[LeaderMessage | Signed]:
        while (message := await self._said.get()) is not None:
            if isinstance(message, PeerFailed):
                self._broken = message
                raise message
            yield message
        self._broken = PeerFailed(self._leader, "the leader closed the line")

    async def close(self) -> None:
        if self._broken is None:
            self._broken = PeerFailed(self._leader, "the line is closed")
            self._heard.put_nowait(None)


class FakePeers:
    """The port `Peers` on a FakeNetwork."""

    def __init__(self, network: FakeNetwork, me: PeerId) -> None:
        self.traffic = Traffic()
        self._network = network
        self._me = me

    async def open_line(self, leader: PeerId, addresses: Sequence[str]) -> FakeLine:
        async with self._call(leader):
            if leader not in self._network.leaders:
                raise PeerFailed(leader, "it leads nothing")
            heard: asyncio.Queue[Any] = asyncio.Queue()
            said: asyncio.Queue[Any] = asyncio.Queue()
            self._network.leaders[leader].put_nowait(LeaderEnd(self._me, heard, said))
            return FakeLine(leader, heard, said)

    async def send_rows(
        self,
        peer: PeerId,
        addresses: Sequence[str],
        deal: bytes,
        chunks: Sequence[int],
        source: RowSource,
        on_receipt: Callable[[bytes], Awaitable[None]],
    ) -> None:
        async with self._call(peer) as call:
            holder = call.holder
            call.count(deal, exchange=True)
            if reason := holder.admit_deal(self._me, deal):
                raise PeerFailed(peer, f"refused: {reason}")
            for chunk in chunks:
                head, row = source(chunk)
                call.count(wire.encode_chunk_frame(head), exchange=True)
                if reason := holder.admit_row(self._me, head):
                    raise PeerFailed(peer, f"refused: {reason}")
                await self._row(call, holder, head, row)
                if reason := await holder.row_done(self._me, head):
                    raise PeerFailed(peer, f"refused: {reason}")
                envelope = holder.receipt(self._me, head.plan, (chunk,))
                call.count(envelope, exchange=True, back=True)
                await on_receipt(envelope)

    async def _row(self, call: _Call, holder: Holder, head: ChunkHead, row: memoryview) -> None:
        offset = 0
        try:
            while offset < min(len(row), head.n_bytes):
                data = bytes(row[offset : offset + PART_BYTES])
                call.count(wire.encode_chunk_frame(Part(data)), exchange=True)
                if offset + len(data) > head.n_bytes:
                    raise PeerFailed(call.peer, f"refused: chunk {head.chunk} is too long")
                await holder.row_part(self._me, head, offset, memoryview(data))
                offset += len(data)
            if len(row) > head.n_bytes:
                raise wire.WireError("a part where a chunk's head is needed")
            if offset < head.n_bytes:
                raise PeerFailed(call.peer, f"refused: chunk {head.chunk} is too short")
        except (PeerFailed, asyncio.CancelledError):
            holder.row_broken(self._me, head)
            raise
        except wire.WireError as error:
            raise PeerFailed(call.peer, f"refused: {error}") from error

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
        missing: list[bytes] = []
        async with self._call(peer) as call, call.holder.serving(self._me, kind) as busy:
            if busy:
                raise PeerBusy(peer, f"busy: {busy}")
            for hash_ in hashes:
                place = call.holder.locate(self._me, kind, hash_)
                if place is None:
                    missing.append(hash_)
                    continue
                n_bytes = len(place) if isinstance(place, memoryview) else place[2]
                if n_bytes > max_bytes:
                    raise PeerFailed(peer, f"it announced {n_bytes} bytes where at most {max_bytes} are possible")
                call.count(wire.encode_fetch_frame(FetchHead(hash_, n_bytes)), exchange=exchange, back=True)
                data = _bytes_of(place)
                for start in range(0, n_bytes, PART_BYTES):
                    call.count(
                        wire.encode_fetch_frame(Part(data[start : start + PART_BYTES])), exchange=exchange, back=True
                    )
                await sink(hash_, data)
        return missing

    async def offer(self, peer: PeerId, addresses: Sequence[str], *, frozen: bool = False) -> StateOffer:
        async with self._call(peer) as call:
            offer = call.holder.state_offer(self._me, frozen=frozen)
            if offer is None:
                raise PeerFailed(peer, "refused: holds no state")
            return offer

    async def commits_after(
        self, peer: PeerId, addresses: Sequence[str], epoch: int, round_: int, n_most: int
    ) -> list[Commit]:
        async with self._call(peer) as call:
            return await call.holder.commits_after(self._me, epoch, round_, n_most)

    async def ping(self, peer: PeerId, addresses: Sequence[str]) -> None:
        async with self._call(peer):
            pass

    async def close(self) -> None:
        pass

    def _call(self, peer: PeerId) -> _Call:
        return _Call(self._network, self.traffic, self._me, peer)


def _bytes_of(place: tuple[str, int, int] | memoryview) -> bytes:
    if isinstance(place, memoryview):
        return bytes(place)
    path, offset, n_bytes = place
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(n_bytes)


class _Call:
    """One call, with the faults of its peer."""

    def __init__(self, network: FakeNetwork, traffic: Traffic, me: PeerId, peer: PeerId) -> None:
        self.peer = peer
        self._network = network
        self._traffic = traffic
        self._me = me
        self._fault = network.faults.get(peer, Fault())
        self._n_bytes = 0

    @property
    def holder(self) -> Holder:
        return self._network.holders[self.peer]

    async def __aenter__(self) -> _Call:
        known = self.peer in self._network.holders or self.peer in self._network.leaders
        if self._fault.drop or not known:
            raise PeerFailed(self.peer, "connection refused")
        if self._fault.stall:
            await asyncio.sleep(self._network.no_progress_s)
            raise PeerFailed(self.peer, f"nothing moved for {self._network.no_progress_s:g} s")
        if reason := self._network.allowed(self._me, self.peer):
            raise PeerFailed(self.peer, f"refused: {reason}")
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def count(self, raw: bytes, *, exchange: bool, back: bool = False) -> None:
        self._n_bytes += len(raw)
        at = self._fault.break_at_byte
        if at is not None and self._n_bytes > at:
            raise PeerFailed(self.peer, "it broke off")
        if back:
            self._traffic.received += len(raw)
            self._traffic.exchange_received += len(raw) * exchange
        else:
            self._traffic.sent += len(raw)
            self._traffic.exchange_sent += len(raw) * exchange
