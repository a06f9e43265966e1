"""Who may append to the journal: the lock, the term that guards each append, and the lease that a silent leader loses.

On PostgreSQL one session holds an advisory lock for as long as it lives, and everything is appended through that
session. Each append first renews the row of its term, in its own transaction: once another term has begun there is no
such row, whatever the process believes. On SQLite the folder's lock keeps others away, and the term does the rest.

A process that is stopped, or cut off while the server takes its line for alive, keeps the lock. So the leader gives
signs of life, and who waits for the lock has the database end a session that has been silent for longer than its lease,
by the database's clock. A leader that has been silent for its lease by its own clock leads no longer either.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from blake3 import blake3
from sqlalchemy import Connection, insert, inspect, literal_column, select, text, update
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.sql.elements import ColumnElement

from coordinator import database
from coordinator.database import Database
from coordinator.errors import MachineError, StateError
from protos.messages import PeerId

LEASE_S = 15.0
BEATS_PER_LEASE = 5
CLOSING_S = 2.0
"""A session that has just been closed keeps its lock until the server sees that it is gone."""
REMEMBERED_S = 7 * 86400.0
"""So long a coordinator that was there is named to others."""
_LOCK_NOT_AVAILABLE = "55P03"  # SQLSTATE
_TABLE_WAIT_MS = 10_000

# The session that has the lock, and for how long it has done nothing, by the database's clock.
_HOLDER = """
SELECT held.pid AS pid,
       EXTRACT(EPOCH FROM clock_timestamp() - greatest(
           seen.query_start, seen.backend_start, to_timestamp((SELECT max(beat_at) FROM leadership))
       ))::float8 AS silent_s
FROM pg_locks AS held LEFT JOIN pg_stat_activity AS seen ON seen.pid = held.pid
WHERE held.locktype = 'advisory' AND held.granted AND held.objsubid = 1
  AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND held.classid = CAST(:high AS oid) AND held.objid = CAST(:low AS oid)
