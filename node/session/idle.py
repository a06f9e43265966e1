"""How much of its time a node's trainer has nothing to do: measured here, in this round and over the last ones."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from coordinator.rounds.events import Instant

ROUNDS_KEPT = 16


@dataclass(frozen=True, slots=True)
class Idle:
    """Seconds in which a trainer had nothing to do, and in which it worked. Its owner's pauses, and the time without a
    trainer, are in neither."""

    idle_s: float = 0.0
    worked_s: float = 0.0

    @property
    def share(self) -> float | None:
        """Seconds idle of all that count; None where none do."""
        all_s = self.idle_s + self.worked_s
        return self.idle_s / all_s if all_s > 0 else None

    def __add__(self, other: Idle) -> Idle:
        return Idle(self.idle_s + other.idle_s, self.worked_s + other.worked_s)


class IdleClock:
    """Sums up the seconds in which the trainer worked and those in which it waited, round by round."""

    def __init__(self, now: Instant) -> None:
        self._at, self._round = now, 0
        self._works: bool | None = None
        self._sum = Idle()  # of the round that runs, up to the last note
        self._before: deque[Idle] = deque(maxlen=ROUNDS_KEPT)

    def note(self, works: bool | None, round_: int, now: Instant) -> None:
        """From now on the trainer works or waits in this round; None: neither is to be counted."""
        self._sum += self._since(now)
        self._at, self._works = now, works
        if round_ != self._round:
            if self._sum.share is not None:
                self._before.append(self._sum)
            self._round, self._sum = round_, Idle()

    def in_round(self, round_: int, now: Instant) -> Idle:
        """Of the round that runs, up to now; nothing of any other."""
        return self._sum + self._since(now) if round_ == self._round else Idle()

    @property
    def share(self) -> float | None:
        """Seconds idle of all seconds, in the last rounds and this one; None before there are any."""
        return sum(self._before, self._sum).share

    def _since(self, now: Instant) -> Idle:
        """What passed since the last note."""
        if self._works is None:
            return Idle()
        return Idle(worked_s=now - self._at) if self._works else Idle(idle_s=now - self._at)
