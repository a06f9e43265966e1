"""Fetching the state from donors that vanish, lie, lag or are busy: what one doesn't give, another does, and once."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregation.digest import state_chunk_hash
from coordinator.rounds.ledger import Ledger
from node import transfer
from node.donors import Donor, StateUnavailable, spread
from node.serving import Turns
from node.state import StateStore
from node.transfer import Manners, fetch_state
from protos.messages import PeerId
from tests.fakes.peers import FakePeers, Fault
from tests.node.chain import peer
from tests.node.donors import Scene, verify
from tests.node.states import GRID


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
