"""The committed state on disk: stepping, switching, starting again after a crash."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from aggregation import codec
from aggregation.chunks import ChunkGrid
from aggregation.digest import state_chunk_hash, state_digest
from aggregation.errors import CodecError
from aggregation.outer import nesterov
from coordinator.rounds.ledger import Ledger
from node import files
from node.errors import DiskFull, LocalStateError
from node.state import CURRENT, NEXT, StateStore
from node.vectors import each_chunk
from protos import wire
from protos.hashes import body_hash
from protos.messages import Body, Commit, Outcome
from tests.node.chain import body_after, commit_of, commit_zero

GRID = ChunkGrid(5000, 2048)  # three chunks, the last one shorter
RNG = np.random.default_rng(7)
THETA = RNG.standard_normal(GRID.n_values).astype(np.float32)


def digest_of(theta: np.ndarray, momentum: np.ndarray) -> bytes:
    cut = [GRID.bounds(chunk) for chunk in range(GRID.n_chunks)]
    return state_digest(
        [state_chunk_hash(theta[a:b]) for a, b in cut], [state_chunk_hash(momentum[a:b]) for a, b in cut]
    )


def new_store(folder: Path, theta: np.ndarray = THETA) -> tuple[StateStore, Ledger]:
    source = folder / "initial.bin"
    theta.tofile(source)
    commit, ledger = commit_zero(digest_of(theta, np.zeros_like(theta)))
    store = StateStore(folder / "state", GRID)
    assert store.open() == []
    store.install_initial(source, None, commit, ledger)
    return store, ledger


def frames_of(delta: np.ndarray) -> list[bytes]:
    return [codec.encode("int8", delta[slice(*GRID.bounds(chunk))]) for chunk in range(GRID.n_chunks)]


def advance(
    store: StateStore, ledger: Ledger, outcome: Outcome = Outcome.COMMITTED, seed: int = 1, **changes: object
) -> tuple[bytes, Body, Commit, Ledger]:
    """Prepare the next round's body; what is needed to apply it."""
    body, folded = body_after(ledger, outcome, **changes)
    name = body_hash(wire.encode(body))
    frames = frames_of(np.random.default_rng(seed).standard_normal(GRID.n_values).astype(np.float32))
    digest = store.prepare(name, body, frames.__getitem__)
    return name, body, *commit_of(body, folded, digest)


def test_the_initial_state_is_taken_in_and_found_again(tmp_path: Path) -> None:
    store, ledger = new_store(tmp_path)
    held = store.current
    assert held is not None
    assert held.digest == digest_of(THETA, np.zeros_like(THETA))
    assert np.array_equal(np.fromfile(held.theta, np.float32), THETA)
    again = StateStore(tmp_path / "state", GRID)
    assert again.open() == []
    assert again.current == held
    assert held.ledger == ledger


def test_a_state_that_is_not_the_commits_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "initial.bin"
    THETA.tofile(source)
    commit, ledger = commit_zero(digest_of(THETA + 1, np.zeros_like(THETA)))
    store = StateStore(tmp_path / "state", GRID)
    with pytest.raises(LocalStateError):
        store.install_initial(source, None, commit, ledger)
    THETA[:-1].tofile(source)
    with pytest.raises(LocalStateError, match="bytes"):
        store.install_initial(source, None, commit, ledger)
    assert store.current is None


@pytest.mark.parametrize("n_threads", [0, 1, 3])
def test_a_round_steps_the_state_like_the_outer_optimiser(tmp_path: Path, n_threads: int) -> None:
    store, ledger = new_store(tmp_path)
    if n_threads:
        store._pool = ThreadPoolExecutor(n_threads)
    delta = RNG.standard_normal(GRID.n_values).astype(np.float32)
    body, folded = body_after(ledger, clip_factor=0.25)
    frames = frames_of(delta)
    name = body_hash(wire.encode(body))
    digest = store.prepare(name, body, frames.__getitem__)
    decoded = np.concatenate([codec.decode(frame, GRID.chunk_values) for frame in frames])
    theta, momentum = THETA.copy(), np.zeros_like(THETA)
    nesterov(theta, momentum, np.float32(0.25) * decoded, lr=0.7, momentum=0.6)
    assert digest == digest_of(theta, momentum)
    assert np.array_equal(np.fromfile(store.current.theta, np.float32), THETA)  # type: ignore[union-attr]
    held = store.apply(name, *commit_of(body, folded, digest))
    assert np.array_equal(np.fromfile(held.theta, np.float32), theta)
    assert np.array_equal(np.fromfile(held.momentum, np.float32), momentum)
    if n_threads:
        store._pool.shutdown()  # type: ignore[union-attr]


