"""One open gRPC call to a peer: frames as bytes, counted; whatever ends it early is a PeerFailed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import grpc

from node.peers.transport import ACCEPTED, Meter, Progress, failure, failure_of
from node.ports import PeerFailed
from protos import wire
from protos.messages import PeerId

T = TypeVar("T")


class Stream:
    """One open call to a peer: frames as bytes, counted; whatever ends it early is a PeerFailed.

    Args:
        progress: told of what is written; how far what is read gets us, its reader knows.
    """

    def __init__(
        self, peer: PeerId, call: grpc.aio.StreamStreamCall[bytes, bytes], meter: Meter, progress: Progress | None
    ) -> None:
        self.peer = peer
        self._call = call
        self._meter = meter
        self._progress = progress

    async def write(self, frame: bytes) -> None:
        """Send a frame; waits while the peer takes nothing."""
        try:
            await self._call.write(self._meter.sent(frame))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            raise await self._ended(error) from error
        except asyncio.CancelledError:
            await self._unless_ours()
        if self._progress is not None:
            self._progress.moved()

    async def done_writing(self) -> None:
        """Say that nothing more is coming."""
        try:
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            raise await self._ended(error) from error

    async def read(self) -> bytes | None:
        """The next frame; None once the peer has ended the call in order."""
        try:
            frame = await self._call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            raise await self._ended(error) from error
        except asyncio.CancelledError:
            await self._unless_ours()
            return None
        if not isinstance(frame, bytes):
            return None
        return self._meter.received(frame)

    async def read_as(self, decode: Callable[[bytes], T]) -> T | None:
        """The next frame's message; None once the peer has ended the call in order."""
        frame = await self.read()
        if frame is None:
            return None
        try:
            return decode(frame)
        except wire.WireError as error:
            raise PeerFailed(self.peer, f"it sent nonsense: {error}") from error

    async def wait_accepted(self) -> None:
        """Wait until the peer goes into the call. Raises PeerFailed with its reason if it doesn't."""
        accepted = (await self._call.initial_metadata()).get(ACCEPTED[0]) == ACCEPTED[1]
        if not accepted:
            raise failure_of(self.peer, await self._call.code(), await self._call.details())

    async def wait_ended(self) -> None:
        await self._call.code()

    def cancel(self) -> None:
        self._call.cancel()

    async def _unless_ours(self) -> None:
        """gRPC cancels a reader when the peer cancelled the call: our own cancellation goes on, the peer's is data."""
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise asyncio.CancelledError
        raise PeerFailed(self.peer, "it broke off")

    async def _ended(self, error: Exception) -> PeerFailed:
        if isinstance(error, grpc.aio.AioRpcError):
            return failure(self.peer, error)
        code, details = await self._call.code(), await self._call.details()
        if code is grpc.StatusCode.OK:
            return PeerFailed(self.peer, "it ended the call early")
        return failure_of(self.peer, code, details)
