"""A newcomer to a network in memory, and donors that hold the same state."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from coordinator.rounds.ledger import Ledger
from node.donors import Donor, VerifyCommit, Wish
from node.serving import Turns
from node.state import StateStore
from node.transfer import Manners, fetch_state
from protos import wire
from protos.messages import Body, Commit, PeerId
from tests.fakes.holder import FakeHolder
from tests.fakes.peers import FakeNetwork, FakePeers
from tests.node.chain import peer
from tests.node.states import GRID, advance, new_store

ME = peer(99)


async def verify(peer: PeerId, addresses: Sequence[str], commit: Commit) -> Body:
    return wire.decode(Body, commit.body)


class StateHolder(FakeHolder):
    """Serves a store's state, and remembers who was asked for which chunk."""

    def __init__(self, store: StateStore) -> None:
        super().__init__(store.folder)
        self.store = store
        self.asked: list[bytes] = []
        self.lie = False
        self.turns: Turns | None = None

    def serving(self, caller: PeerId, kind: str) -> AbstractAsyncContextManager[str]:
        return self.turns.turn(caller) if self.turns is not None else super().serving(caller, kind)

    def state_offer(self, caller: PeerId, *, frozen: bool):  # type: ignore[no-untyped-def]
        return self.store.offer(frozen=frozen)

    def locate(self, caller: PeerId, kind: str, hash_: bytes) -> tuple[str, int, int] | None:
        self.asked.append(hash_)
        if self.lie:
            hash_ = self.store.current.theta_hashes[0]  # type: ignore[union-attr]
        return self.store.locate(hash_) if kind == "state" else None


class Scene:
    """A network with donors that hold the same state after one round, and a newcomer's empty store."""

    def __init__(self, folder: Path, n_donors: int) -> None:
        self.network = FakeNetwork()
        self.folder = folder
        self.donors = [peer(number) for number in range(n_donors)]
        self.holders: list[StateHolder] = []
        for number, donor in enumerate(self.donors):
            (folder / str(number)).mkdir()
            store, ledger = new_store(folder / str(number))
            name, _, commit, ledger = advance(store, ledger)
            store.apply(name, commit, ledger)
            self.holders.append(StateHolder(store))
            self.network.join(donor, self.holders[-1])
        self.peers = FakePeers(self.network, ME)
        self.liars: dict[PeerId, str] = {}
        self.store = StateStore(folder / "mine", GRID)

    def fetch(
        self,
        donors: Sequence[PeerId] | None = None,
        wish: Wish | None = None,
        verify: VerifyCommit = verify,
        **manners: Any,
    ) -> Ledger:
        asked: list[Donor] = [(donor, ()) for donor in (self.donors if donors is None else donors)]
        return asyncio.run(self._fetch(asked, verify, wish, Manners(**{"lied": self.lied, **manners})))

    async def _fetch(self, asked: list[Donor], verify: VerifyCommit, wish: Wish | None, manners: Manners) -> Ledger:
        async with asyncio.timeout(60):
            return await fetch_state(self.peers, asked, self.store, verify, wish, manners)

    def lied(self, peer: PeerId, why: str) -> None:
        self.liars[peer] = why

    def check(self) -> None:
        theirs, mine = self.holders[0].store.current, self.store.current
        assert theirs is not None
        assert mine is not None
        assert (mine.commit, mine.ledger, mine.theta_hashes) == (theirs.commit, theirs.ledger, theirs.theta_hashes)
        assert mine.theta.read_bytes() == theirs.theta.read_bytes()
        assert mine.momentum.read_bytes() == theirs.momentum.read_bytes()
        again = StateStore(self.store.folder, GRID)
        assert again.open() == []
        assert again.current == mine
        assert not self.store.incoming.exists()
