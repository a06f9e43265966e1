"""The tables of the journal, and transactions on them: durable when they end, every failure one of our errors.

SQLite with a write-ahead log and full sync, or PostgreSQL by a URL. Who may append is `lead`'s to say.
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
    make_url,
    text,
)
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DatabaseError, NoSuchModuleError, OperationalError, SQLAlchemyError

from coordinator.errors import MachineError, StateError, UsageError

RESTORE = "move it away and restore a copy; the members of the run hold the chain too"
_BUSY_MS = 10_000
"""So long an append waits for somebody else's lock on a table."""
_LIVELY = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,  # ms
    "application_name": "barnraise",
}
"""libpq's settings unless the URL has others: a line that is dead is noticed within some 10 s."""
_PERMISSION_DENIED = "42501"  # SQLSTATE

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
leadership = Table(  # one row
    "leadership",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("term", BigInteger, nullable=False),  # of who may append; counts up
    Column("holder", Text, nullable=False),  # its name, for people
    Column("lease_s", Float, nullable=False),  # silent for longer, it may be put out
    Column("beat_at", Float, nullable=False),  # its last sign of life, by the database's clock, seconds since 1970
)
coordinators = Table(  # where they are: it decides nothing, and needs no term
    "coordinators",
    metadata,
    Column("http", String(300), primary_key=True),
    Column("line", String(300), nullable=False),
    Column("seen_at", Float, nullable=False),  # as beat_at
)
ADDED = frozenset({leadership.name, coordinators.name})
"""Tables that a journal has once somebody leads from it."""
EXPECTED = frozenset(metadata.tables) - ADDED


def is_server(place: str) -> bool:
    """Whether a URL leads to a server that several coordinators can reach."""
    return place.partition(":")[0].partition("+")[0] in ("postgresql", "postgres")


class Database:
    """Transactions on one database. `where` names it in messages."""

    def __init__(self, place: Path | str) -> None:
        """A path of SQLite, or a URL.

        Raises UsageError for a URL that nothing here can open, MachineError where its driver is not installed.
        """
        self.where = str(place)
        try:
            url = URL.create("sqlite", database=str(place)) if isinstance(place, Path) else make_url(place)
            if not isinstance(place, Path):
                self.where = url.render_as_string(hide_password=True)
            if url.drivername in ("postgresql", "postgres"):
                url = url.set(drivername="postgresql+psycopg")
            if url.get_backend_name() not in ("sqlite", "postgresql"):
                raise ArgumentError(f"{url.get_backend_name()} is not supported")
            if url.get_backend_name() == "sqlite":
                self.engine = create_engine(url)
            else:
                lively = {name: value for name, value in _LIVELY.items() if name not in url.query}
                self.engine = create_engine(url, connect_args=lively, pool_pre_ping=True)
        except ModuleNotFoundError as error:
            raise MachineError(
                f"--database {self.where} needs a driver that is not installed: {error}",
                "install it with: bash deploy/install.sh postgres (or pip install 'psycopg[binary]')",
            ) from error
        except (ArgumentError, NoSuchModuleError, TypeError, ValueError) as error:
            raise UsageError(
                f"--database {self.where} can't be opened: {error}", "give sqlite:///PATH or postgresql://…"
            ) from error
        if self.is_sqlite:
            _tune(self.engine)

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """All that is read inside is of one moment, whatever is appended meanwhile."""
        with self.explained(), self.engine.connect() as connection:
            if self.is_sqlite:
                connection.exec_driver_sql("BEGIN")
            else:
                connection.execution_options(isolation_level="REPEATABLE READ")
            yield connection

    def check(self) -> None:
        """Raises StateError for a file that is no database or is not whole."""
        if self.is_sqlite:
            with self.reading() as connection:
                found = connection.execute(text("PRAGMA quick_check")).scalars().all()
            if found != ["ok"]:
                raise StateError(f"the database {self.where} is damaged: {found[0]}", RESTORE)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Whatever goes wrong inside becomes a MachineError or a StateError that names the database."""
        try:
            yield
        except OperationalError as error:
            raise MachineError(
                f"the database {self.where} can't be used: {one_line(error.orig)}",
                "check disk, permissions and address",
            ) from error
        except DatabaseError as error:
            if getattr(error.orig, "sqlstate", None) == _PERMISSION_DENIED:
                raise MachineError(
                    f"the database {self.where} can't be used: {one_line(error.orig)}",
                    "let this role create and write tables there",
                ) from error
            raise StateError(f"the database {self.where} is damaged: {one_line(error.orig)}", RESTORE) from error
        except SQLAlchemyError as error:
            raise StateError(f"the database {self.where} can't be used: {one_line(error)}", RESTORE) from error


def one_line(error: object) -> str:
    """What a driver says, which may be a paragraph."""
    return " ".join(str(error).split())


def _tune(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def connected(connection: Any, _record: Any) -> None:
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.close()
