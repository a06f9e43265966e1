"""Whether this node's line keeps up with the run: how long a round's results are, how often and how fast they come."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from statistics import median

KEPT = 8
ENOUGH = 3
"""Fewer rounds than this say nothing of how often they come."""


class Pace:
    """Takes in commits and fetches with their instants; `verdict` reckons. Deterministic, owns no clock."""

    def __init__(self) -> None:
        self._heard_at: deque[float] = deque(maxlen=KEPT + 1)
        self._fetched: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._n_since = 0

    def heard(self, now_s: float) -> None:
        """A commit with results has come from the leader just now."""
        self._heard_at.append(now_s)

    def fetched(self, n_bytes: int, took_s: float) -> None:
        """The results of an earlier round have been fetched."""
        self._fetched.append((n_bytes, took_s))
        self._n_since += 1

    @property
    def interval_s(self) -> float | None:
        """The usual time from one round's commit to the next one's; None while too few have been heard."""
        times = list(self._heard_at)
        gaps = [later - earlier for earlier, later in pairwise(times)]
        return median(gaps) if len(gaps) >= ENOUGH else None

    def verdict(self) -> str:
        """That this line can't keep up, with the figure and the need, or an empty string; again after some rounds."""
        interval_s = self.interval_s
        if interval_s is None or interval_s <= 0 or self._n_since < ENOUGH:
            return ""
        n_bytes = sum(size for size, _ in self._fetched) / len(self._fetched)
        took_s = sum(took for _, took in self._fetched) / len(self._fetched)
        if took_s <= interval_s:
            return ""
        self._n_since = 0
        return _too_slow(n_bytes, interval_s, n_bytes / took_s)

    def outlook(self, rate_bytes_s: float, *, round_bytes: float, n_behind: int) -> str:
        """What is to be said to who holds a state that is some rounds old; nothing while that can't be reckoned."""
        interval_s = self.interval_s
        if interval_s is None or interval_s <= 0 or n_behind < 2:
            return ""
        still_s = seconds_to_catch_up(
            state_bytes=0.0, round_bytes=round_bytes, rate_bytes_s=rate_bytes_s, interval_s=interval_s, behind=n_behind
        )
        if still_s == float("inf"):
            return _too_slow(round_bytes, interval_s, rate_bytes_s)
        return f"holds a state that is {n_behind} rounds behind: up to date in about {still_s:.0f} s"


def _too_slow(n_bytes: float, interval_s: float, rate_bytes_s: float) -> str:
    return (
        f"this line can't keep up with the run: a round's results are {n_bytes / 1e6:.3g} MB and come every "
        f"{interval_s:.3g} s, which needs {mbit_s(n_bytes, interval_s):.3g} Mbit/s; here they come at "
        f"{mbit_s(rate_bytes_s, 1.0):.3g} Mbit/s"
    )


def mbit_s(n_bytes: float, took_s: float) -> float:
    return 8e-6 * n_bytes / max(took_s, 1e-9)


def seconds_to_catch_up(
    *, state_bytes: float, round_bytes: float, rate_bytes_s: float, interval_s: float, behind: float = 0.0
) -> float:
    """How long a newcomer takes until it holds the newest state; infinite where its line doesn't keep up.

    It takes a state that is `behind` rounds old, then the results since, while another round comes every `interval_s`:
    (state + behind·round) / (rate − round/interval).
    """
    gain_bytes_s = rate_bytes_s - round_bytes / interval_s
    if gain_bytes_s <= 0:
        return float("inf")
    return (state_bytes + behind * round_bytes) / gain_bytes_s