def test_preparing_from_a_thread_of_a_full_pool_does_not_stand_still(tmp_path: Path) -> None:
    store, ledger = new_store(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        store._pool = pool
        name, _, commit, folded = pool.submit(advance, store, ledger).result(timeout=60)
    store._pool = None
    assert store.apply(name, commit, folded).commit == commit


def test_an_empty_round_keeps_the_vectors_without_a_copy(tmp_path: Path) -> None:
    store, ledger = new_store(tmp_path)
    before = store.current
    assert before is not None
    body, folded = body_after(ledger, Outcome.EMPTY)
    name = body_hash(wire.encode(body))

    def never(chunk: int) -> bytes:
        raise AssertionError

    digest = store.prepare(name, body, never)
    held = store.apply(name, *commit_of(body, folded, digest))
    assert digest == before.digest == held.digest
    assert os.stat(held.theta).st_ino == os.stat(before.theta).st_ino
    assert held.ledger.round == 1


def test_preparing_and_applying_again_changes_nothing(tmp_path: Path) -> None:
    store, ledger = new_store(tmp_path)
    name, body, commit, folded = advance(store, ledger)
    assert store.prepare(name, body, [].__getitem__) == commit.digest
    held = store.apply(name, commit, folded)
    assert store.apply(name, commit, folded) is held
    with pytest.raises(LocalStateError, match="starts from state"):
        store.prepare(b"x" * 32, body, [].__getitem__)


def test_applying_needs_the_prepared_candidate_with_the_commits_digest(tmp_path: Path) -> None:
    store, ledger = new_store(tmp_path)
    before = store.current
    name, body, _, folded = advance(store, ledger)
    other, at_other = commit_of(body, folded, b"d" * 32)
    with pytest.raises(LocalStateError, match="is not here"):
        store.apply(name, other, at_other)
    with pytest.raises(LocalStateError, match="nothing was prepared"):
        store.apply(b"n" * 32, other, at_other)
    assert store.current is before


def test_a_bad_frame_leaves_no_candidate_and_the_state_alone(tmp_path: Path) -> None:
    store, ledger = new_store(tmp_path)
    body, _ = body_after(ledger)
    frames = frames_of(THETA)
    frames[1] = frames[1][:-1]
    with pytest.raises(CodecError):
        store.prepare(b"b" * 32, body, frames.__getitem__)
    assert sorted(path.name for path in store.folder.iterdir()) == sorted(
        [CURRENT, store.current.folder.name]  # type: ignore[union-attr]
    )


def test_two_generations_are_kept_and_served_by_hash(tmp_path: Path) -> None:
    store, ledger = new_store(tmp_path)
    seen = [store.current]
    for seed in range(3):
        name, _, commit, ledger = advance(store, ledger, seed=seed)
        seen.append(store.apply(name, commit, ledger))
    folders = sorted(path.name for path in store.folder.iterdir() if path.is_dir())
    assert folders == sorted(held.folder.name for held in seen[-2:] if held)
    for held in seen[-2:]:
        assert held is not None
        for chunk, hash_ in enumerate(held.theta_hashes):
            place = store.locate(hash_)
            assert place is not None
            path, offset, n_bytes = place
            assert state_chunk_hash(Path(path).read_bytes()[offset : offset + n_bytes]) == hash_
            assert n_bytes == 4 * GRID.size(chunk)
    assert store.locate(seen[0].theta_hashes[0]) is None  # type: ignore[union-attr]
    offer = store.offer()
    assert offer is not None
    assert state_digest(offer.theta_hashes, offer.momentum_hashes) == offer.commit.digest


class Crash(BaseException):
    pass


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


def test_candidates_of_a_round_are_bounded(tmp_path: Path) -> None:
    store, ledger = new_store(tmp_path)
    names = []
    for seed in range(5):
        body, folded = body_after(ledger, attempt=seed)
        name = body_hash(wire.encode(body))
        digest = store.prepare(name, body, frames_of(THETA).__getitem__)
        names.append((name, commit_of(body, folded, digest)))
    assert len(list(store.folder.glob("candidate-*"))) == 3
    with pytest.raises(LocalStateError):
        store.apply(names[0][0], *names[0][1])
    store.apply(names[4][0], *names[4][1])
    assert not list(store.folder.glob("candidate-*"))


def test_a_full_disk_is_an_error_with_the_need_and_the_state_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, ledger = new_store(tmp_path)
    before = store.current

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("node.vectors.reserve", full)
        with pytest.raises(DiskFull, match=r"39\.1 KiB in .*free some space"):
            advance(store, ledger)
    assert store.current is before
    assert not list(store.folder.glob("candidate-*"))
    name, _, commit, ledger = advance(store, ledger)
    store.apply(name, commit, ledger)


def test_chunks_are_worked_on_once_each_and_the_first_error_comes_out() -> None:
    done: list[int] = []
    with ThreadPoolExecutor(4) as pool:
        each_chunk(range(100), done.append, pool)
        assert sorted(done) == list(range(100))

        def work(chunk: int) -> None:
            if chunk == 50:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            each_chunk(range(10_000), work, pool)


def test_serving_goes_on_while_generations_change(tmp_path: Path) -> None:
    store, ledger = new_store(tmp_path)
    wrong: list[str] = []
    going = True

    def serve() -> None:
        while going:
            held = store.current
            assert held is not None
            place = store.locate(held.theta_hashes[0])
            if place is None and store.current is held:
                wrong.append("a chunk of the current state was not found")

    thread = Thread(target=serve)
    thread.start()
    for seed in range(5):
        name, _, commit, ledger = advance(store, ledger, seed=seed)
        store.apply(name, commit, ledger)
    going = False
    thread.join()
    assert wrong == []
