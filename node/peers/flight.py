"""A bound on the bytes on their way through this process: who would exceed it waits, first come first served."""

from __future__ import annotations

import asyncio
from collections import deque

RECEIVING_BYTES = 64 * 2**20
"""Of rows coming in: a part has its room before it is read, however slowly its sender's line brings it."""
IN_FLIGHT_BYTES = 32 * 2**20
"""Of each other kind: rows going out, things fetched, things served. One kind never waits for another one, so no circle
of members can wait for each other."""


class InFlight:
    """Bytes that may be held at once; for one event loop."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.n_bytes = 0
        self.most_bytes = 0
        """The most that were ever held."""

    async def take(self, n_bytes: int) -> int:
        """Wait for room; what is to be given back. More than the limit has room where nothing else is held."""
        held = self.take_now(n_bytes)
        if held is None:
            n_bytes = min(n_bytes, self._limit_bytes)
            ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry = (n_bytes, ready)
            self._waiting.append(entry)
            try:
                await ready
            except asyncio.CancelledError:
                if ready.done() and not ready.cancelled():  # it was our turn just then
                    self.give_back(n_bytes)
                else:
                    self._waiting.remove(entry)
                    self._let_in()
                raise
            return n_bytes
        return held

    def take_now(self, n_bytes: int) -> int | None:
        """As `take`, where there is room at once; else None, and nothing is held."""
        n_bytes = min(n_bytes, self._limit_bytes)
        if self._waiting or self.n_bytes + n_bytes > self._limit_bytes:
            return None
        self._hold(n_bytes)
        return n_bytes

    def give_back(self, n_bytes: int) -> None:
        self.n_bytes -= n_bytes
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self.n_bytes + self._waiting[0][0] <= self._limit_bytes:
            n_bytes, ready = self._waiting.popleft()
            self._hold(n_bytes)
            ready.set_result(None)

    def _hold(self, n_bytes: int) -> None:
        self.n_bytes += n_bytes
        if self.n_bytes > self.most_bytes:
            self.most_bytes = self.n_bytes
