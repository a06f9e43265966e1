"""Frozen snapshots: they stand still while the state moves, cost no copy, and give way where the disk is full."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from aggregation.digest import state_chunk_hash
from coordinator.rounds.ledger import Ledger
from node import files
from node.errors import DiskFull
from node.snapshots import LINGER_S
from node.state import StateStore
from protos import wire
from protos.hashes import body_hash
from tests.node.chain import body_after, commit_of
from tests.node.states import GRID, THETA, Crash, advance, digest_of, frames_of, new_store


def run_on(store: StateStore, ledger: Ledger, n: int) -> Ledger:
    for seed in range(n):
        name, _, commit, ledger = advance(store, ledger, seed=seed)
        store.apply(name, commit, ledger)
    return ledger


def test_a_snapshot_stands_still_while_the_state_moves_and_costs_no_copy(tmp_path: Path) -> None:
    store, ledger = new_store(tmp_path)
    before = store.current
    assert before is not None
    inode = os.stat(before.theta).st_ino
    store.freeze()
    store.freeze()  # again changes nothing
    run_on(store, ledger, 3)
    frozen = store.frozen
    assert frozen is not None
    assert (frozen.digest, os.stat(frozen.theta).st_ino) == (before.digest, inode)
    offer = store.offer(frozen=True)
    assert offer is not None
    assert offer.commit == before.commit
    for hash_ in offer.theta_hashes:
        path, offset, n_bytes = store.locate(hash_)  # type: ignore[misc]
        assert state_chunk_hash(Path(path).read_bytes()[offset : offset + n_bytes]) == hash_
    again = StateStore(store.folder, GRID)
    assert again.open() == []
    assert again.frozen == frozen


def test_a_disk_without_links_gets_a_copy_that_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, ledger = new_store(tmp_path)

    def no_links(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("os.link", no_links)
    store.freeze()
    run_on(store, ledger, 3)
    assert store.frozen is not None
    assert digest_of(np.fromfile(store.frozen.theta, np.float32), np.zeros_like(THETA)) == store.frozen.digest


def test_a_snapshot_stays_while_somebody_fetches_it(tmp_path: Path) -> None:
    now = [0.0]
    store, ledger = new_store(tmp_path)
    store = StateStore(store.folder, GRID, seconds=lambda: now[0])
    store.open()
    store.freeze()
    wanted = store.frozen.theta_hashes[0]  # type: ignore[union-attr]
    ledger = run_on(store, ledger, 3)
    assert store.locate(wanted) is not None
    store.freeze()
    assert store.frozen is not None
    assert store.frozen.ledger.round == 3
    now[0] = LINGER_S - 1
    store.tidy()
    assert store.locate(wanted) is not None
    ledger = run_on(store, ledger, 3)
    store.freeze()
    ledger = run_on(store, ledger, 3)
    store.freeze()
    assert store.locate(wanted) is None  # two newer ones are there
    assert len(list(store.folder.glob("frozen-*"))) == 1
    now[0] = 10 * LINGER_S
    store.tidy()
    assert store.frozen.ledger.round == 9
    assert len(list(store.folder.glob("frozen-*"))) == 1


@pytest.mark.parametrize("at", range(5))
def test_a_crash_while_freezing_leaves_the_state_and_a_whole_snapshot_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    store, ledger = new_store(tmp_path)
    run_on(store, ledger, 1)
    calls = iter(range(1000))

    def crashing(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if next(calls) == at:
                raise Crash
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for function, module in (
            (files.replace_file, "node.snapshots"), (files.sync_folder, "node.snapshots"), (os.link, "os"),
        ):  # fmt: skip
            patch.setattr(f"{module}.{function.__name__}", crashing(function))
        patch.setattr("node.snapshots.remove_folder", lambda _: None)
        with suppress(Crash):
            store.freeze()
    again = StateStore(store.folder, GRID)
    assert again.open() == []
    assert again.current is not None
    assert again.current.ledger.round == 1
    assert again.frozen is None or again.frozen.digest == again.current.digest
    assert not (store.folder / "freezing").exists()
    again.freeze()  # what is left over of it does not stand in the way
    assert again.frozen is not None


def test_without_room_for_a_snapshot_there_is_none_and_the_state_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, ledger = new_store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("node.snapshots.link_vectors", full)
        with pytest.raises(DiskFull):
            store.freeze()
    assert store.frozen is None
    assert not (store.folder / "freezing").exists()
    assert run_on(store, ledger, 1).round == 1


def full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_on_a_full_disk_what_is_kept_for_others_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, ledger = new_store(tmp_path)
    store.freeze()
    ledger = run_on(store, ledger, 2)
    body, folded = body_after(ledger)
    name = body_hash(wire.encode(body))
    reserve, refused = files.reserve, [2]

    def fills(file: int, n_bytes: int) -> None:
        if refused[0]:
            refused[0] -= 1
            full()
        reserve(file, n_bytes)

    monkeypatch.setattr("node.vectors.reserve", fills)
    digest = store.prepare(name, body, frames_of(THETA).__getitem__)
    store.apply(name, *commit_of(body, folded, digest))
    assert store.frozen is None
    notes = store.take_notes()
    assert len(notes) == 2
    assert all("the disk is full" in note for note in notes)
    refused[0] = 100
    body, folded = body_after(store.current.ledger)  # type: ignore[union-attr]
    with pytest.raises(DiskFull):
        store.prepare(body_hash(wire.encode(body)), body, frames_of(THETA).__getitem__)
    assert store.current.ledger.round == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["gone", "cut off"])
def test_what_was_damaged_while_it_ran_is_offered_and_served_to_nobody(tmp_path: Path, how: str) -> None:
    store, ledger = new_store(tmp_path)
    store.freeze()
    run_on(store, ledger, 3)
    frozen = store.frozen
    assert frozen is not None
    if how == "gone":
        frozen.theta.unlink()
    else:
        os.truncate(frozen.theta, 100)
    assert store.locate(frozen.theta_hashes[0]) is None
    assert store.offer(frozen=True) is None
    assert store.offer() is not None
    (note,) = store.take_notes()
    assert "damaged" in note
    assert "round 0" in note


def test_a_state_that_is_damaged_is_gone_on_with_from_the_snapshot(tmp_path: Path) -> None:
    store, ledger = new_store(tmp_path)
    ledger = run_on(store, ledger, 2)
    store.freeze()
    run_on(store, ledger, 2)
    for folder in store.folder.glob("[34]-*"):
        os.truncate(folder / "momentum.bin", 40)
    again = StateStore(store.folder, GRID)
    problems = again.open()
    assert len(problems) == 3
    assert "going on from the snapshot after round 2" in problems[-1]
    assert again.current is not None
    assert again.current.ledger == ledger
    run_on(again, ledger, 1)


def test_a_damaged_snapshot_is_dropped_at_the_start(tmp_path: Path) -> None:
    store, ledger = new_store(tmp_path)
    store.freeze()
    run_on(store, ledger, 3)
    assert store.frozen is not None
    with store.frozen.theta.open("r+b") as file:
        file.write(b"\xff\xff")
    again = StateStore(store.folder, GRID)
    (problem,) = again.open()
    assert "frozen-0" in problem
    assert again.frozen is None
    assert again.current == store.current
