"""The voter's record on disk: what this node promised and voted for, so that a restart can't contradict it.

Beside it the numbers that this node used as a leader, and the newest head that the coordinator has signed.

One row in an SQLite file, on disk (with the removal of its rollback journal) before `save` returns. Who has no record
may have lost one: it abstains until the next commit.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from threading import Lock
from typing import Any

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
_SIGNED = "CREATE TABLE IF NOT EXISTS signed (epoch INTEGER PRIMARY KEY, round INTEGER NOT NULL)"
_OPENED = "CREATE TABLE IF NOT EXISTS opened (epoch INTEGER, round INTEGER, attempt INTEGER)"
_HEAD = "CREATE TABLE IF NOT EXISTS signed_head (id INTEGER PRIMARY KEY CHECK (id = 1), envelope BLOB NOT NULL)"
_WHOLE = "CREATE TABLE IF NOT EXISTS whole (id INTEGER PRIMARY KEY CHECK (id = 1))"
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
            for table in (_SCHEMA, _SIGNED, _OPENED, _HEAD, _WHOLE):
                self._database.execute(table)
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
        self._write(
            "the voter's record",
            (
                "INSERT INTO voter (id, kind, message) VALUES (1, ?, ?)"
                " ON CONFLICT (id) DO UPDATE SET kind = excluded.kind, message = excluded.message",
                (kind, raw),
            ),
            (
                "INSERT INTO signed (epoch, round) VALUES (?, ?)"
                " ON CONFLICT (epoch) DO UPDATE SET round = max(round, excluded.round)",
                (entry.epoch, entry.round),
            ),
            n_bytes=len(raw),
        )

    def signed(self) -> dict[int, int]:
        """The last round of each epoch in which this node promised or voted. Raises LocalStateError."""
        row = self._read("SELECT json_group_array(json_array(epoch, round)) FROM signed", ())
        return dict(json.loads(row[0])) if row is not None else {}

    def load(self) -> tuple[Promise | Leave | None, bool]:
        """The record, and whether one may be lost: there is none, and none was needed since this file was made.

        Raises LocalStateError.
        """
        with self._lock:
            try:
                row = self._database.execute("SELECT kind, message FROM voter").fetchone()
            except sqlite3.Error as error:
                raise self._damaged(error) from error
        if row is None:
            return None, self._read("SELECT id FROM whole", ()) is None
        kind, raw = row
        try:
            return wire.decode(_KINDS[kind], raw), False
        except ValueError as error:
            raise self._damaged(error) from error

    def is_whole(self) -> None:
        """A commit has come since this file was made: from now on it holds all that its node signs, even if nothing.

        Else voters of a first round that all stop before they signed anything would wait for one another for good.
        Raises LocalStateError or DiskFull.
        """
        self._write("the voter's record", ("INSERT OR IGNORE INTO whole (id) VALUES (1)", ()))

    def open_number(self, epoch: int, round_: int, attempt: int) -> None:
        """A number that this node uses as a leader; on disk when this returns. Those of the epoch's earlier rounds are
        forgotten: later ones, and those of other epochs, may come again, if it leads from an older state.

        Raises LocalStateError or DiskFull.
        """
        self._write(
            "a leader's number",
            ("DELETE FROM opened WHERE epoch = ? AND round < ?", (epoch, round_)),
            ("INSERT INTO opened (epoch, round, attempt) VALUES (?, ?, ?)", (epoch, round_, attempt)),
        )

    def numbers(self) -> dict[tuple[int, int], int]:
        """The highest number that this node has used as a leader, by epoch and round. Raises LocalStateError."""
        row = self._read("SELECT json_group_array(json_array(epoch, round, attempt)) FROM opened", ())
        used: dict[tuple[int, int], int] = {}
        for epoch, round_, attempt in json.loads(row[0]) if row is not None else ():
            used[epoch, round_] = max(attempt, used.get((epoch, round_), -1))
        return used

    def keep_head(self, envelope: bytes) -> None:
        """Keep the newest head that the coordinator has signed. Raises LocalStateError or DiskFull."""
        self._write("the signed head", ("INSERT OR REPLACE INTO signed_head (id, envelope) VALUES (1, ?)", (envelope,)))

    def head(self) -> bytes:
        """The envelope of that head, empty: none. Raises LocalStateError."""
        row = self._read("SELECT envelope FROM signed_head", ())
        return b"" if row is None else bytes(row[0])

    def _write(self, what: str, *statements: tuple[str, tuple[object, ...]], n_bytes: int = 4096) -> None:
        with self._lock:
            try:
                self._database.execute("BEGIN")
                for statement, values in statements:
                    self._database.execute(statement, values)
                self._database.execute("COMMIT")
            except sqlite3.Error as error:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                    raise DiskFull(what, str(self.path.parent), n_bytes, None) from error
                raise self._damaged(error) from error

    def _read(self, statement: str, values: tuple[object, ...]) -> tuple[Any, ...] | None:
        with self._lock:
            try:
                row = self._database.execute(statement, values).fetchone()
            except sqlite3.Error as error:
                raise self._damaged(error) from error
        return None if row is None else tuple(row)

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _damaged(self, error: Exception) -> LocalStateError:
        return LocalStateError(
            f"the journal {self.path} can't be used ({error})",
            "make sure that the folder can be written to; if the file is damaged, move it away: "
            "the node then abstains until the next round is committed",
        )
