"""How much of its time a node's trainer has nothing to do: measured here, over the last rounds."""

from __future__ import annotations

from collections import deque

from coordinator.rounds.events import Instant

ROUNDS_KEPT = 16


class IdleClock:
    """Sums up the seconds in which the trainer worked and those in which it waited; its owner's pauses are neither."""

    def __init__(self, now: Instant) -> None:
        self._at, self._round = now, 0
        self._works: bool | None = None
        self._now = [0.0, 0.0]  # of the round that runs: idle, all
        self._before: deque[tuple[float, float]] = deque(maxlen=ROUNDS_KEPT)

    def note(self, works: bool | None, round_: int, now: Instant) -> None:
        """From now on the trainer works or waits in this round; None: neither is to be counted."""
        if self._works is not None:
            self._now[0] += 0.0 if self._works else now - self._at
            self._now[1] += now - self._at
        self._at, self._works = now, works
        if round_ != self._round:
            if self._now[1] > 0:
                self._before.append((self._now[0], self._now[1]))
            self._round, self._now = round_, [0.0, 0.0]

    @property
    def share(self) -> float | None:
        """Seconds idle of all seconds, in the last rounds and this one; None before there are any."""
        rounds = [*self._before, (self._now[0], self._now[1])]
        all_s = sum(of_all for _, of_all in rounds)
        return sum(idle for idle, _ in rounds) / all_s if all_s > 0 else None
