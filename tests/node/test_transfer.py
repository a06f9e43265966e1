"""Fetching the full state: from several donors, in spite of those that vanish, lie, lag or are busy, and resumed."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregation.digest import results_root, state_chunk_hash
from coordinator.rounds.ledger import Ledger
from node import transfer
from node.donors import Donor, StateUnavailable, VerifyCommit, Wish, spread
from node.errors import DiskFull
from node.serving import Turns
from node.state import StateStore
from node.transfer import Manners, StateMoves, fetch_state
from protos import wire
from protos.messages import Body, Commit, PeerId
from tests.fakes.holder import FakeHolder
from tests.fakes.peers import FakeNetwork, FakePeers, Fault
from tests.node.chain import peer
from tests.node.test_state import GRID, THETA, advance, new_store

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
    assert list(scene.liars) == [scene.donors[0]]
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


@pytest.mark.parametrize("others", [0, 1], ids=["the only one", "one of two"])
@pytest.mark.parametrize("n_given", [0, 1, 3, 5], ids=lambda n: f"after {n} of 6 chunks")
def test_a_donor_that_dies_at_any_point_leaves_a_whole_state_or_none(tmp_path: Path, n_given: int, others: int) -> None:
    scene = Scene(tmp_path, 1 + others)
    dies, holder = Fault(), scene.holders[0]
    scene.network.faults[scene.donors[0]] = dies
    locate = holder.locate

    def last_words(caller: PeerId, kind: str, hash_: bytes) -> tuple[str, int, int] | None:
        if len(holder.asked) == n_given:
            dies.break_at_byte, dies.drop = 0, True  # all its streams end, and no call comes through any more
        return locate(caller, kind, hash_)

    holder.locate = last_words  # type: ignore[method-assign]
    if others:
        scene.fetch()
        scene.check()
        return
    with pytest.raises(StateUnavailable, match="broke off"):
        scene.fetch()
    assert scene.store.current is None
    scene.store = StateStore(scene.store.folder, GRID)
    assert scene.store.open() == []
    assert scene.store.current is None, "nothing is half loaded, after a restart neither"
    dies.break_at_byte, dies.drop, holder.locate = None, False, locate  # type: ignore[method-assign]
    n_before = len(holder.asked)
    scene.fetch()
    scene.check()
    assert len(holder.asked) - n_before <= 6 - n_given + 2, "what was whole is not fetched again: two streams broke"


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

    async def refuse(peer: PeerId, addresses: Sequence[str], commit: Commit) -> Body:
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
        (replace(offer, ledger=b"{}"), "ledger is not the one"),  # it is not even read
        (replace(offer, ledger=other_ledger), "ledger is not the one"),
    ):
        scene.holders[0].state_offer = lambda caller, frozen, bad=bad: bad  # type: ignore[method-assign,misc]
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
    with pytest.raises(StateMoves, match="holds this state no longer"):
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

    monkeypatch.setattr("node.transfer.write_all", broken)
    with pytest.raises(DiskFull):
        scene.fetch()


# -- snapshots -----------------------------------------------------------------------------------------------------


def test_a_state_that_moves_on_is_given_up_for_the_snapshot(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 2)
    for holder in scene.holders:
        holder.store.freeze()
        name, _, commit, ledger = advance(holder.store, holder.store.current.ledger, seed=9)  # type: ignore[union-attr]
        holder.store.apply(name, commit, ledger)
    with pytest.raises(StateMoves, match="has moved on"):
        scene.fetch(moves=lambda share: share > 0.1)
    assert scene.store.current is None
    ledger = scene.fetch(wish=Wish(frozen=True), moves=lambda share: True)  # a snapshot stands still
    assert ledger.round == 1
    assert scene.store.current is not None
    assert scene.store.current.digest == scene.holders[0].store.frozen.digest


def test_a_state_that_is_too_old_is_not_taken_whatever_its_kind(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 1)
    scene.holders[0].store.freeze()
    with pytest.raises(StateUnavailable, match="none of a later round than 1 is offered"):
        scene.fetch(wish=Wish(newer_than=1, frozen=True))
    assert scene.fetch(wish=Wish(newer_than=0)).round == 1


def test_where_nobody_has_a_snapshot_the_current_state_will_do(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 2)
    assert scene.fetch(wish=Wish(frozen=True)).round == 1
    scene.check()


def test_what_is_begun_is_gone_on_with_as_long_as_somebody_has_it(tmp_path: Path) -> None:
    """After a restart nobody knows any more why the snapshot was chosen: the chunks that are here say it."""
    scene = Scene(tmp_path, 2)
    scene.holders[0].store.freeze()
    scene.network.faults[scene.donors[0]] = Fault(break_at_byte=9000)
    with pytest.raises(StateUnavailable):
        scene.fetch(scene.donors[:1], Wish(frozen=True))
    del scene.network.faults[scene.donors[0]]
    n_before = len(scene.holders[0].asked)
    for holder in scene.holders:
        name, _, commit, ledger = advance(holder.store, holder.store.current.ledger, seed=9)  # type: ignore[union-attr]
        holder.store.apply(name, commit, ledger)
    scene.store = StateStore(scene.store.folder, GRID)
    assert scene.store.open() == []
    assert scene.fetch().round == 1
    assert len(scene.holders[0].asked) - n_before < 6
    assert scene.fetch().round == 2  # what was begun then is done


@settings(max_examples=25, deadline=None)
@given(breaks=st.lists(st.integers(100, 60_000), max_size=6), n_donors=st.integers(1, 3))
def test_however_often_it_is_broken_off_no_chunk_comes_twice(breaks: list[int], n_donors: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder), n_donors)
        arrived: list[bytes] = []
        for at in breaks:
            for donor in scene.donors:
                scene.network.faults[donor] = Fault(break_at_byte=at)
            with suppress(StateUnavailable):
                scene.fetch(progress=lambda done, of: arrived.append(b""))
            scene.store = StateStore(scene.store.folder, GRID)
            scene.store.open()
            if scene.store.current is not None:
                break
        scene.network.faults.clear()
        written: list[bytes] = []
        whole = transfer._write_chunk

        def write(store: StateStore, places: Any, hash_: bytes, data: bytes) -> bool:
            written.append(hash_)
            return whole(store, places, hash_, data)

        missing = _missing(scene)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfer, "_write_chunk", write)
            if scene.store.current is None:
                scene.fetch()
        assert sorted(written) == sorted(missing)
        scene.check()


def _missing(scene: Scene) -> list[bytes]:
    """Hashes of the chunks that lie nowhere in the newcomer's folder."""
    held = scene.holders[0].store.current
    assert held is not None
    if scene.store.current is not None:
        return []
    there: list[bytes] = []
    for name, hashes in (("theta.bin", held.theta_hashes), ("momentum.bin", held.momentum_hashes)):
        path = scene.store.incoming / name
        values = np.fromfile(path, np.float32) if path.exists() else np.zeros(0, np.float32)
        for chunk, hash_ in enumerate(hashes):
            start, stop = GRID.bounds(chunk)
            if len(values) >= stop and state_chunk_hash(values[start:stop]) == hash_:
                there.append(hash_)
    return [hash_ for hash_ in (*held.theta_hashes, *held.momentum_hashes) if hash_ not in there]


