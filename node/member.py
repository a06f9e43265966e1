"""One member of a run, put together: session and driver, trainer, lines, server, and what its owner reaches it by."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import IO, Any

from coordinator.leading.service import LineServicer
from coordinator.rounds.events import Instant
from node.admission import Admission, revision_now
from node.blocks import PieceStore
from node.clock import RunClock
from node.config import NodeOptions
from node.control import ControlServer
from node.driver import Driver, Parts
from node.fetching import Fetcher
from node.folder import Folder
from node.holding import NodeHolder
from node.leaderline import LeaderLine, OpensLines
from node.leading import Leading, StandInParts
from node.lines import Lines
from node.network import Network, data_sources
from node.obeying import Obeying
from node.observer import Evaluator
from node.opening import Opener
from node.outside import Outside
from node.peers.server import NodeServer
from node.record import OwnRecord, advertised
from node.selfline import SelfOpener
from node.session import events as ev
from node.session.machine import Session
from node.session.view import View
from node.status import status_of
from node.stocking import Stocker
from node.training.link import Start
from node.training.supervisor import Supervisor
from node.training.utilisation import flops_per_token, utilisation
from node.wishes import Wishes
from protos import limits
from protos.messages import Hello, MemberState, PeerId, Standing
from protos.runspec import DeadlineSpec, RunSpec
from protos.sealer import KeySealer
from protos.signing import Identity

PUBLISH_S = 60.0
ALONE_FIRST_S = 0.5
ROUND_NEEDS_LINE = (MemberState.JOINING, MemberState.EXCHANGING, MemberState.VOTING)


class Member:
    """The parts of a node that takes part, made from what is open already; `start` it, then run its `tasks`.

    Args:
        folder: its data folder, open.
        network: its ways to others, up.
        pool: threads for bytes and numbers.
        trainer_log: takes what the trainer prints.
        reachable: whether there is an address that others could connect to.
        say: takes what a contributor would want to read.
    """

    def __init__(
        self,
        options: NodeOptions,
        admission: Admission,
        identity: Identity,
        outside: Outside,
        folder: Folder,
        network: Network,
        pool: ThreadPoolExecutor,
        trainer_log: IO[bytes],
        *,
        reachable: bool,
        clock: RunClock,
        say: Callable[[str], None],
    ) -> None:
        self._options, self._admission, self._identity = options, admission, identity
        self._folder, self._network, self._pool = folder, network, pool
        self._seconds, self._clock, self._say = outside.seconds, clock, say
        self._me, self._run, self._coordinator = identity.peer, options.invite.run, admission.operator.coordinator
        self._sealer = KeySealer(identity, self._run)
        self._opener = Opener(self._run, self._coordinator)
        self._wishes = Wishes(options.data)
        self.session = self._make_session(reachable)
        self._pieces = PieceStore(folder.data, folder.spec, data_sources(options, network, self._voters, self._seconds))
        self._fetcher = self._make_fetcher()
        self._supervisor = Supervisor(
            outside.make_trainer(trainer_log),
            Start(
                str(folder.spec_path),
                str(folder.data),
                options.threads,
                run=self._run,
                checkpoints="" if options.observer else str(folder.work / "checkpoints"),
            ),
            folder.spec.model.layout_digest,
            post=lambda event: self.driver.post(event),
            say=say,
            step_tokens=folder.spec.work.batch_tokens,
        )
        self._evaluator = Evaluator(
            folder.spec, folder.store, self._supervisor, folder.work, lambda figure: self._line.say(figure), say
        )
        self.driver = Driver(self.session, self._parts())
        self._leading = self.driver.leading = self._make_leading()
        line = self._new_line(network.peers, network.landmarks.leader)
        line.run_time_s = clock.is_told
        self._line = self.driver.line = Lines(self._coordinator, line, self._line_to_stand_in, self.driver.failed)
        self._stocker = Stocker(
            self._me,
            self._pieces,
            spec=lambda: self.session.spec,
            ledger=lambda: self.session.ledger,
            reachable=self._reachable_others,
            quiet=self._line_is_free,
            cache_bytes=options.data_cache,
            seconds=self._seconds,
            say=say,
        )
        self._record: OwnRecord  # made by `start`: it names the port

    async def start(self, stack: AsyncExitStack) -> None:
        """Be there for others and for the owner; the stack ends that. Raises NodeError: a taken port, say."""
        options = self._options
        await asyncio.to_thread(self._pieces.open)
        server = self._make_server()
        port = await server.start(options.listen)
        stack.push_async_callback(server.stop)
        self._record = OwnRecord(
            self._identity,
            self._run,
            advertised(options, port),
            dht=self._network.dht.addresses,
            held=lambda: self.session.ledger,
            run_time_s=self._clock,
        )
        if self._wishes.paused and not options.observer:
            self._say("paused, as it was before it ended; go on with: node resume")
            self.driver.post(ev.PauseAsked("user", True))
        control = ControlServer(options.data, self._answer)
        await control.start()
        stack.push_async_callback(control.stop)
        if options.observer:
            self._evaluator.state_changed()

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """What runs beside the driver until it stops."""
        last = self._evaluator.run() if self._options.observer else self._stocker.run()
        return [self._supervisor.run(), self._line.run(), self._publish(), self._network.book.run(), last]

    def view(self) -> View:
        """The session's, but who waits for itself as the leader names whom that one waits for."""
        seen, leader_waits_for = self.session.view(), self._leading.waits_for()
        return replace(seen, waiting_for=leader_waits_for) if seen.waiting_for and leader_waits_for else seen

    # -- parts ----------------------------------------------------------------------------------------------------

    def _make_session(self, reachable: bool) -> Session:
        folder = self._folder
        return Session(
            self._me,
            folder.spec,
            self._sealer,
            coordinator=self._coordinator,
            voter=folder.voter,
            ledger=folder.store.current.ledger if folder.store.current else None,
            now=Instant(self._seconds()),
            observer=self._options.observer,
            rounds=self._options.rounds,
            stands_in=reachable,
            specs=folder.specs,
            signed_head=self._opener.head_signed(folder.signed_head) if folder.signed_head else None,
        )

    def _make_fetcher(self) -> Fetcher:
        folder, network = self._folder, self._network
        return Fetcher(
            self._me,
            folder.spec,
            peers=network.peers,
            whereabouts=network.whereabouts,
            landmarks=network.landmarks,
            store=folder.store,
            results=folder.results,
            pieces=self._pieces,
            pool=self._pool,
            say=self._say,
            seconds=self._seconds,
            open_commit=lambda commit: self._opener.event(commit, self._coordinator),
        )

    def _parts(self) -> Parts:
        folder, network, options = self._folder, self._network, self._options
        return Parts(
            me=self._me,
            spec=folder.spec,
            sealer=self._sealer,
            journal=folder.journal,
            store=folder.store,
            results=folder.results,
            residuals=folder.residuals,
            keeper=folder.keeper,
            obeying=Obeying(
                folder.kept_specs,
                folder.store,
                folder.spec_path,
                ask=lambda revision: revision_now(options.invite, revision, seconds=self._seconds),
                amended=self._amended,
                say=self._say,
            ),
            fetcher=self._fetcher,
            peers=network.peers,
            whereabouts=network.whereabouts,
            trainer=self._supervisor,
            pool=self._pool,
            stages=network.uplink.stages,
            work=folder.work,
            seconds=self._seconds,
            say=self._say,
            applied=lambda: self._evaluator.state_changed() if options.observer else None,
        )

    def _make_leading(self) -> Leading:
        session, store = self.session, self._folder.store
        return Leading(
            StandInParts(
                me=self._me,
                run=self._run,
                coordinator=self._coordinator,
                spec=lambda: session.spec,
                specs=lambda: session.specs,
                targets=lambda: {**store.books(), **session.targets},
                sealer=self._sealer,
                journal=self._folder.journal,
                peers=self._network.peers,
                held=lambda: (held.commit, held.ledger) if (held := store.current) is not None else None,
                head_since=lambda: session.head_since,
                signed_head=lambda: session.signed_head,
                seconds=self._seconds,
                run_time_s=self._clock,
                say=self._say,
                led=lambda leads: self.driver.post(ev.Led(leads)),
                failed=self.driver.failed,
            )
        )

    def _make_server(self) -> NodeServer:
        folder = self._folder
        servicer = LineServicer(
            self._run,
            self._leading.inbox,
            self._leading,
            observer=lambda: None,
            coordinator=self._coordinator,
            beat_s=self._beat_s,
            silence_s=lambda: 2 * self._deadlines().heartbeat_timeout_s,
        )
        holder = NodeHolder(
            folder.store,
            folder.results,
            self._pieces,
            folder.commits,
            lambda: self.driver.exchanging,
            wait_s=folder.spec.deadlines.no_progress_s / 4,  # which no amendment changes
        )
        return NodeServer(
            self._admission.credentials,
            holder,
            allowed=self._ban,
            more=(servicer.handler(),),
            **self._network.uplink.as_options(),
        )

    def _deadlines(self) -> DeadlineSpec:
        """Those in force."""
        return self.session.spec.deadlines

    def _beat_s(self) -> float:
        return self._deadlines().heartbeat_s

    # -- lines to leaders -----------------------------------------------------------------------------------------

    def _new_line(
        self, peers: OpensLines, where: Callable[[], Awaitable[tuple[PeerId, tuple[str, ...]]]]
    ) -> LeaderLine:
        line = LeaderLine(
            peers,
            self._opener,
            where=where,
            hello=self._hello,
            post=self.driver.post,
            learn=self._network.whereabouts.learn,
            silence_s=lambda: max(self._deadlines().heartbeat_timeout_s, 3 * self._beat_s()),
        )
        line.run_time_s = self._clock.is_told_by_peer
        return line

    def _line_to_stand_in(self, peer: PeerId) -> LeaderLine:
        async def where() -> tuple[PeerId, tuple[str, ...]]:
            return peer, () if peer == self._me else await self._network.whereabouts.addresses(peer)

        if peer != self._me:
            return self._new_line(self._network.peers, where)
        mine = SelfOpener(
            self._run, self._me, self._leading.inbox, self._beat_s, self._seconds, coordinator=self._coordinator
        )
        return self._new_line(mine, where)

    def _hello(self) -> Hello:
        held, observer = self.session.ledger, self._options.observer
        return Hello(
            protocol=limits.PROTOCOL,
            record=self._record.sealed(),
            epoch=held.epoch if held else 0,
            round=held.round if held else 0,
            head=held.head if held else b"",
            digest=held.digest if held else b"",
            holds_state=held is not None,
            observer=observer,
            name=self._options.name,
            abstain_round=0,
            tokens=held.tokens if held else 0,
            speed=0.0 if observer else self._supervisor.tokens_per_s,
        )

    async def _publish(self) -> None:
        """Keep the record in the DHT. Alone in it, look for others at once and then more and more rarely."""
        dht, landmarks = self._network.dht, self._network.landmarks
        pause_s = ALONE_FIRST_S
        while True:
            if dht.alone and not self._options.observer:
                known = [address for record in self._network.whereabouts.all() for address in record.dht]
                await dht.join(known or (await landmarks.look()).dht)
            if self.session.view().reachable is False:
                await dht.dial_out_only()  # the leader has tried: what others would look for here is lost to them
            await dht.publish(self._record.now())
            pause_s = min(2 * pause_s, PUBLISH_S) if dht.alone else PUBLISH_S
            await asyncio.sleep(pause_s)

    # -- answers --------------------------------------------------------------------------------------------------

    def _answer(self, word: str) -> Mapping[str, Any]:
        """What the owner is told. Raises KeyError for an unknown word."""
        match word:
            case "status":
                return self._status()
            case "leave":
                told = self.session.may_give_its_seat_back(Instant(self._seconds()))
                self.driver.post(ev.LeaveAsked("left on request"))
                back, kept = "gives its seat back", "keeps its seat for a restart, since the coordinator is away,"
                return {"said": f"the node {back if told else kept} and ends"}
            case "pause" | "resume":
                self.driver.post(ev.PauseAsked("user", word == "pause"))
                problem = self._wishes.pause(word == "pause")
                return {"said": f"{'paused' if word == 'pause' else 'resumed'}{problem}"}
            case _:
                raise KeyError(word)

    def _status(self) -> Mapping[str, Any]:
        seen, supervisor, uplink = self.view(), self._supervisor, self._network.uplink
        since_s = self._seconds() - seen.since
        mfu = utilisation(seen.tokens_per_s, flops_per_token(self._folder.spec), supervisor.peak_flops)
        return status_of(seen, self._run, self._me, uplink.traffic, uplink.stages, since_s, mfu) | {
            "trainer_restarts": supervisor.n_restarts,
            "trainer_last_end": supervisor.last_end,
            "checkpoint": supervisor.checkpoint,
            "checkpoint_problem": supervisor.checkpoint_problem,
            "training_data": self._stocker.status(),
            "data": str(self._options.data),
            "tasks": len(asyncio.all_tasks()),
        }

    def _voters(self) -> tuple[PeerId, ...]:
        return self.session.ledger.voters if self.session.ledger else ()

    def _reachable_others(self) -> list[PeerId]:
        observer = self._network.landmarks.observer
        return [each.peer for each in self._network.whereabouts.reachable() if each.peer != observer]

    def _line_is_free(self) -> bool:
        """Whether now is a time for what can wait."""
        seen = self.session.view()
        return self.driver.exchanging is None and seen.state not in ROUND_NEEDS_LINE and "user" not in seen.paused_by

    def _amended(self, spec: RunSpec) -> None:
        """Other settings are in force."""
        self._fetcher.amend(spec)
        self._evaluator.amend(spec)
        self._supervisor.amend()

    def _ban(self, peer: PeerId) -> str:
        ledger = self.session.ledger
        banned = ledger is not None and ledger.standing.get(peer) is Standing.BANNED
        return "banned from this run" if banned else ""
