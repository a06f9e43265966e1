"""Whose turn it is to be served: so many transfers at once, so many to each, the others in a line that is not long."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from protos.messages import PeerId

AT_ONCE = 4
EACH = 2
WAITING = 8


class Turns:
    """Turns of one kind of transfer, so that a crowd of newcomers doesn't take a donor's line away from its round.

    Args:
        at_once: transfers that run beside each other.
        each: transfers to one caller, waiting ones included.
        waiting: callers in line; whoever comes then is told to come again.
        wait_s: how long one waits in line.
    """

    def __init__(
        self, *, at_once: int = AT_ONCE, each: int = EACH, waiting: int = WAITING, wait_s: float = 5.0
    ) -> None:
        self._at_once, self._each, self._n_waiting, self._wait_s = at_once, each, waiting, wait_s
        self._running = 0
        self._of: Counter[PeerId] = Counter()
        self._line: deque[asyncio.Future[None]] = deque()

    @property
    def n_running(self) -> int:
        return self._running

    @asynccontextmanager
    async def turn(self, caller: PeerId) -> AsyncIterator[str]:
        """A turn within the block; where a reason is given there is none, and it says so at once or after `wait_s`."""
        if self._of[caller] >= self._each:
            yield f"{self._each} transfers to you are under way"
            return
        self._of[caller] += 1
        try:
            refusal = await self._wait()
            if refusal:
                yield refusal
                return
            try:
                yield ""
            finally:
                self._give_back()
        finally:
            self._of[caller] -= 1
            if not self._of[caller]:
                del self._of[caller]

    async def _wait(self) -> str:
        if self._running < self._at_once and not self._line:
            self._running += 1
            return ""
        busy = f"{self._running} transfers are under way and {len(self._line)} wait"
        if len(self._line) >= self._n_waiting:
            return busy
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(mine)
        try:
            async with asyncio.timeout(self._wait_s):
                await mine
            return ""
        except BaseException as error:
            if mine in self._line:
                self._line.remove(mine)
            elif mine.done() and not mine.cancelled():
                self._give_back()  # the turn came in the moment in which waiting for it ended
            if isinstance(error, TimeoutError):
                return busy
            raise

    def _give_back(self) -> None:
        """The turn goes to the first in line, or back."""
        while self._line:
            first = self._line.popleft()
            if not first.done():
                first.set_result(None)
                return
        self._running -= 1
