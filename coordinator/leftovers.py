"""Looks whether processes that were started are really gone, their children included, and ends what is not.

All of them inherit a mark in their environment, whatever session or parent they end up with.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import psutil

MARK = "BARNRAISE_SIMULATION"
WAIT_S = 3.0


def marked(mark: str) -> list[psutil.Process]:
    """Living processes with this mark, zombies left out."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


async def end_leftovers(mark: str, say: Callable[[str], None]) -> list[str]:
    """Wait a moment for what is on its way out; end and name what stays, with the ports that it listens on."""
    until = time.monotonic() + WAIT_S
    left = marked(mark)
    while left and time.monotonic() < until:
        await asyncio.sleep(0.1)  # nobody tells us when a grandchild ends
        left = marked(mark)
    names: list[str] = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            ports = sorted(
                connection.laddr.port
                for connection in process.net_connections(kind="inet")
                if connection.status == psutil.CONN_LISTEN
            )
            listening = f", listening on {', '.join(map(str, ports))}" if ports else ""
            names.append(f"{process.pid} ({' '.join(process.cmdline()[:4])}{listening})")
            process.kill()
    if names:
        say(f"processes were left and have been ended: {'; '.join(names)}")
    return names
