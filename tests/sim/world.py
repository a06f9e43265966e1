"""A deterministic world of processes: one heap of (time, sequence, call), one source of chance, no event loop.

The same options give the same history. `run_until` lets it go on until something holds or a time has passed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from aggregation.codec import frame_bytes
from aggregation.digest import tagged_hash
from coordinator.rounds import policy
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.ledger import genesis as genesis_ledger
from coordinator.rounds.machine import Rounds
from coordinator.rounds.voter import Voter
from node.session import events as ev
from node.session.machine import Session
from protos.hashes import commit_hash
from protos.messages import ZERO_HASH, Body, Commit, Genesis, Outcome, PeerId, Range
from tests.fakes.sealer import Registry
from tests.sim.chain import Chain
from tests.sim.leader import LeaderProcess
from tests.sim.member import MemberProcess
from tests.sim.network import TO_LEADER, Line, Network
from tests.sim.options import Options
from tests.sim.process import Process
from tests.sim.sharing import sharing_session
from tests.sim.sizes import Meter
from tests.sim.standing_in import StandIn
from tests.sim.training import Training

RUN = PeerId("run")
COORDINATOR = PeerId("coordinator")
OBSERVER = PeerId("observer")


def member_name(number: int) -> PeerId:
    """Its place in peer order is its number, and its digits are base58's, which has no 0."""
    digits = ""
    for _ in range(5):
        number, digit = divmod(number, 9)
        digits = f"{digit + 1}{digits}"
    return PeerId(f"m{digits}")


