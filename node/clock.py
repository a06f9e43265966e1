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
        self._is_known = False

    def __call__(self) -> float:
        """The run's time now, in seconds."""
        return self._seconds() + self._offset_s

    def is_off_by(self, offset_s: float) -> None:
        """Admission has measured it."""
        self._offset_s, self._is_known = offset_s, True

    def is_told(self, run_time_s: float) -> None:
        """The coordinator says the run's time: it may have another clock than before."""
        self.is_off_by(run_time_s - self._seconds())

    def is_told_by_peer(self, run_time_s: float) -> None:
        """A stand-in says it, which is heeded only as long as the coordinator has not been heard: it may lie."""
        if not self._is_known:
            self._offset_s = run_time_s - self._seconds()
