"""The run's journal in a database: it moves into an empty one whole, and an old copy of it is recognised."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from coordinator import moving, standby
from coordinator.errors import StateError
from coordinator.folder import RunFolder, read_founded, write_json
from coordinator.journal import Journal
from coordinator.ledger_file import LedgerFile
from coordinator.standby import Leading, Standby, begin
from protos.messages import PeerId
from tests.coordinator.made import append, make_run, next_commit
from tests.coordinator.postgres import url
from tests.coordinator.standing_by import FIRST, SECOND, Heard, _quick, stands_by, waiting

__all__ = ["_quick", "url"]


def test_the_journal_moves_to_an_empty_database_whole(url: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    run = read_founded(folder).run
    for _ in range(3):
        served = begin(Journal.open(folder.journal, run), folder, FIRST, 5.0)
        served.journal.close()
    source = Journal.open(folder.journal, run)
    source.begin_term("before")
    source.order("pause", b"an order", 1.0)
    source.admit(PeerId("somebody"), "a name", "1", "aa", 1, observer=False, at_run_s=2.0)
    before = source.recover()
    source.close()
    copied = tmp_path / "copy"
    shutil.copytree(folder.path, copied)

    async def scene() -> None:
        waits, moves = Heard(), Heard()
        patient = Standby(RunFolder(copied), run, url, SECOND, patient=True, lease_s=5.0, say=waits)
        first = Standby(folder, run, url, FIRST, patient=False, lease_s=60.0, say=moves)
        async with waiting(patient) as task:
            await waits.wait_for("waiting for a coordinator without --standby, to move the run's journal")
            leading = await first.lead()
            await waits.wait_for("waiting for the lock held by the coordinator at first:1")
            assert any("the journal has been moved" in line for line in moves.lines)
            made = leading.journal
            assert (leading.lead.term, leading.lost) == (6, False)  # terms count on
            after = made.recover()
            assert (after.commit, after.ledger, made.orders()) == (before.commit, before.ledger, [b"an order"])
            assert made.origin_unix_s() > 0
            assert made.admitted(PeerId("somebody"))
            assert not made.admit(PeerId("another"), "", "2", "aa", 1, observer=False, at_run_s=3.0)  # used up
            made.order("resume", b"another", 4.0)  # numbers go on where they were
            append(made, next_commit(after.ledger))
            assert not folder.journal.exists()
            assert (folder.path / moving.MOVED).exists()
            made.close()
            second = await task
            assert second.journal.recover().body.round == 1
            assert not RunFolder(copied).journal.exists()

    asyncio.run(scene())


def test_an_empty_database_is_no_new_run_once_the_journal_has_moved(url: str, tmp_path: Path) -> None:
    """The database was lost: going on from commit 0 would sign everything a second time."""
    by = stands_by(tmp_path / "second", url, lambda _: None, patient=False)
    with pytest.raises(StateError, match="holds no run"):
        asyncio.run(by.lead())


def test_an_old_copy_of_the_database_is_recognised(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    run = read_founded(folder).run

    def start() -> Leading:
        return begin(Journal.open(folder.journal, run), folder, FIRST, 5.0)

    leading = start()
    assert not leading.lost
    leading.journal.close()
    backup = tmp_path / "backup.sqlite"
    shutil.copy(folder.journal, backup)
    for _ in range(2):
        leading = start()
        assert not leading.lost
        leading.journal.close()
    last = leading.lead.term
    shutil.copy(backup, folder.journal)
    leading = start()
    assert leading.lost
    assert leading.lead.term > last  # a process of the lost terms can append nothing
    leading.journal.close()
    for _ in range(2):
        leading = start()
        assert leading.lost, "it stays one until a commit follows its head"
        leading.journal.close()
    leading = start()
    append(leading.journal, next_commit(leading.journal.recover().ledger))
    leading.journal.close()
    leading = start()
    assert not leading.lost
    leading.journal.close()


def test_a_crash_between_two_terms_forgets_no_old_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy's terms have caught up then, though what was signed in the lost ones is still unknown."""
    folder = make_run(tmp_path / "run")
    run = read_founded(folder).run
    backup = tmp_path / "backup.sqlite"
    shutil.copy(folder.journal, backup)
    for _ in range(3):
        begin(Journal.open(folder.journal, run), folder, FIRST, 5.0).journal.close()
    shutil.copy(backup, folder.journal)

    def only_the_first(path: Path, content: Mapping[str, Any]) -> None:
        write_json(path, content)
        monkeypatch.setattr(standby, "write_json", crash)

    def crash(*_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(standby, "write_json", only_the_first)
    journal_ = Journal.open(folder.journal, run)
    with pytest.raises(SystemExit):
        begin(journal_, folder, FIRST, 5.0)
    journal_.close()
    monkeypatch.setattr(standby, "write_json", write_json)
    leading = begin(Journal.open(folder.journal, run), folder, FIRST, 5.0)
    assert leading.lost
    leading.journal.close()


def test_a_database_that_lacks_a_round_of_the_ledger_s_file_is_an_old_copy(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    run = read_founded(folder).run
    row = {"epoch": 0, "round": 1, "val_loss": 1.0}
    LedgerFile(folder.ledger, [{**row, "round": 0}]).close()
    leading = begin(Journal.open(folder.journal, run), folder, FIRST, 5.0)
    assert not leading.lost
    leading.journal.close()
    LedgerFile(folder.ledger, [row]).close()
    leading = begin(Journal.open(folder.journal, run), folder, FIRST, 5.0)
    assert leading.lost
    leading.journal.close()
    LedgerFile(folder.ledger, [{**row, "round": 0}]).close()  # as the start itself makes it from the database
    leading = begin(Journal.open(folder.journal, run), folder, FIRST, 5.0)
    assert leading.lost
    leading.journal.close()
