"""A journal in SQLite and in PostgreSQL, what is appended to it, and what happens behind its back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from coordinator import journal as journals
from coordinator import lead
from coordinator.database import Database
from coordinator.journal import Journal
from coordinator.rounds.ledger import Ledger
from protos.messages import Range, Seat
from tests.coordinator.made import RUN, Chained, identity, journal, next_commit
from tests.coordinator.postgres import Server

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
