"""A member's task, line and calls, and the leader's journal: real ones, at which whoever uses them may stand still."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coordinator.leading.ports import Journal, Observation
from coordinator.rounds.events import Committed, Opened
from coordinator.rounds.ledger import Ledger
from node.peers.grpc import GrpcLine, GrpcPeers
from node.ports import PeerFailed, RowSource
from protos import wire
from protos.messages import (
    Commit,
    Envelope,
    LeaderMessage,
    MemberMessage,
    PeerId,
    Promise,
    Proposal,
    Signed,
    StateOffer,
)
from protos.runspec import RunSpec
from tests.fakes.tiny import TinyTask

if TYPE_CHECKING:
    from tests.e2e.member import Member
    from tests.e2e.village import Village


class HaltingTask(TinyTask):
    """The village's task; its trainer stands still at the next step once its member is to halt at `training`."""

    member: Member
    loop: asyncio.AbstractEventLoop

    @classmethod
    def within(cls, member: Member, spec: RunSpec) -> HaltingTask:
        task = cls.of(spec)
        assert isinstance(task, HaltingTask)
        task.member, task.loop = member, member.village.loop
        return task

    def loss(self, ids_BL: Any) -> Any:
        reached = self.member.halts.get("training")
        if reached is not None:
            gate = self.member.gate
            self.loop.call_soon_threadsafe(reached.set)
            self.loop.call_soon_threadsafe(self.member.village.notice)
            gate.wait()
        return super().loss(ids_BL)


class WatchedLine:
    """A line on which its member may stand still."""

    def __init__(self, line: GrpcLine, member: Member) -> None:
        self._line, self._member = line, member

    async def send(self, message: MemberMessage | Signed) -> None:
        kind = type(message).__name__.lower()
        if isinstance(message, Signed):
            kind = wire.decode(Envelope, message.envelope).purpose
        await self._member.stand_if(f"before {kind}")
        await self._line.send(message)
        await self._member.stand_if(f"after {kind}")

    def messages(self) -> AsyncIterator[LeaderMessage | Signed]:
        return self._line.messages()

    def break_off(self) -> None:
        self._line._stream.cancel()

    async def close(self) -> None:
        await self._line.close()


@dataclass(frozen=True)
class Rows:
    """Rows on their way to one reducer."""

    addresses: tuple[str, ...]
    deal: bytes
    chunks: tuple[int, ...]
    source: RowSource


class WatchedPeers:
    """The real calls to others; the member may stand still in the middle of its rows."""

    def __init__(self, peers: GrpcPeers, member: Member) -> None:
        self.inner, self._member = peers, member
        self.traffic = peers.traffic
        self.lines: list[WatchedLine] = []
        self.rows: dict[PeerId, Rows] = {}  # what it was to send in the newest attempt, by reducer

    async def open_line(self, leader: PeerId, addresses: Sequence[str]) -> WatchedLine:
        self.lines.append(WatchedLine(await self.inner.open_line(leader, addresses), self._member))
        self._member.village.notice()
        return self.lines[-1]

    async def send_rows(
        self,
        peer: PeerId,
        addresses: Sequence[str],
        deal: bytes,
        chunks: Sequence[int],
        source: RowSource,
        on_receipt: Callable[[bytes], Awaitable[None]],
    ) -> None:
        if any(rows.deal != deal for rows in self.rows.values()):
            self.rows.clear()  # of an earlier attempt
        self.rows[peer] = Rows(tuple(addresses), deal, tuple(chunks), source)
        if peer in self._member.cut_off_from:
            raise PeerFailed(peer, "no route to it")
        await self._member.stand_if("rows")

        async def receipted(envelope: bytes) -> None:
            await self._member.stand_if("receipt")
            await on_receipt(envelope)

        await self.inner.send_rows(peer, addresses, deal, chunks, source, receipted)

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
        async def sunk(hash_: bytes, data: bytes) -> None:
            await self._member.stand_if(kind)
            await sink(hash_, data)

        return await self.inner.fetch(peer, addresses, kind, hashes, max_bytes, sunk, exchange=exchange)

    async def offer(self, peer: PeerId, addresses: Sequence[str], *, frozen: bool = False) -> StateOffer:
        return await self.inner.offer(peer, addresses, frozen=frozen)

    async def commits_after(
        self, peer: PeerId, addresses: Sequence[str], epoch: int, round_: int, n_most: int
    ) -> list[Commit]:
        return await self.inner.commits_after(peer, addresses, epoch, round_, n_most)

    async def ping(self, peer: PeerId, addresses: Sequence[str]) -> None:
        await self.inner.ping(peer, addresses)

    async def close(self) -> None:
        await self.inner.close()


class WatchedJournal:
    """The leader's journal; the leader may be made to stand still before or after it writes something."""

    def __init__(self, journal: Journal, village: Village) -> None:
        self._journal, self._village = journal, village

    async def persist(self, entry: Opened | Promise | Proposal) -> None:
        if isinstance(entry, Proposal):
            self._village.proposals.append(entry)
        await self._journal.persist(entry)
        await self._village.leader_stands_if(f"after {type(entry).__name__.lower()}")

    async def commit(self, effect: Committed, before: Ledger, after: Ledger) -> None:
        await self._village.leader_stands_if("before commit")
        await self._journal.commit(effect, before, after)
        self._village.commits.append(effect)
        self._village.notice()

    async def orphan(self, fork: Ledger) -> None:
        await self._journal.orphan(fork)

    def observe(self, observation: Observation) -> None:
        self._journal.observe(observation)
        self._village.observations.append(observation)
        self._village.notice()
