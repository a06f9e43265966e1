"""A village: one run with coordinator, observer and members in one process and one event loop, over real TLS sockets.

The model is tiny and its trainers are threads, so that a round takes a fraction of a second; the DHT is a table in
memory unless the real one is asked for. Whoever waits for something waits for `until`, which looks again whenever
anything was said or written.
"""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import uvloop
from numpy.typing import NDArray

from coordinator import operating
from coordinator.app import Outside as CoordinatorOutside
from coordinator.app import ServeOptions, serve
from coordinator.children import Process
from coordinator.config import load
from coordinator.control import Caller, find
from coordinator.folder import RunFolder, read_founded
from coordinator.founding import found
from coordinator.leading.ports import Journal, Observation
from coordinator.observing import ObserverOrder
from coordinator.rounds.events import Committed, Opened
from coordinator.rounds.ledger import Ledger
from node.admission import admit
from node.app import join
from node.config import NodeOptions
from node.control import ask
from node.identity import load_or_make, make_folder
from node.outside import Outside
from node.peers.dht import Dht
from node.peers.grpc import GrpcLine, GrpcPeers
from node.ports import PeerFailed, Records, RowSource
from protos import wire
from protos.invite import Invite, parse
from protos.messages import (
    Commit,
    Envelope,
    LeaderMessage,
    MemberMessage,
    Outcome,
    PeerId,
    Promise,
    Proposal,
    Signed,
    StateOffer,
)
from protos.runspec import RunSpec
from protos.signing import Identity
from tests.fakes.records import FakeTable
from tests.fakes.tiny import TinyRun, TinyTask, tiny_run
from tests.fakes.trainer import ThreadTrainer

LOCAL = "127.0.0.1:0"
WIDTH = 601
"""9018 parameters: a multiple neither of the block nor of leaf and chunk, and enough chunks for seven reducers."""
SETTINGS = (
    "work.h=4",
    "work.batch_tokens=44",
    "inner.lr=0.02",
    "rule.degraded=true",
    "inner.warmup_steps=10",
    "codec.block=64",
    "codec.leaf_values=1024",
    "codec.chunk_values=1024",
    "data.sequence_length=11",
    "evaluation.max_tokens=220",
    "deadlines.deadline_k=0",  # a member shares the machine with who knows what: nobody is cut for that
    "deadlines.heartbeat_s=0.2",
    "deadlines.heartbeat_timeout_s=5",
    "deadlines.gone_grace_s=0.6",
    "deadlines.no_progress_s=5",
    "deadlines.train_limit_s=20",
    "deadlines.commitment_s=10",
    "deadlines.exchange_s=10",
    "deadlines.vote_s=10",
)
LIMIT_S = 45.0
UNTIL_S = 20.0
ENDING_S = 10.0

T = TypeVar("T")


def live(scenario: Coroutine[Any, Any, T], *, limit_s: float = LIMIT_S) -> T:
    """Run a scenario to its end, in time, and see that it leaves no task and no thread of ours."""

    async def limited() -> T:
        async with asyncio.timeout(limit_s):
            result = await scenario
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:  # what was cancelled ends at its next turn
            _, left = await asyncio.wait(left, timeout=ENDING_S)
        assert not left, left
        return result

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(limited())
    gc.collect()  # what was not closed complains now, in the test that left it
    ours = [thread for thread in threading.enumerate() if thread.name.startswith(("bytes", "journal", "trainer"))]
    for thread in ours:  # who is to end isn't waited for where it was told so
        thread.join(ENDING_S)
    assert not (left := [thread.name for thread in ours if thread.is_alive()]), left
    return result


