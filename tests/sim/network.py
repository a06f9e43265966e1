"""Lines between members and leaders, and what the network does to what is said on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from protos.messages import PeerId
from tests.sim.options import Options

if TYPE_CHECKING:
    from tests.sim.leader import LeaderProcess
    from tests.sim.member import MemberProcess

TO_LEADER, TO_MEMBER = 0, 1


@dataclass(slots=True, eq=False)
class Line:
    """One stream, opened by a member's process; each end closes by itself."""

    member: MemberProcess
    leader: LeaderProcess
    member_up: bool = True
    leader_up: bool = False
    welcomed: bool = False
    last_at: list[float] = field(default_factory=lambda: [0.0, 0.0])


class Network:
    """Delays, losses and partitions."""

    def __init__(self, options: Options, rng: Random) -> None:
        self._rng = rng
        self._low_s, high_s = options.delay_s
        self._width_s = high_s - self._low_s
        self._fifo, self._loss, self._duplication = options.fifo, options.loss, options.duplication
        self._row_break = options.row_break
        self._spikes, self._spike_s = options.spikes, options.spike_s
        self._cut: set[PeerId] = set()

    def delay_s(self) -> float:
        delay_s = self._low_s + self._width_s * self._rng.random()
        if self._spikes and self._rng.random() < self._spikes:
            delay_s += self._spike_s * self._rng.random()
        return delay_s

    def arrivals(self, line: Line, direction: int, now: float) -> list[float]:
        """When a message arrives at the other end: never, once, or twice."""
        if self.parted(line.member.name, line.leader.name):
            return []
        if self._loss and self._rng.random() < self._loss:
            return []
        at = now + self.delay_s()
        if self._fifo:
            at = max(at, line.last_at[direction])
            line.last_at[direction] = at
        if self._duplication and self._rng.random() < self._duplication:
            return [at, at + self.delay_s()]
        return [at]

    def breaks_row(self) -> bool:
        return self._row_break > 0 and self._rng.random() < self._row_break

    def cut(self, peers: set[PeerId]) -> None:
        """Part these peers from all others; an empty set heals."""
        self._cut = peers

    def parted(self, one: PeerId, other: PeerId) -> bool:
        return (one in self._cut) != (other in self._cut)

    def heal(self) -> None:
        """No more faults: from now on everything arrives, once."""
        self._loss = self._duplication = self._row_break = self._spikes = 0.0
        self._cut = set()
