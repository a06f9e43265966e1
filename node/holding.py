"""What this node serves to others: rows into the current exchange, and states, results and data out of its files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext

from node.blocks import PieceStore
from node.commits import CommitLog
from node.exchanging import Exchanging
from node.results import ResultsStore
from node.serving import Turns
from node.state import StateStore
from protos.messages import ChunkHead, Commit, PeerId, StateOffer


class NodeHolder:
    """The port `Holder` over this node's stores.

    Args:
        exchanging: gives the attempt that runs now, if any.
        wait_s: how long who fetches the state waits for its turn.
    """

    def __init__(
        self,
        store: StateStore,
        results: ResultsStore,
        pieces: PieceStore,
        commits: CommitLog,
        exchanging: Callable[[], Exchanging | None],
        *,
        wait_s: float,
    ) -> None:
        self._store, self._results, self._pieces, self._commits = store, results, pieces, commits
        self._exchanging = exchanging
        self._states = Turns(wait_s=wait_s)

    def admit_deal(self, caller: PeerId, deal: bytes) -> str:
        running = self._exchanging()
        return running.admit_deal(deal, caller) if running else "no exchange runs here now"

    def admit_row(self, caller: PeerId, head: ChunkHead) -> str:
        running = self._exchanging()
        return running.admit_row(caller, head) if running else "no exchange runs here now"

    async def row_part(self, caller: PeerId, head: ChunkHead, offset: int, data: memoryview) -> None:
        if (running := self._of(head.plan)) is not None:
            await running.put(caller, head.chunk, offset, data)

    async def row_done(self, caller: PeerId, head: ChunkHead) -> str:
        running = self._of(head.plan)
        return await running.row_done(caller, head.chunk) if running else "the attempt is over"

    def receipt(self, caller: PeerId, plan: bytes, chunks: tuple[int, ...]) -> bytes:
        running = self._of(plan)
        return running.receipt(caller, chunks) if running else b""

    def row_broken(self, caller: PeerId, head: ChunkHead) -> None:
        if (running := self._of(head.plan)) is not None:
            running.row_broken(caller, head.chunk)

    def locate(self, caller: PeerId, kind: str, hash_: bytes) -> tuple[str, int, int] | memoryview | None:
        match kind:
            case "piece":
                return self._pieces.locate(hash_)
            case "result":
                return self._results.find(hash_)
            case "state":
                return self._store.locate(hash_)
            case _:
                return None

    def serving(self, caller: PeerId, kind: str) -> AbstractAsyncContextManager[str]:
        """States go out in turns; results, which a round waits for, and pieces at once."""
        return self._states.turn(caller) if kind == "state" else nullcontext("")

    def state_offer(self, caller: PeerId, *, frozen: bool) -> StateOffer | None:
        return self._store.offer(frozen=frozen)

    async def commits_after(self, caller: PeerId, epoch: int, round_: int, n_most: int) -> list[Commit]:
        held = self._store.current
        if held is None or n_most < 1:
            return []
        return await asyncio.to_thread(self._commits.after, held.head, epoch, round_, n_most)

    def _of(self, plan: bytes) -> Exchanging | None:
        running = self._exchanging()
        return running if running is not None and running.plan_hash == plan else None
