"""The voter's record on disk: what this node promised and voted for, so that a restart can't contradict it.

One row in an SQLite file, on disk (with the removal of its rollback journal) before `save` returns. Who has no record
may have lost one: it abstains until the next commit.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from threading import Lock

from node.errors import DiskFull, LocalStateError
from protos import wire
from protos.messages import Leave, Promise

_SCHEMA = """
CREATE TABLE IF NOT EXISTS voter (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    kind TEXT NOT NULL CHECK (kind IN ('promise', 'leave')),
    message BLOB NOT NULL
)
"""
_KINDS: dict[str, type[Promise] | type[Leave]] = {"promise": Promise, "leave": Leave}


class Journal:
    """Open the journal, making it if it is missing. Raises LocalStateError for a file that is damaged or unreadable.

    Methods may be called from any thread; they block for the disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()
        try:
            self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
        except sqlite3.Error as error:
            raise self._damaged(error) from error
        try:
            self._database.execute("PRAGMA synchronous = EXTRA")
            self._database.execute(_SCHEMA)
            (verdict,) = self._database.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
        except sqlite3.Error as error:
            self._database.close()
            raise self._damaged(error) from error

    def save(self, entry: Promise | Leave) -> None:
        """Replace the record; it is on disk when this returns. Raises LocalStateError or DiskFull."""
        kind = next(name for name, cls in _KINDS.items() if type(entry) is cls)
        raw = wire.encode(entry)
        with self._lock:
            try:
                self._database.execute(
                    "INSERT INTO voter (id, kind, message) VALUES (1, ?, ?)"
                    " ON CONFLICT (id) DO UPDATE SET kind = excluded.kind, message = excluded.message",
                    (kind, raw),
                )
            except sqlite3.Error as error:
                if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                    raise DiskFull("the voter's record", str(self.path.parent), len(raw), None) from error
                raise self._damaged(error) from error

    def load(self) -> tuple[Promise | Leave | None, bool]:
        """The record, and whether there is none: then this node can't know what it signed. Raises LocalStateError."""
        with self._lock:
            try:
                row = self._database.execute("SELECT kind, message FROM voter").fetchone()
            except sqlite3.Error as error:
                raise self._damaged(error) from error
        if row is None:
            return None, True
        kind, raw = row
        try:
            return wire.decode(_KINDS[kind], raw), False
        except ValueError as error:
            raise self._damaged(error) from error

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _damaged(self, error: Exception) -> LocalStateError:
        return LocalStateError(
            f"the journal {self.path} can't be used ({error})",
            "make sure that the folder can be written to; if the file is damaged, move it away: "
            "the node then abstains until the next round is committed",
        )