class World:
    """All processes, and what they can't get around: time, the network, and what has been committed."""

    def __init__(
        self,
        options: Options,
        *,
        rounds_type: type[Rounds] = Rounds,
        session_type: type[Session] | None = None,
        voter_type: type[Voter] = Voter,
    ) -> None:
        self.options, self.spec = options, options.spec()
        self.specs = {self.spec.revision: self.spec}
        """The revisions of the RunSpec that were ordered; who doesn't know one fetches it."""
        self.rounds_type, self.voter_type = rounds_type, voter_type
        self.liars: frozenset[PeerId] = frozenset()
        """Voters that make up what they have signed; nobody else may ever be taken for one."""
        self.session_type = session_type or (
            sharing_session(instant=options.instant_rows) if options.memory else Session
        )
        self.coordinator = COORDINATOR
        self.now = 0.0
        self.rng = Random(options.seed)
        self.network = Network(options, self.rng)
        self.registry = Registry()
        self._heap: list[tuple[float, int, Process | None, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self._n_divisions = 0
        self.n_events = 0
        self._trace = tagged_hash("trace")
        self.story: list[str] | None = None
        self.meter: Meter | None = None
        grid = policy.grid(self.spec)
        codec = self.spec.codec
        self.row_bytes = [frame_bytes(codec.name, grid.size(chunk), codec.block) for chunk in range(grid.n_chunks)]
        genesis, ledger = self._genesis()
        self.chain = Chain(ledger)
        self._ledgers: dict[bytes, Ledger] = {}
        self.opened: dict[bytes, ev.Event] = {}
        """Events of envelopes, the same for whoever opens them."""
        self.opened_commits: dict[tuple[int, PeerId], tuple[Commit, ev.CommitHeard]] = {}
        """And of commits, by which object each is and who tells it."""
        names = [COORDINATOR, *(PeerId(f"standin{i}") for i in range(1, options.n_leaders))]
        self.leaders = [LeaderProcess(self, name, genesis, ledger.head) for name in names]
        self.members = {
            name: MemberProcess(self, name, number, observer=False)
            for number in range(options.n_members)
            for name in [member_name(number)]
        }
        if options.observer:
            self.members[OBSERVER] = MemberProcess(self, OBSERVER, -1, observer=True)
        for member in self.members.values():
            if member.observer or member.number < options.n_members - options.n_newcomers:
                member.disk.ledger, member.disk.commit = ledger, genesis
        self.stand_ins = {
            name: StandIn(self, name, genesis, ledger.head)
            for name, member in self.members.items()
            if options.stand_ins and not member.observer
        }
        self._leaders_of: dict[PeerId, list[LeaderProcess]] = {name: list(self.leaders) for name in self.members}

    def _genesis(self) -> tuple[Commit, Ledger]:
        spec = self.spec
        peers = [member_name(number) for number in range(self.options.n_members if self.options.all_vote else 0)]
        voters = (*peers, COORDINATOR)
        ledger = replace(genesis_ledger(RUN, COORDINATOR), voters=voters)
        body = Body(
            run=RUN, epoch=0, round=0, previous=ZERO_HASH, attempt=0, leader=COORDINATOR, spec_revision=1,
            fragment=Range(0, spec.model.n_values), tau=0, anchor_digest=ZERO_HASH, outcome=Outcome.EMPTY,
            reason="the beginning", members=(), reducers=(), rule=spec.rule.name, f=0, fallback="", degraded="",
            codec=spec.codec.name, results_root=ZERO_HASH, clip_factor=1.0, aggregate_norm=0.0, numerics_version=1,
            h=spec.work.h, lr=spec.inner.lr, outer_lr=spec.outer.lr, outer_momentum=spec.outer.momentum,
            returned=(), standing=(), orders=(), seats=(), voters=voters, ledger_hash=ledger.hash(),
        )  # fmt: skip
        raw = self.registry.encode(body)
        digest = tagged_hash("digest", b"the beginning")
        vote = self.registry.seal(RUN, Genesis(raw, digest))  # type: ignore[arg-type]
        return Commit(raw, digest, 0, (vote,), ()), ledger.at(commit_hash(raw, digest), digest)

    # -- time -------------------------------------------------------------------------------------------------

    def push(self, at: float, process: Process | None, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._sequence += 1
        incarnation = process.incarnation if process is not None else 0
        heapq.heappush(self._heap, (at, self._sequence, process, incarnation, call, args))

    def at(self, at: float, call: Callable[..., None], *args: Any) -> None:
        """Something that happens to the world."""
        self.push(at, None, call, args)

    def run_until(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Go on until it holds; False if it does not before the limit."""
        end = self.now + limit_s
        while not done():
            if not self._heap or self._heap[0][0] > end:
                self.now = end
                return done()
            self._step()
        return True

    def run_for(self, seconds: float) -> None:
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            self._step()
        self.now = end

    def _step(self) -> None:
        at, _, process, incarnation, call, args = heapq.heappop(self._heap)
        self.now = max(self.now, at)
        if process is not None:
            if not process.alive or process.incarnation != incarnation:
                return
            if process.frozen_until > self.now:
                self._sequence += 1
                thawed = process.frozen_until
                heapq.heappush(self._heap, (thawed, self._sequence, process, incarnation, call, args))
                return
        self.n_events += 1
        call(*args)

    def trace(self, *what: object) -> None:
        """Part of the history by which two runs are compared."""
        text = f"{self.now:.6f} " + " ".join(str(item) for item in what)
        self._trace = tagged_hash("trace", self._trace, text.encode())
        if self.story is not None:
            self.story.append(text)

    @property
    def trace_hash(self) -> str:
        return self._trace.hex()

    # -- processes --------------------------------------------------------------------------------------------

    @property
    def leader(self) -> LeaderProcess:
        """The coordinator."""
        return self.leaders[0]

    def start(self, processes: Iterable[Process] | None = None) -> World:
        for process in processes if processes is not None else [*self.leaders, *self.members.values()]:
            process.start()
        return self

    def member(self, number: int) -> MemberProcess:
        return self.members[member_name(number)]

    def crash(self, process: Process, restart_after_s: float | None) -> None:
        """kill -9; it comes back after so long, or never."""
        process.crash()
        if restart_after_s is not None:
            self.at(self.now + restart_after_s, self.restart, process)

    def restart(self, process: Process) -> None:
        """Start it unless it runs."""
        if not process.alive:
            process.start()

    def ask_to_leave(self, member: MemberProcess) -> None:
        if member.alive:
            self.push(self.now, member, member.decide, (ev.LeaveAsked("asked"),))

    def leaders_of(self, member: MemberProcess) -> list[LeaderProcess]:
        return [*self._leaders_of[member.name], *(self.stand_ins[peer] for peer in member.followed)]

    def assign(self, member: MemberProcess, leaders: list[LeaderProcess]) -> None:
        """From now on the member's lines are to these leaders."""
        self._leaders_of[member.name] = leaders
        if member.alive:
            self.push(self.now, member, member.switch, ())

    def can_reach(self, one: Process, other: Training) -> bool:
        frozen = other.frozen_until > self.now
        return other.alive and other.reachable and not frozen and self.network.dials(one.name, other.name)

    def donors(self, asking: MemberProcess) -> list[MemberProcess]:
        return [other for other in self.members.values() if other is not asking and self.can_reach(asking, other)]

    # -- lines ------------------------------------------------------------------------------------------------

    def send(self, line: Line, direction: int, message: object) -> None:
        end: Process = line.leader if direction == TO_LEADER else line.member
        hear = line.leader.hear if direction == TO_LEADER else line.member.hear
        if self.meter is not None:
            self.meter.note(direction == TO_LEADER, message)
        for at in self.network.arrivals(line, direction, self.now):
            self.push(at, end, hear, (line, message))

    def tell_line_broke(self, line: Line, reason: str) -> None:
        """Each end learns of it after what was sent before."""
        for direction, end in ((TO_LEADER, line.leader), (1 - TO_LEADER, line.member)):
            at = max(self.now + self.network.delay_s(), line.last_at[direction])
            self.push(at, end, end.line_broke, (line, reason))

    def part(self, peers: set[PeerId], for_s: float) -> None:
        """Cut peers off; lines across the cut are found broken after a while."""
        self.divide([peers], for_s)

    def divide(self, islands: Sequence[Collection[PeerId]], for_s: float) -> None:
        """Part several sets from each other and from all others, until it heals or others are parted."""
        self.network.divide(*islands)
        self.trace("part", *(sorted(peers) for peers in islands))
        self._find_broken()
        self._n_divisions += 1
        self.at(self.now + for_s, self._join, self._n_divisions)

    def _join(self, division: int) -> None:
        if division == self._n_divisions:
            self.network.divide()

    def block(self, one: PeerId, other: PeerId, for_s: float) -> None:
        """For a while nothing gets from the one to the other, and the other way is open."""
        self.network.block(one, other)
        self.trace("block", one, other)
        self._find_broken()
        self.at(self.now + for_s, self.network.unblock, one, other)

    def half_open(self, peer: PeerId, for_s: float) -> None:
        """A host loses all its connections, and the other ends hear nothing of it; it is cut off for a while."""
        self.network.divide([peer])
        self.trace("half open", peer)
        for line in self.lines():
            if peer in (line.member.name, line.leader.name):
                here, there = (line.member, line.leader) if line.member.name == peer else (line.leader, line.member)
                self.push(self.now, here, here.line_broke, (line, "reset"))
                self.push(self.now + self.options.keepalive_s, there, there.line_broke, (line, "no keepalive"))
        self._n_divisions += 1
        self.at(self.now + for_s, self._join, self._n_divisions)

    def lines(self) -> list[Line]:
        """Those that members hold for open."""
        return [line for member in self.members.values() for line in member.lines.values()]

    def _find_broken(self) -> None:
        for line in self.lines():
            if self.network.parted(line.member.name, line.leader.name):
                self.at(self.now + self.options.keepalive_s, self.tell_line_broke, line, "no keepalive")

    # -- what is computed once for all ------------------------------------------------------------------------

    def ledger_of(self, commit: Commit, raw: bytes) -> Ledger:
        hash_ = commit_hash(commit.body, commit.digest)
        if hash_ not in self._ledgers:
            self._ledgers[hash_] = Ledger.from_bytes(raw).at(hash_, commit.digest)
        return self._ledgers[hash_]

    @property
    def n_committed(self) -> int:
        """Committed rounds with contributions."""
        return sum(1 for _, body, _ in self.chain.commits if body.outcome is Outcome.COMMITTED)

    @property
    def round(self) -> int:
        return max((body.round for _, body, _ in self.chain.commits), default=0)


def heads(members: Mapping[PeerId, MemberProcess]) -> dict[PeerId, bytes]:
    """What each living member holds."""
    return {
        name: member.disk.ledger.head
        for name, member in members.items()
        if member.alive and member.disk.ledger is not None
    }
