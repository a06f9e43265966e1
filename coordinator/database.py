"""The tables of the journal, and transactions on them: durable when they end, every failure one of our errors.

SQLite with a write-ahead log and full sync, or whatever SQLAlchemy reaches by a URL; nothing that PostgreSQL lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Engine,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    event,
    text,
)
from sqlalchemy.exc import ArgumentError, DatabaseError, NoSuchModuleError, OperationalError, SQLAlchemyError

from coordinator.errors import MachineError, StateError, UsageError

RESTORE = "move it away and restore a copy; the members of the run hold the chain too"
_BUSY_MS = 10_000

metadata = MetaData()
_serial = BigInteger().with_variant(Integer, "sqlite")

facts = Table("facts", metadata, Column("name", String(40), primary_key=True), Column("value", Text, nullable=False))
commits = Table(
    "commits",
    metadata,
    Column("id", _serial, primary_key=True),
    Column("hash", String(64), nullable=False, unique=True),
    Column("epoch", BigInteger, nullable=False),
    Column("round", BigInteger, nullable=False),
    Column("content", LargeBinary, nullable=False),  # Commit, encoded
    Column("failed", Text, nullable=False),  # JSON: failed attempts
    Column("nominal_step", BigInteger, nullable=False),  # at the round's start
    Column("tokens", BigInteger, nullable=False),  # of the run, after the round
    Column("at_run_s", Float, nullable=False),
    Column("orphaned", Boolean, nullable=False, default=False),
)
ledgers = Table(
    "ledgers",
    metadata,
    Column("hash", String(64), primary_key=True),  # of the commit that it follows from
    Column("content", LargeBinary, nullable=False),
)
opened = Table(
    "opened",
    metadata,
    Column("id", _serial, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("round", BigInteger, nullable=False),
    Column("attempt", BigInteger, nullable=False),
)
promises = Table(
    "promises",
    metadata,
    Column("id", _serial, primary_key=True),
    Column("round", BigInteger, nullable=False),
    Column("content", LargeBinary, nullable=False),  # Promise, encoded
)
proposals = Table(
    "proposals",
    metadata,
    Column("id", _serial, primary_key=True),
    Column("round", BigInteger, nullable=False),
    Column("content", LargeBinary, nullable=False),  # Proposal, encoded
)
admissions = Table(
    "admissions",
    metadata,
    Column("id", _serial, primary_key=True),
    Column("peer", String(128), nullable=False, index=True),
    Column("name", String(100), nullable=False),
    Column("observer", Boolean, nullable=False),
    Column("certificate", String(64), nullable=False),  # its serial number, hex
    Column("token", String(32), nullable=False),  # serial of the token that let the peer in, hex; empty without one
    Column("at_run_s", Float, nullable=False),
)
token_uses = Table(
    "token_uses",
    metadata,
    Column("token", String(32), primary_key=True),
    Column("peer", String(128), primary_key=True),
)
observations = Table(
    "observations",
    metadata,
    Column("id", _serial, primary_key=True),
    Column("kind", String(20), nullable=False),
    Column("peer", String(128), nullable=False),
    Column("subject", String(64), nullable=False, index=True),  # a round, a commit's or a state's hash
    Column("content", Text, nullable=False),  # JSON
    Column("at_run_s", Float, nullable=False),
)
orders = Table(
    "orders",
    metadata,
    Column("id", _serial, primary_key=True),
    Column("kind", String(20), nullable=False),
    Column("content", Text, nullable=False),
    Column("at_run_s", Float, nullable=False),
)


class Database:
    """Transactions on one database. `where` names it in messages."""

    def __init__(self, place: Path | str) -> None:
        """A path of SQLite, or a URL. Raises UsageError for a URL that nothing here can open."""
        self.where = str(place)
        try:
            if isinstance(place, Path):
                self._engine = create_engine(f"sqlite:///{place}")
            else:
                self._engine = create_engine(place)
                self.where = self._engine.url.render_as_string(hide_password=True)
        except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
            raise UsageError(
                f"--database {self.where} can't be opened: {error}", "give sqlite:///PATH or postgresql://…"
            ) from error
        if self._engine.dialect.name == "sqlite":
            _tune(self._engine)

    @property
    def is_sqlite(self) -> bool:
        return self._engine.dialect.name == "sqlite"

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def appending(self) -> Iterator[Connection]:
        """A transaction: on disk when it ends without an exception, else without a trace."""
        with self._explained(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        with self._explained(), self._engine.connect() as connection:
            yield connection

    def check(self) -> None:
        """Raises StateError for a file that is no database or is not whole."""
        if self.is_sqlite:
            with self.reading() as connection:
                found = connection.execute(text("PRAGMA quick_check")).scalars().all()
            if found != ["ok"]:
                raise StateError(f"the database {self.where} is damaged: {found[0]}", RESTORE)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OperationalError as error:
            raise MachineError(
                f"the database {self.where} can't be used: {error.orig}", "check disk, permissions and address"
            ) from error
        except DatabaseError as error:
            raise StateError(f"the database {self.where} is damaged: {error.orig}", RESTORE) from error
        except SQLAlchemyError as error:
            raise StateError(f"the database {self.where} can't be used: {error}", RESTORE) from error


def _tune(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def connected(connection: Any, _record: Any) -> None:
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.close()
