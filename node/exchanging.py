"""The work of one attempt's exchange: rows received, checked and combined, and one's own rows sent.

`aggregation.exchange` decides; this carries its effects out on bytes, in threads, and reports each outcome as an event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path

from aggregation.exchange import (
    CheckRow,
    CombineChunk,
    CombineFailed,
    DropRow,
    ExchangeEffect,
    GiveReceipt,
    Receipted,
    RefuseRow,
    ReportMissing,
    ReportResults,
    RowArrived,
    RowBroken,
    RowChecked,
    SendRows,
    Stalled,
    StopRows,
    Unable,
)
from aggregation.exchange import ExchangeEvent as Happened
from coordinator.rounds import policy
from node.errors import NodeError
from node.ports import PeerFailed, Peers
from node.reducing import Previous, Reducing, Row
from node.results import ResultsArea
from node.rows import ROWS_IN_MEMORY_BYTES, RowMemory
from node.session.effects import BeginExchange
from node.session.part import included_of
from node.stages import Stages
from node.training.shared import CodesArea
from protos.messages import (
    ChunkHead,
    ChunkResult,
    Lack,
    Missing,
    PeerId,
    Receipt,
    Results,
    Signed,
)
from protos.runspec import RunSpec
from protos.sealer import KeySealer, open_signed
from protos.signing import SignatureError
from protos.wire import WireError

SEND_PAUSE_FIRST_S = 0.05
SEND_PAUSE_MAX_S = 2.0

OWN_ROWS_AT_ONCE = 2
STALLED_TIMES = 2
"""A call that stands still for `no_progress_s` ends and is made again, so who is silent for longer can't be reached."""

Where = Callable[[PeerId], Awaitable[tuple[str, ...]]]


