"""The work of one attempt's exchange: rows received into a mapped file, checked and combined, and one's own rows sent.

`aggregation.exchange` decides; this carries its effects out on bytes, in threads, and reports each outcome as an event.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path

from aggregation import codec
from aggregation.digest import chunk_root, contribution_root_from_path
from aggregation.errors import CodecError, RuleError
from aggregation.exchange import (
    CheckRow,
    CombineChunk,
    Combined,
    CombineFailed,
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
    Unable,
)
from aggregation.exchange import ExchangeEvent as Happened
from aggregation.rules import combine
from coordinator.rounds import policy
from node.errors import NodeError
from node.files import reserve_part
from node.ports import PeerFailed, Peers
from node.results import ResultsArea
from node.session.events import BeginExchange
from node.session.part import included_of
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

Where = Callable[[PeerId], Awaitable[tuple[str, ...]]]


@dataclass(slots=True)
class _Row:
    """A row on its way in: its place in the work file, and who waits for its check."""

    head: ChunkHead
    offset: int
    n_bytes: int
    outcome: asyncio.Future[bytes | str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Exchanging:
    """The bytes of one attempt, for one member.

    Args:
        begin: the attempt as the session begins it.
        me: this member.
        admit: the exchange's own say on a row, before a byte of it is taken.
        codes: this member's encoded contribution, with its chunks' Merkle paths; None if it has none.
        results: where combined chunks are kept and served from.
        work: the file for received rows; removed by `close`.
        where: a peer's addresses.
        happened: takes events of the exchange.
        tell: says something to the leader.
        failed: takes what went wrong here that is no peer's fault.
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
    ) -> None:
        self.plan_hash = begin.plan_hash
        self._begin, self._me, self._spec, self._sealer = begin, me, spec, sealer
        self._admit, self._codes, self._code_paths, self._results = admit, codes, code_paths, results
        self._pool, self._peers, self._where = pool, peers, where
        self._happened, self._tell, self._failed, self._seconds = happened, tell, failed, seconds
        self._grid = policy.grid(spec)
        self._included = included_of(begin.deal, begin.commitments)
        applied = policy.applied_rule(spec, len(self._included))
        self._rule = applied or policy.Applied(spec.rule.name, 0, "", "")
        self._slots: dict[tuple[PeerId, int], int] = {}
        self._rows: dict[tuple[PeerId, int], _Row] = {}
        self._receipts: dict[tuple[PeerId, int], bytes] = {}
        self._work = work
        self._file: mmap.mmap | None = None
        self._descriptor = -1
        self._began_s = seconds()
        self._n_received_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending: dict[PeerId, dict[int, None]] = {}
        self._closed = False

    # -- what the server asks ---------------------------------------------------------------------------------

    def admit_deal(self, deal: bytes) -> str:
        """Whether rows may come for this deal's envelope."""
        return "" if deal == self._begin.deal_envelope and not self._closed else "not the deal of the current attempt"

    def admit_row(self, sender: PeerId, head: ChunkHead) -> str:
        """Before a byte of a row is taken in. A sender whose receipt was lost gets it again: see `row_done`."""
        if self._closed or head.plan != self.plan_hash:
            return "not of the current attempt"
        key = (sender, head.chunk)
        if key in self._receipts:
            return ""
        if reason := self._admit(sender, head.chunk, head.n_bytes):
            return reason
        if key not in self._slots:
            offset = len(self._slots) * self._slot_bytes()
            try:
                self._mapped()
                reserve_part(self._descriptor, offset, self._slot_bytes())
            except OSError as error:
                self._happened(RowBroken(sender, head.chunk))
                self._happened(Unable())
                return f"this reducer's disk has no room for the row: {error.strerror or error}"
            self._slots[key] = offset
        self._rows[key] = _Row(head, self._slots[key], head.n_bytes)
        return ""

    def put(self, sender: PeerId, chunk: int, offset: int, data: bytes | memoryview) -> None:
        """Some bytes of a row that was let in; dropped where it is here already."""
        row = self._rows.get((sender, chunk))
        if (sender, chunk) in self._receipts or row is None:  # it is here already, or the attempt is over
            return
        if offset + len(data) > row.n_bytes:
            raise ValueError(f"a row of {row.n_bytes} bytes has no room for {len(data)} at {offset}")
        area = self._mapped()
        area[row.offset + offset : row.offset + offset + len(data)] = bytes(data)
        if sender != self._me:
            self._n_received_bytes += len(data)

    async def row_done(self, sender: PeerId, chunk: int) -> bytes | str:
        """The row is whole: its receipt's envelope once it is checked, or the reason of a refusal."""
        if (receipt := self._receipts.get((sender, chunk))) is not None:
            return receipt
        row = self._rows.get((sender, chunk))
        if row is None:
            return "the attempt is over"
        self._happened(RowArrived(sender, chunk))
        return await row.outcome

    def row_broken(self, sender: PeerId, chunk: int) -> None:
        if (sender, chunk) in self._receipts:
            return
        row = self._rows.pop((sender, chunk), None)
        if row is not None and not row.outcome.done():
            row.outcome.set_result("it did not come whole")
            self._happened(RowBroken(sender, chunk))

    # -- effects ----------------------------------------------------------------------------------------------

    async def carry_out(self, effect: ExchangeEffect) -> None:
        match effect:
            case SendRows(reducer, chunks):
                self._spawn(self._send(PeerId(reducer), chunks))
            case CheckRow(sender, chunk):
                self._spawn(self._check(PeerId(sender), chunk))
            case GiveReceipt(sender, chunk):
                receipt = self._sealer.seal(Receipt(self.plan_hash, PeerId(sender), (chunk,)))
                self._receipts[(PeerId(sender), chunk)] = receipt
                self._settle(PeerId(sender), chunk, receipt)
            case RefuseRow(sender, chunk, reason):
                self._settle(PeerId(sender), chunk, reason)
            case CombineChunk():
                self._spawn(self._combine(effect))
            case ReportResults(set_hash, results):
                listed = tuple(ChunkResult(item.chunk, item.hash, item.norm_sq) for item in results)
                report = Results(self.plan_hash, set_hash, listed, self._kib_s())
                await self._tell(Signed(self._sealer.seal(report)))
            case ReportMissing(lacks):
                await self._tell(Missing(self.plan_hash, tuple(Lack(c, PeerId(sender)) for c, sender in lacks)))

    async def close(self) -> None:
        """Stop all streams and drop received rows; combined chunks stay to be served."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for sender, chunk in list(self._rows):
            self._settle(sender, chunk, "the attempt is over")
        if self._file is not None:
            self._file.close()
            os.close(self._descriptor)
            self._file, self._descriptor = None, -1
        self._work.unlink(missing_ok=True)

    # -- sending ----------------------------------------------------------------------------------------------

    async def _send(self, reducer: PeerId, chunks: tuple[int, ...]) -> None:
        """Stream rows until all are receipted; tries again with growing pauses until the exchange is closed."""
        if self._codes is None:
            return
        pending = dict.fromkeys(chunks)
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
        """One's own rows go the same way as others', without the network: checked, receipted, combined."""
        for chunk in list(pending):
            head, frame = self._row_source(chunk)
            if reason := self.admit_row(self._me, head):
                raise PeerFailed(self._me, f"own row {chunk} is not let in: {reason}")
            self.put(self._me, chunk, 0, frame)
            outcome = await self.row_done(self._me, chunk)
            if isinstance(outcome, str):
                raise PeerFailed(self._me, f"own row {chunk} is refused: {outcome}")
            del pending[chunk]
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
        fault = await loop.run_in_executor(self._pool, self._fault_of, sender, chunk, row)
        self._happened(RowChecked(sender, chunk, fault))

    def _fault_of(self, sender: PeerId, chunk: int, row: _Row) -> str:
        commitment = self._included[sender]
        frame = bytes(self._mapped()[row.offset : row.offset + row.n_bytes])
        spec = self._spec.codec
        try:
            codec.check(frame, codec=spec.name, block=spec.block, n_values=self._grid.size(chunk))
            root = chunk_root(frame, spec.leaf_values)
            whole = contribution_root_from_path(root, chunk, self._grid.n_chunks, row.head.path)
        except (CodecError, ValueError) as error:
            return f"chunk {chunk}: {error}"
        if whole != commitment.root:
            return f"chunk {chunk} is not what its commitment names"
        if codec.squared_norm(frame) != commitment.norms[chunk]:
            return f"chunk {chunk} has another norm than committed"
        return ""

    async def _combine(self, effect: CombineChunk) -> None:
        loop = asyncio.get_running_loop()
        try:
            combined = await loop.run_in_executor(self._pool, self._combined, effect)
        except (CodecError, RuleError, NodeError, OSError) as error:
            self._happened(CombineFailed(effect.chunk, str(error)))
            return
        self._happened(combined)

    def _combined(self, effect: CombineChunk) -> Combined:
        area = self._mapped()
        rows = [self._rows[(PeerId(sender), effect.chunk)] for sender in effect.senders]
        frames = [bytes(area[row.offset : row.offset + row.n_bytes]) for row in rows]
        spec = self._spec.codec
        frame, norm_sq = combine(
            self._rule.rule, frames, weights_N=effect.weights, f=self._rule.f, codec=spec.name, block=spec.block
        )
        root = chunk_root(frame, spec.leaf_values)
        self._results.put(effect.chunk, frame, root)
        return Combined(effect.chunk, root, norm_sq)

    # -- small things -----------------------------------------------------------------------------------------

    def _settle(self, sender: PeerId, chunk: int, outcome: bytes | str) -> None:
        row = self._rows.get((sender, chunk))
        if row is not None and not row.outcome.done():
            row.outcome.set_result(outcome)
        if isinstance(outcome, str):
            self._rows.pop((sender, chunk), None)

    def _slot_bytes(self) -> int:
        spec = self._spec.codec
        return codec.frame_bytes(spec.name, self._grid.size(0), spec.block)

    def _mapped(self) -> mmap.mmap:
        """The work file, made at the first row: a slot for each included sender's row of each chunk.

        It is sparse, so what is not dealt here takes no room. Raises OSError, and ValueError once all is over: a thread
        that is still at work then must not make it anew.
        """
        if self._closed:
            raise ValueError("the attempt is over")
        if self._file is None:
            self._work.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._work, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                n_slots = max(1, len(self._included) * self._grid.n_chunks)
                os.ftruncate(descriptor, n_slots * self._slot_bytes())
                self._file = mmap.mmap(descriptor, n_slots * self._slot_bytes())
            except BaseException:
                os.close(descriptor)
                raise
            self._descriptor = descriptor
        return self._file

    def _kib_s(self) -> float:
        elapsed_s = max(self._seconds() - self._began_s, 1e-3)
        return self._n_received_bytes / 1024 / elapsed_s

    def _spec_run(self) -> PeerId:
        return self._begin.plan.run

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)
