"""Moves a run's journal from the SQLite file in its folder to another database, whole or not at all."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import BigInteger, Connection, func, insert, inspect, select, text

from coordinator import database
from coordinator.database import Database
from coordinator.errors import MachineError
from coordinator.folder import RunFolder
from coordinator.journal import Journal
from coordinator.lead import Lead
from protos.messages import PeerId

MOVED = "journal.moved.sqlite"
"""What the file is called afterwards, so that nobody goes on from it."""
_ROWS_AT_ONCE = 500


def holds_run(opened: Database) -> bool:
    """Whether there is a journal in it, of whichever run."""
    with opened.reading() as connection:
        if not inspect(connection).has_table(database.facts.name):
            return False
        return connection.execute(select(database.facts.c.name).limit(1)).first() is not None


def move(folder: RunFolder, to: Lead, run: PeerId) -> None:
    """Copy all that the folder's journal holds to where `to` leads. Raises StateError where it is not whole."""
    source = Journal.open(folder.journal, run)
    source.close()
    kept = Database(folder.journal)
    try:
        with to.copying() as connection, kept.reading() as reading:
            there = inspect(reading).get_table_names()
            for name in sorted({*database.EXPECTED, *database.ADDED.intersection(there)}):
                _copy(name, reading, connection)
    finally:
        kept.close()


def put_aside(folder: RunFolder) -> bool:
    """Rename the file that was moved; whether there was one. Raises MachineError."""
    if not folder.journal.exists():
        return False
    try:
        folder.journal.replace(folder.path / MOVED)
        for ending in ("-wal", "-shm"):  # empty: all of it was in the file when the last reader left
            Path(f"{folder.journal}{ending}").unlink(missing_ok=True)
    except OSError as error:
        raise MachineError(f"{folder.journal} can't be renamed: {error.strerror}", "rename it by hand") from error
    return True


def _copy(name: str, source: Connection, to: Connection) -> None:
    table = database.metadata.tables[name]
    rows = source.execution_options(yield_per=_ROWS_AT_ONCE).execute(select(table)).mappings()
    for bunch in rows.partitions(_ROWS_AT_ONCE):
        to.execute(insert(table), [dict(row) for row in bunch])
    key = table.columns.get("id")
    if key is not None and isinstance(key.type, BigInteger) and to.dialect.name == "postgresql":
        last = to.execute(select(func.max(key))).scalar()
        if last is not None:  # numbers were given: those that the server gives go on from there
            to.execute(
                text("SELECT setval(pg_get_serial_sequence(:table, 'id'), :last)"), {"table": name, "last": last}
            )
