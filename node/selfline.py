"""A stand-in's line to itself: this node's session and its rounds in one process, over frames as on any other line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from coordinator.leading.lines import MemberLine
from coordinator.leading.opening import open_frame, open_hello
from coordinator.leading.ports import Arrived, Departed, Inbox
from coordinator.rounds.events import Instant
from node.ports import PeerFailed
from protos import wire
from protos.messages import Hello, LeaderMessage, MemberMessage, PeerId, Signed


class SelfLine:
    """Both ends of the line: what the session says goes into the inbox, what the rounds say comes as messages."""

    def __init__(
        self, run: PeerId, me: PeerId, inbox: Inbox, beat_s: Callable[[], float], now: Instant, coordinator: PeerId
    ) -> None:
        self._run, self._me, self._inbox, self._beat_s = run, me, inbox, beat_s
        self._coordinator = coordinator
        self._line = MemberLine(me, now)
        self._greeted = self._ended = False

    async def send(self, message: MemberMessage | Signed) -> None:
        if self._ended:
            raise PeerFailed(self._me, "this node leads no longer")
        frame = wire.encode_member_frame(message)
        if not self._greeted and isinstance(message, Hello):
            greeting = open_hello(frame, run=self._run, peer=self._me, observer=None)
            self._greeted = True
            self._inbox.post(Arrived(self._line, greeting.hello, greeting.record, greeting.hello.record))
            return
        for item in open_frame(frame, self._line, run=self._run, observer=False, coordinator=self._coordinator):
            self._inbox.post(item)

    async def messages(self) -> AsyncIterator[LeaderMessage | Signed]:
        while (frame := await self._line.next_frame(self._beat_s())) is not None:
            yield wire.decode_leader_frame(frame)

    async def close(self) -> None:
        if not self._ended:
            self._ended = True
            self._line.drop("closed")
            if self._greeted:
                self._inbox.post(Departed(self._line, "closed"))


class SelfOpener:
    """Opens that line, in the place of calls to others. `beat_s`: how long it says nothing at most, as it is now."""

    def __init__(
        self,
        run: PeerId,
        me: PeerId,
        inbox: Callable[[], Inbox | str],
        beat_s: Callable[[], float],
        seconds: Callable[[], float],
        *,
        coordinator: PeerId,
    ) -> None:
        self._run, self._me, self._inbox = run, me, inbox
        self._beat_s, self._seconds, self._coordinator = beat_s, seconds, coordinator

    async def open_line(self, leader: PeerId, addresses: Sequence[str]) -> SelfLine:
        await asyncio.sleep(0)
        inbox = self._inbox()
        if isinstance(inbox, str):
            raise PeerFailed(leader, inbox)
        now = Instant(self._seconds())
        return SelfLine(self._run, self._me, inbox, self._beat_s, now, self._coordinator)
