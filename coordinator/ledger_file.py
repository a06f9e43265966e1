"""`ledger.jsonl`: a line a commit, in order; rebuilt from the database at each start, appended to after that.

A line is written once its evaluation is known, or, without one, when the next commit but one or the end comes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from coordinator.errors import MachineError
from coordinator.folder import write_whole

Row = Mapping[str, Any]

LAST_BYTES = 4 * 2**20
"""More than a line has."""
WAITING_MOST = 1
"""A row waits for its evaluation while at most so many are newer."""


def line(row: Row) -> str:
    return json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n"


def last_round(path: Path) -> tuple[int, int] | None:
    """(epoch, round) of the last whole line of a ledger's file; None where there is none that says."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            lines = file.read().split(b"\n")[:-1]
        row = json.loads(lines[-1])
        return int(row["epoch"]), int(row["round"])
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None


class LedgerFile:
    """Appends rows in order. `refresh` gives a row as it is known now."""

    def __init__(self, path: Path, rows: Iterable[Row]) -> None:
        """Write the file anew with the rows that are complete. Raises MachineError."""
        self._path = path
        self._waiting: deque[int] = deque()
        self._file: IO[str] | None = None
        self.has_gaps = False
        """Whether a line was written without its evaluation."""
        done: list[Row] = []
        kept = list(rows)
        for index, row in enumerate(kept):
            newer = len(kept) - 1 - index
            if self._waiting or (row["val_loss"] is None and newer <= WAITING_MOST):
                self._waiting.append(int(row["round"]))
            else:
                done.append(row)
        self.rewrite(done)

    def rewrite(self, rows: Iterable[Row]) -> None:
        """Put the file anew, with exactly these rows. Raises MachineError."""
        kept = list(rows)
        write_whole(self._path, "".join(line(row) for row in kept).encode())
        self.close()
        try:
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error) from error
        self.has_gaps = any(row["val_loss"] is None for row in kept)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Rounds whose line is not written yet."""
        return tuple(self._waiting)

    def committed(self, round_: int) -> None:
        self._waiting.append(round_)

    def write(self, rows: Iterable[Row], *, all_of_them: bool = False) -> None:
        """Write what can be written, given the waiting rounds' rows as they are known now. Raises MachineError."""
        by_round = {int(row["round"]): row for row in rows}
        text = ""
        while self._waiting and (row := by_round.get(self._waiting[0])) is not None:
            if not all_of_them and row["val_loss"] is None and len(self._waiting) <= WAITING_MOST + 1:
                break
            text += line(row)
            self.has_gaps |= row["val_loss"] is None
            self._waiting.popleft()
        if text and self._file is not None:
            try:
                self._file.write(text)
                self._file.flush()
                os.fdatasync(self._file.fileno())
            except OSError as error:
                raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> MachineError:
        return MachineError(f"{self._path} can't be written: {error.strerror}", "free space")

    def close(self) -> None:
        """Never raises: what could not be written has been said by `write`, and the next start writes it anew."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
