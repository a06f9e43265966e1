"""Fetching the full state: from several donors, in spite of those that vanish, lie or lag, and resumed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aggregation.digest import results_root
from coordinator.rounds.ledger import Ledger
from node.donors import StateUnavailable, fetch_state
from node.errors import DiskFull
from node.state import StateStore
from protos import wire
from protos.messages import Body, Commit, PeerId
from tests.fakes.holder import FakeHolder
from tests.fakes.peers import FakeNetwork, FakePeers, Fault
from tests.node.chain import peer
from tests.node.test_state import GRID, THETA, advance, new_store

ME = peer(99)


def verify(commit: Commit) -> Body:
    return wire.decode(Body, commit.body)


class StateHolder(FakeHolder):
    """Serves a store's state, and remembers who was asked for which chunk."""

    def __init__(self, store: StateStore) -> None:
        super().__init__(store.folder)
        self.store = store
        self.asked: list[bytes] = []
        self.lie = False

    def state_offer(self, caller: PeerId):  # type: ignore[no-untyped-def]
        return self.store.offer()

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
        self.store = StateStore(folder / "mine", GRID)

    def fetch(self, donors: Sequence[PeerId] | None = None, **options: Callable[..., object]) -> Ledger:
        asked = [(donor, ()) for donor in (self.donors if donors is None else donors)]
        return asyncio.run(self._fetch(asked, **options))

    async def _fetch(self, asked: Sequence[tuple[PeerId, Sequence[str]]], **options: Callable[..., object]) -> Ledger:
        async with asyncio.timeout(10):
            given = {"verify": verify, **options}
            return await fetch_state(self.peers, asked, self.store, **given)  # type: ignore[arg-type]

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


def test_the_state_is_shared_out_over_donors(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 2)
    told: list[tuple[int, int]] = []
    ledger = scene.fetch(progress=lambda done, of: told.append((done, of)))
    assert ledger.round == 1
    scene.check()
    assert all(holder.asked for holder in scene.holders)
    asked = [hash_ for holder in scene.holders for hash_ in holder.asked]
    assert len(asked) == len(set(asked)) == 6
    assert told[0] == (0, 6)
    assert told[-1] == (6, 6)


def test_momenta_of_zeros_do_not_travel(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    store, _ = new_store(tmp_path / "d")  # commit 0: all momenta are zero
    holder = StateHolder(store)
    network = FakeNetwork()
    network.join(peer(0), holder)
    mine = StateStore(tmp_path / "mine", GRID)
    asyncio.run(fetch_state(FakePeers(network, ME), [(peer(0), ())], mine, verify))
    assert mine.current is not None
    assert len(holder.asked) == 3  # θ; momenta of zeros are what a new file holds
    assert np.array_equal(np.fromfile(mine.current.theta, np.float32), THETA)


@pytest.mark.parametrize("fault", [Fault(drop=True), Fault(stall=True), Fault(break_at_byte=9000)])
def test_a_donor_that_fails_is_made_up_for_by_others(tmp_path: Path, fault: Fault) -> None:
    scene = Scene(tmp_path, 3)
    scene.network.faults[scene.donors[1]] = fault
    scene.fetch()
    scene.check()


def test_a_donor_that_sends_other_bytes_is_given_up(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 2)
    scene.holders[0].lie = True
    scene.fetch()
    scene.check()
    scene.store = StateStore(tmp_path / "alone", GRID)
    with pytest.raises(StateUnavailable, match="doesn't have its hash"):
        scene.fetch(scene.donors[:1])


def test_what_was_fetched_before_a_break_is_not_fetched_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 2)
    scene.network.faults[scene.donors[0]] = Fault(break_at_byte=9000)
    told: list[tuple[int, int]] = []
    with pytest.raises(StateUnavailable, match="it broke off"):
        scene.fetch(scene.donors[:1], progress=lambda done, of: told.append((done, of)))
    n_done = told[-1][0]
    assert 0 < n_done < 6
    assert scene.store.current is None
    scene.store = StateStore(scene.store.folder, GRID)
    assert scene.store.open() == []
    scene.fetch(scene.donors[1:])
    scene.check()
    assert len(scene.holders[1].asked) == 6 - n_done


def test_the_newest_state_that_holds_up_is_taken(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 3)
    newer = scene.holders[0].store
    name, _, commit, ledger = advance(newer, newer.current.ledger, seed=9)  # type: ignore[union-attr]
    newer.apply(name, commit, ledger)
    assert scene.fetch().round == 2
    scene.check()
    assert scene.holders[1].asked == []


def test_an_offer_whose_commit_is_not_certified_is_passed_over(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 2)

    def refuse(commit: Commit) -> Body:
        raise ValueError("no quorum signed it")

    with pytest.raises(StateUnavailable, match="no quorum signed it"):
        scene.fetch(verify=refuse)
    assert scene.store.current is None


def test_an_offer_that_contradicts_itself_is_passed_over(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 1)
    offer = scene.holders[0].store.offer()
    assert offer is not None
    other_ledger = offer.ledger.replace(b'"cursor":0', b'"cursor":1')
    hashes = (b"x" * 32,)
    for bad, why in (
        (replace(offer, commit=replace(offer.commit, result_hashes=hashes)), "result hashes are not those"),
        (replace(offer, theta_hashes=offer.theta_hashes[:-1]), "chunks"),
        (replace(offer, theta_hashes=offer.theta_hashes[::-1]), "digest"),
        (replace(offer, ledger=b"{}"), "not a ledger"),
        (replace(offer, ledger=other_ledger), "ledger is not the one"),
    ):
        scene.holders[0].state_offer = lambda caller, bad=bad: bad  # type: ignore[method-assign,misc]
        with pytest.raises(StateUnavailable, match=why):
            scene.fetch()


@pytest.mark.parametrize("first", [0, 1])
def test_the_hashes_of_the_last_results_come_from_whichever_donor_has_them(tmp_path: Path, first: int) -> None:
    """They stand beside the commit, so that anyone may leave them out; without them nothing can be reduced."""
    scene, hashes = Scene(tmp_path, 2), (b"x" * 32, b"y" * 32)
    for number, holder in enumerate(scene.holders):
        held = holder.store.current
        assert held is not None
        name, _, commit, ledger = advance(holder.store, held.ledger, results_root=results_root(hashes))
        holder.store.apply(name, replace(commit, result_hashes=() if number == first else hashes), ledger)
    assert scene.fetch().round == 2
    assert scene.store.current is not None
    assert scene.store.current.commit.result_hashes == hashes


def test_nobody_to_ask_and_nobody_with_a_state(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 0)
    with pytest.raises(StateUnavailable, match="nobody was asked"):
        scene.fetch()
    scene.network.join(peer(5), FakeHolder(tmp_path))
    with pytest.raises(StateUnavailable, match="holds no state"):
        scene.fetch([peer(5)])


def test_a_donor_that_moves_on_in_the_middle_is_named(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 1)
    scene.holders[0].locate = lambda caller, kind, hash_: None  # type: ignore[method-assign]
    with pytest.raises(StateUnavailable, match="holds this state no longer"):
        scene.fetch()


def test_too_little_room_is_said_before_anything_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, 1)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(DiskFull, match="1000 bytes are free"):
        scene.fetch()
    assert scene.holders[0].asked == []


def test_a_fault_of_ours_comes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(tmp_path, 2)

    def broken(*_: object) -> Awaitable[bool]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("node.donors.write_all", broken)
    with pytest.raises(DiskFull):
        scene.fetch()
