"""Who appends to a journal: one leads at a time; locks, a full disk and a server that refuses are errors with a name.

One suite for SQLite and for PostgreSQL; what only PostgreSQL can meet is at the end.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import text

from coordinator import database, lead
from coordinator import journal as journals
from coordinator.database import Database
from coordinator.errors import MachineError, StateError
from coordinator.journal import Journal
from coordinator.lead import LeadLost
from coordinator.leading.ports import Observation
from coordinator.rounds.events import Opened
from coordinator.rounds.ledger import Ledger
from tests.coordinator.databases import ALICE, Place, _patient, chain, kept, place, tamper
from tests.coordinator.made import RUN, append, journal
from tests.coordinator.postgres import Server, schema_of, url

__all__ = ["_patient", "kept", "place", "url"]


def test_an_old_term_appends_nothing(kept: tuple[Journal, Ledger, Place]) -> None:
    """Whatever the process believes, and whatever became of its session."""
    made, ledger, place = kept
    links = chain(ledger, 3)
    append(made, links[0])
    tamper(place, "UPDATE leadership SET term = term + 1, holder = 'the other one'")
    for attempt in range(2):  # it stays so
        with pytest.raises(LeadLost, match="the other one has begun term 2, and its own was 1"):
            append(made, links[1])
        with pytest.raises(LeadLost) as caught:
            made.persist(Opened(0, 2, attempt))
        assert caught.value.exit_code == 6
    with pytest.raises(LeadLost):
        made.order("pause", b"envelope", 2.0)
    with pytest.raises(LeadLost):
        made.check_lead()
    recovered = made.recover()  # reading needs no term
    assert (recovered.body.round, recovered.opened, made.orders()) == (1, -1, [])


def test_terms_count_up_and_an_append_needs_one(kept: tuple[Journal, Ledger, Place]) -> None:
    made, ledger, place = kept
    made.close()
    again = Journal.open(place, RUN.peer)
    with pytest.raises(RuntimeError, match="a term is begun before"):
        append(again, chain(ledger, 1)[0])
    assert again.begin_term("somebody") == 2
    assert again.begin_term("somebody", above=7) == 8
    append(again, chain(ledger, 1)[0])
    assert again.recover().body.round == 1
    again.close()


def test_coordinators_that_were_there_lately_are_remembered(kept: tuple[Journal, Ledger, Place]) -> None:
    made, _, place = kept
    assert made.lead is not None
    made.lead.meet("a:1", "a:2")
    made.lead.meet("b:1", "b:2")
    made.lead.meet("a:1", "a:3")
    assert sorted(made.lead.beat()) == [("a:1", "a:3"), ("b:1", "b:2")]
    tamper(place, "UPDATE coordinators SET seen_at = seen_at - 700000 WHERE http = 'a:1'")
    assert made.coordinators() == [("b:1", "b:2")]


def test_readers_and_the_writer_do_not_hinder_each_other(kept: tuple[Journal, Ledger, Place]) -> None:
    made, ledger, _ = kept
    links = chain(ledger, 30)
    done = threading.Event()

    def read() -> list[int]:
        seen = []
        while not done.is_set():
            seen.append(made.recover().body.round)
            assert len(made.entries()) > seen[-1]
        return seen

    with ThreadPoolExecutor(4) as readers:
        reading = [readers.submit(read) for _ in range(4)]
        try:
            for link in links:
                append(made, link)
                made.observe([Observation("digest", ALICE, "aa", {"digest": "11"})], 1.0)
        finally:
            done.set()
        for each in reading:
            assert (seen := each.result()) == sorted(seen)
    assert made.recover().body.round == 30


def test_a_lock_that_somebody_keeps_is_an_error_with_a_name(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever, nothing is half written, and the next append goes through."""
    monkeypatch.setattr(database, "_BUSY_MS", 20)
    monkeypatch.setattr(lead, "_TABLE_WAIT_MS", 20)
    made, ledger = journal(place)
    links = chain(ledger, 2)
    append(made, links[0])
    opened = Database(place)
    with opened.engine.connect() as other:
        other.execute(text("BEGIN IMMEDIATE" if opened.is_sqlite else "LOCK TABLE commits"))
        with pytest.raises(MachineError, match=r"can't be used: .*lock") as caught:
            append(made, links[1])
        assert caught.value.exit_code == 3
        other.rollback()
    opened.close()
    assert made.recover().body.round == 1
    append(made, links[1])
    assert made.recover().body.round == 2
    made.close()


