"""Who may be connected over HTTP: so many at once, and each only for as long as it asks for something.

aiohttp waits for a request's head for ever. So this knows which connections are answered, since it stands around every
call, and since when each of the others has said nothing that is whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

HEAD_S = 20.0
"""A new connection whose first request has no whole head after so long is closed."""
IDLE_S = 75.0
"""So is one that was answered before: a client keeps it for its next call."""
CONNECTIONS_MOST = 1000
MAKES_ROOM_S = 1.0
"""Where there are so many, one that has been waiting for longer gives its place to a new one."""
LOOKS_S = 1.0
_REASON = b'{"code": "busy", "reason": "too many connections are open"}'
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 5\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_REASON), _REASON)
)


class Connections:
    """The connections of one server.

    Args:
        most: so many at once.
    """

    def __init__(self, server: Callable[[], web.Server], most: int) -> None:
        self._server = server
        self._most = most
        self._answered: set[web.RequestHandler] = set()
        self._waits: dict[web.RequestHandler, tuple[float, float]] = {}
        """Since when each of the others has waited for a whole head, and until when it may, by the monotonic clock."""

    def accept(self) -> asyncio.BaseProtocol:
        """What speaks to whoever has just connected."""
        server, now = self._server(), time.monotonic()
        if len(server.connections) >= self._most and not self._make_room(now):
            return _Full()
        found = server()
        self._waits[found] = (now, now + HEAD_S)
        return found

    @property
    def middleware(self) -> Middleware:
        """Stands around every call."""

        @web.middleware
        async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
            connection = request.protocol
            self._answered.add(connection)
            self._waits.pop(connection, None)
            try:
                return await handler(request)
            finally:
                self._answered.discard(connection)
                now = time.monotonic()
                self._waits[connection] = (now, now + IDLE_S)

        return note

    async def watch(self) -> None:
        """Close those that have waited too long, until cancelled."""
        while True:
            await asyncio.sleep(LOOKS_S)
            now = time.monotonic()
            there = set(self._server().connections)
            for connection in there - self._answered:
                _, until = self._waits.setdefault(connection, (now, now + HEAD_S))
                if until <= now:
                    _abort(connection)
            for gone in self._waits.keys() - there:
                del self._waits[gone]

    def _make_room(self, now: float) -> bool:
        waiting = [each for each in self._server().connections if each in self._waits]
        oldest = min(waiting, key=self._waits.__getitem__, default=None)
        if oldest is None or now - self._waits[oldest][0] < MAKES_ROOM_S:
            return False
        del self._waits[oldest]  # the next one to come takes another's place
        _abort(oldest)
        return True


def _abort(connection: web.RequestHandler) -> None:
    """At once: what it has been sent and does not read is not waited for either."""
    if connection.transport is not None:
        connection.transport.abort()


class _Full(asyncio.Protocol):
    """Tells one that there is no place, and closes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.WriteTransport):
            transport.write(_FULL)
        transport.close()
