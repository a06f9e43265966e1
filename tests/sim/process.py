"""A process of a simulated world: it lives, freezes, crashes and comes back with what is on its disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from coordinator.rounds.events import Instant
from protos.messages import PeerId
from tests.sim.chain import Violated

if TYPE_CHECKING:
    from tests.sim.world import World

WAKES_AT_ONE_INSTANT_MOST = 3
RESTART_S = 1.0
"""So long after there is room on its disk again a process that ended for lack of it is started again."""


class Process:
    """Its machine is called directly; `later` and `wake` go through the world's heap and die with the incarnation."""

    def __init__(self, world: World, name: PeerId) -> None:
        self.world, self.name = world, name
        self.alive = False
        self.incarnation = 0
        self.frozen_until = 0.0
        self.crash_after: int | None = None
        """Crash after so many effects of the next event that has more than one."""
        self.clock_offset_s, self.clock_rate = 0.0, 1.0
        """What this process's clock shows is the world's time × rate + offset: nobody else may take it for theirs."""
        self.disk_full_until = 0.0
        self._started_at = self._lived_s = 0.0
        self._wake_at: float | None = None
        self._n_wakes = 0
        self._woke_at = -1.0

    def start(self) -> None:
        if self.alive:
            raise Violated(f"{self.name} is running already")
        self.alive = True
        self._started_at = self.world.now
        self.incarnation += 1
        self._wake_at = None
        self.crash_after = None
        self.boot()

    def crash(self) -> None:
        """All that is not on disk is lost."""
        if self.alive:
            self.alive = False
            self._lived_s += self.world.now - self._started_at
            self.world.trace("crash", self.name)
            self.died()

    @property
    def lived_s(self) -> float:
        """For how long it has run, in all."""
        return self._lived_s + (self.world.now - self._started_at if self.alive else 0.0)

    def freeze(self, for_s: float) -> None:
        self.frozen_until = self.world.now + for_s
        self.world.trace("freeze", self.name)

    def later(self, after_s: float, call: Callable[..., None], *args: Any) -> None:
        """Do something in this incarnation, if it still lives then."""
        self.world.push(self.world.now + after_s, self, call, args)

    def at(self, at: float, call: Callable[..., None], *args: Any) -> None:
        self.world.push(at, self, call, args)

    def carry_out_all(self, effects: Sequence[object], call: Callable[[Any], None]) -> None:
        """Effects in order; an injected crash cuts them short."""
        n_most = self.crash_after if self.crash_after is not None and len(effects) > 1 else None
        for number, effect in enumerate(effects):
            if n_most is not None and number >= n_most:
                self.crash()
            if not self.alive:
                return
            call(effect)

    def plan_wake(self, wake: float | None, *, after_woke: bool) -> None:
        """Sleep until then by its own clock. Checks that the machine neither looks back nor spins."""
        now = self.now()
        if wake is None:
            self._wake_at = None
            return
        if wake < now or (after_woke and wake <= now):
            raise Violated(f"{self.name} wants to be woken at {wake}, now is {now}")
        if wake != self._wake_at:
            self._wake_at = wake
            self.world.push(self._in_world(wake), self, self._woke, (wake,))

    def _woke(self, wake: float) -> None:
        if wake != self._wake_at:
            return
        self._wake_at = None
        self._n_wakes = self._n_wakes + 1 if self._woke_at == self.world.now else 1
        self._woke_at = self.world.now
        if self._n_wakes > WAKES_AT_ONE_INSTANT_MOST:
            raise Violated(f"{self.name} spins at {self.world.now}")
        self.wake()

    def now(self) -> Instant:
        """What its clock shows."""
        return Instant(self.world.now * self.clock_rate + self.clock_offset_s)

    def _in_world(self, instant: float) -> float:
        """The world's time when its clock shows this, or a moment later."""
        if self.clock_rate == 1.0 and not self.clock_offset_s:
            return instant
        at = (instant - self.clock_offset_s) / self.clock_rate
        while at * self.clock_rate + self.clock_offset_s < instant:
            at = math.nextafter(at, math.inf)
        return at

    def leap(self, by_s: float) -> None:
        """Its clock jumps ahead, as after a sleep of the machine."""
        self.clock_offset_s += by_s
        self.world.trace("leap", self.name, by_s)
        if self.alive:
            self._wake_at = None
            self.later(0.0, self.wake)

    def fill_disk(self, for_s: float) -> None:
        """Nothing can be written for so long."""
        self.disk_full_until = self.world.now + for_s
        self.world.trace("disk full", self.name)

    def disk_is_full(self) -> bool:
        return self.world.now < self.disk_full_until

    def writes(self) -> bool:
        """Whether what must be written can be; if not, the process ends, and is started again when there is room."""
        if not self.disk_is_full():
            return True
        self.crash()
        self.world.at(self.disk_full_until + RESTART_S, self.world.restart, self)
        return False

    def boot(self) -> None:
        raise NotImplementedError

    def died(self) -> None:
        raise NotImplementedError

    def wake(self) -> None:
        raise NotImplementedError
