"""The journal: what was acknowledged is there after any death, and damage is found at the start.

One suite for SQLite and for PostgreSQL; what only one of them can meet is at the end.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import text

from coordinator import database, lead
from coordinator import journal as journals
from coordinator.database import Database
from coordinator.errors import MachineError, StateError, UsageError
from coordinator.journal import Journal
from coordinator.lead import LeadLost
from coordinator.leading.ports import Observation
from coordinator.rounds.events import Opened
from coordinator.rounds.ledger import Ledger
from protos.messages import AttemptFailed, PeerId, Promise, Proposal, Range, Seat
from protos.wire import encode
from tests.coordinator.made import COORDINATOR, RUN, Chained, append, identity, journal, next_commit
from tests.coordinator.postgres import Server, schema_of

ALICE = identity(10).peer
Place = Path | str


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may take its time to see that a session was closed, and give its lock back."""
    monkeypatch.setattr(journals, "CLOSING_S", 60.0)


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Where a journal may be made."""
    if request.param == "sqlite":
        return tmp_path / "journal.sqlite"
    server: Server = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture
def kept(place: Place) -> Iterator[tuple[Journal, Ledger, Place]]:
    made, ledger = journal(place)
    yield made, ledger, place
    made.close()


def tamper(place: Place, statement: str, **values: object) -> None:
    """Change the database behind everybody's back."""
    opened = Database(place)
    with opened.engine.begin() as connection:
        connection.execute(text(statement), values)
    opened.close()


def wait_until_nobody_leads(place: Place) -> None:
    """The session of a process that was killed ends what it was told to do, and keeps its lock until then."""
    if isinstance(place, Path):
        return
    opened = Database(place)
    with opened.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while lead.look(connection, RUN.peer)[1]:
            pass
    opened.close()


def chain(ledger: Ledger, n: int) -> list[Chained]:
    counted = (ALICE,) if ledger.seat_of(ALICE) else ()
    links = [next_commit(ledger, counted=counted, seats=(Seat(ALICE, (Range(ledger.cursor, 2),), 1),))]
    while len(links) < n:
        before = links[-1].after
        seats = (Seat(ALICE, (Range(before.cursor, 2),), 1),)
        links.append(next_commit(before, counted=(ALICE,), seats=seats))
    return links


def test_the_chain_comes_back(kept: tuple[Journal, Ledger, Place]) -> None:
    made, ledger, place = kept
    links = chain(ledger, 5)
    failed = (AttemptFailed(0, 1, 0, "a reducer was lost"),)
    made.append(links[0].commit, links[0].body, links[0].before, links[0].after, failed, 7.0)
    for link in links[1:]:
        append(made, link, 8.0)
        append(made, link, 9.0)  # again changes nothing
    made.close()
    again = Journal.open(place, RUN.peer)
    recovered = again.recover()
    assert (recovered.commit, recovered.body, recovered.ledger) == (links[-1].commit, links[-1].body, links[-1].after)
    assert (recovered.opened, recovered.promise, recovered.run_time_s) == (-1, None, 8.0)
    entries = again.entries()
    assert [entry.body.round for entry in entries] == [0, 1, 2, 3, 4, 5]
    assert entries[1].failed == failed
    assert [entry.nominal_step for entry in entries] == [0, 0, 0, 2, 4, 6]
    assert [entry.tokens for entry in entries] == [0, 0, 16, 32, 48, 64]
    assert [entry.body.round for entry in again.entries(after_round=3)] == [4, 5]
    assert again.origin_unix_s() == 1000.0
    again.close()


def test_the_ledger_is_folded_again_where_the_stored_one_does_not_fit(kept: tuple[Journal, Ledger, Place]) -> None:
    made, ledger, place = kept
    links = chain(ledger, 3)
    for link in links:
        append(made, link)
    tamper(place, "UPDATE ledgers SET content = :content", content=ledger.to_bytes())
    assert made.recover().ledger == links[-1].after


def test_promises_openings_and_orders(kept: tuple[Journal, Ledger, Place]) -> None:
    made, ledger, _ = kept
    link = chain(ledger, 1)[0]
    proposal = Proposal(link.commit.body, b"", b"", (), ())
    made.persist(Opened(0, 1, 0))
    made.persist(proposal)
    made.persist(Promise(0, 1, 1, COORDINATOR.peer, b"h" * 32, -1, None))
    voted = Promise(0, 1, 2, COORDINATOR.peer, b"h" * 32, 2, proposal)
    made.persist(Opened(0, 1, 2))
    made.persist(voted)
    made.order("pause", b"first", 3.0)
    recovered = made.recover()
    assert (recovered.opened, recovered.promise, recovered.run_time_s) == (2, voted, 3.0)
    append(made, link)
    made.order("resume", b"second", 4.0)
    recovered = made.recover()
    assert (recovered.opened, recovered.promise, recovered.run_time_s) == (-1, voted, 4.0)
    assert made.orders() == [b"first", b"second"]


