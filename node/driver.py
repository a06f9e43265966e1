"""The member's shell: asks the session, carries its effects out in order, and sleeps until woken.

The driver alone supplies `now`. Work that takes time runs in tasks or threads, and its outcome comes back as an event;
`Persist` is awaited before anything after it is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import assert_never

from aggregation.exchange import ExchangeEvent as Happened
from coordinator.rounds.events import Instant
from node.centre import centre_of
from node.encoding import Contribution, Reading, make_area
from node.errors import NodeError
from node.exchanging import Exchanging
from node.fetching import Fetcher
from node.folder import ROWS_PREFIX
from node.journal import Journal
from node.keeping import Keeper
from node.leading import Leading
from node.lines import Lines
from node.obeying import Obeying
from node.ports import Peers
from node.residual import Residuals
from node.results import ResultsStore
from node.session import effects as fx
from node.session import events as ev
from node.session.machine import Session
from node.sparing import Sparing
from node.stages import Stages
from node.state import Held, StateStore
from node.training.link import Encode
from node.training.supervisor import Supervisor
from node.whereabouts import Whereabouts
from protos import hashes
from protos.bounds import as_reason
from protos.messages import ExchangeReport, Heartbeat, Missing, PeerId, Range, Refusal, Signed
from protos.runspec import RunSpec
from protos.sealer import KeySealer

WAKE_FLOOR_S = 0.001
"""Event loops count in milliseconds: a shorter sleep would be none, again and again."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """How the driver ended: the exit code and the last line."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Parts:
    """What the driver drives; constructed by `app`."""

    me: PeerId
    spec: RunSpec
    sealer: KeySealer
    journal: Journal
    store: StateStore
    results: ResultsStore
    residuals: Residuals
    keeper: Keeper
    obeying: Obeying
    fetcher: Fetcher
    peers: Peers
    whereabouts: Whereabouts
    trainer: Supervisor | None
    pool: Executor
    stages: Stages
    work: Path
    seconds: Callable[[], float]
    say: Callable[[str], None]
    applied: Callable[[], None]  # told when another state is the current one


