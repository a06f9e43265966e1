"""The line to the leader: kept open, tried again with growing pauses, and its words handed on as events."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

from node.opening import BadWord, Opener
from node.ports import Line, PeerFailed
from node.session import events as ev
from protos.messages import Goodbye, Hello, LeaderMessage, MemberMessage, PeerId, Records, Signed, Welcome

PAUSE_FIRST_S = 0.25
PAUSE_MAX_S = 15.0
SILENCE_S = 60.0


class OpensLines(Protocol):
    async def open_line(self, leader: PeerId, addresses: Sequence[str]) -> Line: ...


class LeaderLine:
    """One member's line.

    Args:
        peers: opens it.
        opener: verifies what comes.
        where: the leader's peer id and its addresses now; raises PeerFailed if nobody knows.
        hello: the first message, made anew for each line.
        post: takes the events.
        learn: takes address records that the leader relays.
        silence_s: a leader that says nothing for so long, not even that it is there, has lost its line. As it is now:
            it may change while the line is up.
        jitter: a fraction from 0 to 1, so that members don't come back all at once.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        peers: OpensLines,
        opener: Opener,
        *,
        where: Callable[[], Awaitable[tuple[PeerId, tuple[str, ...]]]],
        hello: Callable[[], Hello],
        post: Callable[[ev.Event], None],
        learn: Callable[[tuple[bytes, ...]], None],
        silence_s: Callable[[], float] = lambda: SILENCE_S,
        jitter: Callable[[], float] = random.random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._peers, self._opener = peers, opener
        self._where, self._hello, self._post, self._learn = where, hello, post, learn
        self._silence_s, self._jitter, self._sleep = silence_s, jitter, sleep
        self._leader = PeerId("")
        self._line: Line | None = None
        self._was_welcome = False
        self.run_time_s: Callable[[float], None] = lambda _: None

    async def run(self) -> None:
        """Keep the line until cancelled. The pause grows while lines fail before a Welcome."""
        pause_s = PAUSE_FIRST_S
        while True:
            self._was_welcome = False
            try:
                await self._once()
            except (PeerFailed, BadWord) as error:
                self._post(ev.LineDown(str(error), self._leader))
            pause_s = PAUSE_FIRST_S if self._was_welcome else min(2 * pause_s, PAUSE_MAX_S)
            await self._sleep(pause_s * (0.5 + self._jitter()))

    async def say(self, message: MemberMessage | Signed) -> None:
        """Send if the line is up; what must arrive is said again after the next Welcome."""
        line = self._line
        if line is None:
            return
        try:
            await line.send(message)
        except PeerFailed:
            return  # the reader meets the same failure and says so

    async def close(self) -> None:
        """Say what is queued, then close."""
        line, self._line = self._line, None
        if line is not None:
            await line.close()

    async def _once(self) -> None:
        """One line's life. Returns after a Goodbye that says why, else raises PeerFailed or BadWord."""
        leader, addresses = await self._where()
        self._leader = leader
        line = await self._peers.open_line(leader, addresses)
        try:
            await line.send(self._hello())
            messages = aiter(line.messages())
            while (message := await self._next(messages, leader)) is not None:
                if isinstance(message, Welcome):
                    self._welcomed(message, leader)
                    self._line = line
                elif isinstance(message, Records):
                    self._learn(message.records)
                    self._post(ev.LeaderHeard(leader))
                else:
                    if self._was_welcome and not isinstance(message, Goodbye):
                        self._post(ev.LeaderHeard(leader))
                    self._post(self._opener.event(message, leader))
                    if isinstance(message, Goodbye) and message.code in ("ended", "left", "refused", "superseded"):
                        return
        finally:
            if self._line is line:
                self._line = None
            await line.close()
        raise PeerFailed(leader, "the leader closed the line")

    async def _next(
        self, messages: AsyncIterator[LeaderMessage | Signed], leader: PeerId
    ) -> LeaderMessage | Signed | None:
        coming = asyncio.create_task(_next_of(messages))
        began_s = asyncio.get_running_loop().time()
        try:
            while not coming.done():
                # A commit may have brought another limit since: the leader goes by it already.
                silence_s = self._silence_s()
                left_s = began_s + silence_s - asyncio.get_running_loop().time()
                if left_s <= 0:
                    raise PeerFailed(leader, f"the leader has said nothing for {silence_s:g} s")
                await asyncio.wait((coming,), timeout=left_s)
            return coming.result()
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)

    def _welcomed(self, welcome: Welcome, leader: PeerId) -> None:
        if welcome.leader != leader:
            raise BadWord(f"a Welcome in the name of {welcome.leader} on the line of {leader}")
        opened = self._opener.welcome(welcome)
        self.run_time_s(welcome.run_time_s)
        self._learn(welcome.records)
        self._post(opened)
        self._was_welcome = True


async def _next_of(messages: AsyncIterator[LeaderMessage | Signed]) -> LeaderMessage | Signed | None:
    return await anext(messages, None)
