"""The committed state after a crash: a step or a switch counts whole or not at all, and what is damaged gives way."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from node import files
from node.state import CURRENT, NEXT, StateStore
from tests.node.states import GRID, Crash, advance, digest_of, new_store


@pytest.mark.parametrize("at", range(9))
def test_a_crash_at_any_write_leaves_a_whole_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    store, ledger = new_store(tmp_path)
    before = store.current
    calls = iter(range(1000))

    def crashing(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if next(calls) == at:
                raise Crash
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for function in (files.replace_file, files.sync_folder, files.write_all):
            module = "node.vectors" if function is files.write_all else "node.state"
            patch.setattr(f"{module}.{function.__name__}", crashing(function))
        patch.setattr("node.state.remove_folder", lambda _: None)  # a killed process tidies nothing
        try:
            name, _, commit, ledger = advance(store, ledger)
            store.apply(name, commit, ledger)
        except Crash:
            pass
    again = StateStore(store.folder, GRID)
    assert again.open() == []
    assert again.current is not None
    assert again.current.ledger.round in (0, 1)
    assert before is not None
    if again.current.ledger.round == 0:
        assert again.current == before
    theta, momentum = (np.fromfile(path, np.float32) for path in (again.current.theta, again.current.momentum))
    assert digest_of(theta, momentum) == again.current.commit.digest
    assert not list(store.folder.glob("candidate-*"))
    assert (store.folder / CURRENT).read_text() == again.current.folder.name
    assert not (store.folder / NEXT).exists()


SWITCH = ["commit.bin", "ledger.json", "CURRENT.next", "folder", "CURRENT", "synced", "removed"]
"""What a switch does, in this order."""


def cut_off_before(step: str, patch: pytest.MonkeyPatch) -> None:
    """Die just before this step of a switch."""
    done: list[str] = []

    def dying(function: Callable[..., object], name_of: Callable[..., str]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if (name := name_of(*args)) in SWITCH:
                done.append(name)
                if name == step:
                    assert done == SWITCH[: SWITCH.index(step) + 1]
                    raise Crash
            return function(*args, **kwargs)

        return call

    patch.setattr("node.state.replace_file", dying(files.replace_file, lambda path, _: path.name))
    patch.setattr("node.state.sync_folder", dying(files.sync_folder, lambda _: "synced"))
    patch.setattr(Path, "rename", dying(Path.rename, lambda path, _: "folder" if path.is_dir() else ""))
    replaced = dying(Path.replace, lambda path, to: to.name if path.name == NEXT else "")
    patch.setattr(Path, "replace", replaced)
    patch.setattr("node.state.drop_folder", dying(lambda _: "", lambda _: "removed"))


@pytest.mark.parametrize("step", SWITCH)
def test_a_step_that_is_cut_off_counts_from_the_renaming_of_its_folder_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    store, ledger = new_store(tmp_path)
    for seed in (1, 2):
        name, _, commit, after = advance(store, ledger, seed=seed)
        with monkeypatch.context() as patch:
            if seed == 2:
                cut_off_before(step, patch)
                with pytest.raises(Crash):
                    store.apply(name, commit, after)
            else:
                ledger = store.apply(name, commit, after).ledger
    again = StateStore(store.folder, GRID)
    assert again.open() == []
    assert again.current is not None
    assert again.current.ledger.round == (1 if SWITCH.index(step) <= SWITCH.index("folder") else 2)
    left = {path.name for path in again.folder.iterdir() if path.is_dir()}
    assert left == {served.held.folder.name for served in again._held}
    if again.current.ledger.round == 1:  # and it can be done again
        name, _, commit, after = advance(again, again.current.ledger, seed=2)
        again.apply(name, commit, after)


@pytest.mark.parametrize("step", SWITCH)
def test_a_switch_to_a_lower_number_that_is_cut_off_counts_from_the_renaming_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The branch that is given up went further, and stays on disk until the switch is named."""
    (tmp_path / "theirs").mkdir()
    (store, ledger), (theirs, other) = new_store(tmp_path), new_store(tmp_path / "theirs")
    mine = ledger
    for seed in (1, 2):
        name, _, commit, after = advance(store, mine, seed=seed)
        mine = store.apply(name, commit, after).ledger
    name, _, commit, after = advance(theirs, other, seed=3)
    held = theirs.apply(name, commit, after)
    shutil.copytree(held.folder, store.incoming, ignore=shutil.ignore_patterns("*.json", "commit.bin"))
    with monkeypatch.context() as patch:
        cut_off_before(step, patch)
        with pytest.raises(Crash):
            store.adopt((held.theta_hashes, held.momentum_hashes), commit, after)
    again = StateStore(store.folder, GRID)
    assert again.open() == []
    assert again.current is not None
    assert again.current.head == (mine.head if SWITCH.index(step) <= SWITCH.index("folder") else held.head)
    assert (again.folder / CURRENT).read_text() == again.current.folder.name
    assert all(one.held.number < again.current.number for one in again._held[1:])
    (again.folder / CURRENT).unlink()
    last = StateStore(store.folder, GRID)
    assert last.open() == []
    assert last.current is not None
    assert last.current.head == again.current.head


