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
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from coordinator import operating
from coordinator.app import Outside as CoordinatorOutside
from coordinator.app import ServeOptions, serve
from coordinator.children import Process
from coordinator.config import load
from coordinator.control import Caller, find
from coordinator.folder import RunFolder, read_founded
from coordinator.founding import found
from coordinator.leading.ports import Observation
from coordinator.observing import ObserverOrder
from coordinator.rounds.events import Committed
from node.admission import admit
from node.app import join
from node.config import NodeOptions
from node.identity import load_or_make, make_folder
from node.outside import Outside
from node.peers.dht import Dht
from node.ports import Records
from protos.invite import Invite, parse
from protos.messages import Outcome, PeerId, Proposal
from protos.runspec import RunSpec
from protos.signing import Identity
from tests.e2e.member import LOCAL, Member
from tests.e2e.watched import WatchedJournal
from tests.fakes.records import FakeTable
from tests.fakes.tiny import TinyRun, tiny_run
from tests.fakes.trainer import ThreadTrainer

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