# -- crowds --------------------------------------------------------------------------------------------------------


def test_newcomers_ask_donors_in_orders_of_their_own() -> None:
    donors: list[Donor] = [(peer(number), ()) for number in range(8)]
    firsts = Counter(spread(peer(100 + number), donors)[0][0] for number in range(100))
    assert len(firsts) == 8
    assert max(firsts.values()) < 30


def test_a_busy_donor_is_asked_later_and_others_meanwhile(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 2)
    scene.holders[0].busy = ["4 transfers are under way and 8 wait"] * 3
    slept: list[float] = []

    async def sleep(pause_s: float) -> None:
        slept.append(pause_s)
        await asyncio.sleep(0)

    scene.fetch(sleep=sleep)
    scene.check()
    assert slept
    assert slept == sorted(slept)


def test_a_donor_that_is_busy_for_ever_is_given_up(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 1)
    scene.holders[0].busy = ["no"] * 1000
    slept: list[float] = []

    async def sleep(pause_s: float) -> None:
        slept.append(pause_s)

    with pytest.raises(StateUnavailable, match="busy: no"):
        scene.fetch(sleep=sleep)
    assert 100 < sum(slept) < 600


def test_a_crowd_of_newcomers_is_served_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 newcomers at 2 donors: never more than so many transfers at once, and all come to hold the state."""
    monkeypatch.setattr(transfer, "BUSY_TIRES_S", float("inf"))  # pauses are short here, and transfers are not
    scene = Scene(tmp_path, 2)
    most = dict.fromkeys(scene.donors, 0)
    for donor, holder in zip(scene.donors, scene.holders, strict=True):
        holder.turns = turns = Turns(at_once=3, each=2, waiting=4, wait_s=0.01)
        locate = holder.locate

        def watched(*asked: Any, locate: Any = locate, turns: Turns = turns, donor: PeerId = donor) -> Any:
            most[donor] = max(most[donor], turns.n_running)
            return locate(*asked)

        holder.locate = watched  # type: ignore[assignment,method-assign]

    async def newcomer(number: int) -> Ledger:
        me = peer(100 + number)
        store = StateStore(tmp_path / f"new{number}", GRID)
        donors = spread(me, [(donor, ()) for donor in scene.donors])
        quick = Manners(sleep=lambda pause_s: asyncio.sleep(pause_s / 100))
        return await fetch_state(FakePeers(scene.network, me), donors, store, verify, None, quick)

    async def crowd() -> list[Ledger]:
        async with asyncio.timeout(60):
            return await asyncio.gather(*(newcomer(number) for number in range(12)))

    assert [ledger.round for ledger in asyncio.run(crowd())] == [1] * 12
    assert all(0 < n <= 3 for n in most.values())
    served = [len(holder.asked) for holder in scene.holders]
    assert min(served) > sum(served) / 5  # not everybody from the same one


def test_a_donor_that_dawdles_is_made_up_for_at_the_end(tmp_path: Path) -> None:
    """It sends, so slowly that it is never still: nobody waits for its last chunk."""
    scene = Scene(tmp_path, 2)
    never = asyncio.Event()
    fetch = scene.peers.fetch

    async def dawdling(asked: PeerId, *rest: Any, **more: Any) -> list[bytes]:
        if asked == scene.donors[0]:
            await never.wait()
        return await fetch(asked, *rest, **more)

    scene.peers.fetch = dawdling  # type: ignore[assignment,method-assign]
    scene.fetch(patience_s=0.01)
    scene.check()