def test_what_a_crash_left_by_the_names_of_the_next_round_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "twin").mkdir()
    (store, ledger), (twin, twins) = new_store(tmp_path), new_store(tmp_path / "twin")
    name, _, commit, after = advance(twin, twins)
    generation = twin.apply(name, commit, after).folder.name
    before = store.current
    assert before is not None
    for left in (store.folder / generation, store.folder / f"candidate-{name.hex()[:16]}"):
        left.mkdir()
        (left / "theta.bin").write_bytes(b"half")
        (left / "folder").mkdir()
    assert advance(store, ledger)[0] == name
    held = store.apply(name, commit, after)
    assert held.folder.name == generation
    assert sorted(os.listdir(held.folder)) == sorted(os.listdir(before.folder))
    again = StateStore(store.folder, GRID)
    assert again.open() == []
    assert again.current == held


def test_a_state_of_a_lower_epoch_that_was_fetched_is_gone_on_with_after_a_restart(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (store, ledger), (theirs, _) = new_store(tmp_path), new_store(tmp_path / "theirs")
    name, _, commit, after = advance(store, ledger, epoch=1)
    store.apply(name, commit, after)
    name, _, commit, after = advance(theirs, ledger)
    held = theirs.apply(name, commit, after)  # the larger branch
    shutil.copytree(held.folder, store.incoming)
    store.adopt((held.theta_hashes, held.momentum_hashes), commit, after)
    again = StateStore(tmp_path / "state", GRID)
    assert again.open() == []
    assert again.current is not None
    assert again.current.head == after.head


def test_a_damaged_newest_generation_gives_way_to_the_one_before(tmp_path: Path) -> None:
    store, ledger = new_store(tmp_path)
    before = store.current
    assert before is not None
    name, _, commit, ledger = advance(store, ledger)
    held = store.apply(name, commit, ledger)
    with held.theta.open("r+b") as file:
        file.seek(777)
        file.write(b"\xff")
    again = StateStore(store.folder, GRID)
    (problem,) = again.open()
    assert held.folder.name in problem
    assert again.current is not None
    assert again.current.folder == before.folder


@pytest.mark.parametrize("file", ["commit.bin", "ledger.json", "theta.bin", "momentum.bin"])
@pytest.mark.parametrize("how", ["gone", "empty", "other"])
def test_a_generation_with_a_broken_file_is_dropped_and_said(tmp_path: Path, file: str, how: str) -> None:
    store, _ = new_store(tmp_path)
    assert store.current is not None
    path = store.current.folder / file
    if how == "gone":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    else:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    again = StateStore(store.folder, GRID)
    assert len(again.open()) == 1
    assert again.current is None
    assert again.offer() is None