class Driver:
    """Drives one session. `run` is its only task; `post` may be called from the same event loop."""

    def __init__(self, session: Session, parts: Parts) -> None:
        self.session, self._parts = session, parts
        self.line: Lines | None = None
        self.leading: Leading | None = None
        self.exchanging: Exchanging | None = None
        self._inbox: asyncio.Queue[ev.Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._data: asyncio.Task[None] | None = None
        self._fault: BaseException | None = None
        self._contribution: Contribution | None = None
        self._sealing: asyncio.Task[None] | None = None
        self._preparing = asyncio.Lock()  # of the files that encoding goes into: one round's at a time
        self._stopped: Stopped | None = None
        self._exchange_bytes = (0, 0)
        self._began_s: dict[str, float] = {}
        self._took_s: dict[str, float] = {}
        self._disk = Sparing(lambda: self._parts.results.relieve(), lambda text: self._parts.say(text))

    def post(self, event: ev.Event) -> None:
        """Take in an event."""
        if isinstance(event, ev.CommitHeard):
            self._parts.fetcher.told(event.commit, event.body)
        self._inbox.put_nowait(event)

    async def run(self) -> Stopped:
        """Until the session says stop. A fault of ours ends it with that fault."""
        await self._decide(ev.Woke())
        self._spawn(self._parts.fetcher.centre())  # an earlier process may have gone without it
        try:
            while self._stopped is None:
                await self._decide(await self._next())
                if self._fault is not None:
                    raise self._fault
            return self._stopped
        finally:
            await self._close()

    async def _next(self) -> ev.Event:
        wake_s = self.session.next_wake(self._now()) - self._now()
        try:
            async with asyncio.timeout(max(wake_s, WAKE_FLOOR_S)):
                return await self._inbox.get()
        except TimeoutError:
            return ev.Woke()

    async def _decide(self, event: ev.Event) -> None:
        abstained = self.session.abstains
        effects = self.session.handle(event, self._now())
        if abstained and not self.session.abstains:
            await self._disk.spared("a note that no vote is lost", self._parts.journal.is_whole)
        for effect in effects:
            await self._carry_out(effect)

    async def _carry_out(self, effect: fx.Effect) -> None:
        parts = self._parts
        match effect:
            case fx.TellLeader(message, leader):
                await self._tell(message, leader)
            case fx.Follow(leaders):
                if self.line is not None:
                    self.line.follow(leaders)
            case fx.Lead():
                if self.leading is not None:
                    await self.leading.begin()
            case fx.StepDown(reason):
                if self.leading is not None:
                    self.leading.step_down(reason)
            case fx.KeepHead(envelope):
                await self._disk.spared("the coordinator's word on the head", parts.journal.keep_head, envelope)
            case fx.Persist(entry):
                await asyncio.to_thread(parts.journal.save, entry)
            case fx.FetchState():
                self._spawn(self._fetch_state(effect))
            case fx.FetchCommits():
                self._spawn(self._fetch_commits(effect))
            case fx.FetchData(round_, ranges):
                if self._data is not None:
                    self._data.cancel()  # an earlier round's, which may have been waiting for long
                self._data = self._spawn(self._fetch_data(round_, ranges))
            case fx.LoadAnchor() | fx.StartTraining() | fx.PauseTraining() | fx.Encode():
                self._train(effect)
            case fx.BeginExchange():
                await self._begin_exchange(effect)
            case fx.InExchange(plan_hash, inner):
                if self.exchanging is not None and self.exchanging.plan_hash == plan_hash:
                    await self.exchanging.carry_out(inner)
            case fx.EndExchange(plan_hash):
                if self.exchanging is not None and self.exchanging.plan_hash == plan_hash:
                    ended, self.exchanging = self.exchanging, None
                    await ended.close()
            case fx.Verify():
                self._spawn(self._verify(effect))
            case fx.Apply():
                await self._apply(effect)
            case fx.KeepSpec():
                await parts.obeying.at_once(effect)
            case fx.Amended(spec):
                self._parts = replace(parts, spec=spec)
                if not await parts.obeying.at_once(effect):
                    self._spawn(self._obey(effect))
            case fx.Restore() | fx.FetchSpec():
                self._spawn(self._obey(effect))
            case fx.Stop(code, reason):
                self._stopped = Stopped(code, reason)
            case fx.Say(text):
                parts.say(text)
            case _:
                assert_never(effect)

    # -- effects ----------------------------------------------------------------------------------------------

    async def _tell(self, message: object, leader: str = "") -> None:
        if self.line is None:
            return
        traffic = self._parts.peers.traffic
        if isinstance(message, Heartbeat):
            message = replace(message, bytes_sent=traffic.sent, bytes_received=traffic.received)
        await self.line.say(message, leader)  # type: ignore[arg-type]

    def _train(self, effect: fx.LoadAnchor | fx.StartTraining | fx.PauseTraining | fx.Encode) -> None:
        trainer, held = self._parts.trainer, self._parts.store.current
        if trainer is None or held is None:
            return
        match effect:
            case fx.LoadAnchor(_, nominal_step, fresh_moments):
                trainer.load(held.theta, held.ledger.round, nominal_step, fresh_moments, held.ledger.digest)
            case fx.StartTraining(round_, ranges, h, batch_scale):
                self._began("train")
                trainer.train(round_, ranges, h, batch_scale)
            case fx.PauseTraining(paused):
                trainer.pause(paused)
            case fx.Encode(round_):
                self._took("train")
                self._spawn(self._encode(round_, trainer, held))

    async def _encode(self, round_: int, trainer: Supervisor, held: Held) -> None:
        """Have Δ encoded into the area and hash what comes to lie there: the commitment is to those very bytes."""
        parts = self._parts
        path = parts.work / "codes.0"
        try:
            async with self._preparing:
                await asyncio.to_thread(make_area, path, parts.spec)
                feedback = await asyncio.to_thread(parts.residuals.begin, held)
                reading = Reading(path, parts.spec, parts.pool, parts.stages)
        except (NodeError, OSError, ValueError) as error:
            self.post(ev.EncodeFailed(round_, str(error)))
            return
        if parts.store.current is not held:  # the trainer has been told of the next round: it would stop that one
            reading.stop()
            self.post(ev.EncodeFailed(round_, "its commit came first"))
            return
        paths = (feedback.residual, feedback.next) if feedback else ("", "")
        encoded = await trainer.encode(Encode(round_, str(path), *paths), reading.written)
        if encoded is None:
            reading.stop()
            self.post(ev.EncodeFailed(round_, "the trainer stopped"))
            return
        try:
            contribution = await reading.contribution()
        except (OSError, ValueError) as error:  # a frame that reducers would refuse
            self.post(ev.EncodeFailed(round_, f"it can't be encoded: {error}"))
            return
        parts.stages.add("encode", sum(contribution.area.frame_bytes), encoded.encode_s)
        self._contribution = contribution
        if feedback is not None:
            sealing = self._disk.spared("what encoding leaves over", parts.residuals.seal, round_, contribution.root)
            self._sealing = self._spawn(sealing)
        self.post(
            ev.Encoded(
                round_,
                encoded.steps,
                encoded.tokens,
                encoded.used,
                encoded.sum_lr,
                encoded.inner_loss,
                contribution.root,
                contribution.norms,
            )
        )

    async def _begin_exchange(self, effect: fx.BeginExchange) -> None:
        parts = self._parts
        plan_hash = effect.plan_hash
        self._began("exchange")

        def happened(event: Happened) -> None:
            self.post(ev.Exchanged(plan_hash, event))

        async def tell(message: Signed | Missing) -> None:
            await self._tell(message)

        sequences = {member.peer: member.record_sequence for member in effect.plan.members}

        async def where(peer: PeerId) -> tuple[str, ...]:
            return await parts.whereabouts.addresses(peer, min_sequence=sequences.get(peer, 0))

        contribution = self._contribution
        try:
            centre = await asyncio.to_thread(centre_of, parts.store.current, parts.results)
            results = await asyncio.to_thread(parts.results.area, plan_hash)  # older ones leave the disk over it
        except (NodeError, OSError) as error:
            await self._decline(effect, error)
            return
        self.exchanging = Exchanging(
            effect,
            parts.me,
            parts.spec,
            parts.sealer,
            admit=lambda sender, chunk, n_bytes: self.session.admit_row(plan_hash, sender, chunk, n_bytes),
            codes=contribution.area if contribution else None,
            code_paths=contribution.paths if contribution else (),
            results=results,
            work=parts.work / f"{ROWS_PREFIX}{plan_hash.hex()[:16]}",
            pool=parts.pool,
            peers=parts.peers,
            where=where,
            happened=happened,
            tell=tell,
            failed=self.failed,
            seconds=parts.seconds,
            previous=centre.previous if centre else None,
            previous_scale=centre.scale if centre else 1.0,
            stages=parts.stages,
        )

    async def _decline(self, effect: fx.BeginExchange, error: Exception) -> None:
        """Tell the leader that this node neither combines nor sends anything in this attempt, which goes on without."""
        plan, reason = effect.plan, as_reason(str(error))
        self._parts.say(f"takes no part in the exchange of attempt {plan.attempt} of round {plan.round}: {error}")
        await self._tell(Missing(effect.plan_hash, (), unable=True))
        await self._tell(Refusal(plan.epoch, plan.round, plan.attempt, reason), plan.leader)

    async def _fetch_state(self, effect: fx.FetchState) -> None:
        outcome = await self._parts.fetcher.state(effect)
        if isinstance(outcome, str):
            self.post(ev.StateFetchFailed(outcome))
            return
        await self._settle()
        self._parts.applied()
        self.post(ev.StateFetched(outcome))

    async def _fetch_commits(self, effect: fx.FetchCommits) -> None:
        self.post(await self._parts.fetcher.commits(effect))

    async def _obey(self, effect: fx.Restore | fx.FetchSpec | fx.Amended) -> None:
        self.post(await self._parts.obeying.in_time(effect))

    async def _fetch_data(self, round_: int, ranges: tuple[Range, ...]) -> None:
        await self._parts.fetcher.data(ranges)
        self.post(ev.DataReady(round_))

    async def _verify(self, effect: fx.Verify) -> None:
        try:
            fault = await self._parts.fetcher.results(effect)
        except (NodeError, OSError) as error:  # no room on the disk, say
            fault = str(error)
        if fault:
            self.post(ev.VerifyFailed(effect.body_hash, fault))
            return
        self._took("exchange")
        self._began("apply")
        try:
            frames = self._parts.fetcher.frames(effect)
            digest = await self._disk.needed(
                self._parts.pool, self._parts.store.prepare, effect.body_hash, effect.body, frames
            )
        except (NodeError, ValueError, KeyError) as error:
            self.post(ev.VerifyFailed(effect.body_hash, str(error)))
            return
        self.post(ev.Verified(effect.body_hash, digest))

    async def _apply(self, effect: fx.Apply) -> None:
        """The switch is awaited here: nothing is decided while it is half done."""
        body_hash = hashes.body_hash(effect.commit.body)
        await self._disk.needed(self._parts.pool, self._parts.store.apply, body_hash, effect.commit, effect.ledger)
        await self._settle()
        self._took("apply")
        traffic = self._parts.peers.traffic
        sent, received = traffic.exchange_sent, traffic.exchange_received
        before = self._exchange_bytes
        self._exchange_bytes = (sent, received)
        self._contribution = None
        idle = self.session.idle_in(effect.body.round, self._now())
        report = ExchangeReport(
            effect.body.epoch,
            effect.body.round,
            sent - before[0],
            received - before[1],
            self._took_s.pop("train", 0.0),
            self._took_s.pop("exchange", 0.0),
            self._took_s.pop("apply", 0.0),
            idle.idle_s,
            idle.worked_s,
        )
        await self._tell(report)
        self._parts.applied()
        if self.leading is not None:
            self.leading.applied(effect.commit)
        self.post(ev.Applied(effect.commit_hash))

    async def _settle(self) -> None:
        """What encoding left over, and the results that are kept, follow the state that is held now."""
        if self._sealing is not None:
            await asyncio.wait([self._sealing])
        held = self._parts.store.current
        await self._disk.spared("what encoding left over", self._parts.residuals.settle, held)
        for note in await self._disk.spared("what is kept for others", self._parts.keeper.settle) or ():
            self._parts.say(note)

    # -- small things -----------------------------------------------------------------------------------------

    def _now(self) -> Instant:
        return Instant(self._parts.seconds())

    def _began(self, what: str) -> None:
        self._began_s[what] = self._parts.seconds()

    def _took(self, what: str) -> None:
        began_s = self._began_s.pop(what, None)
        if began_s is not None:
            self._took_s[what] = self._took_s.get(what, 0.0) + self._parts.seconds() - began_s

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed(error)

    def failed(self, error: BaseException) -> None:
        """A fault of ours: `run` ends with it."""
        self._fault = self._fault or error
        self.post(ev.Woke())

    async def _close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.exchanging is not None:
            await self.exchanging.close()
        if self.leading is not None:
            await self.leading.close()
        if self.line is not None:
            await self.line.close()