@dataclass
class Member:
    """One member's place in the village: its folder and key stay, `task` is the node that runs there now, if any."""

    village: Village
    folder: Path
    identity: Identity
    said: list[str] = field(default_factory=list)
    task: asyncio.Task[str] | None = None
    peers: WatchedPeers | None = None
    trainer: ThreadTrainer | None = None
    halts: dict[str, asyncio.Event] = field(default_factory=dict)
    cut_off_from: set[PeerId] = field(default_factory=set)  # who its rows don't reach
    gate: threading.Event = field(default_factory=threading.Event)
    going: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def peer(self) -> PeerId:
        return self.identity.peer

    def start(self, *, rounds: int | None = None, invite: Invite | None = None, **more: Any) -> None:
        """Have it join, or join again with what is in its folder. `more` are further options of `node join`."""
        assert self.task is None or self.task.done()
        self.go_on()
        options = NodeOptions(
            invite=invite or self.village.invite,
            data=self.folder,
            threads=1,
            listen=LOCAL,
            dht=LOCAL,
            rounds=rounds,
            name=self.folder.name,
            **more,
        )
        self.task = asyncio.create_task(join(options, self._outside()), name=f"node {self.folder.name}")
        self.task.add_done_callback(lambda _: self.village.notice())

    async def halted(self, at: str, *others: str) -> None:
        """Have it stand still when it next comes to a place, and wait until it does; at the others, too, unawaited.

        Places are `training`, `rows` and `receipt`, the first `state`, `result` or `piece` that it fetches, and
        `before` and `after` it says something to the leader, such as `before vote`.
        """
        self.halts |= {place: asyncio.Event() for place in (at, *others)}
        reached = self.halts[at]
        await self.village.until(reached.is_set, f"{self.folder.name} to halt at {at}")

    def go_on(self) -> None:
        self.halts = {}
        self.gate.set()
        self.gate = threading.Event()
        self.going, going = asyncio.Event(), self.going
        going.set()

    async def stand_if(self, at: str) -> None:
        if at in self.halts:
            self.halts[at].set()
            self.village.notice()
            await self.going.wait()

    async def kill(self) -> None:
        """As `kill -9` does: its connections break, nothing is said, nothing is written any more."""
        task = self.task
        assert task is not None
        self.gate.set()  # a thread can't be killed
        if self.peers is not None:
            await self.peers.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def leave(self) -> str:
        """Ask it to leave, as `node leave` does; its last words."""
        assert self.task is not None
        await ask(self.folder, "leave")
        return await self.task

    async def status(self) -> dict[str, Any]:
        return await ask(self.folder, "status")

    @property
    def n_lines(self) -> int:
        """Lines to the leader that it has opened."""
        return len(self.peers.lines) if self.peers else 0

    def break_line(self) -> None:
        """As a network does."""
        assert self.peers is not None
        self.peers.lines[-1].break_off()

    @property
    def rows(self) -> dict[PeerId, Rows]:
        return self.peers.rows if self.peers else {}

    @property
    def theta_D(self) -> NDArray[np.float32]:
        """The parameters that it holds, on disk."""
        return np.fromfile(self.state_folder / "theta.bin", "<f4")

    @property
    def state_folder(self) -> Path:
        return self.folder / "state" / (self.folder / "state" / "CURRENT").read_text().strip()

    def _outside(self) -> Outside:
        return Outside(
            make_trainer=lambda _: self._new_trainer(),
            start_dht=self.village.start_records,
            make_peers=self._new_peers,
            say=self._heard,
            owns_process=False,
        )

    def _heard(self, text: str) -> None:
        self.said.append(text)
        self.village.notice()

    def _new_trainer(self) -> ThreadTrainer:
        self.trainer = ThreadTrainer(lambda spec: HaltingTask.within(self, spec))
        return self.trainer

    def _new_peers(self, credentials: Any, **options: Any) -> WatchedPeers:
        self.peers = WatchedPeers(GrpcPeers(credentials, **options), self)
        return self.peers


class HaltingTask(TinyTask):
    """The village's task; its trainer stands still at the next step once its member is to halt at `training`."""

    member: Member
    loop: asyncio.AbstractEventLoop

    @classmethod
    def within(cls, member: Member, spec: RunSpec) -> HaltingTask:
        task = cls.of(spec)
        assert isinstance(task, HaltingTask)
        task.member, task.loop = member, member.village.loop
        return task

    def loss(self, ids_BL: Any) -> Any:
        reached = self.member.halts.get("training")
        if reached is not None:
            gate = self.member.gate
            self.loop.call_soon_threadsafe(reached.set)
            self.loop.call_soon_threadsafe(self.member.village.notice)
            gate.wait()
        return super().loss(ids_BL)


class WatchedLine:
    """A line on which its member may stand still."""

    def __init__(self, line: GrpcLine, member: Member) -> None:
        self._line, self._member = line, member

    async def send(self, message: MemberMessage | Signed) -> None:
        kind = type(message).__name__.lower()
        if isinstance(message, Signed):
            kind = wire.decode(Envelope, message.envelope).purpose
        await self._member.stand_if(f"before {kind}")
        await self._line.send(message)
        await self._member.stand_if(f"after {kind}")

    def messages(self) -> AsyncIterator[LeaderMessage | Signed]:
        return self._line.messages()

    def break_off(self) -> None:
        self._line._stream.cancel()

    async def close(self) -> None:
        await self._line.close()


