"""A driver that is busy when an instant comes: the deciding code hears of it first, and nothing passes it over."""

from __future__ import annotations

import asyncio

from coordinator.rounds.events import Effect, Event, Instant, Opened, Ordered, Persist, Woke
from protos.orders import Kind
from tests.coordinator.driving import Bench, Machine, World, driven
from tests.coordinator.rounds.ordered import ordered

PAUSE, RESUME = Ordered(ordered(1, Kind.PAUSE)), Ordered(ordered(2, Kind.RESUME))


class Timed(Machine):
    """Names one instant until it has looked at it, and asks for an append at the first word."""

    due = 5.0

    def handle(self, event: Event, now: Instant) -> list[Effect]:
        super().handle(event, now)
        return [Persist(Opened(0, 1, 0))] if event == PAUSE else []

    def next_wake(self, now: Instant) -> Instant | None:
        return Instant(self.due) if now < self.due else None


def test_an_instant_that_comes_during_an_append_comes_before_what_came_then() -> None:
    async def scene(bench: Bench) -> None:
        assert bench.world.on_disk is not None
        bench.driver.order(PAUSE)
        await bench.settle()
        assert bench.world.trace == ["persisting Opened"]
        bench.clock.at = 6.0  # the disk takes its time
        bench.driver.order(RESUME)
        bench.world.on_disk.set()
        await bench.settle()

    async def main() -> World:
        return World(on_disk=asyncio.Event())

    bench = driven(scene, machine=Timed(), world=asyncio.run(main()))
    assert bench.machine.heard == [(Woke(), 0.0), (PAUSE, 0.0), (Woke(), 6.0), (RESUME, 6.0)]
