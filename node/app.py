"""Builds a node out of its parts and runs it until it has left: `node join`, and `node observe` for the observer."""

from __future__ import annotations

import asyncio
import datetime
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from aggregation import codec
from aggregation.rules.sorting import compile_networks
from coordinator.leading.service import LineServicer
from coordinator.rounds import ledger as ledgers
from coordinator.rounds import policy
from coordinator.rounds.events import Instant
from coordinator.rounds.voter import Voter
from node import identity as identities
from node import memory
from node.addressbook import AddressBook
from node.admission import Admission, addresses_now, admit, revision_now
from node.blocks import PieceStore
from node.commits import CommitLog
from node.config import NodeOptions
from node.control import ControlServer
from node.display import Display
from node.driver import Driver, Parts, Stopped
from node.ending import error_of, until_stopped
from node.fetching import Fetcher
from node.files import replace_file
from node.holding import NodeHolder
from node.journal import Journal
from node.keeping import Keeper
from node.landmarks import Landmarks
from node.leaderline import LeaderLine, OpensLines
from node.leading import Leading, StandInParts
from node.lines import Lines
from node.obeying import Obeying
from node.observer import Evaluator
from node.opening import Opener
from node.parent import ORPHANED
from node.peers.dht import Dht
from node.peers.grpc import GrpcPeers
from node.peers.pacing import Direction, Rates
from node.peers.server import NodeServer
from node.ports import Peers, Records, Traffic
from node.record import OwnRecord, advertised, advertised_hosts
from node.residual import Residuals
from node.results import ResultsStore
from node.room import check_room_for
from node.selfline import SelfOpener
from node.session import events as ev
from node.session.catching_up import commits_kept
from node.session.machine import Session
from node.sources import HttpSource, PeerSource
from node.specs import SpecsFolder
from node.stages import Stages
from node.state import StateStore
from node.status import status_of
from node.stocking import Stocker
from node.training.link import Start, Trainer
from node.training.process import TrainerProcess
from node.training.shared import frame_sizes
from node.training.supervisor import Supervisor
from node.training.utilisation import flops_per_token, utilisation
from node.whereabouts import Whereabouts
from node.wishes import Wishes
from protos import hashes, limits, wire
from protos.messages import Commit, Hello, MemberState, PeerId, Standing
from protos.runspec import RunSpec
from protos.sealer import KeySealer
from protos.signing import Identity

PUBLISH_S = 60.0
ALONE_FIRST_S = 0.5
ROUND_NEEDS_LINE = (MemberState.JOINING, MemberState.EXCHANGING, MemberState.VOTING)
TOKEN_FILE = "observer-token"


@dataclass(frozen=True, slots=True)
class Outside:
    """What a node is built upon, and what others may put in its place: tests run many nodes in one process."""

    make_trainer: Callable[[IO[bytes]], Trainer] = lambda log: TrainerProcess(log=log)
    start_dht: Callable[..., Awaitable[Records]] = Dht.start
    make_peers: Callable[..., Peers] = GrpcPeers
    seconds: Callable[[], float] = time.monotonic
    """This machine's monotonic clock: what two of them show has nothing to do with each other."""
    today: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC)
    """The calendar, which volunteers' machines have wrong."""
    say: Callable[[str], None] | None = None
    """Takes what a contributor would want to read; None: standard error does."""
    owns_process: bool = True
    """Handle signals, and show progress on standard error."""


def clocks_off_by(offset_s: float) -> Outside:
    """The outside as a machine sees it whose clock and calendar are wrong by so many seconds."""
    return Outside(
        seconds=lambda: time.monotonic() + offset_s,
        today=lambda: datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=offset_s),
    )


async def join(options: NodeOptions, outside: Outside = Outside()) -> str:
    """Take part until told to leave; the last line to say. Raises NodeError with the contract's exit code."""
    async with AsyncExitStack() as stack:
        await asyncio.to_thread(identities.make_folder, options.data)
        lock = await asyncio.to_thread(identities.FolderLock, options.data)
        stack.callback(lock.release)
        node = _Node(options, outside, stack)
        stopped = await node.run()
    if stopped.code == 0:
        return stopped.reason
    raise error_of(stopped)


