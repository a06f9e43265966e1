"""Lines between members and leaders, and what the network does to what is said on them.

Hosts are named by peer ids; a member and its stand-in share one. What a host's faults do holds for all of its links.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from protos.messages import PeerId
from tests.sim.options import Options

if TYPE_CHECKING:
    from tests.sim.leader import LeaderProcess
    from tests.sim.member import MemberProcess
    from tests.sim.process import Process
    from tests.sim.world import World

TO_LEADER, TO_MEMBER = 0, 1
AGAIN_FIRST_S = 0.2
"""A lost packet of a stream is sent again after so long, twice as long the next time, and what follows it waits."""
AGAIN_MOST_S = 3.2


@dataclass(slots=True, eq=False)
class Line:
    """One stream, opened by a member's process; each end closes by itself."""

    member: MemberProcess
    leader: LeaderProcess
    member_up: bool = True
    leader_up: bool = False
    welcomed: bool = False
    last_at: list[float] = field(default_factory=lambda: [0.0, 0.0])


@dataclass(slots=True)
class _Load:
    """Something on its way: who gets it then, unless nobody wants it any more."""

    n_bytes: int
    wanted: Callable[[], bool]
    process: Process
    incarnation: int
    call: Callable[..., None]
    args: tuple[Any, ...]


class Pipe:
    """One direction of a host's access: what goes through it goes one after the other."""

    def __init__(self, world: World, bytes_per_s: float) -> None:
        self._world, self.bytes_per_s = world, bytes_per_s
        self._queue: deque[_Load] = deque()
        self._busy = False

    def carry(
        self, n_bytes: int, wanted: Callable[[], bool], process: Process, call: Callable[..., None], *args: Any
    ) -> None:
        """Call the process when the last byte has passed; what nobody wants when its turn comes is dropped."""
        self._queue.append(_Load(n_bytes, wanted, process, process.incarnation, call, args))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = False
        while self._queue:
            load = self._queue.popleft()
            if load.wanted() and load.process.incarnation == load.incarnation and load.process.alive:
                self._busy = True
                self._world.at(self._world.now + load.n_bytes / self.bytes_per_s, self._carried, load)
                return

    def _carried(self, load: _Load) -> None:
        if load.process.incarnation == load.incarnation:
            self._world.push(self._world.now, load.process, load.call, load.args)
        self._next()


class Network:
    """Delays, losses, rates, partitions, and links that carry one way only."""

    def __init__(self, options: Options, rng: Random) -> None:
        self._rng = rng
        self._low_s, high_s = options.delay_s
        self._width_s = high_s - self._low_s
        self._fifo, self._loss, self._duplication = options.fifo, options.loss, options.duplication
        self._row_break = options.row_break
        self._spikes, self._spike_s = options.spikes, options.spike_s
        self._island: dict[PeerId, int] = {}  # where it is not the mainland
        self._blocked: set[tuple[PeerId, PeerId]] = set()
        self._undialled: set[tuple[PeerId, PeerId]] = set()
        self._lossy: dict[PeerId, float] = {}
        self._far_s: dict[PeerId, float] = {}
        self.up: dict[PeerId, Pipe] = {}
        self.down: dict[PeerId, Pipe] = {}

    # -- how long things take ---------------------------------------------------------------------------------

    def delay_s(self, one: PeerId | None = None, other: PeerId | None = None) -> float:
        """Of a message between two hosts; of one between any two, where they are not named."""
        delay_s = self._low_s + self._width_s * self._rng.random()
        if self._spikes and self._rng.random() < self._spikes:
            delay_s += self._spike_s * self._rng.random()
        if one is not None and other is not None and (self._lossy or self._far_s):
            delay_s += self._far_s.get(one, 0.0) + self._far_s.get(other, 0.0)
            delay_s += self._again_s(max(self._lossy.get(one, 0.0), self._lossy.get(other, 0.0)))
        return delay_s

    def _again_s(self, share: float) -> float:
        """What a stream loses by sending lost packets again."""
        total_s, again_s = 0.0, AGAIN_FIRST_S
        while share > 0 and self._rng.random() < share:
            total_s, again_s = total_s + again_s, min(2 * again_s, AGAIN_MOST_S)
        return total_s

    def arrivals(self, line: Line, direction: int, now: float) -> list[float]:
        """When a message arrives at the other end: never, once, or twice."""
        ends = (line.member.name, line.leader.name)
        one, other = ends if direction == TO_LEADER else ends[::-1]
        if not self.carries(one, other):
            return []
        if self._loss and self._rng.random() < self._loss:
            return []
        at = now + self.delay_s(one, other)
        if self._fifo:
            at = max(at, line.last_at[direction])
            line.last_at[direction] = at
        if self._duplication and self._rng.random() < self._duplication:
            return [at, at + self.delay_s(one, other)]
        return [at]

    def breaks_row(self) -> bool:
        return self._row_break > 0 and self._rng.random() < self._row_break

    def limits(self, one: PeerId, other: PeerId) -> bool:
        """Whether sizes count on the way from one to the other."""
        return one in self.up or other in self.down

    # -- what the network is like ---------------------------------------------------------------------------------

    def throttle(self, world: World, peer: PeerId, up_bytes_per_s: float, down_bytes_per_s: float) -> None:
        """From now on a host's rows, results and states take the time that its access needs."""
        self.up[peer], self.down[peer] = Pipe(world, up_bytes_per_s), Pipe(world, down_bytes_per_s)

    def lose(self, peer: PeerId, share: float) -> None:
        """Packets are lost on the way to and from a host; its streams send them again."""
        self._lossy[peer] = share

    def move_away(self, peer: PeerId, delay_s: float) -> None:
        """All that goes to or from a host takes so much longer."""
        self._far_s[peer] = delay_s

    def cut(self, peers: Collection[PeerId]) -> None:
        """Part these peers from all others; an empty set heals."""
        self.divide(peers)

    def divide(self, *islands: Collection[PeerId]) -> None:
        """Each set is parted from all others and from who is in none; without sets all are together."""
        self._island = {peer: number for number, peers in enumerate(islands, 1) for peer in peers}

    def block(self, one: PeerId, other: PeerId) -> None:
        """Nothing gets from the one to the other; the other way is open."""
        self._blocked.add((one, other))

    def unblock(self, one: PeerId, other: PeerId) -> None:
        self._blocked.discard((one, other))

    def undial(self, one: PeerId, other: PeerId) -> None:
        """The one can't open a connection to the other, as through a NAT; what the other opens carries both ways."""
        self._undialled.add((one, other))

    def carries(self, one: PeerId, other: PeerId) -> bool:
        """Whether a packet gets from the one to the other."""
        if self._island and self._island.get(one, 0) != self._island.get(other, 0):
            return False
        return not self._blocked or (one, other) not in self._blocked

    def parted(self, one: PeerId, other: PeerId) -> bool:
        """Whether no connection between them lives: one needs both ways."""
        return not (self.carries(one, other) and self.carries(other, one))

    def dials(self, one: PeerId, other: PeerId) -> bool:
        """Whether the one can open a connection to the other."""
        return (one, other) not in self._undialled and not self.parted(one, other)

    def heal(self) -> None:
        """No more faults: from now on everything arrives, once."""
        self._loss = self._duplication = self._row_break = self._spikes = 0.0
        self._island, self._blocked, self._undialled, self._lossy = {}, set(), set(), {}
