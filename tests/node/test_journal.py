"""The voter's record: what was saved is there after a kill, and a lost one is known to be lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from node.errors import DiskFull, LocalStateError
from node.journal import Journal
from protos.messages import Leave, Promise, Proposal
from tests.node.chain import COORDINATOR

PROPOSAL = Proposal(b"body", b"plan", b"deal", (b"result",), (bytes(32),))
PROMISE = Promise(0, 7, 2, COORDINATOR, bytes(32), 1, PROPOSAL)


def test_a_fresh_journal_says_that_it_knows_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    for _ in range(2):  # a process that died before it promised anything has left nothing behind
        journal = Journal(path)
        assert journal.load() == (None, True)
        journal.close()


def test_one_that_saw_a_commit_come_knows_that_nothing_was_signed(tmp_path: Path) -> None:
    """All voters of a first round may stop before they vote, and then none of them may abstain for ever."""
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    for _ in range(2):
        journal.is_whole()
    journal.close()
    again = Journal(path)
    assert again.load() == (None, False)
    again.save(PROMISE)
    assert again.load() == (PROMISE, False)
    again.close()


@pytest.mark.parametrize(
    "entry", [PROMISE, replace(PROMISE, proposal=None), Leave(0, 7, 2, COORDINATOR, bytes(32), 1, PROPOSAL)]
)
def test_the_last_record_is_read_back(tmp_path: Path, entry: Promise | Leave) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    journal.save(replace(PROMISE, attempt=1))
    journal.save(entry)
    assert journal.load() == (entry, False)
    journal.close()
    again = Journal(path)
    assert again.load() == (entry, False)
    again.close()


@pytest.mark.slow
def test_what_was_saved_outlives_kill_9(tmp_path: Path) -> None:
    code = (
        "import sys, itertools; from dataclasses import replace; from pathlib import Path;"
        "from node.journal import Journal; from tests.node.test_journal import PROMISE\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "for attempt in itertools.count():\n"
        "    journal.save(replace(PROMISE, attempt=attempt)); print(attempt, flush=True)\n"
    )
    path = tmp_path / "journal.sqlite"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        for _ in range(20):
            said = int(writer.stdout.readline())
        os.kill(writer.pid, signal.SIGKILL)
        rest = writer.stdout.read().split()
        said = int(rest[-1]) if rest else said
    journal = Journal(path)
    entry, fresh = journal.load()
    journal.close()
    assert not fresh
    assert isinstance(entry, Promise)
    assert entry.attempt in (said, said + 1)


@pytest.mark.parametrize("damage", [b"no database", bytes(5000)])
def test_a_damaged_journal_is_named_with_a_remedy(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(damage)
    with pytest.raises(LocalStateError, match=f"{path}.*move it away"):
        Journal(path)


def test_a_record_that_makes_no_sense_is_not_taken_for_none(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    journal.save(PROMISE)
    journal._database.execute("UPDATE voter SET message = x'ffff'")
    with pytest.raises(LocalStateError):
        journal.load()
    journal.close()
    with pytest.raises(LocalStateError):
        Journal(tmp_path / "nowhere" / "journal.sqlite")


def test_a_full_disk_is_called_that_and_the_old_record_stays(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.save(PROMISE)
    (n_pages,) = journal._database.execute("PRAGMA page_count").fetchone()
    journal._database.execute(f"PRAGMA max_page_count = {n_pages}")
    with pytest.raises(DiskFull, match="the voter's record needs"):
        journal.save(replace(PROMISE, proposal=replace(PROPOSAL, body=bytes(100_000))))
    assert journal.load() == (PROMISE, False)
    journal.close()


def test_a_leaders_numbers_and_the_signed_head_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    assert (journal.numbers(), journal.head()) == ({}, b"")
    for attempt in (1, 2, 5):
        journal.open_number(0, 7, attempt)
    journal.keep_head(b"older")
    journal.keep_head(b"newer")
    journal.close()
    again = Journal(path)
    assert again.numbers() == {(0, 7): 5}
    assert again.head() == b"newer"
    assert again.load() == (None, True), "a leader's numbers are no voter's record"
    again.open_number(0, 8, 1)
    assert again.numbers() == {(0, 8): 1}, "what is over is forgotten"
    again.open_number(1, 4, 2)
    again.open_number(1, 5, 1)
    assert again.numbers() == {(0, 8): 1, (1, 5): 1}, "the epoch's own branch may be followed again"
    again.close()


def test_the_last_round_that_was_signed_in_is_kept_of_each_epoch(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    assert journal.signed() == {}
    for epoch, round_ in ((0, 7), (1, 5), (0, 6)):
        journal.save(replace(PROMISE, epoch=epoch, round=round_))
    journal.close()
    again = Journal(path)
    assert again.signed() == {0: 7, 1: 5}
    again.close()
