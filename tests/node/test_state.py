"""The committed state on disk: taken in, stepped round by round, and served meanwhile."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from aggregation import codec
from aggregation.digest import state_chunk_hash, state_digest
from aggregation.errors import CodecError
from aggregation.outer import nesterov
from node.errors import DiskFull, LocalStateError
from node.state import CURRENT, StateStore
from node.vectors import each_chunk
from protos import wire
from protos.hashes import body_hash
from protos.messages import Outcome
from tests.node.chain import body_after, commit_of, commit_zero
from tests.node.states import GRID, RNG, THETA, advance, digest_of, frames_of, new_store


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
