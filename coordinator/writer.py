"""The one thread that appends to the journal: in order, so that nobody waits for a lock, and off the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from coordinator.journal import Journal
from coordinator.leading.learning import Past
from coordinator.leading.ports import Clock, Observation
from coordinator.rounds.events import Committed, Opened
from coordinator.rounds.ledger import Ledger
from protos.messages import Promise, Proposal

T = TypeVar("T")

OBSERVATIONS_WAITING_MOST = 20_000
"""What members claim beyond that, while the disk takes none, is not written: it decides nothing."""

_log = logging.getLogger(__name__)


class Writer:
    """The driver's journal port, and whatever else is appended.

    Observations are written in bunches, one at a time: however many come, an append waits for one bunch of them.
    """

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self._journal = journal
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._waiting: list[Observation] = []
        self._bunch: asyncio.Future[None] | None = None
        """What is being written of them."""

    async def run(self, work: Callable[[], T]) -> T:
        """Do this in the writing thread; returns or raises when it is done."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def persist(self, entry: Opened | Promise | Proposal) -> None:
        await self.run(lambda: self._journal.persist(entry))

    async def commit(self, effect: Committed, before: Ledger, after: Ledger) -> None:
        at_run_s = self._clock.run_time_s()
        back_to = effect.target.round if effect.target is not None else None
        await self.run(
            lambda: self._journal.append(
                effect.commit,
                effect.body,
                before,
                after,
                effect.failed,
                at_run_s,
                went_back_to=back_to,
                orders=effect.orders,
            )
        )

    async def orphan(self, fork: Ledger) -> None:
        await self.run(lambda: self._journal.orphan(fork))

    async def heads(self) -> list[tuple[int, int, bytes]]:
        return await asyncio.to_thread(self._journal.heads)

    async def at(self, head: bytes) -> Past | None:
        # Not in the writing thread: folding a long chain takes longer than an append, or the lease, may wait.
        return await asyncio.to_thread(self._journal.at, head)

    def observe(self, observation: Observation) -> None:
        if len(self._waiting) >= OBSERVATIONS_WAITING_MOST:
            return
        self._waiting.append(observation)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._hand_over)

    def _hand_over(self) -> None:
        """Give what waits to the thread, in one transaction, unless one is under way: then it goes after that."""
        if self._waiting and self._bunch is None:
            bunch, self._waiting = self._waiting, []
            work = partial(self._journal.observe, bunch, self._clock.run_time_s())
            self._bunch = asyncio.get_running_loop().run_in_executor(self._thread, work)
            self._bunch.add_done_callback(self._handed_over)

    def _handed_over(self, done: asyncio.Future[None]) -> None:
        self._bunch = None
        if not done.cancelled() and (error := done.exception()) is not None:
            _log.error("observations were not written: %s", error)
        self._hand_over()

    async def flushed(self) -> None:
        """Returns when what was observed before can be read back."""
        for _ in range(2):  # what is being written, and what waits for that
            self._hand_over()
            if self._bunch is not None:
                await asyncio.wait((self._bunch,))

    async def close(self) -> None:
        """Write what waits, and end the thread."""
        await self.flushed()
        await asyncio.to_thread(self._thread.shutdown, True)
