"""A leader's process: `Rounds` with the part of a driver, a journal that survives it, and lines to members."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coordinator.rounds.events import (
    Branched,
    Close,
    Committed,
    Connected,
    DigestKnown,
    Disconnected,
    Effect,
    Ended,
    Event,
    Heard,
    Learn,
    Learned,
    Opened,
    Ordered,
    Orphaned,
    Persist,
    Probe,
    Reached,
    Say,
    Seek,
    Sought,
    Tell,
    Woke,
)
from coordinator.rounds.machine import Rounds
from protos.hashes import commit_hash
from protos.messages import (
    AttemptFailed,
    Body,
    Commit,
    Commitment,
    Goodbye,
    Heartbeat,
    Hello,
    Inquiry,
    Leave,
    Missing,
    PeerId,
    Plan,
    Prepare,
    Promise,
    Proposal,
    Propose,
    Record,
    Records,
    Refusal,
    Results,
    Signed,
    StateDigest,
    Vote,
    Welcome,
)
from protos.orders import Kind, OpenedOrder
from tests.fakes.evidence import carried_evidence
from tests.fakes.sealer import FakeSealer
from tests.sim.chain import Violated, check_record
from tests.sim.network import TO_MEMBER, Line
from tests.sim.process import Process

if TYPE_CHECKING:
    from tests.sim.world import World


@dataclass(slots=True)
class LeaderJournal:
    """What is on a leader's disk."""

    commits: list[tuple[Commit, bytes]]
    opened: list[Opened] = field(default_factory=list)
    promise: Promise | None = None
    signed: dict[int, int] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)  # epochs of branches that are not followed any more
    proposals: list[Proposal] = field(default_factory=list)
    failed: list[AttemptFailed] = field(default_factory=list)
    orders: list[Ordered] = field(default_factory=list)

    def numbers(self) -> dict[tuple[int, int], int]:
        """The highest number that was used, by epoch and round."""
        used: dict[tuple[int, int], int] = {}
        for entry in self.opened:
            used[entry.epoch, entry.round] = max(entry.attempt, used.get((entry.epoch, entry.round), -1))
        return used