@dataclass(frozen=True)
class Rows:
    """Rows on their way to one reducer."""

    addresses: tuple[str, ...]
    deal: bytes
    chunks: tuple[int, ...]
    source: RowSource


class WatchedPeers:
    """The real calls to others; the member may stand still in the middle of its rows."""

    def __init__(self, peers: GrpcPeers, member: Member) -> None:
        self.inner, self._member = peers, member
        self.traffic = peers.traffic
        self.lines: list[WatchedLine] = []
        self.rows: dict[PeerId, Rows] = {}  # what it was to send in the newest attempt, by reducer

    async def open_line(self, leader: PeerId, addresses: Sequence[str]) -> WatchedLine:
        self.lines.append(WatchedLine(await self.inner.open_line(leader, addresses), self._member))
        self._member.village.notice()
        return self.lines[-1]

    async def send_rows(
        self,
        peer: PeerId,
        addresses: Sequence[str],
        deal: bytes,
        chunks: Sequence[int],
        source: RowSource,
        on_receipt: Callable[[bytes], Awaitable[None]],
    ) -> None:
        if any(rows.deal != deal for rows in self.rows.values()):
            self.rows.clear()  # of an earlier attempt
        self.rows[peer] = Rows(tuple(addresses), deal, tuple(chunks), source)
        if peer in self._member.cut_off_from:
            raise PeerFailed(peer, "no route to it")
        await self._member.stand_if("rows")

        async def receipted(envelope: bytes) -> None:
            await self._member.stand_if("receipt")
            await on_receipt(envelope)

        await self.inner.send_rows(peer, addresses, deal, chunks, source, receipted)

    async def fetch(
        self,
        peer: PeerId,
        addresses: Sequence[str],
        kind: str,
        hashes: Sequence[bytes],
        max_bytes: int,
        sink: Callable[[bytes, bytes], Awaitable[None]],
        *,
        exchange: bool,
    ) -> list[bytes]:
        async def sunk(hash_: bytes, data: bytes) -> None:
            await self._member.stand_if(kind)
            await sink(hash_, data)

        return await self.inner.fetch(peer, addresses, kind, hashes, max_bytes, sunk, exchange=exchange)

    async def offer(self, peer: PeerId, addresses: Sequence[str], *, frozen: bool = False) -> StateOffer:
        return await self.inner.offer(peer, addresses, frozen=frozen)

    async def commits_after(
        self, peer: PeerId, addresses: Sequence[str], epoch: int, round_: int, n_most: int
    ) -> list[Commit]:
        return await self.inner.commits_after(peer, addresses, epoch, round_, n_most)

    async def ping(self, peer: PeerId, addresses: Sequence[str]) -> None:
        await self.inner.ping(peer, addresses)

    async def close(self) -> None:
        await self.inner.close()


class ObserverHere:
    """The observer as a task of this process, in the place of the coordinator's child."""

    def __init__(self, task: asyncio.Task[str], log: Path) -> None:
        self.task, self.log = task, log

    async def wait(self) -> int:
        await asyncio.wait([self.task])
        return 0 if self.task.cancelled() or self.task.exception() is None else 1

    async def stop(self, within_s: float) -> int:
        self.task.cancel()
        return await self.wait()

    def last_line(self) -> str:
        return "" if self.task.cancelled() else str(self.task.exception() or "")


class WatchedJournal:
    """The leader's journal; the leader may be made to stand still before or after it writes something."""

    def __init__(self, journal: Journal, village: Village) -> None:
        self._journal, self._village = journal, village

    async def persist(self, entry: Opened | Promise | Proposal) -> None:
        if isinstance(entry, Proposal):
            self._village.proposals.append(entry)
        await self._journal.persist(entry)
        await self._village.leader_stands_if(f"after {type(entry).__name__.lower()}")

    async def commit(self, effect: Committed, before: Ledger, after: Ledger) -> None:
        await self._village.leader_stands_if("before commit")
        await self._journal.commit(effect, before, after)
        self._village.commits.append(effect)
        self._village.notice()

    async def orphan(self, fork: Ledger) -> None:
        await self._journal.orphan(fork)

    def observe(self, observation: Observation) -> None:
        self._journal.observe(observation)
        self._village.observations.append(observation)
        self._village.notice()


