"""A holder that keeps rows in memory and things in files: what a node serves, without a node."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from protos.messages import ChunkHead, Commit, PeerId, StateOffer


@dataclass
class FakeHolder:
    """Everything that a test wants to set or see is an attribute."""

    folder: Path
    deal_refusal: str = ""
    row_refusals: dict[int, str] = field(default_factory=dict)  # by chunk, at its head
    verdicts: dict[int, str] = field(default_factory=dict)  # by chunk, after its check
    rows: dict[tuple[PeerId, int], bytearray] = field(default_factory=dict)
    whole: list[tuple[PeerId, int]] = field(default_factory=list)
    broken: list[tuple[PeerId, int]] = field(default_factory=list)
    deals: list[tuple[PeerId, bytes]] = field(default_factory=list)
    things: dict[tuple[str, bytes], tuple[str, int, int]] = field(default_factory=dict)
    views: dict[bytes, memoryview] = field(default_factory=dict)  # results in memory
    offer: StateOffer | None = None
    frozen: StateOffer | None = None
    busy: list[str] = field(default_factory=list)  # why the next fetches get no turn
    commits: list[Commit] = field(default_factory=list)
    checking: asyncio.Event | None = None  # where set, checks wait for it
    n_checks: int = 0

    def put(self, kind: str, hash_: bytes, data: bytes) -> None:
        path = self.folder / f"{kind}-{hash_.hex()[:16]}-{len(self.things)}"
        path.write_bytes(b"head" + data + b"tail")
        self.things[kind, hash_] = (str(path), 4, len(data))

    def admit_deal(self, caller: PeerId, deal: bytes) -> str:
        self.deals.append((caller, deal))
        return self.deal_refusal

    def admit_row(self, caller: PeerId, head: ChunkHead) -> str:
        if head.chunk in self.row_refusals:
            return self.row_refusals[head.chunk]
        self.rows[caller, head.chunk] = bytearray()
        return ""

    async def row_part(self, caller: PeerId, head: ChunkHead, offset: int, data: memoryview) -> None:
        row = self.rows[caller, head.chunk]
        if len(row) != offset:
            raise ValueError(f"part at {offset} after {len(row)} bytes")
        row += data

    async def row_done(self, caller: PeerId, head: ChunkHead) -> str:
        self.n_checks += 1
        if self.checking is not None:
            await self.checking.wait()
        if head.chunk in self.verdicts:
            return self.verdicts[head.chunk]
        self.whole.append((caller, head.chunk))
        return ""

    def receipt(self, caller: PeerId, plan: bytes, chunks: tuple[int, ...]) -> bytes:
        """Readable: the chunks' numbers."""
        return b"receipt " + b" ".join(b"%d" % chunk for chunk in chunks)

    def row_broken(self, caller: PeerId, head: ChunkHead) -> None:
        self.broken.append((caller, head.chunk))

    def locate(self, caller: PeerId, kind: str, hash_: bytes) -> tuple[str, int, int] | memoryview | None:
        return self.views[hash_] if kind == "result" and hash_ in self.views else self.things.get((kind, hash_))

    def serving(self, caller: PeerId, kind: str) -> AbstractAsyncContextManager[str]:
        return nullcontext(self.busy.pop(0) if self.busy else "")

    def state_offer(self, caller: PeerId, *, frozen: bool) -> StateOffer | None:
        return self.frozen if frozen else self.offer

    async def commits_after(self, caller: PeerId, epoch: int, round_: int, n_most: int) -> list[Commit]:
        return self.commits[:n_most]
