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
    """

    def __init__(self, origin_unix_s: float, recorded_run_s: float) -> None:
        self._base_s = max(time.time() - origin_unix_s, recorded_run_s, 0.0) - time.monotonic()

    def now(self) -> Instant:
        return Instant(time.monotonic())

    def run_time_s(self) -> float:
        return self._base_s + time.monotonic()
