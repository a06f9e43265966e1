"""A member's lines: the one to the coordinator, which is always tried, and those to who stands in for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from node.leaderline import LeaderLine
from protos.messages import MemberMessage, PeerId, Signed


class Lines:
    """All lines of one member.

    Args:
        coordinator: the line to it.
        to_stand_in: makes the line to a stand-in; to this node itself, where it leads.
        failed: is told of a fault of ours on a stand-in's line.
    """

    def __init__(
        self,
        coordinator: PeerId,
        line: LeaderLine,
        to_stand_in: Callable[[PeerId], LeaderLine],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._failed = failed
        self._coordinator, self._line, self._to_stand_in = coordinator, line, to_stand_in
        self._stand_ins: dict[PeerId, tuple[LeaderLine, asyncio.Task[None]]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Keep the line to the coordinator until cancelled; the others go with it."""
        try:
            await self._line.run()
        finally:
            self.follow(())
            await asyncio.gather(*self._closing, return_exceptions=True)

    def follow(self, leaders: Sequence[PeerId]) -> None:
        """Have lines to these stand-ins and no others."""
        for peer in [peer for peer in self._stand_ins if peer not in leaders]:
            line, task = self._stand_ins.pop(peer)
            self._spawn(_end(line, task), f"end of the line to {peer[-6:]}")
        for peer in leaders:
            if peer not in self._stand_ins:
                line = self._to_stand_in(peer)
                task = asyncio.get_running_loop().create_task(line.run(), name=f"line to {peer[-6:]}")
                task.add_done_callback(self._ended)
                self._stand_ins[peer] = (line, task)

    async def say(self, message: MemberMessage | Signed, leader: str = "") -> None:
        """Send on the lines that are up; on that to one leader, where one is named."""
        if leader in ("", self._coordinator):
            await self._line.say(message)
        for peer, (line, _) in list(self._stand_ins.items()):
            if leader in ("", peer):
                await line.say(message)

    async def close(self) -> None:
        """Say what is queued, then close."""
        lines = [line for line, _ in self._stand_ins.values()]
        await asyncio.gather(self._line.close(), *(line.close() for line in lines))
        self.follow(())
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _end(line: LeaderLine, task: asyncio.Task[None]) -> None:
    await line.close()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
