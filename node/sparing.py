"""What gives way on a full disk, and what a node goes on without where the disk refuses it, which is said once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar, TypeVarTuple

from node.errors import DiskFull, NodeError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Sparing:
    """One node's work on the disk, by how much depends on it.

    Args:
        relieve: drops something that is kept for others; whether there was anything. Called in a thread.
        say: takes what a contributor would want to read.
    """

    def __init__(self, relieve: Callable[[], bool], say: Callable[[str], None]) -> None:
        self._relieve, self._say = relieve, say
        self._said: dict[str, str] = {}

    async def needed(self, pool: Executor, work: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Do what the node can't go on without, in the pool. Raises DiskFull once nothing is left to give way."""
        while True:
            try:
                return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)
            except DiskFull:
                if not await asyncio.to_thread(self._relieve):
                    raise

    async def spared(self, what: str, work: Callable[[*Ts], T], *arguments: *Ts) -> T | None:
        """Do what it can go on without, in a thread; None where that fails, which is said if it is new."""
        try:
            done = await asyncio.to_thread(work, *arguments)
        except (NodeError, OSError) as error:
            if self._said.get(what) != str(error):
                self._said[what] = str(error)
                self._say(f"going on without {what}: {error}")
            return None
        self._said.pop(what, None)
        return done
