"""The log of commits: a chain without gaps up to a head, bounded, whatever a crash left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.rounds.ledger import Ledger
from node.commits import CommitLog
from protos.messages import Commit, Outcome
from tests.node.chain import body_after, commit_of, commit_zero


def chain(n: int, *, start: Ledger | None = None, seed: int = 0) -> tuple[list[Commit], list[Ledger]]:
    """So many commits, and the ledgers after them."""
    ledger = start or commit_zero(bytes(32))[1]
    commits, ledgers = [], []
    for number in range(n):
        outcome = Outcome.EMPTY if number % 3 == 2 else Outcome.COMMITTED
        body, folded = body_after(ledger, outcome, attempt=seed)
        commit, ledger = commit_of(body, folded, bytes([number, seed]) * 16)
        commits.append(commit)
        ledgers.append(ledger)
    return commits, ledgers


def test_what_came_after_a_round_is_found_in_order_and_after_a_restart(tmp_path: Path) -> None:
    commits, ledgers = chain(6)
    log = CommitLog(tmp_path, 100)
    for commit in commits:
        log.add(commit)
        log.add(commit)
    for store in (log, CommitLog(tmp_path, 100)):
        head = ledgers[-1].head
        assert len(store) == 6
        assert store.after(head, 0, 2, 100) == commits[2:]
        assert store.after(head, 0, 2, 2) == commits[2:4]
        assert store.after(head, 0, 6, 100) == []
        assert store.after(ledgers[3].head, 0, 0, 100) == commits[:4]
        assert store.after(b"x" * 32, 0, 0, 100) == []
        assert [entry.committed for entry in store.back(head)] == [False, True, True, False, True, True]


def test_the_oldest_leave(tmp_path: Path) -> None:
    commits, ledgers = chain(10)
    log = CommitLog(tmp_path, 4)
    for commit in commits:
        log.add(commit)
    assert len(log) == len(list(tmp_path.iterdir())) == 4
    assert log.after(ledgers[-1].head, 0, 0, 100) == commits[-4:]


def test_a_lost_branch_is_not_served_as_part_of_the_chain(tmp_path: Path) -> None:
    commits, ledgers = chain(3)
    others, their_ledgers = chain(3, start=ledgers[0], seed=1)
    log = CommitLog(tmp_path, 100)
    for commit in (*commits, *others):
        log.add(commit)
    assert log.after(ledgers[-1].head, 0, 0, 100) == commits
    assert log.after(their_ledgers[-1].head, 0, 0, 100) == [commits[0], *others]


def test_a_lost_branch_of_a_higher_epoch_gives_way_to_the_chain(tmp_path: Path) -> None:
    commits, ledgers = chain(2)
    lost, _ = chain(4, start=replace(ledgers[0], epoch=1), seed=1)
    log = CommitLog(tmp_path, 4)
    for commit in (*lost, *commits):
        log.add(commit)
    assert len(log) == 4
    assert log.after(ledgers[-1].head, 0, 0, 100) == commits


@pytest.mark.parametrize("how", ["cut off", "other", "part", "renamed"])
def test_what_a_crash_left_is_a_gap_and_no_error(tmp_path: Path, how: str) -> None:
    commits, ledgers = chain(4)
    log = CommitLog(tmp_path, 100)
    for commit in commits:
        log.add(commit)
    path = next(path for path in tmp_path.iterdir() if path.name.startswith("0-2-"))
    if how == "cut off":
        path.write_bytes(path.read_bytes()[:40])
    elif how == "other":
        path.write_bytes(next(tmp_path.glob("0-3-*")).read_bytes())
    elif how == "part":
        path.rename(path.with_name(path.name + ".part"))
    else:
        path.rename(path.with_name("0-2-0123456789abcdef.bin"))
    again = CommitLog(tmp_path, 100)
    assert again.after(ledgers[-1].head, 0, 0, 100) == commits[2:]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_commit_that_vanishes_while_it_runs_ends_the_row(tmp_path: Path) -> None:
    commits, ledgers = chain(4)
    log = CommitLog(tmp_path, 100)
    for commit in commits:
        log.add(commit)
    next(tmp_path.glob("0-3-*")).unlink()
    assert log.after(ledgers[-1].head, 0, 0, 100) == commits[:2]