"""


class LeadLost(StateError):
    """This process may append nothing any more."""


@dataclass(frozen=True, slots=True)
class Held:
    """Somebody else has the lock.

    Attributes:
        holder: its name; empty where it hasn't said yet.
        silent_s: for how long it has given no sign of life, by the database's clock; 0 where that can't be told.
        lease_s: for how long it may.
        ended: whether its session has been ended just now, for that.
    """

    holder: str
    term: int
    silent_s: float
    lease_s: float
    ended: bool


class Lead:
    """The right to append, through one session. `begin` first; used by one thread at a time, but for `abandon`.

    Args:
        seconds: a monotonic clock.
    """

    def __init__(self, opened: Database, session: Connection, *, seconds: Callable[[], float] | None = None) -> None:
        self._database = opened
        self._session = session
        self._seconds = seconds or _seconds
        self._socket = None if opened.is_sqlite else _socket_of(session)
        self._lost = ""
        self._beat_at = self._seconds()
        self.term = 0
        self.lease_s = LEASE_S

    # -- life ------------------------------------------------------------------------------------------------------

    def begin(self, holder: str, lease_s: float = LEASE_S, *, above: int = 0) -> int:
        """A new term, higher than all before and than `above`. Nothing of an earlier one can be appended any more."""
        began_at = self._seconds()
        with self._transaction() as connection:
            database.metadata.create_all(connection)
            now_s = _now_s(self._database)
            values = {"holder": holder, "lease_s": lease_s, "beat_at": now_s}
            table = database.leadership
            # The row is locked first: two that begin at once get two numbers.
            if connection.execute(update(table).values(**values)).rowcount:
                last = int(connection.execute(select(table.c.term)).scalar_one())
                self.term = max(last, above) + 1
                connection.execute(update(table).values(term=self.term))
            else:
                self.term = above + 1
                connection.execute(insert(table).values(id=1, term=self.term, **values))
        self.lease_s, self._beat_at = lease_s, began_at
        return self.term

    def close(self) -> None:
        """Give the lock back."""
        self._lost = self._lost or "this process has stopped leading"
        with contextlib.suppress(Exception):
            if not self._database.is_sqlite:
                self._session.invalidate()  # closes it, with its lock: back in the pool it would keep it
            self._session.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def abandon(self, why: str) -> None:
        """Lead no longer, from any thread: what the session still waits for fails at once."""
        self._lost = self._lost or why
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    @property
    def is_local(self) -> bool:
        """Whether no other machine can take the lead: there is no lease to keep then."""
        return self._database.is_sqlite

    # -- appends ---------------------------------------------------------------------------------------------------

    @contextmanager
    def copying(self) -> Iterator[Connection]:
        """A transaction in which a journal comes into a database that has none, before any term."""
        with self._transaction() as connection:
            database.metadata.create_all(connection)
            yield connection

    @contextmanager
    def appending(self) -> Iterator[Connection]:
        """A transaction of this term: on disk when it ends without an exception, else without a trace.

        Raises LeadLost where another term has begun, or the session is gone.
        """
        began_at = self._seconds()
        with self._transaction() as connection:
            table = database.leadership
            renewed = connection.execute(
                update(table).where(table.c.term == self.term).values(beat_at=_now_s(self._database))
            )
            if renewed.rowcount != 1:
                self._lost = self._lost or _overtaken(connection, self.term)
                raise self._gone()
            yield connection
        self._beat_at = began_at

    def beat(self) -> list[tuple[str, str]]:
        """A sign of life; (http, line) of each coordinator of the run that was there lately, the newest first."""
        with self.appending() as connection:
            return met(connection, self._database)

    def meet(self, http: str, line: str) -> None:
        """Note where this coordinator is."""
        with self.appending() as connection:
            meet(connection, self._database, http, line)

    def check(self) -> None:
        """Raises LeadLost where this process may sign and send nothing more, as far as it can tell by itself."""
        silent_s = self._seconds() - self._beat_at
        if not self._database.is_sqlite and not self._lost and silent_s > self.lease_s:
            self._lost = f"nothing reached the database for {silent_s:.0f} s, and its lease is {self.lease_s:g} s"
        if self._lost:
            raise self._gone()

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        if self._lost:
            raise self._gone()
        try:
            with self._database.explained(), self._session.begin():
                yield self._session
        except (MachineError, StateError) as error:
            cause = error.__cause__
            if self._database.is_sqlite or not isinstance(cause, DBAPIError):
                raise
            if cause.connection_invalidated or self._lost:
                # A new session would not have the lock.
                self._lost = self._lost or f"the session that held the lock is gone ({error.cause})"
                raise self._gone() from error
            raise

    def _gone(self) -> LeadLost:
        return LeadLost(
            f"this coordinator leads no longer: {self._lost}",
            "nothing was signed after that; start it again, with --standby where another one leads",
        )


class Contender:
    """Asks for the right to append. One thread at a time. `seconds` as for a Lead."""

    def __init__(self, opened: Database, run: PeerId, *, seconds: Callable[[], float] | None = None) -> None:
        self._database = opened
        self._seconds = seconds or _seconds
        self._run = run
        self._session: Connection | None = None

    def ask(self, wait_s: float = 0.0) -> Lead | Held:
        """The right to append as soon as it is free, or who has it after `wait_s`.

        Raises MachineError or StateError.
        """
        if self._database.is_sqlite:
            with self._database.explained():
                return Lead(self._database, self._database.engine.connect(), seconds=self._seconds)
        with self._database.explained():
            try:
                session = self._session or self._connect()
                self._session = session
                if self._locked(session, wait_s):
                    self._session = None
                    return Lead(self._database, session, seconds=self._seconds)
                return self._held(session)
            except DBAPIError as error:
                if error.connection_invalidated:
                    self.close()
                raise

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(Exception):
                session.invalidate()
                session.close()

    def _connect(self) -> Connection:
        session = self._database.engine.connect()
        with session.begin():
            if session.execute(text("SHOW fsync")).scalar_one() != "on":
                raise MachineError(
                    f"the server of {self._database.where} has fsync off: what it acknowledges is not on disk",
                    "set fsync = on in its postgresql.conf",
                )
            # More than `on` may be asked for by who configured the server, less is not enough.
            session.execute(
                text(
                    "SELECT set_config('synchronous_commit', 'on', false) "
                    "WHERE current_setting('synchronous_commit') IN ('off', 'local')"
                )
            )
            session.execute(text(f"SET lock_timeout = {_TABLE_WAIT_MS}"))
        return session

    def _locked(self, session: Connection, wait_s: float) -> bool:
        key = {"key": _key(self._run)}
        if wait_s <= 0:
            with session.begin():
                return bool(
                    session.execute(text("SELECT pg_try_advisory_lock(:key)"), {"key": _key(self._run)}).scalar_one()
                )
        try:
            with session.begin():
                session.execute(text(f"SET LOCAL lock_timeout = {max(1, round(wait_s * 1000))}"))
                session.execute(text("SELECT pg_advisory_lock(:key)"), key)
        except OperationalError as error:
            if getattr(error.orig, "sqlstate", None) != _LOCK_NOT_AVAILABLE:
                raise
            return False
        return True

    def _held(self, session: Connection) -> Held:
        """Who has the lock; its session is ended where it has been silent for longer than its lease."""
        with session.begin():
            held, pid = look(session, self._run)
            if not pid or held.silent_s <= held.lease_s:
                return held
            session.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
        return replace(held, ended=True)


def look(session: Connection, run: PeerId) -> tuple[Held, int]:
    """Who leads, or led last, and the server's process that holds the lock for it, 0: none does. PostgreSQL alone."""
    if not inspect(session).has_table(database.leadership.name):
        return Held("", 0, 0.0, LEASE_S, False), 0
    row = session.execute(select(database.leadership)).first()
    key = _key(run)
    lock = session.execute(text(_HOLDER), {"high": key >> 32, "low": key & 0xFFFFFFFF}).first()
    silent_s = float(lock.silent_s or 0.0) if lock is not None else 0.0
    pid = int(lock.pid) if lock is not None else 0
    if row is None:
        return Held("", 0, silent_s, LEASE_S, False), pid
    return Held(row.holder, int(row.term), silent_s, float(row.lease_s), False), pid


