"""Leads in the coordinator's place, from this node: the same rounds over the same shell, with this node's own ports.

A stand-in has no vote of its own: this node's session votes over a line to itself, like any other's. What it must not
forget are the numbers that it uses; what it commits, its session and all others keep.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.leading.driver import Driver
from coordinator.leading.learning import Learner, Unknown, opened
from coordinator.leading.ports import Inbox, Observation
from coordinator.rounds.events import Committed, Instant, Opened, StepDown
from coordinator.rounds.ledger import Ledger, rollback_of
from coordinator.rounds.machine import Rounds
from node.journal import Journal
from node.ports import PeerFailed, Peers
from protos.hashes import commit_hash
from protos.messages import Commit, PeerId, Promise, Proposal
from protos.runspec import RunSpec
from protos.sealer import KeySealer

FAREWELL = "no longer stands in for the coordinator"
NOT_LEADING = "does not lead: it hears the coordinator, or its turn to stand in has not come"
PROBE_S = 15.0


@dataclass(frozen=True, slots=True)
class StandInParts:
    """What a stand-in is built upon."""

    me: PeerId
    run: PeerId
    coordinator: PeerId
    spec: Callable[[], RunSpec]
    specs: Callable[[], Mapping[int, RunSpec]]  # all revisions that are known
    targets: Callable[[], Mapping[bytes, Ledger]]  # books of states that the run may go back to, by their heads
    sealer: KeySealer
    journal: Journal
    peers: Peers
    held: Callable[[], tuple[Commit, Ledger] | None]  # the head's commit and the books after it
    head_since: Callable[[], Instant]  # when that head came to this node
    signed_head: Callable[[], bytes]
    seconds: Callable[[], float]
    run_time_s: Callable[[], float]
    say: Callable[[str], None]
    led: Callable[[bool], None]  # told when it begins and ends
    failed: Callable[[BaseException], None]


class Leading:
    """A stand-in's rounds, while this node leads."""

    def __init__(self, parts: StandInParts) -> None:
        self._parts = parts
        self._driver: Driver | None = None
        self._task: asyncio.Task[None] | None = None

    # -- the ports that this is -------------------------------------------------------------------------------------

    def now(self) -> Instant:
        return Instant(self._parts.seconds())

    def run_time_s(self) -> float:
        return self._parts.run_time_s()

    async def reaches(self, peer: PeerId, addresses: tuple[str, ...]) -> bool:
        if peer == self._parts.me:
            return True  # a session and its stand-in are one process, wherever others would look for it
        try:
            async with asyncio.timeout(PROBE_S):
                await self._parts.peers.ping(peer, addresses)
        except (PeerFailed, TimeoutError):
            return False
        return True

    async def commits_after(
        self, peer: PeerId, addresses: Sequence[str], epoch: int, round_: int, n_most: int
    ) -> Sequence[Commit]:
        try:
            return await self._parts.peers.commits_after(peer, addresses, epoch, round_, n_most)
        except PeerFailed as error:
            raise Unknown(error.why) from error

    async def persist(self, entry: Opened | Promise | Proposal) -> None:
        if isinstance(entry, Opened):
            await asyncio.to_thread(self._parts.journal.open_number, entry.epoch, entry.round, entry.attempt)

    async def commit(self, effect: Committed, before: Ledger, after: Ledger) -> None:
        """Whoever voted for it can make it again, byte for byte."""

    async def orphan(self, fork: Ledger) -> None:
        """A stand-in has no memory of another branch, so it never leaves its own."""

    def observe(self, observation: Observation) -> None:
        """What members measured is the coordinator's to keep."""

    def said(self, text: str) -> None:
        self._parts.say(f"standing in: {text}")

    def committed(self, effect: Committed, after: Ledger) -> None:
        """Its session hears of it over its own line."""

    def observed(self, observation: Observation) -> None: ...

    def ended(self, reason: str) -> None:
        if self._driver is not None:
            self._driver.stop()

    # -- life -------------------------------------------------------------------------------------------------------

    def inbox(self) -> Inbox | str:
        """Where the lines of others go, or why not."""
        return self._driver if self._driver is not None else NOT_LEADING

    def waits_for(self) -> str:
        """Whom this leader waits for between attempts, such as voters for a quorum; empty where none leads."""
        if self._driver is None:
            return ""
        seen, _ = self._driver.view()
        return seen.waiting_for if seen.attempt < 0 else ""

    async def begin(self) -> None:
        """Lead from the state that is held."""
        parts, held = self._parts, self._parts.held()
        if self._driver is not None or held is None:
            parts.led(self._driver is not None)
            return
        commit, ledger = held
        numbers = await asyncio.to_thread(parts.journal.numbers)
        rounds = Rounds(
            parts.me,
            parts.spec(),
            ledger,
            commit,
            parts.sealer,
            now=self.now(),
            coordinator=parts.coordinator,
            opened=numbers.get((ledger.epoch, ledger.round + 1), -1),
            numbers=numbers,
            voter=None,
            head_since=parts.head_since(),
            specs=parts.specs(),
            targets=parts.targets(),
            signed_head=parts.signed_head(),
        )
        learner = Learner(parts.run, parts.coordinator, self)
        self._driver = Driver(
            rounds, ledger, journal=self, prober=self, clock=self, audience=self, learner=learner, farewell=FAREWELL
        )
        self._task = asyncio.get_running_loop().create_task(self._driver.run(), name="stand-in")
        self._task.add_done_callback(self._over)
        parts.say(f"stands in for the coordinator from round {ledger.round + 1} on")
        parts.led(True)

    def step_down(self, reason: str) -> None:
        if self._driver is not None:
            self._driver.tell(StepDown(reason))

    def applied(self, commit: Commit) -> None:
        """This node's session has moved on; if by another leader's commit, this one follows."""
        driver = self._driver
        if driver is None or commit_hash(commit.body, commit.digest) == driver.ledger.head:
            return
        told = opened(commit, self._parts.run, self._parts.coordinator)
        if (told.body.epoch, told.body.round) > (driver.ledger.epoch, driver.ledger.round):
            rollback = rollback_of(told.orders)
            target = self._parts.targets().get(rollback.order.spec) if rollback is not None else None
            driver.tell(replace(told, target=target))

    async def close(self) -> None:
        task = self._task
        if task is None:
            return
        if self._driver is not None:
            self._driver.stop()
        await asyncio.wait((task,), timeout=1.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._driver = self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._parts.failed(error)
        self._parts.led(False)
