"""Rows of one sender as they come on one stream: taken part by part, checked while the next one comes, receipted."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

import grpc

from node.peers.flight import InFlight
from node.peers.pacing import StreamPace
from node.peers.transport import END, LEAST_PART_BYTES, Meter, Progress
from node.ports import Holder
from protos import limits, wire
from protos.bounds import as_reason
from protos.calls import Declined
from protos.messages import ChunkHead, Part, PeerId, Signed

Context = grpc.aio.ServicerContext[bytes, bytes]

CHECKS_AT_ONCE = 4
"""Rows of one stream whose check may be under way while the next one arrives; beyond it the sender waits."""
RECEIPTED_AT_ONCE = 8
"""Rows that share a receipt, where checks end faster than receipts are asked for."""


@dataclass(slots=True)
class Row:
    """A row on its way in, and what of the bytes in flight is its."""

    head: ChunkHead
    taken_bytes: list[int] = field(default_factory=list)
    first: Part | None = None  # where it came with the head


class RowStream:
    """The rows of one sender on one stream, and the answers to them."""

    def __init__(
        self,
        context: Context,
        progress: Progress,
        meter: Meter,
        caller: PeerId,
        holder: Holder,
        receiving: InFlight,
        pace: StreamPace,
    ) -> None:
        self._slots = asyncio.Semaphore(CHECKS_AT_ONCE)
        self._context = context
        self._progress = progress
        self._meter = meter
        self._caller = caller
        self._holder = holder
        self._receiving = receiving
        self._pace = pace
        self._writing = asyncio.Lock()
        self._n_checks = 0
        self._due: dict[bytes, list[int]] = {}  # by plan, the rows that are held and not yet receipted

    def deal(self, first: bytes) -> str:
        """Take the first frame; the reason why no rows are taken, or an empty string."""
        frame = wire.decode_chunk_frame(self._meter.received(first))
        if not isinstance(frame, Signed):
            return "the first frame is not the deal"
        return self._holder.admit_deal(self._caller, frame.envelope)

    async def head(self) -> Row | None:
        """The next row, of which the first part may be here already; None when the sender has no more."""
        taken = await self._room(limits.PART_BYTES)
        kept = 0
        try:
            frame = await self._frame()
            if frame is None:
                return None
            if isinstance(frame, ChunkHead):
                return Row(frame)
            if not isinstance(frame, wire.Begun) or not isinstance(frame.head, ChunkHead):
                raise wire.WireError(f"{type(frame).__name__} where a chunk's head is needed")
            kept = min(taken, len(frame.part.data))
            return Row(frame.head, [kept], frame.part)
        finally:
            self._receiving.give_back(taken - kept)

    async def row(self, row: Row) -> str:
        """Take a row's parts; the reason why it is refused, or an empty string once it is whole."""
        head = row.head
        reason = self._holder.admit_row(self._caller, head)
        if reason:
            return reason
        offset = unpaid = 0
        try:
            while offset < head.n_bytes:
                part = row.first or await self._part(row, min(limits.PART_BYTES, head.n_bytes - offset))
                row.first = None
                if not isinstance(part, Part) or not part.data:
                    return f"chunk {head.chunk} is too short: {offset} of {head.n_bytes} bytes"
                if offset + len(part.data) > head.n_bytes:
                    return f"chunk {head.chunk} is too long: more than {head.n_bytes} bytes"
                self._progress.came(len(part.data))
                unpaid += len(part.data)
                with self._progress.ours():
                    # Small parts wait together: the wait behind others is ours, and a sender could have one for each.
                    if self._pace.limited and (unpaid >= LEAST_PART_BYTES or offset + len(part.data) == head.n_bytes):
                        await self._pace.wait(unpaid)
                        unpaid = 0
                    await self._holder.row_part(self._caller, head, offset, memoryview(part.data))
                offset += len(part.data)
                if offset < head.n_bytes:  # the last part is kept until it is checked
                    self.forget(row)
        finally:
            if offset < head.n_bytes:
                self._holder.row_broken(self._caller, head)
        self._progress.moved()
        return ""

    def forget(self, row: Row) -> None:
        """The row's bytes are no longer in memory."""
        while row.taken_bytes:
            self._receiving.give_back(row.taken_bytes.pop())

    @property
    def has_free_slot(self) -> bool:
        """Whether fewer checks are under way than may be."""
        return not self._slots.locked()

    async def free_slot(self) -> None:
        """Wait until fewer checks are under way than may be."""
        async with self._slots:
            pass

    async def check(self, row: Row) -> None:
        self._n_checks += 1
        try:
            async with self._slots:
                reason = await self._holder.row_done(self._caller, row.head)
        finally:
            self._n_checks -= 1
            self.forget(row)
        if reason:
            await self.answer(Declined(as_reason(reason)))
        else:
            self._due.setdefault(row.head.plan, []).append(row.head.chunk)
        await self.give_receipts()

    async def give_receipts(self, *, all_of_them: bool = False) -> None:
        """Receipts for rows that are held: one for several, where others are being checked meanwhile."""
        n_due = sum(len(chunks) for chunks in self._due.values())
        if not n_due or (self._n_checks and n_due < RECEIPTED_AT_ONCE and not all_of_them):
            return
        due, self._due = self._due, {}
        for plan, chunks in due.items():
            envelope = self._holder.receipt(self._caller, plan, tuple(chunks))
            await self.answer(Signed(envelope) if envelope else Declined("the attempt is over"))

    async def answer(self, message: Signed | Declined) -> None:
        """Send an answer, if the sender is still there."""
        frame = self._meter.sent(wire.encode_receipt_frame(message))
        async with self._writing:
            if not self._context.done():
                with suppress(grpc.aio.BaseError):  # it went away just now
                    await self._context.write(frame)

    async def _part(self, row: Row, n_bytes: int) -> ChunkHead | Part | wire.Begun | Signed | None:
        """The next frame. Nothing is read before there is room for it, which is how the sender is held back."""
        row.taken_bytes.append(await self._room(n_bytes))
        return await self._frame()

    async def _room(self, n_bytes: int) -> int:
        taken = self._receiving.take_now(n_bytes)
        if taken is None:
            with self._progress.ours():
                taken = await self._receiving.take(n_bytes)
        return taken

    async def _frame(self) -> ChunkHead | Part | wire.Begun | Signed | None:
        raw = await self._context.read()
        if raw is END:
            return None
        return wire.decode_chunk_frame(self._meter.received(raw))
