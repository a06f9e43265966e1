"""Members that lay in training data, each by a clock that stands still."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from coordinator.rounds.ledger import Ledger
from node.blocks import PieceStore
from node.sources import Source
from node.spreading import places_of, stock_order
from node.stocking import IDLE_S, Stocker
from protos.messages import PeerId, Seat
from protos.runspec import RunSpec
from tests.coordinator.made import genesis
from tests.node.chain import peer
from tests.node.pieces import Run, new_store

N_TRAIN_PIECES = 13
PIECE_BYTES = 80
PLENTY, FREE = 2**40, 2**45
MEMBERS = tuple(peer(n) for n in range(10, 15))


def books(cursor: int, members: Sequence[PeerId]) -> Ledger:
    return replace(genesis()[2], cursor=cursor, seats=tuple(Seat(member, (), 1) for member in members))


@dataclass
class Stock:
    """One member that lays in; its clock stands still unless it is told to go on."""

    spec: RunSpec
    store: PieceStore
    me: PeerId = MEMBERS[0]
    members: tuple[PeerId, ...] = MEMBERS
    cache_bytes: int = PLENTY
    free_bytes: int = FREE
    quiet: bool = True
    cursor: int = 0
    now_s: float = 1000.0
    said: list[str] = field(default_factory=list)
    joined: bool = True

    def __post_init__(self) -> None:
        self.stocker = Stocker(
            self.me, self.store, spec=lambda: self.spec, ledger=self._books,
            reachable=lambda: [member for member in self.members if member != self.me], quiet=lambda: self.quiet,
            cache_bytes=self.cache_bytes, free_bytes=lambda: self.free_bytes, seconds=lambda: self.now_s,
            say=self.said.append,
        )  # fmt: skip

    def _books(self) -> Ledger | None:
        return books(self.cursor, self.members) if self.joined else None

    @property
    def held(self) -> list[int]:
        return [piece for piece in range(N_TRAIN_PIECES) if self.store.files.have(piece)]

    async def turns(self, n: int) -> float:
        """So many turns; how long to rest after the last."""
        rest_s = 0.0
        for _ in range(n):
            rest_s = await self.stocker.turn()
        return rest_s

    async def until_idle(self) -> None:
        for _ in range(100):
            if await self.stocker.turn() == IDLE_S:
                return
        raise AssertionError(self.said)

    def order(self) -> list[int]:
        places_P = places_of(self.store.files.hashes[:N_TRAIN_PIECES])
        order: list[int] = stock_order(self.spec, self.cursor, places_P, self.me, self.members).tolist()
        return order


def stock_of(run: Run, folder: Path, *sources: Source, **settings: object) -> Stock:
    return Stock(run[0], new_store(folder / "mine", run[0], *sources), **settings)  # type: ignore[arg-type]
