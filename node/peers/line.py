"""The leader's line as its member sees it: a bounded queue out, messages in, and an orderly end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from node.peers.stream import Stream
from node.ports import PeerFailed
from protos import wire
from protos.messages import LeaderMessage, MemberMessage, Signed

LINE_QUEUE = 256
"""Messages that may wait on a line; more than that and `send` waits."""
CLOSE_S = 1.0


class GrpcLine:
    """The leader's line as its member sees it; made by `GrpcPeers.open_line`."""

    def __init__(self, stream: Stream, first_s: float) -> None:
        self._stream = stream
        self._first_s = first_s
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(LINE_QUEUE)
        self._broken: PeerFailed | None = None
        self._writer = asyncio.create_task(self._write(), name=f"line to {stream.peer}")

    async def send(self, message: MemberMessage | Signed) -> None:
        """Queue a message. Raises PeerFailed once the line is broken, WireError for a message that can't be sent."""
        frame = wire.encode_member_frame(message)
        if self._broken is None and self._queue.full():
            putting = asyncio.create_task(self._queue.put(frame))
            await asyncio.wait((putting, self._writer), return_when=asyncio.FIRST_COMPLETED)
            if not putting.done():
                putting.cancel()
        elif self._broken is None:
            self._queue.put_nowait(frame)
        if self._broken is not None:
            raise self._broken

    async def messages(self) -> AsyncIterator[LeaderMessage | Signed]:
        """What the leader says, in order. The first message must come in time; later ones come when they come.

        That the leader's machine is still there is checked by keepalive pings.
        """
        limit_s: float | None = self._first_s
        while True:
            try:
                async with asyncio.timeout(limit_s):
                    message = await self._stream.read_as(wire.decode_leader_frame)
            except TimeoutError:
                raise self._fail(PeerFailed(self._stream.peer, f"no word in {limit_s} s")) from None
            except PeerFailed as error:
                raise self._fail(error) from error
            if message is None:
                break
            limit_s = None
            yield message
        self._fail(PeerFailed(self._stream.peer, "the leader closed the line"))

    async def close(self) -> None:
        """Say what is queued and that nothing more comes, and give the leader a moment to take it."""
        try:
            if self._broken is None:
                with suppress(TimeoutError, PeerFailed):
                    async with asyncio.timeout(CLOSE_S):
                        await self._queue.join()
                        await self._stream.done_writing()
                        await self._stream.wait_ended()
        finally:
            self._fail(PeerFailed(self._stream.peer, "the line is closed"))
            await asyncio.gather(self._writer, return_exceptions=True)

    def _fail(self, error: PeerFailed) -> PeerFailed:
        if self._broken is None:
            self._broken = error
        self._writer.cancel()
        self._stream.cancel()
        return self._broken

    async def _write(self) -> None:
        while True:
            frame = await self._queue.get()
            try:
                await self._stream.write(frame)
            except PeerFailed as error:
                self._broken = self._broken or error
                return
            finally:
                self._queue.task_done()