def _key(run: PeerId) -> int:
    """The advisory lock's number, 63 bits: other programs may lock in the same database."""
    return int.from_bytes(blake3(b"barnraise coordinator " + run.encode()).digest()[:8]) >> 1


def _seconds() -> float:
    """A monotonic clock that goes on while the machine sleeps, where there is one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _now_s(opened: Database) -> ColumnElement[float]:
    """The database's clock."""
    if opened.is_sqlite:
        return literal_column("(julianday('now') - 2440587.5) * 86400.0")
    return literal_column("EXTRACT(EPOCH FROM clock_timestamp())::float8")


def _overtaken(connection: Connection, term: int) -> str:
    row = connection.execute(select(database.leadership)).first()
    if row is None:
        return f"the database knows nothing of its term {term}: it was put back to an older state"
    return f"{row.holder} has begun term {row.term}, and its own was {term}"


def _socket_of(session: Connection) -> socket.socket | None:
    """A second handle on the session's socket, to end it from another thread."""
    number = getattr(session.connection.driver_connection, "fileno", None)
    return None if number is None else socket.socket(fileno=os.dup(number()))


def meet(connection: Connection, opened: Database, http: str, line: str) -> None:
    """Note where a coordinator is, whoever leads."""
    table = database.coordinators
    values = {"line": line, "seen_at": _now_s(opened)}
    if not connection.execute(update(table).where(table.c.http == http).values(**values)).rowcount:
        connection.execute(insert(table).values(http=http, **values))


def met(connection: Connection, opened: Database) -> list[tuple[str, str]]:
    """(http, line) of each coordinator that was there lately, the newest first."""
    table = database.coordinators
    wanted = select(table.c.http, table.c.line).where(table.c.seen_at > _now_s(opened) - REMEMBERED_S)
    return [(row.http, row.line) for row in connection.execute(wanted.order_by(table.c.seen_at.desc()))]
