"""Serves the pages on one address, and stops in time."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from aiohttp import web

STOP_S = 1.0
_BACKLOG = 256


class WebServer:
    """One HTTP listener. The socket is bound before, so that a taken port is known early."""

    def __init__(self, app: web.Application) -> None:
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_S, handle_signals=False)
        self._open = False

    async def start(self, bound: socket.socket) -> None:
        await self._runner.setup()
        await web.SockSite(self._runner, bound, backlog=_BACKLOG).start()
        self._open = True

    async def stop(self) -> None:
        """Stop listening and end open answers, event streams included, within `STOP_S` and a little."""
        if self._open:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2 * STOP_S):
                    await self._runner.cleanup()
            self._open = False
