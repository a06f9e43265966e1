"""The run's clock as this node knows it: its own monotonic one, and how far that is from what a leader said."""

from __future__ import annotations

from collections.abc import Callable


class RunClock:
    """No decision hangs on it; records and the DHT need one clock for all.

    Args:
        seconds: this machine's monotonic clock.
    """

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self._offset_s = 0.0

    def __call__(self) -> float:
        """The run's time now, in seconds."""
        return self._seconds() + self._offset_s

    def is_off_by(self, offset_s: float) -> None:
        """Admission has measured it."""
        self._offset_s = offset_s

    def is_told(self, run_time_s: float) -> None:
        """A leader's Welcome says the run's time: it may be the first to, or have another clock than the last one."""
        self._offset_s = run_time_s - self._seconds()
