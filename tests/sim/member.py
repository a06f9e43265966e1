"""A member's process, or the observer's: `Session` with the parts of a driver, a trainer, and a disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aggregation import exchange as ex
from aggregation.digest import tagged_hash
from coordinator.rounds import leases, policy
from coordinator.rounds.ledger import Ledger
from node.session import events as ev
from node.session.machine import Session
from protos import limits
from protos.hashes import body_hash
from protos.messages import (
    Body,
    ChunkResult,
    Commit,
    Hello,
    Lack,
    Leave,
    Missing,
    Outcome,
    PeerId,
    Promise,
    Range,
    Record,
    Results,
    Signed,
    Vote,
    Welcome,
)
from tests.fakes.sealer import FakeSealer
from tests.sim.chain import Violated, check_record
from tests.sim.network import TO_LEADER, Line
from tests.sim.opening import opened
from tests.sim.process import Process

if TYPE_CHECKING:
    from tests.sim.leader import LeaderProcess
    from tests.sim.world import World

RECONNECT_S = 0.5
WELCOME_S = 4.0
SEND_AGAIN_S = 0.3
FETCH_TRIES = 4


def digest_after(body_hash: bytes, body: Body, held: bytes) -> bytes:
    """The digest of the state that a body leads to from a state with this digest."""
    return held if body.outcome is Outcome.EMPTY else tagged_hash("digest", body_hash, held)


def result_hash(chunk: int, roots: Mapping[str, bytes], effect: ex.CombineChunk) -> bytes:
    """A result depends on the rows that are in it, in their order, and on their weights."""
    rows = b"".join(roots[sender] for sender in effect.senders)
    return tagged_hash("result", bytes([chunk]), rows, repr(effect.weights).encode())


@dataclass(slots=True)
class MemberDisk:
    """What survives a member's process."""

    record: Promise | Leave | None = None
    ledger: Ledger | None = None
    commit: Commit | None = None
    results: dict[bytes, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Trainer:
    """A trainer that makes a step every so often; its Δ is lost with the process."""

    up: bool = False
    round: int = 0
    anchor: bytes = b""
    ranges: tuple[Range, ...] = ()
    began_at: float | None = None
    generation: int = 0
    codes: bytes = b""  # root of the encoded Δ


class MemberProcess(Process):
    def __init__(self, world: World, name: PeerId, number: int, *, observer: bool) -> None:
        super().__init__(world, name)
        options = world.options
        self.observer = observer
        self.number = number
        self.reachable = observer or number not in options.unreachable
        self.step_s = options.step_s[number % len(options.step_s)]
        self.trains = not observer and number not in options.never_trains
        self.diverges = not observer and number in options.diverges
        self.disk = MemberDisk()
        self.sealer = FakeSealer(world.registry, name)
        self.session: Session
        self.lines: dict[PeerId, Line] = {}
        self.trainer = _Trainer()
        self.stopped: ev.Stop | None = None
        self.said: list[str] = []
        self._record = Record(name, 1, ("here:1",) if self.reachable else (), (), 0, 0, b"")
        self._sending: dict[tuple[bytes, str], dict[int, None]] = {}
        self._received: dict[tuple[bytes, str, int], None] = {}
        self._exchange: ev.BeginExchange | None = None

    # -- life -------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        self.lines, self.trainer, self.stopped = {}, _Trainer(), None
        self._sending, self._received, self._exchange = {}, {}, None
        self.session = self.world.session_type(
            self.name,
            self.world.spec,
            self.sealer,
            coordinator=self.world.coordinator,
            voter=self.world.voter_type(self.name, self.disk.record),
            ledger=self.disk.ledger,
            now=self.now(),
            observer=self.observer,
        )
        self.decide(ev.Woke())
        if self.trains:
            self.later(self.world.options.work_s, self._trainer_up)
        for leader in self.world.leaders_of(self):
            self.later(self.world.network.delay_s(), self._connect, leader)

    def died(self) -> None:
        for line in list(self.lines.values()):
            self.world.tell_line_broke(line, "the member is gone")
        self.lines = {}

    def wake(self) -> None:
        self.decide(ev.Woke())

    def decide(self, event: ev.Event) -> None:
        now = self.now()
        effects = self.session.handle(event, now)
        self.carry_out_all(effects, self._carry_out)
        if self.alive:
            self.plan_wake(self.session.next_wake(now), after_woke=isinstance(event, ev.Woke))

    # -- the line ---------------------------------------------------------------------------------------------

    def _connect(self, leader: LeaderProcess) -> None:
        if leader.name in self.lines or leader not in self.world.leaders_of(self):
            return
        if not leader.alive or self.world.network.parted(self.name, leader.name):
            self.later(RECONNECT_S, self._connect, leader)
            return
        line = self.lines[leader.name] = Line(self, leader)
        held = self.disk.ledger
        hello = Hello(
            protocol=limits.PROTOCOL,
            record=self.world.registry.encode(self._record),
            epoch=held.epoch if held else 0,
            round=held.round if held else 0,
            head=held.head if held else b"",
            digest=held.digest if held else b"",
            holds_state=held is not None,
            observer=self.observer,
            name="",
            abstain_round=0,
        )
        self.world.push(
            self.world.now + self.world.network.delay_s(), leader, leader.accept, (line, hello, self._record)
        )
        self.later(WELCOME_S, self._still_waiting, line)

    def _still_waiting(self, line: Line) -> None:
        if line.member_up and not line.welcomed:
            self.world.tell_line_broke(line, "no welcome")

    def switch(self) -> None:
        """Leave all lines and look for the leaders that are this member's now."""
        for line in list(self.lines.values()):
            self.world.tell_line_broke(line, "the member changes its leader")
            self.line_broke(line, "another leader")
        for leader in self.world.leaders_of(self):
            self.later(0.0, self._connect, leader)

    def line_broke(self, line: Line, reason: str) -> None:
        if not line.member_up or self.lines.get(line.leader.name) is not line:
            return
        line.member_up = False
        del self.lines[line.leader.name]
        if not any(other.welcomed for other in self.lines.values()):
            self.decide(ev.LineDown(reason))
        if self.alive:
            self.later(RECONNECT_S * (0.5 + self.world.rng.random()), self._connect, line.leader)

    def hear(self, line: Line, message: object) -> None:
        if not line.member_up or self.lines.get(line.leader.name) is not line:
            return
        if isinstance(message, Welcome):
            line.welcomed = True
        elif not line.welcomed:
            return
        if (event := opened(self.world, message, line.leader.name)) is not None:
            self.decide(event)

    # -- effects ----------------------------------------------------------------------------------------------

    def _carry_out(self, effect: ev.Effect) -> None:
        options = self.world.options
        match effect:
            case ev.TellLeader(message):
                self._tell(message)
            case ev.Persist(entry):
                self.disk.record = entry
            case ev.FetchState(commit, body):
                self.later(options.fetch_s, self._fetch_state, commit, body)
            case ev.FetchData(round_, _):
                self.later(options.work_s, self.decide, ev.DataReady(round_))
            case ev.LoadAnchor(round_):
                self.trainer.generation += 1
                self.trainer.began_at = None
                self.trainer.round = round_
                self.trainer.anchor = self.disk.ledger.digest if self.disk.ledger else b""
            case ev.StartTraining():
                self._start_training(effect)
            case ev.PauseTraining():
                pass
            case ev.Encode(round_):
                self.later(options.work_s, self._encode, round_, self.trainer.generation)
            case ev.BeginExchange():
                self._exchange = effect
            case ev.InExchange(plan, inner):
                if self._exchange is not None and self._exchange.plan_hash == plan:
                    self._in_exchange(self._exchange, inner)
            case ev.EndExchange(plan):
                if self._exchange is not None and self._exchange.plan_hash == plan:
                    self._exchange = None
            case ev.Verify():
                self.later(options.fetch_s, self._verify, effect, FETCH_TRIES)
            case ev.Apply():
                self._apply(effect)
            case ev.Stop():
                self.stopped = effect
                self.world.trace("stopped", self.name, effect.reason)
                self.crash()
            case ev.Say(text):
                self.said.append(text)
                self.world.trace("said", self.name, text)

    def _tell(self, message: object) -> None:
        if isinstance(message, Signed):
            signer, sealed = self.world.registry.open(message.envelope)
            if signer != self.name:
                raise Violated(f"{self.name} tells what {signer} signed")
            if isinstance(sealed, Promise | Leave | Vote):
                check_record(self.disk.record, sealed, self.name)
            if isinstance(sealed, Vote):
                self.world.chain.vote(self.name, sealed)
        for line in self.lines.values():
            if line.welcomed:
                self.world.send(line, TO_LEADER, message)

    # -- the state --------------------------------------------------------------------------------------------

    def _fetch_state(self, commit: Commit, body: Body) -> None:
        for donor in self.world.donors(self):
            held = donor.disk.ledger
            if held is not None and held.round >= body.round:
                self.disk.ledger, self.disk.commit = held, donor.disk.commit
                self.world.trace("fetched", self.name, held.round)
                self.decide(ev.StateFetched(held))
                return
        self.decide(ev.StateFetchFailed("no donor"))

    def _verify(self, effect: ev.Verify, tries: int) -> None:
        held, results = self.disk.ledger, self.disk.results
        missing = [(chunk, hash_) for chunk, hash_ in enumerate(effect.result_hashes) if hash_ not in results]
        if missing:
            holders = [self.world.members[peer] for peer in effect.holders]
            for chunk, hash_ in missing:
                line = effect.reducers[chunk][:2] if effect.reducers else ()
                for donor in (*(self.world.members[peer] for peer in line), *holders):
                    if hash_ in donor.disk.results and donor is not self and self.world.can_reach(self, donor):
                        results[hash_] = None
                        break
            if any(hash_ not in results for _, hash_ in missing):
                if tries > 1:
                    self.later(SEND_AGAIN_S, self._verify, effect, tries - 1)
                else:
                    self.decide(ev.VerifyFailed(effect.body_hash, "nobody has them"))
                return
        if held is None or effect.body.anchor_digest != held.digest:
            self.decide(ev.VerifyFailed(effect.body_hash, "the state has moved on"))
            return
        self.decide(ev.Verified(effect.body_hash, digest_after(effect.body_hash, effect.body, held.digest)))

    def _apply(self, effect: ev.Apply) -> None:
        held = self.disk.ledger
        if held is None or effect.body.anchor_digest != held.digest or effect.body.round <= held.round:
            raise Violated(f"{self.name} applies a commit that doesn't extend its state")
        if digest_after(body_hash(effect.commit.body), effect.body, held.digest) != effect.commit.digest:
            raise Violated(f"{self.name} applies a commit that leads elsewhere")
        if self.world.chain.commit(effect.commit, effect.body) != effect.ledger.head:
            raise Violated(f"{self.name} applies a commit under another name")
        self.disk.ledger, self.disk.commit = effect.ledger, effect.commit
        self.later(self.world.options.work_s, self.decide, ev.Applied(effect.commit_hash))

    # -- the trainer ------------------------------------------------------------------------------------------

    def _trainer_up(self) -> None:
        self.trainer.up = True
        self.decide(ev.TrainerUp())

    def kill_trainer(self) -> None:
        """It comes back by itself after a while."""
        if self.trainer.up:
            self.trainer = _Trainer(generation=self.trainer.generation + 1, codes=self.trainer.codes)
            self.decide(ev.TrainerDown("killed"))
            self.later(self.world.options.restart_s, self._trainer_up)

    def _start_training(self, effect: ev.StartTraining) -> None:
        trainer = self.trainer
        held = self.disk.ledger
        if held is None or trainer.anchor != held.digest or effect.round != held.round + 1:
            raise Violated(f"{self.name} trains from another anchor than its state")
        trainer.began_at, trainer.ranges, trainer.codes = self.world.now, effect.ranges, b""
        for step in sorted({1, effect.h}):
            self.later(self.step_s * step, self._progress, step, trainer.generation)

    def _progress(self, step: int, generation: int) -> None:
        if generation == self.trainer.generation:
            tokens = step * self.world.spec.work.batch_tokens
            left_s = self.step_s * (self.world.spec.work.h - step)
            self.decide(ev.Progressed(self.trainer.round, step, tokens, 1.0, 1.0 / self.step_s, left_s))

    def _encode(self, round_: int, generation: int) -> None:
        trainer, spec = self.trainer, self.world.spec
        if generation != trainer.generation or trainer.began_at is None:
            self.decide(ev.EncodeFailed(round_, "the trainer stopped"))
            return
        if self.diverges:
            self.decide(ev.EncodeFailed(round_, "Δ is not finite"))
            return
        steps = min(spec.work.h, int((self.world.now - trainer.began_at) / self.step_s + 1e-9))
        identity = (self.name, str(round_), str(steps), str(self.incarnation), str(generation))
        trainer.codes = tagged_hash("delta", trainer.anchor, *(part.encode() for part in identity))
        norm_sq = (1.0 + 0.1 * (self.number % 7)) * max(steps, 1)
        self.decide(
            ev.Encoded(
                round_,
                steps,
                steps * spec.work.batch_tokens,
                leases.prefix(trainer.ranges, steps),
                steps * spec.inner.lr,
                1.0,
                trainer.codes,
                (norm_sq,) * policy.grid(spec).n_chunks,
            )
        )

    # -- the exchange -----------------------------------------------------------------------------------------

    def _in_exchange(self, begun: ev.BeginExchange, effect: ex.ExchangeEffect) -> None:
        plan, work_s = begun.plan_hash, self.world.options.work_s
        match effect:
            case ex.SendRows(reducer, chunks):
                self._sending[(plan, reducer)] = dict.fromkeys(chunks)
                self._send_rows(plan, reducer)
            case ex.CheckRow(sender, chunk):
                self.later(work_s, self._exchanged, plan, ex.RowChecked(sender, chunk, ""))
            case ex.GiveReceipt(sender, chunk):
                self._received[(plan, sender, chunk)] = None
                self._give_receipt(plan, sender, chunk)
            case ex.RefuseRow():
                raise Violated("a true row is refused")
            case ex.CombineChunk(chunk):
                self.later(work_s, self._combine, begun, effect)
            case ex.ReportResults(set_hash, results):
                listed = tuple(ChunkResult(item.chunk, item.hash, item.norm_sq) for item in results)
                report = Results(plan, set_hash, listed, 100.0 + self.number)
                self._tell(Signed(self.sealer.seal(report)))
            case ex.ReportMissing(lacks):
                self._tell(Missing(plan, tuple(Lack(chunk, PeerId(sender)) for chunk, sender in lacks)))

    def _exchanged(self, plan: bytes, event: ex.ExchangeEvent) -> None:
        self.decide(ev.Exchanged(plan, event))

    def _send_rows(self, plan: bytes, reducer: str) -> None:
        pending = self._sending.get((plan, reducer))
        if self._exchange is None or self._exchange.plan_hash != plan or not pending:
            self._sending.pop((plan, reducer), None)
            return
        mine = self._exchange.commitments.get(self.name)
        if mine is None or mine.root != self.trainer.codes:
            return  # what was committed to is gone
        target = self.world.members[PeerId(reducer)]
        own = target is self
        if own or self.world.can_reach(self, target):
            for chunk in pending:
                delay_s = 0.0 if own else self.world.network.delay_s()
                self.world.push(self.world.now + delay_s, target, target.receive_row, (self, plan, chunk))
        self.later(SEND_AGAIN_S, self._send_rows, plan, reducer)

    def receive_row(self, sender: MemberProcess, plan: bytes, chunk: int) -> None:
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
        delay_s = 0.0 if target is self else self.world.network.delay_s()
        self.world.push(self.world.now + delay_s, target, target.receipted, (plan, self.name, chunk))

    def receipted(self, plan: bytes, reducer: str, chunk: int) -> None:
        pending = self._sending.get((plan, reducer))
        if pending is not None and chunk in pending:
            del pending[chunk]
            self._exchanged(plan, ex.Receipted(reducer, (chunk,)))

    def _combine(self, begun: ev.BeginExchange, effect: ex.CombineChunk) -> None:
        if self._exchange is not begun:
            return
        if begun.plan.round in self.world.options.unable_rounds:
            self._exchanged(begun.plan_hash, ex.CombineFailed(effect.chunk, "there is no centre"))
            return
        commitments = begun.commitments
        roots = {str(peer): commitment.root for peer, commitment in commitments.items()}
        hash_ = result_hash(effect.chunk, roots, effect)
        self.disk.results[hash_] = None
        norm_sq = min(commitments[PeerId(sender)].norms[effect.chunk] for sender in effect.senders)
        self._exchanged(begun.plan_hash, ex.Combined(effect.chunk, hash_, norm_sq))