class Exchanging:
    """The bytes of one attempt, for one member.

    Args:
        begin: the attempt as the session begins it.
        me: this member.
        admit: the exchange's own say on a row, before a byte of it is taken.
        codes: this member's encoded contribution, with its chunks' Merkle paths; None if it has none.
        results: where combined chunks are kept and served from.
        work: the file for received rows beyond `memory_bytes`; removed by `close`.
        where: a peer's addresses.
        happened: takes events of the exchange.
        tell: says something to the leader.
        failed: takes what went wrong here that is no peer's fault.
        previous: the encoded result of a chunk from which a centred rule starts, or None where it is not here; itself
            None where there is no centre: at first, and after an empty round.
        previous_scale: the clip factor with which those were applied.
        stages: where bytes, seconds and copies are counted.
        memory_bytes: of received rows, so much may wait in memory.
    """

    def __init__(
        self,
        begin: BeginExchange,
        me: PeerId,
        spec: RunSpec,
        sealer: KeySealer,
        *,
        admit: Callable[[str, int, int], str],
        codes: CodesArea | None,
        code_paths: tuple[tuple[bytes, ...], ...],
        results: ResultsArea,
        work: Path,
        pool: Executor,
        peers: Peers,
        where: Where,
        happened: Callable[[Happened], None],
        tell: Callable[[Signed | Missing], Awaitable[None]],
        failed: Callable[[BaseException], None],
        seconds: Callable[[], float],
        previous: Previous | None = None,
        previous_scale: float = 1.0,
        stages: Stages | None = None,
        memory_bytes: int = ROWS_IN_MEMORY_BYTES,
    ) -> None:
        self.plan_hash = begin.plan_hash
        self._begin, self._me, self._spec, self._sealer = begin, me, spec, sealer
        self._admit, self._codes, self._code_paths = admit, codes, code_paths
        self._pool, self._peers, self._where = pool, peers, where
        self._happened, self._tell, self._failed, self._seconds = happened, tell, failed, seconds
        self._dealt = included_of(begin.deal, begin.commitments)
        applied = policy.applied_rule(spec, self._dealt, begin.deal.excluded)
        self._reducing = Reducing(
            spec,
            self._dealt,
            applied or policy.Applied(spec.rule.name, 0, "", ""),
            results=results,
            work=work,
            previous=previous,
            previous_scale=previous_scale,
            stages=stages if stages is not None else Stages(),
        )
        self._memory = RowMemory(memory_bytes)
        self._slots: dict[tuple[PeerId, int], int | None] = {}  # of rows let in: where in the file; None: in memory
        self._writing: dict[tuple[PeerId, int], Future[None]] = {}
        self._rows: dict[tuple[PeerId, int], Row] = {}
        self._held: set[tuple[PeerId, int]] = set()  # checked: a receipt may be had as often as it is lost
        self._pending: dict[PeerId, dict[int, None]] = {}  # chunks that reducers have not acknowledged
        self._combines: dict[int, asyncio.Task[None]] = {}  # the last one of each chunk
        self._began_s = seconds()
        self._heard_s: dict[PeerId, float] = {}  # when a sender last called or sent something
        self._n_received_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._spawn(self._watch())

    # -- what the server asks ---------------------------------------------------------------------------------

    def admit_deal(self, deal: bytes, sender: PeerId | None = None) -> str:
        """Whether rows may come for this deal's envelope."""
        if sender is not None:
            self._heard_s[sender] = self._seconds()
        return "" if deal == self._begin.deal_envelope and not self._closed else "not the deal of the current attempt"

    def admit_row(self, sender: PeerId, head: ChunkHead) -> str:
        """Before a byte of a row is taken in. One that is here already may come again: see `put` and `receipt`."""
        if self._closed or head.plan != self.plan_hash:
            return "not of the current attempt"
        key = (sender, head.chunk)
        if key in self._held:
            row = self._rows.get(key)
            return "" if row is None or row.head.n_bytes == head.n_bytes else "it came before, of another length"
        if (writing := self._writing.get(key)) is not None and not writing.done():
            return "a part of it that came before is still being written"
        if reason := self._admit(sender, head.chunk, head.n_bytes):
            return reason
        try:
            if key not in self._slots:
                in_memory = self._memory.take(head.n_bytes)
                self._slots[key] = None if in_memory else self._reducing.file.slot()
        except OSError as error:
            self._happened(RowBroken(sender, head.chunk))
            return self._no_room(error)
        self._rows[key] = self._reducing.row(head, self._slots[key])
        return ""

    async def put(self, sender: PeerId, chunk: int, offset: int, data: memoryview) -> None:
        """The next bytes of a row that was let in; dropped where it is here already.

        The last ones are left as they are until the check, which takes them in; all others are kept and hashed here.
        """
        key = (sender, chunk)
        row = self._rows.get(key)
        if key in self._held or row is None:  # it is here already, or the attempt is over
            return
        if offset + len(data) > row.head.n_bytes:
            raise ValueError(f"a row of {row.head.n_bytes} bytes has no room for {len(data)} at {offset}")
        self._n_received_bytes += len(data)
        self._heard_s[sender] = self._seconds()
        if offset + len(data) == row.head.n_bytes:
            row.rest = (offset, data)
            return
        self._writing[key] = self._pool.submit(self._reducing.take, row, offset, data)
        try:
            await asyncio.wrap_future(self._writing[key])
        except OSError as error:
            row.fault = self._no_room(error)
        except ValueError:  # closed meanwhile
            return

    async def row_done(self, sender: PeerId, chunk: int) -> str:
        """The row is whole: an empty string once it is checked and held, or the reason of a refusal."""
        if (sender, chunk) in self._held:
            return ""
        row = self._rows.get((sender, chunk))
        if row is None:
            return "the attempt is over, or the row counts no more"
        self._happened(RowArrived(sender, chunk))
        return await row.outcome

    def receipt(self, sender: PeerId, chunks: tuple[int, ...]) -> bytes:
        """The envelope of a receipt for those of these rows that are held; empty where there are none."""
        held = tuple(chunk for chunk in chunks if (sender, chunk) in self._held)
        return self._sealer.seal(Receipt(self.plan_hash, sender, held)) if held else b""

    def row_broken(self, sender: PeerId, chunk: int) -> None:
        if (sender, chunk) in self._held:
            return
        row = self._rows.pop((sender, chunk), None)
        if row is not None and not row.outcome.done():
            row.outcome.set_result("it did not come whole")
            self._happened(RowBroken(sender, chunk))

    # -- effects ----------------------------------------------------------------------------------------------

    async def carry_out(self, effect: ExchangeEffect) -> None:
        match effect:
            case SendRows(reducer, chunks):
                self._offer(PeerId(reducer), chunks)
            case StopRows(reducer, chunks):
                for chunk in chunks:
                    self._pending.get(PeerId(reducer), {}).pop(chunk, None)
            case CheckRow(sender, chunk):
                self._spawn(self._check(PeerId(sender), chunk))
            case GiveReceipt(sender, chunk):
                if not self._closed:  # what was checked as the attempt ended is held by nobody
                    self._held.add((PeerId(sender), chunk))
                    self._settle(PeerId(sender), chunk, "")
            case RefuseRow(sender, chunk, reason):
                self._settle(PeerId(sender), chunk, reason)
            case DropRow(sender, chunk):
                self._drop(PeerId(sender), chunk)
            case CombineChunk(chunk, senders):
                rows = [self._rows[(PeerId(sender), chunk)] for sender in senders]
                self._combines[chunk] = self._spawn(self._combine(effect, rows, self._combines.get(chunk)))
            case ReportResults(set_hash, results):
                listed = tuple(ChunkResult(item.chunk, item.hash, item.norm_sq) for item in results)
                report = Results(self.plan_hash, set_hash, listed, self._kib_s())
                await self._tell(Signed(self._sealer.seal(report)))
            case ReportMissing(lacks, asked, unable):
                named = tuple(Lack(chunk, PeerId(sender)) for chunk, sender in lacks)
                await self._tell(Missing(self.plan_hash, named, tuple(PeerId(peer) for peer in asked), unable))

    async def close(self) -> None:
        """Stop all streams and drop received rows; combined chunks stay to be served."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for sender, chunk in list(self._rows):
            self._settle(sender, chunk, "the attempt is over")
        self._rows.clear()
        self._held.clear()
        self._reducing.file.close()

    # -- sending ----------------------------------------------------------------------------------------------

    def _offer(self, reducer: PeerId, chunks: tuple[int, ...]) -> None:
        """Send a reducer more chunks: what sends to it already takes them along."""
        if self._codes is None:
            return
        pending = self._pending.get(reducer)
        if pending is None:
            self._pending[reducer] = dict.fromkeys(chunks)
            self._spawn(self._send(reducer))
        else:
            pending.update(dict.fromkeys(chunks))

    async def _send(self, reducer: PeerId) -> None:
        """Stream rows until all are receipted; tries again with growing pauses until the exchange is closed."""
        pending = self._pending[reducer]
        pause_s = SEND_PAUSE_FIRST_S
        while pending:
            n_before = len(pending)
            try:
                if reducer == self._me:
                    await self._send_to_self(pending)
                else:
                    await self._stream(reducer, pending)
            except PeerFailed:
                pass  # the reducer's silence shows in what the leader is told; here it is tried again
            pause_s = SEND_PAUSE_FIRST_S if len(pending) < n_before else min(2 * pause_s, SEND_PAUSE_MAX_S)
            if pending:
                await asyncio.sleep(pause_s)
        del self._pending[reducer]

    async def _stream(self, reducer: PeerId, pending: dict[int, None]) -> None:
        async def receipted(envelope: bytes) -> None:
            try:
                opened = open_signed(envelope, self._spec_run(), signer=reducer, kind=Receipt)
            except (SignatureError, WireError) as error:
                raise PeerFailed(reducer, f"a receipt that is none: {error}") from error
            receipt = opened.message
            if isinstance(receipt, Receipt) and receipt.sender == self._me and receipt.plan == self.plan_hash:
                for chunk in receipt.chunks:
                    pending.pop(chunk, None)
                self._happened(Receipted(reducer, receipt.chunks))

        addresses = await self._where(reducer)
        await self._peers.send_rows(
            reducer, addresses, self._begin.deal_envelope, tuple(pending), self._row_source, receipted
        )

    async def _send_to_self(self, pending: dict[int, None]) -> None:
        """One's own rows pass the same checks as others', but stay where they lie."""
        chunks = list(pending)
        for start in range(0, len(chunks), OWN_ROWS_AT_ONCE):
            await asyncio.gather(*(self._own(chunk) for chunk in chunks[start : start + OWN_ROWS_AT_ONCE]))
            for chunk in chunks[start : start + OWN_ROWS_AT_ONCE]:
                pending.pop(chunk, None)

    async def _own(self, chunk: int) -> None:
        head, frame = self._row_source(chunk)
        if (self._me, chunk) not in self._held:
            if reason := self._admit(self._me, chunk, head.n_bytes):
                raise PeerFailed(self._me, f"own row {chunk} is not let in: {reason}")
            self._rows[(self._me, chunk)] = self._reducing.row(head, frame)
            if reason := await self.row_done(self._me, chunk):
                raise PeerFailed(self._me, f"own row {chunk} is refused: {reason}")
        self._happened(Receipted(self._me, (chunk,)))

    def _row_source(self, chunk: int) -> tuple[ChunkHead, memoryview]:
        if self._codes is None:
            raise ValueError("a member without a contribution has no rows")
        frame = self._codes.frame(chunk).data
        return ChunkHead(self.plan_hash, chunk, len(frame), self._code_paths[chunk]), frame

    # -- reducing ---------------------------------------------------------------------------------------------

    async def _check(self, sender: PeerId, chunk: int) -> None:
        row = self._rows.get((sender, chunk))
        if row is None:
            return
        loop = asyncio.get_running_loop()
        try:
            fault = await loop.run_in_executor(self._pool, self._reducing.fault_of, sender, row)
        except OSError as error:
            fault = self._no_room(error)
        self._happened(RowChecked(sender, chunk, fault))

    async def _combine(self, effect: CombineChunk, rows: list[Row], before: asyncio.Task[None] | None) -> None:
        """Combine a chunk, after what is combined of it already: the result that is kept is the last set's."""
        if before is not None:
            await asyncio.wait([before])
        loop, work = asyncio.get_running_loop(), self._reducing.combine
        rule = self._rule_of(effect.senders)
        try:
            combined = await loop.run_in_executor(self._pool, work, effect.chunk, rows, effect.weights, rule)
        except (ValueError, NodeError, OSError) as error:  # what can't be combined, or results that are closed
            self._happened(CombineFailed(effect.chunk, str(error), effect.set_number))
            return
        self._happened(replace(combined, set_number=effect.set_number))

    def _rule_of(self, senders: tuple[str, ...]) -> policy.Applied | None:
        """The rule for a set that has shrunk; None for the one that was dealt."""
        if len(senders) == len(self._dealt):
            return None
        included = {PeerId(sender): self._dealt[PeerId(sender)] for sender in senders}
        return policy.applied_rule(self._spec, included, self._begin.deal.excluded)

    def _drop(self, sender: PeerId, chunk: int) -> None:
        """A row that counts no more makes room for others."""
        key = (sender, chunk)
        row = self._rows.get(key)
        self._settle(sender, chunk, "it counts no more: the chunk or the set has changed")
        self._held.discard(key)
        if row is not None and self._slots.get(key, 0) is None:
            del self._slots[key]
            self._memory.give_back(row.head.n_bytes)

    async def _watch(self) -> None:
        """Say who has stalled, again and again: right after a deal it is not yet believed."""
        while not self._closed:
            await asyncio.sleep(STALLED_TIMES * self._spec.deadlines.no_progress_s / 8)
            if stalled := self.stalled():
                self._happened(Stalled(stalled))

    def stalled(self) -> tuple[str, ...]:
        """Senders of whom nothing has come for so long that it can't be on its way."""
        since_s = self._seconds() - STALLED_TIMES * self._spec.deadlines.no_progress_s
        silent = [peer for peer in self._dealt if self._heard_s.get(peer, self._began_s) < since_s]
        return tuple(str(peer) for peer in silent if peer != self._me)

    # -- small things -----------------------------------------------------------------------------------------

    def _no_room(self, error: OSError) -> str:
        """Tell the exchange that this reducer can't take rows in."""
        self._happened(Unable())
        return f"this reducer's disk has no room for the row: {error.strerror or error}"

    def _settle(self, sender: PeerId, chunk: int, reason: str) -> None:
        row = self._rows.get((sender, chunk))
        if row is not None and not row.outcome.done():
            row.outcome.set_result(reason)
        if reason:
            self._rows.pop((sender, chunk), None)

    def _kib_s(self) -> float:
        elapsed_s = max(self._seconds() - self._began_s, 1e-3)
        return self._n_received_bytes / 1024 / elapsed_s

    def _spec_run(self) -> PeerId:
        return self._begin.plan.run

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)