class LeaderProcess(Process):
    def __init__(self, world: World, name: PeerId, genesis: Commit, head: bytes) -> None:
        super().__init__(world, name)
        self.journal = LeaderJournal([(genesis, head)])
        self.sealer = FakeSealer(world.registry, name)
        self.lines: dict[PeerId, Line] = {}
        self.rounds: Rounds
        self.ended = ""
        self.said: list[str] = []

    # -- life -------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        self.lines = {}
        commit, head = self.journal.commits[-1]
        ledger = self.world.chain.ledgers[head]
        gone = {epoch for epoch in self.journal.given_up if epoch > ledger.epoch}
        opened = [each for each in self.journal.opened if each.round == ledger.round + 1 and each.epoch not in gone]
        epoch = max([ledger.epoch, *(entry.epoch for entry in opened)])
        promise = self.journal.promise
        proposal = promise.proposal if promise is not None else None
        voted = self.world.registry.decode(Body, proposal.body) if proposal is not None else None
        self.rounds = self.world.rounds_type(
            self.name,
            self.world.specs[ledger.spec_revision],
            ledger,
            commit,
            self.sealer,
            now=self.now(),
            coordinator=self.world.coordinator,
            opened=max((entry.attempt for entry in opened if entry.epoch == epoch), default=-1),
            epoch=epoch,
            numbers=self.journal.numbers(),
            voter=self.world.voter_type(self.name, promise, signed=self.journal.signed),
            voter_body=voted,
            voter_orders=self.world.chain.orders_of(voted) if voted is not None else (),
            specs=self.world.specs,
            relay=self.world.options.relay,
        )
        self.begin_beating()
        self.decide(Woke())
        for order in self.journal.orders:
            self.decide(order)

    def order(self, order: OpenedOrder) -> None:
        """The operator's word: on disk, then obeyed."""
        self.world.chain.orders[order.envelope] = order
        if order.spec is not None:
            self.world.specs[order.spec.revision] = order.spec
        ordered = Ordered(order, self.world.chain.ledgers.get(order.order.spec))
        self.journal.orders.append(ordered)
        if self.alive:
            self.decide(ordered)

    def died(self) -> None:
        for line in list(self.lines.values()):
            self.world.tell_line_broke(line, "the leader is gone")
        self.lines = {}

    def wake(self) -> None:
        self.decide(Woke())

    def decide(self, event: Event) -> None:
        now = self.now()
        effects = self.rounds.handle(event, now)
        if self.world.options.checks:
            self.rounds.check()
        self.carry_out_all(effects, self._carry_out)
        if self.alive:
            self.plan_wake(self.rounds.next_wake(now), after_woke=True)

    def begin_beating(self) -> None:
        """Say that it is there, by and by."""
        if self.world.options.stand_ins:
            self.later(self.world.spec.deadlines.heartbeat_s, self._beat)

    def _beat(self) -> None:
        for line in self.lines.values():
            self.world.send(line, TO_MEMBER, Records(()))
        self.begin_beating()

    # -- what others have ---------------------------------------------------------------------------------------

    def _learn(self, peer: PeerId) -> None:
        """What a member has beyond this leader's head, or from the fork on."""
        member = self.world.members[peer]
        held = member.disk.ledger
        if held is None or not member.alive or self.world.network.parted(peer, self.name):
            return
        commits = {hash_: commit for commit, _, hash_ in self.world.chain.commits}
        own = {hash_ for _, hash_ in self.journal.commits}
        path: list[Learned] = []
        head = held.head
        while head not in own and head in commits:
            path.insert(0, self.told(commits[head]))
            head = path[0].body.previous
        if head == self.rounds.ledger.head:
            for told in path:
                self.decide(told)
        elif head in own and path:
            commit = next(commit for commit, hash_ in self.journal.commits if hash_ == head)
            self.decide(Branched(self.world.chain.ledgers[head], commit, tuple(path)))

    def told(self, commit: Commit) -> Learned:
        registry = self.world.registry
        body = registry.decode(Body, commit.body)
        opened = [registry.open(envelope) for envelope in commit.votes]
        signed = tuple((signer, message) for signer, message in opened if isinstance(message, Vote | Leave))
        orders = self.world.chain.orders_of(body)
        targets = [self.world.chain.ledgers[each.order.spec] for each in orders if each.order.kind == Kind.ROLLBACK]
        target = targets[0] if targets else None
        return Learned(commit, body, commit_hash(commit.body, commit.digest), signed, orders, target)

    def _sought(self, peers: tuple[PeerId, ...]) -> None:
        for peer in peers:
            self._learn(peer)
        self.decide(Sought())

    # -- lines ------------------------------------------------------------------------------------------------

    def accept(self, line: Line, hello: Hello, record: Record) -> None:
        peer = line.member.name
        if not line.member_up:
            return  # given up before its hello was read
        old = self.lines.pop(peer, None)
        if old is not None:
            old.leader_up = False
            self.decide(Disconnected(peer, "superseded"))
        line.leader_up = True
        self.lines[peer] = line
        self.decide(Connected(peer, hello, record))

    def line_broke(self, line: Line, reason: str) -> None:
        if line.leader_up and self.lines.get(line.member.name) is line:
            line.leader_up = False
            del self.lines[line.member.name]
            self.decide(Disconnected(line.member.name, reason))

    def hear(self, line: Line, message: object) -> None:
        peer = line.member.name
        if not line.leader_up or self.lines.get(peer) is not line:
            return
        match message:
            case Signed(envelope):
                signer, opened = self.world.registry.open(envelope)
                if signer != peer:
                    raise Violated(f"{peer} passes on what {signer} signed")
                self._heard_signed(peer, opened, envelope)
            case Heartbeat():
                self.decide(Heard(peer, message, b""))
            case Missing() | Refusal():
                self.decide(Heard(peer, message, b""))
            case StateDigest(hash_, _, digest):
                self.decide(DigestKnown(hash_, digest))
            case _:
                raise Violated(f"{peer} says {message} to a leader")

    def _heard_signed(self, peer: PeerId, opened: object, envelope: bytes) -> None:
        body: Body | None = None
        evidence, fault = None, ""
        if isinstance(opened, Promise | Leave) and opened.proposal is not None:
            body = self.world.registry.decode(Body, opened.proposal.body)
            evidence, fault = carried_evidence(self.world.registry, opened.proposal, body)
        if not isinstance(opened, Commitment | Results | Vote | Promise | Leave):
            raise Violated(f"{peer} signs {opened} for a leader")
        orders = self.world.chain.orders_of(body) if body is not None else ()
        self.decide(Heard(peer, opened, envelope, body, orders, evidence, fault))

    # -- effects ----------------------------------------------------------------------------------------------

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Persist(entry):
                if self.writes():
                    self._persist(entry)
            case Committed(commit, body, hash_, failed):
                if not self.writes():
                    return
                if self.world.chain.commit(commit, body) != hash_:
                    raise Violated("the commit's hash is another one")
                self._check_certificate(commit)
                self.journal.commits.append((commit, hash_))
                self.journal.failed += failed
                self.world.trace("committed", self.name, body.round, body.attempt, str(body.outcome))
            case Tell(peers, message):
                self._check_told(message)
                for peer in peers:
                    if (line := self.lines.get(peer)) is not None:
                        self.world.send(line, TO_MEMBER, message)
            case Close(peer, goodbye):
                if (line := self.lines.get(peer)) is not None:
                    self.world.send(line, TO_MEMBER, goodbye)
                    self.world.tell_line_broke(line, "closed by the leader")
            case Probe(peer, _):
                self.later(self.world.network.delay_s(), self._probed, peer)
            case Learn(peer):
                if self.world.options.learns:
                    self.later(self.world.network.delay_s(), self._learn, peer)
            case Seek(peers):
                self.later(self.world.network.delay_s(), self._sought, peers)
            case Orphaned(fork):
                kept = next(i for i, (_, hash_) in enumerate(self.journal.commits) if hash_ == fork.head)
                for _, hash_ in self.journal.commits[kept + 1 :]:
                    self.journal.given_up.add(self.world.chain.ledgers[hash_].epoch)
                del self.journal.commits[kept + 1 :]
                self.world.trace("orphaned", self.name, fork.round)
            case Ended(reason):
                self.ended = reason
            case Say(text):
                named = " reports a proposal" in text
                if named and not any(text.startswith(liar[-6:]) for liar in self.world.liars):
                    raise Violated(f"{self.name} takes an honest voter for a liar: {text}")
                self.said.append(text)
                self.world.trace("said", self.name, text)

    def _probed(self, peer: PeerId) -> None:
        member = self.world.members.get(peer)
        here = member is not None and member.alive and self.world.network.dials(self.name, peer)
        self.decide(Reached(peer, here and member is not None and member.reachable))

    def _persist(self, entry: Opened | Promise | Proposal) -> None:
        match entry:
            case Opened():
                if entry in self.journal.opened:
                    raise Violated(f"{self.name} opens attempt {entry.attempt} of round {entry.round} again")
                self.journal.opened.append(entry)
            case Promise():
                self.journal.promise = entry
                self.journal.signed[entry.epoch] = max(entry.round, self.journal.signed.get(entry.epoch, -1))
            case Proposal():
                self.journal.proposals.append(entry)

    def _check_told(self, message: object) -> None:
        """What binds this leader must be on its disk before it is said."""
        if isinstance(message, Commit):
            if message != self.journal.commits[-1][0]:
                raise Violated(f"{self.name} tells a commit that is not on its disk")
        elif isinstance(message, Signed):
            signer, opened = self.world.registry.open(message.envelope)
            if signer != self.name:
                raise Violated(f"{self.name} tells what {signer} signed")
            if isinstance(opened, Plan | Prepare | Propose):
                if Opened(opened.epoch, opened.round, opened.attempt) not in self.journal.opened[-3:]:
                    raise Violated(f"{self.name} uses number {opened.attempt} before it is on disk")
            if isinstance(opened, Propose):
                self.world.chain.propose(self.name, opened)
        elif not isinstance(message, Welcome | Goodbye | AttemptFailed | Inquiry | Records):
            raise Violated(f"{self.name} tells {message}")

    def _check_certificate(self, commit: Commit) -> None:
        for envelope in commit.votes:
            signer, opened = self.world.registry.open(envelope)
            if signer == self.name and isinstance(opened, Vote):
                check_record(self.journal.promise, opened, signer)
                self.world.chain.vote(signer, opened)
