"""Told to go by a signal: before the node takes part, what is being started ends; later the node leaves.

SIGINT, SIGTERM and SIGHUP are its owner's, and a second one ends the process at once. `ORPHANED` says that the program
that started the node is gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from node.driver import Stopped
from node.errors import KILLED
from node.parent import ORPHANED
from node.session import events as ev

OWNERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
THREADS_S = 5.0


class Signals:
    """What signals do to one node, which has this process to itself. Made and used in its event loop."""

    def __init__(self) -> None:
        self._told = False
        self._asked: ev.LeaveAsked | None = None
        self._starting: asyncio.Task[Stopped] | None = None
        self._post: Callable[[ev.LeaveAsked], None] | None = None
        loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(thread_name_prefix="asyncio")
        loop.set_default_executor(self._threads)
        for number in OWNERS:
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(ORPHANED, self._orphaned)

    async def run(self, node: Coroutine[Any, Any, Stopped]) -> Stopped:
        """The node's end, or the word that it was told to go before `leaves_by`: then nothing of it works any more,
        its threads included, so that what it had open can be closed."""
        self._starting = asyncio.create_task(node)
        try:
            return await self._starting
        except asyncio.CancelledError:
            if self._asked is None or self._post is not None:
                raise
            await self._threads_end()
            return Stopped(0, f"{self._asked.reason}, before this node took part")

    def leaves_by(self, post: Callable[[ev.LeaveAsked], None]) -> None:
        """From now on it leaves as a member does."""
        self._post = post
        if self._asked is not None:
            post(self._asked)

    def _signalled(self, number: int) -> None:
        if self._told:
            if number == signal.SIGHUP:  # a window that closes tells twice, its shell and the kernel
                return
            os._exit(KILLED)
        self._told = True
        self._ask(ev.LeaveAsked("left on a signal"))

    def _orphaned(self) -> None:
        self._ask(ev.LeaveAsked("the program that started this node is gone", keeps_seat=True))

    def _ask(self, asked: ev.LeaveAsked) -> None:
        if self._post is not None:
            self._post(asked)
        elif self._asked is None:
            self._asked = asked
            if self._starting is not None:
                self._starting.cancel()

    async def _threads_end(self) -> None:
        """A thread can't be cancelled; what is closed next is served by others."""
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(thread_name_prefix="asyncio"))
        try:
            async with asyncio.timeout(THREADS_S):
                await loop.run_in_executor(None, self._threads.shutdown)
        except TimeoutError:  # it hashes or copies gigabytes; whatever it writes may be cut off anywhere
            os._exit(0)
