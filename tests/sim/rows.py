"""A simulated member's side of the exchange: rows and results, as fast as the accesses of both ends let them be."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from aggregation import exchange as ex
from node.session import effects as fx
from node.session import events as ev
from protos.messages import ChunkResult, Lack, Missing, PeerId, Results, Signed
from tests.fakes.sealer import FakeSealer
from tests.sim.chain import Violated
from tests.sim.disk import result_hash
from tests.sim.training import Training

if TYPE_CHECKING:
    from tests.sim.world import World

SEND_AGAIN_S = 0.3
RECEIPT_S = 1.0
"""So long after a row has come its receipt is waited for before it is sent again."""
UNLIMITED_KIB_S = 100.0


def always() -> bool:
    return True


class Rows(Training):
    """A process that sends rows, takes them in, and combines them."""

    def __init__(self, world: World, name: PeerId, number: int, *, observer: bool) -> None:
        super().__init__(world, name, number, observer=observer)
        self.sealer = FakeSealer(world.registry, name)
        self.lay_down_rows()

    def lay_down_rows(self) -> None:
        """A new process has none."""
        self._exchange: fx.BeginExchange | None = None
        self._sending: dict[tuple[bytes, str], dict[int, None]] = {}
        self._received: dict[tuple[bytes, str, int], None] = {}
        # Rows that take time: queued by their receiver, and until when those on their way are not sent again.
        self._queued: dict[str, deque[tuple[bytes, int]]] = {}
        self._under_way: dict[tuple[bytes, str, int], float] = {}
        self._uploads = False

    def _tell(self, message: object, to: str = "") -> None:
        raise NotImplementedError

    def _in_exchange(self, begun: fx.BeginExchange, effect: ex.ExchangeEffect) -> None:
        plan, options = begun.plan_hash, self.world.options
        match effect:
            case ex.SendRows(reducer, chunks):
                if options.instant_rows:
                    return
                sends = (plan, reducer) in self._sending
                self._sending.setdefault((plan, reducer), {}).update(dict.fromkeys(chunks))
                if not sends:
                    self._send_rows(plan, reducer)
            case ex.StopRows(reducer, chunks):
                for chunk in chunks:
                    self._sending.get((plan, reducer), {}).pop(chunk, None)
            case ex.DropRow(sender, chunk):
                self._received.pop((plan, sender, chunk), None)
            case ex.CheckRow(sender, chunk):
                if options.instant_rows:
                    self._exchanged(plan, ex.RowChecked(sender, chunk, ""))
                else:
                    self.later(options.work_s, self._exchanged, plan, ex.RowChecked(sender, chunk, ""))
            case ex.GiveReceipt(sender, chunk):
                self._received[(plan, sender, chunk)] = None
                if not options.instant_rows:
                    self._give_receipt(plan, sender, chunk)
            case ex.RefuseRow():
                raise Violated("a true row is refused")
            case ex.CombineChunk():
                self.later(options.work_s, self._combine, begun, effect)
            case ex.ReportResults(set_hash, results):
                listed = tuple(ChunkResult(item.chunk, item.hash, item.norm_sq) for item in results)
                report = Results(plan, set_hash, listed, self._kib_per_s())
                self._tell(Signed(self.sealer.seal(report)))
            case ex.ReportMissing(lacks, asked, unable):
                named = tuple(Lack(chunk, PeerId(sender)) for chunk, sender in lacks)
                self._tell(Missing(plan, named, tuple(PeerId(peer) for peer in asked), unable))

    def _exchanged(self, plan: bytes, event: ex.ExchangeEvent) -> None:
        self.decide(ev.Exchanged(plan, event))

    def _kib_per_s(self) -> float:
        """What it measures of its own access."""
        network = self.world.network
        limits = [pipe.bytes_per_s / 1024 for pipes in (network.up, network.down) if (pipe := pipes.get(self.name))]
        return min(limits, default=UNLIMITED_KIB_S + self.number)

    # -- sending ------------------------------------------------------------------------------------------------

    def _send_rows(self, plan: bytes, reducer: str) -> None:
        pending = self._sending.get((plan, reducer))
        if self._exchange is None or self._exchange.plan_hash != plan or not pending:
            self._sending.pop((plan, reducer), None)
            return
        mine = self._exchange.commitments.get(self.name)
        if mine is None or mine.root != self.trainer.codes:
            return  # what was committed to is gone
        target = self.world.members[PeerId(reducer)]
        if target is not self and self.world.network.limits(self.name, target.name):
            self._queue(plan, reducer, [*pending])
        elif target is self or self.world.can_reach(self, target):
            for chunk in pending:
                delay_s = 0.0 if target is self else self.world.network.delay_s(self.name, target.name)
                self.world.push(self.world.now + delay_s, target, target.receive_row, (self, plan, chunk))
        self.later(SEND_AGAIN_S, self._send_rows, plan, reducer)

    def _queue(self, plan: bytes, reducer: str, chunks: list[int]) -> None:
        now = self.world.now
        queue = self._queued.setdefault(reducer, deque())
        for chunk in chunks:
            if self._under_way.get((plan, reducer, chunk), 0.0) <= now:
                self._under_way[plan, reducer, chunk] = math.inf
                queue.append((plan, chunk))
        if not self._uploads:
            self._upload()

    def _upload(self) -> None:
        """The next row goes out; receivers take turns."""
        self._uploads = False
        while self._queued:
            reducer = next(iter(self._queued))
            queue = self._queued.pop(reducer)
            if not queue:
                continue
            plan, chunk = queue.popleft()
            self._queued[reducer] = queue
            target = self.world.members[PeerId(reducer)]
            wanted = chunk in self._sending.get((plan, reducer), {})
            if not wanted or not self.world.can_reach(self, target):
                self._under_way[plan, reducer, chunk] = self.world.now + SEND_AGAIN_S
                continue
            self._uploads = True
            pipe = self.world.network.up.get(self.name)
            if pipe is None:
                self.later(0.0, self._uploaded, target, plan, chunk)
            else:
                n_bytes = self.world.row_bytes[chunk]
                pipe.carry(n_bytes, always, self, self._uploaded, target, plan, chunk)
            return

    def _uploaded(self, target: Rows, plan: bytes, chunk: int) -> None:
        self.later(self.world.network.delay_s(self.name, target.name), self._arrived, target, plan, chunk)
        self._upload()

    def _arrived(self, target: Rows, plan: bytes, chunk: int) -> None:
        """At the other end's access, which takes in one row after the other."""
        world, key = self.world, (plan, target.name, chunk)
        self._under_way[key] = world.now + RECEIPT_S
        if not target.alive or not world.can_reach(self, target):
            return
        pipe = world.network.down.get(target.name)
        if pipe is None:
            world.push(world.now, target, target.receive_row, (self, plan, chunk))
            return

        def wanted() -> bool:
            here = target._exchange is not None and target._exchange.plan_hash == plan
            if not here or chunk not in self._sending.get((plan, target.name), {}):
                self._under_way[key] = world.now + SEND_AGAIN_S
                return False
            self._under_way[key] = world.now + world.row_bytes[chunk] / pipe.bytes_per_s + RECEIPT_S
            return True

        self._under_way[key] = math.inf
        pipe.carry(world.row_bytes[chunk], wanted, target, target.receive_row, self, plan, chunk)

    def receipted(self, plan: bytes, reducer: str, chunk: int) -> None:
        pending = self._sending.get((plan, reducer))
        if pending is not None and chunk in pending:
            del pending[chunk]
            self._under_way.pop((plan, reducer, chunk), None)
            self._exchanged(plan, ex.Receipted(reducer, (chunk,)))

    # -- reducing -----------------------------------------------------------------------------------------------

    def receive_row(self, sender: Rows, plan: bytes, chunk: int) -> None:
        if (plan, sender.name, chunk) in self._received:
            self._give_receipt(plan, sender.name, chunk)
            return
        if self._exchange is None or self._exchange.plan_hash != plan:
            return
        n_bytes = self.world.row_bytes[chunk]
        if self.session.admit_row(plan, sender.name, chunk, n_bytes):
            return
        broken = sender is not self and self.world.network.breaks_row()
        event: ex.ExchangeEvent = ex.RowBroken(sender.name, chunk) if broken else ex.RowArrived(sender.name, chunk)
        self._exchanged(plan, event)

    def _give_receipt(self, plan: bytes, sender: str, chunk: int) -> None:
        target = self.world.members[PeerId(sender)]
        if target is not self and not self.world.network.carries(self.name, target.name):
            return
        delay_s = 0.0 if target is self else self.world.network.delay_s(self.name, target.name)
        self.world.push(self.world.now + delay_s, target, target.receipted, (plan, self.name, chunk))

    def take_all_rows(self, begun: fx.BeginExchange) -> None:
        """Where rows take no time: all that are dealt here, from whoever sends."""
        part = self.session._part
        if self._exchange is not begun or part is None or part.exchange is None:
            return
        for chunk, sender in part.exchange.lacks():
            if not part.exchange.admit(sender, chunk, self.world.row_bytes[chunk]):
                self._exchanged(begun.plan_hash, ex.RowArrived(sender, chunk))

    def _combine(self, begun: fx.BeginExchange, effect: ex.CombineChunk) -> None:
        if self._exchange is not begun:
            return
        if begun.plan.round in self.world.options.unable_rounds:
            self._exchanged(begun.plan_hash, ex.CombineFailed(effect.chunk, "there is no centre", effect.set_number))
            return
        commitments = begun.commitments
        roots = {str(peer): commitment.root for peer, commitment in commitments.items()}
        hash_ = result_hash(effect.chunk, roots, effect)
        self.disk.results[hash_] = None
        norm_sq = min(commitments[PeerId(sender)].norms[effect.chunk] for sender in effect.senders)
        self._exchanged(begun.plan_hash, ex.Combined(effect.chunk, hash_, norm_sq, effect.set_number))
