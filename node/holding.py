"""What this node serves to others: rows into the current exchange, and states, results and data out of its files."""

from __future__ import annotations

from collections.abc import Callable

from node.blocks import PieceStore
from node.exchanging import Exchanging
from node.results import ResultsStore
from node.state import StateStore
from protos.messages import ChunkHead, Commit, PeerId, StateOffer


class NodeHolder:
    """The port `Holder` over this node's stores. `exchanging` is the attempt that runs now, if any."""

    def __init__(
        self,
        store: StateStore,
        results: ResultsStore,
        pieces: PieceStore,
        exchanging: Callable[[], Exchanging | None],
    ) -> None:
        self._store, self._results, self._pieces, self._exchanging = store, results, pieces, exchanging

    def admit_deal(self, caller: PeerId, deal: bytes) -> str:
        running = self._exchanging()
        return running.admit_deal(deal) if running else "no exchange runs here now"

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

    def state_offer(self, caller: PeerId) -> StateOffer | None:
        return self._store.offer()

    def commits_after(self, caller: PeerId, epoch: int, round_: int, n_most: int) -> list[Commit]:
        held = self._store.current
        newer = held is not None and (held.ledger.epoch, held.ledger.round) > (epoch, round_)
        return [held.commit] if held is not None and newer and n_most > 0 else []

    def _of(self, plan: bytes) -> Exchanging | None:
        running = self._exchanging()
        return running if running is not None and running.plan_hash == plan else None