def test_a_full_disk_is_an_error_and_changes_nothing(place: Place) -> None:
    made, ledger = journal(place)
    links = chain(ledger, 40)
    append(made, links[0])
    fill(place, made)
    written = iter(links[1:])
    last = links[0]

    def append_them() -> None:  # SQLite still has some room in its last page
        nonlocal last
        for link in written:
            append(made, link)
            last = link

    with pytest.raises(MachineError, match=r"can't be used: .*(disk is full|No space left)") as caught:
        append_them()
    assert caught.value.exit_code == 3
    recovered = made.recover()
    assert (recovered.commit, recovered.ledger) == (last.commit, last.after)
    made.close()


def fill(place: Place, made: Journal) -> None:
    """Leave no room: SQLite may add no page, the server says what it says when its own write fails."""
    if isinstance(place, Path):
        assert made.lead is not None
        with made.lead.appending() as connection:
            connection.execute(text("PRAGMA max_page_count = 1"))  # means: no more than there are
        return
    tamper(
        place,
        "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION "
        "'could not extend file: No space left on device' USING ERRCODE = 'disk_full'; END $$",
    )
    tamper(place, "CREATE TRIGGER full_disk BEFORE INSERT ON ledgers EXECUTE FUNCTION full_disk()")


# -- PostgreSQL alone ----------------------------------------------------------------------------------------------


def end_sessions(postgres: Server) -> None:
    """Cut every session of ours, as a restart of the server or a broken line does."""
    postgres.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'barnraise'")


def test_a_session_that_was_cut_appends_nothing_more(postgres: Server, url: str) -> None:
    """It could open another session, and nobody else leads: the lock is gone all the same."""
    made, ledger = journal(url)
    links = chain(ledger, 2)
    append(made, links[0])
    made.check_lead()
    end_sessions(postgres)
    for _ in range(2):
        with pytest.raises(LeadLost, match="the session that held the lock is gone"):
            append(made, links[1])
    with pytest.raises(LeadLost):
        made.check_lead()
    assert made.recover().body.round == 1  # readers come back by themselves
    made.close()


def test_one_leads_at_a_time(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = journal(url)
    other = Journal.open(url, RUN.peer)
    with monkeypatch.context() as patch:
        patch.setattr(journals, "CLOSING_S", 0.01)
        with pytest.raises(StateError, match="is led from by the founding"):
            other.begin_term("the other one")
    made.close()  # gives the lock back
    assert other.begin_term("the other one") == 2
    other.close()


def test_a_server_that_is_not_there_and_one_that_refuses(url: str) -> None:
    with pytest.raises(MachineError, match="can't be used") as caught:
        Journal.open("postgresql://somebody:secret@localhost:1/x", RUN.peer)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(StateError, match="holds no run"):
        Journal.open(url, RUN.peer)


def test_a_role_that_may_not_write_is_said_so(postgres: Server, url: str) -> None:
    made, _ = journal(url)
    made.close()
    schema = schema_of(url)
    postgres.run(f"CREATE ROLE reader_{schema} LOGIN")
    postgres.run(f"GRANT USAGE ON SCHEMA {schema} TO reader_{schema}")
    postgres.run(f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO reader_{schema}")
    reader = Journal.open(url.replace("barnraise@", f"reader_{schema}@", 1), RUN.peer)
    with pytest.raises(MachineError, match="permission denied"):
        reader.begin_term("a reader")
    reader.close()


def test_a_missing_driver_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MachineError, match="needs a driver") as caught:
        Database(url)
    assert caught.value.exit_code == 3
    assert "postgres" in caught.value.remedy
