"""Serves the pages on one address, and stops in time."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket

from aiohttp import web

from coordinator.web.connections import CONNECTIONS_MOST, Connections

STOP_S = 1.0
_BACKLOG = 256
_UNSENT_BYTES = 128 * 1024
"""The system takes no more than that beyond what is under way to a reader: so it is seen who reads nothing."""


class WebServer:
    """One HTTP listener. The socket is bound before, so that a taken port is known early."""

    def __init__(self, app: web.Application) -> None:
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_S, handle_signals=False)
        self._connections = Connections(self._server, _connections_most())
        app.middlewares.insert(0, self._connections.middleware)
        self._listening: asyncio.Server | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self, bound: socket.socket) -> None:
        await self._runner.setup()
        with contextlib.suppress(OSError, AttributeError):  # without it that is seen some megabytes later
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self._connections.accept, sock=bound, backlog=_BACKLOG)
        self._watching = asyncio.create_task(self._connections.watch(), name="connections")

    async def stop(self) -> None:
        """Stop listening and end open answers, event streams included, within `STOP_S` and a little."""
        if self._listening is None or self._watching is None:
            return
        self._listening.close()
        self._watching.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * STOP_S):
                await self._runner.cleanup()
        self._listening = self._watching = None

    def _server(self) -> web.Server:
        if self._runner.server is None:
            raise RuntimeError("a server is set up before it is asked for")
        return self._runner.server


def _connections_most() -> int:
    """A quarter of what this process may open at most: the members' lines and its own files need the rest."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS_MOST if soft == resource.RLIM_INFINITY else max(1, min(CONNECTIONS_MOST, soft // 4))
