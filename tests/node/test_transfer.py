"""Fetching the full state: which of those that are offered is taken, and what of it travels."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aggregation.digest import results_root
from node.donors import StateUnavailable, Wish
from node.errors import DiskFull
from node.state import StateStore
from node.transfer import StateMoves, fetch_state
from protos.messages import Body, Commit, PeerId
from tests.fakes.holder import FakeHolder
from tests.fakes.peers import FakeNetwork, FakePeers, Fault
from tests.node.chain import peer
from tests.node.donors import ME, Scene, StateHolder, verify
from tests.node.states import GRID, THETA, advance, new_store


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
