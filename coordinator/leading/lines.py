"""One member's open line: what is queued for it, how much it may say, and how it ends."""

from __future__ import annotations

import asyncio
from collections import deque

from coordinator.rounds.events import Instant
from protos import limits
from protos.messages import Goodbye, PeerId, Records
from protos.wire import as_reason, encode_leader_frame

QUEUE_FRAMES = 1024
QUEUE_BYTES = 2 * limits.MESSAGE_BYTES
"""What may wait for a member that reads slowly; beyond it the line is dropped, and the member comes back if it can."""

FRAMES_PER_S = 100.0
FRAMES_BURST = 1000.0
BYTES_PER_S = 8.0 * 2**20
BYTES_BURST = 2.0 * limits.MESSAGE_BYTES


BEAT = encode_leader_frame(Records(()))


class Allowance:
    """A token bucket: `per_s` in the long run, `burst` at once."""

    def __init__(self, per_s: float, burst: float, now: Instant) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = burst
        self._at = now

    def take(self, amount: float, now: Instant) -> bool:
        """Whether so much is left; it is taken then."""
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._per_s)
        self._at = now
        if amount > self._left:
            return False
        self._left -= amount
        return True


class MemberLine:
    """The outgoing side of a line. `send` and `close` never wait; `outgoing` is the writer's end."""

    def __init__(self, peer: PeerId, now: Instant) -> None:
        self._peer = peer
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._changed = asyncio.Event()
        self._dropped = asyncio.Event()
        self._closing = False
        self._frames = Allowance(FRAMES_PER_S, FRAMES_BURST, now)
        self._bytes = Allowance(BYTES_PER_S, BYTES_BURST, now)
        self.dropped = ""
        """Why the line must end at once, without what is queued."""

    @property
    def peer(self) -> PeerId:
        return self._peer

    def send(self, frame: bytes) -> None:
        if self._closing or self.dropped:
            return
        if len(self._queue) >= QUEUE_FRAMES or self._queued_bytes + len(frame) > QUEUE_BYTES:
            self.drop("reads too slowly")
            return
        self._append(frame)

    def close(self, goodbye: Goodbye) -> None:
        """Say goodbye after what is queued; nothing is sent any more."""
        if self._closing or self.dropped:
            return
        self._append(encode_leader_frame(Goodbye(goodbye.code, as_reason(goodbye.reason))))
        self._closing = True

    def drop(self, reason: str) -> None:
        self.dropped = self.dropped or reason
        self._queue.clear()
        self._queued_bytes = 0
        self._changed.set()
        self._dropped.set()

    async def wait_dropped(self) -> None:
        await self._dropped.wait()

    def accepts(self, n_bytes: int, now: Instant) -> bool:
        """Whether the member may say so much more now."""
        return self._frames.take(1.0, now) and self._bytes.take(float(n_bytes), now)

    async def next_frame(self, beat_s: float | None = None) -> bytes | None:
        """The next frame to write, None when the line is to end; after `beat_s` of silence one that says nothing new.

        By that a member knows that its leader lives, and not merely the machine that it runs on.
        """
        while True:
            if self._queue:
                frame = self._queue.popleft()
                self._queued_bytes -= len(frame)
                return frame
            if self._closing or self.dropped:
                return None
            self._changed.clear()
            try:
                async with asyncio.timeout(beat_s):
                    await self._changed.wait()
            except TimeoutError:
                return BEAT

    def _append(self, frame: bytes) -> None:
        self._queue.append(frame)
        self._queued_bytes += len(frame)
        self._changed.set()
