"""A driver on fake ports: everything that happens is written to one trace, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.leading.driver import Driver
from coordinator.leading.ports import Arrived, Line, Observation
from coordinator.rounds.events import Committed, Effect, Event, Instant, Opened, Ordered, View
from coordinator.rounds.ledger import Ledger
from protos.messages import AttemptFailed, Goodbye, Heartbeat, Hello, MemberState, PeerId, Promise, Proposal
from protos.wire import decode_leader_frame
from tests.coordinator.made import RUN, FakeClock, genesis, identity, record

ALICE, BOB = identity(10), identity(11)


@dataclass
class Machine:
    """Answers each event as the test says, and remembers what it was asked."""

    answers: Callable[[Event], list[Effect]] = lambda event: []
    wake: Instant | None = None
    heard: list[tuple[Event, float]] = field(default_factory=list)

    def handle(self, event: Event, now: Instant) -> list[Effect]:
        self.heard.append((event, now))
        return self.answers(event)

    def next_wake(self, now: Instant) -> Instant | None:
        return self.wake

    def explain(self, peer: PeerId) -> list[str]:
        return []

    def view(self, now: Instant) -> View:
        raise NotImplementedError

    def events(self, kind: type) -> list[Any]:
        return [event for event, _ in self.heard if isinstance(event, kind)]


@dataclass
class World:
    """All ports, writing what happens in order to one trace."""

    trace: list[str] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    on_disk: asyncio.Event | None = None
    reachable: bool = True
    probe_gate: asyncio.Event | None = None

    async def persist(self, entry: Opened | Promise | Proposal) -> None:
        self.trace.append(f"persisting {type(entry).__name__}")
        if self.on_disk is not None:
            await self.on_disk.wait()
        self.trace.append(f"persisted {type(entry).__name__}")

    async def commit(self, effect: Committed, before: Ledger, after: Ledger) -> None:
        self.trace.append(f"committing {before.round}>{after.round}")
        if self.on_disk is not None:
            await self.on_disk.wait()
        self.trace.append(f"committed {after.round}")

    async def orphan(self, fork: Ledger) -> None:
        self.trace.append(f"orphaned after {fork.round}")

    def observe(self, observation: Observation) -> None:
        self.observations.append(observation)

    async def reaches(self, peer: PeerId, addresses: tuple[str, ...]) -> bool:
        if self.probe_gate is not None:
            await self.probe_gate.wait()
        self.trace.append(f"probed {addresses}")
        return self.reachable

    def said(self, text: str) -> None:
        self.trace.append(f"said {text}")

    def committed(self, effect: Committed, after: Ledger) -> None:
        self.trace.append(f"shown {after.round}")

    def observed(self, observation: Observation) -> None:
        pass

    def ended(self, reason: str) -> None:
        self.trace.append(f"ended {reason}")


@dataclass(eq=False)
class FakeLine:
    peer: PeerId
    world: World
    name: str = ""
    frames: list[object] = field(default_factory=list)
    goodbye: Goodbye | None = None

    def send(self, frame: bytes) -> None:
        message = decode_leader_frame(frame)
        self.frames.append(message)
        self.world.trace.append(f"sent {type(message).__name__}{self.name}")

    def close(self, goodbye: Goodbye) -> None:
        self.goodbye = goodbye


def arrived(line: Line, who: Any = ALICE, **changes: Any) -> Arrived:
    values = {
        "protocol": 1, "record": b"r", "epoch": 0, "round": 0, "head": b"", "digest": b"", "holds_state": False,
        "observer": False, "name": "", "abstain_round": 0, **changes,
    }  # fmt: skip
    return Arrived(line, Hello(**values), record(who, RUN.peer), b"envelope of " + line.peer[-4:].encode())


@dataclass
class Bench:
    driver: Driver
    machine: Machine
    world: World
    clock: FakeClock

    def line(self, who: Any = ALICE, name: str = "") -> FakeLine:
        return FakeLine(who.peer, self.world, name)

    async def settle(self) -> None:
        """Until the driver has taken in all that was posted and waits."""
        for _ in range(50):
            await asyncio.sleep(0)


def driven(
    scene: Callable[[Bench], Coroutine[Any, Any, None]],
    *,
    machine: Machine | None = None,
    world: World | None = None,
    orders: Sequence[Ordered] = (),
) -> Bench:
    """Run a driver through a scene, stop it, and give what there is to look at."""

    async def main() -> Bench:
        _, _, ledger = genesis()
        used_machine, used_world, clock = machine or Machine(), world or World(), FakeClock()
        driver = Driver(
            used_machine, ledger,
            journal=used_world, prober=used_world, clock=clock, audience=used_world, orders=orders,
        )  # fmt: skip
        bench = Bench(driver, used_machine, used_world, clock)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(driver.run())
            await bench.settle()
            await scene(bench)
            driver.stop()
        return bench

    return asyncio.run(main())


def heartbeat(head: bytes = b"", digest: bytes = b"") -> Heartbeat:
    return Heartbeat(0, 1, head, digest, MemberState.TRAINING, 1, 16, 1.0, 1.0, 1.0, 5, 6)


FAILED = AttemptFailed(0, 1, 0, "why")
