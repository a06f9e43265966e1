"""What the member's driver needs of the outside: ports, each with a fake that passes the same contract suite."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from protos.messages import (
    ChunkHead,
    Commit,
    Heartbeat,
    LeaderMessage,
    MemberMessage,
    PeerId,
    Record,
    Signed,
    StateOffer,
)

__all__ = ["Heartbeat", "Holder", "Line", "Peers", "Records", "RowSource", "Traffic"]


class PeerFailed(Exception):
    """A peer could not be reached, stalled, or broke off: data for the driver, not a fault of ours."""

    def __init__(self, peer: PeerId | str, why: str) -> None:
        super().__init__(f"{peer}: {why}")
        self.peer = peer
        self.why = why


class PeerBusy(PeerFailed):
    """A peer has no room for this call now: ask later."""


class Line(Protocol):
    """The stream to the leader that this member opened."""

    async def send(self, message: MemberMessage | Signed) -> None:
        """Queue a message. Raises PeerFailed once the line is broken."""

    def messages(self) -> AsyncIterator[LeaderMessage | Signed]:
        """What the leader says, in order; ends when it closes, raises PeerFailed when it breaks."""

    async def close(self) -> None: ...


@dataclass(slots=True)
class Traffic:
    """Bytes of messages counted at the transport: exchange streams apart from all."""

    sent: int = 0
    received: int = 0
    exchange_sent: int = 0
    exchange_received: int = 0


RowSource = Callable[[int], tuple[ChunkHead, memoryview]]
"""Gives the head and the bytes of one of my chunks."""


class Peers(Protocol):
    """Calls to other nodes. Every call has a no-progress limit and raises PeerFailed."""

    traffic: Traffic

    async def open_line(self, leader: PeerId, addresses: Sequence[str]) -> Line: ...

    async def send_rows(
        self,
        peer: PeerId,
        addresses: Sequence[str],
        deal: bytes,
        chunks: Sequence[int],
        source: RowSource,
        on_receipt: Callable[[bytes], Awaitable[None]],
    ) -> None:
        """Stream chunks; `on_receipt` gets each receipt's envelope, which may be for several chunks.

        Returns when the peer, which answers every row first, has ended the call. What its receipts cover is for the
        caller to see. A refusal by the peer raises PeerFailed with its reason.
        """

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
        """Fetch things by hash; `sink(hash, data)` gets each whole. Returns the hashes that the peer doesn't have.

        `max_bytes` bounds each thing before memory is spent. `exchange` says in which traffic it counts.
        """

    async def offer(self, peer: PeerId, addresses: Sequence[str], *, frozen: bool = False) -> StateOffer:
        """What the peer holds: its current state, or its frozen snapshot."""

    async def commits_after(
        self,
        peer: PeerId,
        addresses: Sequence[str],
        epoch: int,
        round_: int,
        n_most: int,
    ) -> list[Commit]: ...

    async def ping(self, peer: PeerId, addresses: Sequence[str]) -> None: ...

    async def close(self) -> None: ...


class Holder(Protocol):
    """What this node serves to others; its server calls it. Methods may be called for any peer with a certificate."""

    def admit_deal(self, caller: PeerId, deal: bytes) -> str:
        """Whether a sender may stream rows for this deal envelope: the reason why not, or an empty string."""

    def admit_row(self, caller: PeerId, head: ChunkHead) -> str:
        """Before a byte of a row is taken: the reason why not, or an empty string."""

    async def row_part(self, caller: PeerId, head: ChunkHead, offset: int, data: memoryview) -> None:
        """The next bytes of a row; they may be read until `row_done` or, before the last ones, until this returns."""

    async def row_done(self, caller: PeerId, head: ChunkHead) -> str:
        """The row is whole: wait for its check. The reason of a refusal, or an empty string: a receipt is due."""

    def receipt(self, caller: PeerId, plan: bytes, chunks: tuple[int, ...]) -> bytes:
        """The envelope of a receipt for rows of this caller that `row_done` has passed; empty once that is over."""

    def row_broken(self, caller: PeerId, head: ChunkHead) -> None: ...

    def locate(self, caller: PeerId, kind: str, hash_: bytes) -> tuple[str, int, int] | memoryview | None:
        """Where a thing lies: path, offset, length on disk, or its bytes; None if not held or not for this caller."""

    def serving(self, caller: PeerId, kind: str) -> AbstractAsyncContextManager[str]:
        """A turn to be served things of a kind; its value is why there is none now, or an empty string."""

    def state_offer(self, caller: PeerId, *, frozen: bool) -> StateOffer | None: ...

    async def commits_after(self, caller: PeerId, epoch: int, round_: int, n_most: int) -> list[Commit]: ...


class Records(Protocol):
    """The DHT: each owner's addresses."""

    async def publish(self, record: Record) -> None: ...

    async def find(self, peer: PeerId, min_sequence: int) -> Record | None:
        """The freshest valid record of a peer, at least `min_sequence`; None if it is not found in time."""

    @property
    def alone(self) -> bool:
        """Whether no other node of the DHT is known."""

    async def join(self, bootstrap: Sequence[str]) -> bool:
        """Get to know nodes that are in the DHT by their multiaddresses; whether one of them answered."""

    def addresses(self) -> tuple[str, ...]:
        """Multiaddresses that others can bootstrap from."""

    async def dial_out_only(self) -> None:
        """Others can't connect to this node: tell no address, and keep nothing that they would look for."""

    async def close(self) -> None: ...
