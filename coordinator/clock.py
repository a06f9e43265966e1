"""The run's clock: seconds since its origin, monotonic from the start of the process, never behind what is recorded."""

from __future__ import annotations

import time

from coordinator.rounds.events import Instant


class RunClock:
    """Local instants for deadlines, the run's time for what strangers compare.

    Args:
        origin_unix_s: when the run was made.
        recorded_run_s: the latest instant that the journal knows. If the calendar was set back while nobody served,
            the run's clock goes on from there.
        off_by_s: so many seconds this machine's clock and calendar are wrong.
    """

    def __init__(self, origin_unix_s: float, recorded_run_s: float, *, off_by_s: float = 0.0) -> None:
        self._off_by_s = off_by_s
        self._base_s = max(time.time() + off_by_s - origin_unix_s, recorded_run_s, 0.0) - self.now()

    def now(self) -> Instant:
        return Instant(time.monotonic() + self._off_by_s)

    def run_time_s(self) -> float:
        return self._base_s + self.now()