def test_an_epoch_of_a_branch_that_was_given_up_is_not_open(kept: tuple[Journal, Ledger, Place]) -> None:
    made, ledger, _ = kept
    fork, first = chain(ledger, 2)
    append(made, fork)
    made.persist(Opened(0, 2, 1))
    made.persist(Promise(0, 2, 1, COORDINATOR.peer, fork.after.head, -1, None))
    lonely = fork.after.in_epoch(1, COORDINATOR.peer)
    for link in chain(lonely, 2):
        made.persist(Opened(1, link.body.round, 0))
        append(made, link)
    made.persist(Opened(1, 4, 3))
    made.persist(Promise(1, 4, 3, COORDINATOR.peer, b"h" * 32, -1, None))
    assert (made.recover().ledger.epoch, made.recover().epoch, made.recover().opened) == (1, 1, 3)
    made.orphan(fork.after)
    others = [first, next_commit(first.after, counted=(ALICE,), seats=(Seat(ALICE, (Range(90, 2),), 1),))]
    for link in others:
        append(made, link)
    recovered = made.recover()
    assert (recovered.ledger, recovered.epoch, recovered.opened) == (others[-1].after, 0, -1), "round 4 again"
    assert recovered.numbers == {(0, 2): 1, (1, 2): 0, (1, 3): 0, (1, 4): 3}
    assert recovered.signed == {0: 2, 1: 4}
    made.persist(Opened(2, 4, 0))
    assert made.recover().epoch == 2, "one that was opened since"


def test_observations_are_read_by_kind_and_subject(kept: tuple[Journal, Ledger, Place]) -> None:
    made, _, _ = kept
    first = Observation("evaluation", ALICE, "aa", {"val_loss": 2.5})
    second = Observation("evaluation", ALICE, "bb", {"val_loss": 2.0})
    made.observe([first, Observation("digest", ALICE, "aa", {"digest": "11"}), second], 1.0)
    made.observe([], 1.0)
    assert made.observations("evaluation") == [first, second]
    assert made.observations("evaluation", ["bb"]) == [second]
    assert made.observations("report") == []


def test_another_run_and_another_schema_are_refused(kept: tuple[Journal, Ledger, Place]) -> None:
    made, _, place = kept
    with pytest.raises(StateError, match="is of run"):
        Journal.open(place, PeerId("12D3KooWother"))
    made.close()
    tamper(place, "UPDATE facts SET value = '99' WHERE name = 'schema'")
    with pytest.raises(StateError, match="schema 99"):
        Journal.open(place, RUN.peer)


def test_a_changed_commit_is_noticed(kept: tuple[Journal, Ledger, Place]) -> None:
    made, ledger, place = kept
    links = chain(ledger, 2)
    for link in links:
        append(made, link)
    tamper(place, "UPDATE commits SET content = :content WHERE round = 2", content=encode(links[0].commit))
    with pytest.raises(StateError, match="doesn't have its hash"):
        made.recover()


def test_a_missing_commit_is_noticed(kept: tuple[Journal, Ledger, Place]) -> None:
    made, ledger, place = kept
    for link in chain(ledger, 3):
        append(made, link)
    tamper(place, "DELETE FROM commits WHERE round = 2")
    with pytest.raises(StateError, match="a commit is missing"):
        made.recover()


_WRITER = """
import sys
from pathlib import Path
from coordinator.journal import Journal
from coordinator.rounds.events import Opened
from tests.coordinator.made import RUN, append
from tests.coordinator.test_journal import chain

journal = Journal.open(sys.argv[1] if "://" in sys.argv[1] else Path(sys.argv[1]), RUN.peer)
journal.begin_term("a writer")
recovered = journal.recover()
links = chain(recovered.ledger, 200)
for number, link in enumerate(links):
    journal.persist(Opened(0, link.body.round, number))
    append(journal, link)
    print(link.body.round, flush=True)
"""


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


@pytest.mark.slow
def test_kill_9_loses_no_acknowledged_write(place: Place) -> None:
    made, _ = journal(place)
    made.close()
    for n_lines in (1, 7, 23):
        wait_until_nobody_leads(place)
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(place)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert process.stdout is not None
        with process.stdout:
            acknowledged = 0
            for _ in range(n_lines):
                acknowledged = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read().splitlines(keepends=True)
        whole = [line for line in rest if line.endswith("\n")]
        acknowledged = int(whole[-1]) if whole else acknowledged
        process.wait()
        wait_until_nobody_leads(place)
        again = Journal.open(place, RUN.peer)
        recovered = again.recover()
        rounds = [entry.body.round for entry in again.entries()]
        again.close()
        assert recovered.body.round >= acknowledged
        assert rounds == list(range(recovered.body.round + 1))


# -- SQLite alone --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"not a database at all, but long enough to be looked at" * 100])
def test_a_damaged_file_is_named_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(content)
    with pytest.raises(StateError, match=str(path)) as caught:
        Journal.open(path, RUN.peer)
    assert "copy" in str(caught.value)
    assert caught.value.exit_code == 6


def test_overwritten_pages_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    made, ledger = journal(path)
    for link in chain(ledger, 30):
        append(made, link)
    made.close()
    raw = bytearray(path.read_bytes())
    for start in range(4096, len(raw), 4096):
        raw[start : start + 64] = b"\xff" * 64
    path.write_bytes(raw)
    with pytest.raises(StateError, match="damaged"):
        Journal.open(path, RUN.peer)


def test_a_missing_file_and_a_bad_url(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="missing"):
        Journal.open(tmp_path / "none.sqlite", RUN.peer)
    with pytest.raises(UsageError, match="--database"):
        Journal.open("nonsense://x", RUN.peer)
    with pytest.raises(MachineError):
        Journal.open(f"sqlite:///{tmp_path}/no/such/folder/x.sqlite", RUN.peer)


# -- PostgreSQL alone ----------------------------------------------------------------------------------------------


@pytest.fixture
def url(postgres: Server) -> str:
    return postgres.new_database()


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