async def show_identity(folder: Path) -> str:
    path = folder / identities.KEY_FILE
    identity = await asyncio.to_thread(identities.load, path)
    return f"{identity.peer}  {path}"


async def export_identity(folder: Path, to: Path) -> str:
    identity = await asyncio.to_thread(identities.export, folder, to)
    return f"the key of {identity.peer} is in {to}: whoever has it is this contributor"


async def import_identity(folder: Path, source: Path) -> str:
    await asyncio.to_thread(identities.make_folder, folder)
    identity = await asyncio.to_thread(identities.import_key, folder, source)
    return f"{folder} is {identity.peer} now"


class _Node:
    """One node of one run, from admission to leaving."""

    def __init__(self, options: NodeOptions, outside: Outside, stack: AsyncExitStack) -> None:
        self._options, self._outside, self._stack = options, outside, stack
        self._seconds = outside.seconds
        self._run_offset_s = 0.0
        self._asked_to_stop = False
        self._display: Display | None = None

    async def run(self) -> Stopped:
        options = self._options
        identity = await asyncio.to_thread(identities.load_or_make, options.data, self._say)
        self._say(f"this node is {identity.peer}; its key and state are in {options.data}")
        await asyncio.to_thread(compile_networks)  # a cache hit as a rule; else seconds, which no round should wait for
        admission = await self._admitted(identity)
        self._admission, self._identity = admission, identity
        self._run_offset_s = admission.run_offset_s or 0.0
        return await self._take_part()

    async def _admitted(self, identity: Identity) -> Admission:
        options = self._options
        invite = options.invite
        if options.run_dir is not None:
            token = await asyncio.to_thread((options.run_dir / TOKEN_FILE).read_bytes)
            invite = type(invite)(invite.run, invite.hosts, token)
        return await admit(
            invite,
            identity,
            options.data,
            seconds=self._seconds,
            name=options.name,
            observer=options.observer,
            today=self._outside.today,
        )

    async def _take_part(self) -> Stopped:
        """Build all parts, run their tasks, and end them in order when the session says stop."""
        options, admission, identity = self._options, self._admission, self._identity
        run, spec, me = options.invite.run, admission.spec, identity.peer
        grid = policy.grid(spec)
        sealer = KeySealer(identity, run)
        pool = ThreadPoolExecutor(max(2, os.cpu_count() or 2), thread_name_prefix="bytes")
        self._stack.callback(pool.shutdown, wait=False, cancel_futures=True)

        work = options.data / "work"
        await asyncio.to_thread(work.mkdir, exist_ok=True)
        data_folder = options.run_dir / "data" if options.run_dir else options.data / "data"
        store = StateStore(options.data / "state", grid, pool, seconds=self._seconds)
        for problem in await asyncio.to_thread(store.open):
            self._say(problem)
        kept_specs = SpecsFolder(options.data / "specs", run)
        specs = {spec.revision: spec, **await asyncio.to_thread(kept_specs.load)}
        if store.current is not None:  # the coordinator may have told of one that is not in force here yet
            spec = specs.get(store.current.ledger.spec_revision, spec)
        await asyncio.to_thread(check_room_for, spec, options.data)
        await asyncio.to_thread(replace_file, work / "spec.json", spec.to_bytes())
        if options.run_dir is not None and store.current is None:
            await asyncio.to_thread(self._install_first_state, options.run_dir, store)
        result_codec = codec.result_codec(spec.codec.name)
        results = ResultsStore(
            options.data / "results", frame_sizes(grid, result_codec, spec.codec.block), spec.codec.leaf_values
        )
        self._stack.callback(results.close)
        # Before the files close: a thread that still wrote would write into whatever is opened next.
        self._stack.push_async_callback(asyncio.to_thread, pool.shutdown, wait=True, cancel_futures=True)
        residuals = Residuals(work, run, me, spec)
        await asyncio.to_thread(residuals.settle, store.current)
        commits = CommitLog(options.data / "commits", commits_kept(spec.keep))
        keeper = Keeper(store, results, commits, spec.keep)
        for note in await asyncio.to_thread(keeper.settle):
            self._say(note)
        journal = Journal(options.data / "votes.sqlite")
        self._stack.callback(journal.close)
        record, fresh = await asyncio.to_thread(journal.load)
        signed = await asyncio.to_thread(journal.signed)

        traffic, stages = Traffic(), Stages()
        line_use: dict[str, Any] = {
            "no_progress_s": spec.deadlines.no_progress_s,
            "traffic": traffic,
            "up": Direction(Rates(options.max_up)),
            "down": Direction(Rates(options.max_down)),
            "stages": stages,
        }
        peers = self._outside.make_peers(admission.credentials, **line_use)
        self._stack.push_async_callback(peers.close)

        told_hosts = await asyncio.to_thread(advertised_hosts, options)
        opener = Opener(run, admission.operator.coordinator)
        session = Session(
            me,
            spec,
            sealer,
            coordinator=admission.operator.coordinator,
            voter=Voter(me, record, lost=fresh, signed=signed),
            ledger=store.current.ledger if store.current else None,
            now=Instant(self._seconds()),
            observer=options.observer,
            rounds=options.rounds,
            stands_in=bool(told_hosts),
            specs=specs,
            signed_head=opener.head_signed(kept) if (kept := await asyncio.to_thread(journal.head)) else None,
        )
        self._display = display = Display(session.view, self._seconds)

        if not told_hosts:
            self._say("this machine has no address that others could connect to: the node only dials out")
        dht = await self._outside.start_dht(
            identity,
            run,
            listen=options.dht,
            host=told_hosts[0] if told_hosts else "",
            bootstrap=admission.addresses.dht,
            clock=self._run_time_s,
            folder=options.data,
            failed=self._say,
        )
        self._stack.push_async_callback(dht.close)
        whereabouts = Whereabouts(run, dht)
        book = AddressBook(options.data / "addresses.bin", whereabouts)
        await book.load()
        landmarks = Landmarks(
            me,
            admission.operator.coordinator,
            admission.addresses,
            lambda: addresses_now(options.invite, seconds=self._seconds),
            whereabouts,
        )
        pieces = PieceStore(
            data_folder,
            spec,
            []
            if options.observer
            else [
                PeerSource(
                    peers,
                    lambda: landmarks.find_donors(session.ledger.voters if session.ledger else ()),
                    lambda: landmarks.observer,
                    self._seconds,
                ),
                HttpSource(
                    options.invite.hosts,
                    self._seconds,
                    down=line_use["down"],
                    traffic=traffic,
                    no_progress_s=spec.deadlines.no_progress_s,
                ),
            ],
        )
        await asyncio.to_thread(pieces.open)
        fetcher = Fetcher(
            me,
            spec,
            peers=peers,
            whereabouts=whereabouts,
            landmarks=landmarks,
            store=store,
            results=results,
            pieces=pieces,
            pool=pool,
            say=self._say,
            seconds=self._seconds,
            open_commit=lambda commit: opener.event(commit, admission.operator.coordinator),
        )

        log = await asyncio.to_thread((options.data / "trainer.log").open, "ab")
        self._stack.callback(log.close)
        driver: Driver
        supervisor = Supervisor(
            self._outside.make_trainer(log),
            Start(
                str(work / "spec.json"),
                str(data_folder),
                options.threads,
                run=run,
                checkpoints="" if options.observer else str(work / "checkpoints"),
            ),
            spec.model.layout_digest,
            post=lambda event: driver.post(event),
            say=self._say,
            step_tokens=spec.work.batch_tokens,
        )
        evaluator = Evaluator(spec, store, supervisor, work, lambda figure: line.say(figure), self._say)

        def amended(spec: RunSpec) -> None:
            for each in (fetcher, evaluator):
                each.amend(spec)
            supervisor.amend()

        parts = Parts(
            me=me,
            spec=spec,
            sealer=sealer,
            journal=journal,
            store=store,
            results=results,
            residuals=residuals,
            keeper=keeper,
            obeying=Obeying(
                kept_specs,
                store,
                work / "spec.json",
                ask=lambda revision: revision_now(options.invite, revision, seconds=self._seconds),
                amended=amended,
                say=self._say,
            ),
            fetcher=fetcher,
            peers=peers,
            whereabouts=whereabouts,
            trainer=supervisor,
            pool=pool,
            stages=stages,
            work=work,
            seconds=self._seconds,
            say=self._say,
            applied=lambda: evaluator.state_changed() if options.observer else None,
        )
        driver = Driver(session, parts)
        turn_s = spec.deadlines.no_progress_s / 4
        leading = Leading(
            StandInParts(
                me=me,
                run=run,
                coordinator=admission.operator.coordinator,
                spec=lambda: session.spec,
                specs=lambda: session.specs,
                sealer=sealer,
                journal=journal,
                peers=peers,
                held=lambda: (held.commit, held.ledger) if (held := store.current) is not None else None,
                head_since=lambda: session.head_since,
                signed_head=lambda: session.signed_head,
                seconds=self._seconds,
                run_time_s=self._run_time_s,
                say=self._say,
                led=lambda leads: driver.post(ev.Led(leads)),
                failed=lambda error: driver.failed(error),
            )
        )
        driver.leading = leading

        def view() -> ev.View:
            """The session's, but who waits for itself as the leader names whom that one waits for."""
            seen, leader_waits_for = session.view(), leading.waits_for()
            return replace(seen, waiting_for=leader_waits_for) if seen.waiting_for and leader_waits_for else seen

        display.view = view
        servicer = LineServicer(
            run,
            leading.inbox,
            leading,
            observer=lambda: None,
            coordinator=admission.operator.coordinator,
            beat_s=spec.deadlines.heartbeat_s,
            silence_s=2 * spec.deadlines.heartbeat_timeout_s,
        )
        holder = NodeHolder(store, results, pieces, commits, lambda: driver.exchanging, wait_s=turn_s)
        server = NodeServer(
            admission.credentials,
            holder,
            allowed=lambda peer: _ban(session, peer),
            more=(servicer.handler(),),
            **line_use,
        )
        port = await server.start(options.listen)
        self._stack.push_async_callback(server.stop)
        own = OwnRecord(
            identity,
            run,
            advertised(options, port),
            dht=dht.addresses,
            held=lambda: session.ledger,
            run_time_s=self._run_time_s,
        )

        def hello() -> Hello:
            held = session.ledger
            return Hello(
                protocol=limits.PROTOCOL,
                record=own.sealed(),
                epoch=held.epoch if held else 0,
                round=held.round if held else 0,
                head=held.head if held else b"",
                digest=held.digest if held else b"",
                holds_state=held is not None,
                observer=options.observer,
                name=options.name,
                abstain_round=0,
                tokens=held.tokens if held else 0,
                speed=0.0 if options.observer else supervisor.tokens_per_s,
            )

        deadlines = spec.deadlines
        silence_s = max(deadlines.heartbeat_timeout_s, 3 * deadlines.heartbeat_s)

        def new_line(peers: OpensLines, where: Callable[[], Awaitable[tuple[PeerId, tuple[str, ...]]]]) -> LeaderLine:
            line = LeaderLine(
                peers,
                opener,
                where=where,
                hello=hello,
                post=driver.post,
                learn=whereabouts.learn,
                silence_s=silence_s,
            )
            line.run_time_s = self._told_run_time
            return line

        def to_stand_in(peer: PeerId) -> LeaderLine:
            async def where() -> tuple[PeerId, tuple[str, ...]]:
                return peer, () if peer == me else await whereabouts.addresses(peer)

            mine = SelfOpener(
                run, me, leading.inbox, deadlines.heartbeat_s, self._seconds, coordinator=admission.operator.coordinator
            )
            return new_line(mine if peer == me else peers, where)

        line = Lines(admission.operator.coordinator, new_line(peers, landmarks.leader), to_stand_in, driver.failed)
        driver.line = line

        async def publish() -> None:
            """Keep the record in the DHT. Alone in it, look for others at once and then more and more rarely."""
            pause_s = ALONE_FIRST_S
            while True:
                if dht.alone and not options.observer:
                    known = [address for record in whereabouts.all() for address in record.dht]
                    await dht.join(known or (await landmarks.look()).dht)
                if session.view().reachable is False:
                    await dht.dial_out_only()  # the leader has tried: what others would look for here is lost to them
                await dht.publish(own.now())
                pause_s = min(2 * pause_s, PUBLISH_S) if dht.alone else PUBLISH_S
                await asyncio.sleep(pause_s)

        def answer(word: str) -> Mapping[str, Any]:
            match word:
                case "status":
                    seen = view()
                    since_s = self._seconds() - seen.since
                    mfu = utilisation(seen.tokens_per_s, flops_per_token(spec), supervisor.peak_flops)
                    return status_of(seen, run, me, traffic, stages, since_s, mfu) | {
                        "trainer_restarts": supervisor.n_restarts,
                        "trainer_last_end": supervisor.last_end,
                        "checkpoint": supervisor.checkpoint,
                        "checkpoint_problem": supervisor.checkpoint_problem,
                        "training_data": stocker.status(),
                        "data": str(options.data),
                        "tasks": len(asyncio.all_tasks()),
                    }
                case "leave":
                    driver.post(ev.LeaveAsked("left on request"))
                    return {"said": "the node gives its seat back and ends"}
                case "pause" | "resume":
                    driver.post(ev.PauseAsked("user", word == "pause"))
                    problem = wishes.pause(word == "pause")
                    return {"said": f"{'paused' if word == 'pause' else 'resumed'}{problem}"}
                case _:
                    raise KeyError(word)

        def line_is_free() -> bool:
            """Whether now is a time for what can wait."""
            seen = session.view()
            return driver.exchanging is None and seen.state not in ROUND_NEEDS_LINE and "user" not in seen.paused_by

        stocker = Stocker(
            me,
            pieces,
            spec=lambda: session.spec,
            ledger=lambda: session.ledger,
            reachable=lambda: [each.peer for each in whereabouts.reachable() if each.peer != landmarks.observer],
            quiet=line_is_free,
            cache_bytes=options.data_cache,
            seconds=self._seconds,
            say=self._say,
        )
        wishes = Wishes(options.data)
        if wishes.paused and not options.observer:
            self._say("paused, as it was before it ended; go on with: node resume")
            driver.post(ev.PauseAsked("user", True))
        control = ControlServer(options.data, answer)
        await control.start()
        self._stack.push_async_callback(control.stop)
        if self._outside.owns_process:
            memory.settle()
            self._on_signals(driver)
        if options.observer:
            evaluator.state_changed()
        tasks = [supervisor.run(), line.run(), publish(), book.run()]
        if self._outside.owns_process:
            tasks.append(display.run())
        tasks.append(evaluator.run() if options.observer else stocker.run())
        return await until_stopped(driver, tasks)

    # -- small things -----------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        if self._outside.say is not None:
            self._outside.say(text)
        elif self._display is not None:
            self._display.say(text)
        else:
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)

    def _told_run_time(self, run_time_s: float) -> None:
        """A leader's Welcome says the run's time: it may be the first to, or have another clock than the last one."""
        self._run_offset_s = run_time_s - self._seconds()

    def _run_time_s(self) -> float:
        return self._seconds() + self._run_offset_s

    def _install_first_state(self, run_dir: Path, store: StateStore) -> None:
        """The observer starts from the run's own folder, wherever the chain is by now."""
        commit = wire.decode(Commit, (run_dir / "genesis.bin").read_bytes())
        first = ledgers.genesis(self._options.invite.run, self._admission.operator.coordinator)
        head = hashes.commit_hash(commit.body, commit.digest)
        state = run_dir / "state"
        store.install_initial(state / "theta.bin", state / "momentum.bin", commit, first.at(head, commit.digest))

    def _on_signals(self, driver: Driver) -> None:
        """The first SIGINT or SIGTERM leaves cleanly, the second one ends the process at once."""
        loop = asyncio.get_running_loop()

        def signalled() -> None:
            if self._asked_to_stop:
                os._exit(130)
            self._asked_to_stop = True
            driver.post(ev.LeaveAsked("left on a signal"))

        def orphaned() -> None:
            driver.post(ev.LeaveAsked("the program that started this node is gone", keeps_seat=True))

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, signalled)
        loop.add_signal_handler(ORPHANED, orphaned)


def _ban(session: Session, peer: PeerId) -> str:
    ledger = session.ledger
    banned = ledger is not None and ledger.standing.get(peer) is Standing.BANNED
    return "banned from this run" if banned else ""