class Village:
    """A founded run, its coordinator with its observer, and its members."""

    def __init__(self, folder: Path, spec: RunSpec, run: PeerId, *, relay: bool, real_dht: bool) -> None:
        self.folder, self.spec, self.run = folder, spec, run
        self.relay, self.real_dht = relay, real_dht
        self.loop = asyncio.get_running_loop()
        self.table = FakeTable(run)
        self.members: list[Member] = []
        self.commits: list[Committed] = []
        self.proposals: list[Proposal] = []
        self.observations: list[Observation] = []
        self.said: list[str] = []
        self.observer_task: asyncio.Task[str] | None = None
        self.leader_halts: dict[str, asyncio.Event] = {}
        self._shown: list[str] = []
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._leader: asyncio.Task[None] | None = None

    # -- the coordinator -------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Start the coordinator; again on the same folder, it takes the ports of the last time."""
        self._stop, self._shown, self.leader_halts = asyncio.Event(), [], {}
        first = not RunFolder(self.folder).ports.exists()
        where = LOCAL if first else ""
        options = ServeOptions(data=self.folder, relay=self.relay, http=where, listen=where, dht=where)
        outside = CoordinatorOutside(
            launch_observer=self._observe,
            until=lambda _: self._stop,
            journal=lambda journal: WatchedJournal(journal, self),
        )
        self._leader = asyncio.create_task(serve(options, self._heard, self._show, outside), name="coordinator")
        self._leader.add_done_callback(lambda _: self.notice())
        n_observations = len(self.observations)
        await self.until(lambda: len(self.observations) > n_observations, "the observer to say that it holds the state")

    async def stop_serving(self) -> None:
        """As SIGTERM does."""
        self._stop.set()
        assert self._leader is not None
        await self._leader

    async def drop_leader(self) -> None:
        """As `kill -9` does, as far as a task can: it says and writes nothing any more."""
        assert self._leader is not None
        self._leader.cancel()
        await asyncio.gather(self._leader, return_exceptions=True)

    async def leader_halted(self, at: str) -> None:
        """Have the leader stand still for good, and wait until it does: `before commit`, or `after` it has persisted
        something (`opened`, `proposal`, `promise`)."""
        reached = self.leader_halts[at] = asyncio.Event()
        await self.until(reached.is_set, f"the leader to halt {at}")

    async def leader_stands_if(self, at: str) -> None:
        if at in self.leader_halts:
            self.leader_halts[at].set()
            self.notice()
            await asyncio.get_running_loop().create_future()

    @property
    def invite(self) -> Invite:
        serving = find(RunFolder(self.folder))
        assert serving is not None
        return parse(serving.invite)

    async def invite_with_token(self) -> Invite:
        return parse(await operating.invite(self.folder, uses=1, expires_s=3600.0))

    async def _observe(self, folder: RunFolder, order: ObserverOrder) -> Process:
        options = NodeOptions(
            invite=parse(order.invite),
            data=folder.observer,
            threads=1,
            listen=order.listen,
            dht=order.dht,
            name="observer",
            run_dir=folder.path,
        )
        outside = Outside(
            make_trainer=lambda _: ThreadTrainer(),
            start_dht=self.start_records,
            say=lambda text: self._heard(f"observer: {text}"),
            owns_process=False,
        )
        self.observer_task = asyncio.create_task(join(options, outside), name="observer")
        return ObserverHere(self.observer_task, folder.logs / "observer.log")

    async def start_records(self, identity: Identity, run: PeerId, **options: Any) -> Records:
        return await Dht.start(identity, run, **options) if self.real_dht else self.table.join(identity)

    # -- the members -----------------------------------------------------------------------------------------------

    def member(self, name: str) -> Member:
        """A place for a member, with its own key; nobody lives there until it starts."""
        folder = self.folder.parent / f"node-{name}"
        make_folder(folder)
        member = Member(self, folder, load_or_make(folder))
        self.members.append(member)
        return member

    def settle(self, n: int) -> list[Member]:
        """So many members, started."""
        members = [self.member(str(len(self.members))) for _ in range(n)]
        for member in members:
            member.start()
        return members

    async def admit(self, member: Member) -> None:
        """Have a member admitted, without a node that runs."""
        await admit(self.invite, member.identity, member.folder, seconds=self.loop.time)

    async def everyone_ends(self) -> list[str]:
        """Wait until all members have left because the run has ended; their last words."""
        return list(await asyncio.gather(*(member.task for member in self.members if member.task is not None)))

    # -- what happens ----------------------------------------------------------------------------------------------

    def notice(self) -> None:
        """Something has changed: whoever waits looks again."""
        self._changed.set()

    async def until(self, holds: Callable[[], bool], what: str, limit_s: float = UNTIL_S) -> None:
        """Wait until a condition holds. Fails with what was said if it takes too long, or if the coordinator ends."""
        try:
            async with asyncio.timeout(limit_s):
                while not holds():
                    if self._leader is not None and self._leader.done() and not self._leader.cancelled():
                        self._leader.result()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"waited in vain for {what}\n{self.story()}") from None

    def committed(self) -> list[Committed]:
        """Commits with contributions, in order."""
        return [commit for commit in self.commits if commit.body.outcome is Outcome.COMMITTED]

    async def rounds(self, n: int, limit_s: float = UNTIL_S) -> None:
        """Wait for so many committed rounds."""
        await self.until(lambda: len(self.committed()) >= n, f"{n} committed rounds", limit_s)

    async def counts(self, member: Member, after: int = 0) -> int:
        """Wait until a commit later than this many counts a member; how many committed rounds there are then."""
        await self.until(lambda: any(_counted(c, member) for c in self.committed()[after:]), f"{member.folder.name}")
        return next(i for i, c in enumerate(self.committed(), 1) if i > after and _counted(c, member))

    def holds(self, peer: PeerId, head: str) -> bool:
        """Whether a member, or the observer, has said that it holds the state after this commit."""
        return any((o.kind, o.peer, o.subject) == ("digest", peer, head) for o in self.observations)

    @property
    def observer(self) -> PeerId:
        return load_or_make(RunFolder(self.folder).observer).peer

    async def ledger(self) -> list[dict[str, Any]]:
        """ROUND rows of all commits with members or without, but commit 0."""
        return [row for row in await operating.ledger(self.folder) if row["round"] > 0]

    async def digests(self) -> dict[str, dict[str, str]]:
        serving = find(RunFolder(self.folder))
        assert serving is not None
        async with Caller(serving) as caller:
            return await caller.digests()

    def story(self) -> str:
        lines = [f"coordinator: {text}" for text in self.said[-40:]]
        for member in self.members:
            lines += [f"{member.folder.name} {member.peer[-6:]}: {text}" for text in member.said[-20:]]
            if member.task is not None and member.task.done() and not member.task.cancelled():
                lines.append(f"{member.folder.name} ended: {member.task.exception() or member.task.result()}")
        return "\n".join(lines)

    def _heard(self, text: str) -> None:
        self.said.append(text)
        self.notice()

    def _show(self, text: str) -> None:
        self._shown.append(text)
        self.notice()

    async def end(self) -> None:
        """Stop whoever still lives here."""
        for member in self.members:
            member.gate.set()
            if member.task is not None:
                member.task.cancel()
        await asyncio.gather(
            *(member.task for member in self.members if member.task is not None), return_exceptions=True
        )
        if self._leader is not None and not self._leader.done():
            self._stop.set()
            with suppress(asyncio.CancelledError):
                await self._leader


def _counted(commit: Committed, member: Member) -> bool:
    return any(entry.peer == member.peer and entry.counted for entry in commit.body.members)


@asynccontextmanager
async def village(
    path: Path, *settings: str, width: int = WIDTH, relay: bool = True, real_dht: bool = False, n_texts: int = 12
) -> AsyncIterator[Village]:
    """Found a run, serve it, and clean up. `settings` are as in `--set`, over the village's own."""
    config = load("tiny", None, [*SETTINGS, *settings])

    async def run_tool(wish_path: Path, to: Path) -> Mapping[str, Any]:
        wish = json.loads(wish_path.read_bytes())  # noqa: ASYNC240 - a small file
        sections = {key: value for key, value in wish.items() if key not in ("model", "data", "corpus")}
        made: TinyRun = tiny_run(to, width=width, n_texts=n_texts, **sections)
        return made.spec.model_dump(mode="json")

    run, spec = await found(path / "run", config, run_tool, datetime.now(UTC))
    assert read_founded(RunFolder(path / "run")).run == run
    here = Village(path / "run", spec, run, relay=relay, real_dht=real_dht)
    try:
        await here.serve()
        yield here
    finally:
        await here.end()
