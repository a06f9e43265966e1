"""A leader's process: `Rounds` with the part of a driver, a journal that survives it, and lines to members."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coordinator.rounds.events import (
    Close,
    Committed,
    Connected,
    DigestKnown,
    Disconnected,
    Effect,
    Ended,
    Event,
    Heard,
    Opened,
    Persist,
    Probe,
    Reached,
    Say,
    Tell,
    Woke,
)
from coordinator.rounds.machine import Rounds
from protos.messages import (
    AttemptFailed,
    Body,
    Commit,
    Commitment,
    Goodbye,
    Heartbeat,
    Hello,
    Leave,
    Missing,
    PeerId,
    Plan,
    Prepare,
    Promise,
    Proposal,
    Propose,
    Record,
    Refusal,
    Results,
    Signed,
    StateDigest,
    Vote,
    Welcome,
)
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
    proposals: list[Proposal] = field(default_factory=list)
    failed: list[AttemptFailed] = field(default_factory=list)


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
        opened = [entry for entry in self.journal.opened if entry.round == ledger.round + 1]
        epoch = max([ledger.epoch, *(entry.epoch for entry in opened)])
        promise = self.journal.promise
        proposal = promise.proposal if promise is not None else None
        self.rounds = self.world.rounds_type(
            self.name,
            self.world.spec,
            ledger,
            commit,
            self.sealer,
            now=self.now(),
            coordinator=self.world.coordinator,
            opened=max((entry.attempt for entry in opened if entry.epoch == epoch), default=-1),
            epoch=epoch,
            voter=self.world.voter_type(self.name, promise),
            voter_body=self.world.registry.decode(Body, proposal.body) if proposal is not None else None,
            relay=self.world.options.relay,
        )
        self.decide(Woke())

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

    def learn(self, head: bytes) -> None:
        """Follow a chain that is ahead of this leader's own, as one does at the start."""
        ledger = self.world.chain.ledgers.get(head)
        if ledger is None or not self.world.options.learns or ledger.round <= self.rounds.ledger.round:
            return
        commit = next(commit for commit, _, hash_ in self.world.chain.commits if hash_ == head)
        self.journal.commits.append((commit, head))
        self.crash()
        self.start()

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
        incarnation = self.incarnation
        if hello.holds_state:
            self.learn(hello.head)
        if self.incarnation == incarnation and self.alive:
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
                incarnation = self.incarnation
                self.learn(message.head)
                if self.incarnation == incarnation:
                    self.decide(Heard(peer, message, b""))
            case Missing() | Refusal():
                self.decide(Heard(peer, message, b""))
            case StateDigest(hash_, _, digest):
                self.decide(DigestKnown(hash_, digest))
            case _:
                raise Violated(f"{peer} says {message} to a leader")

    def _heard_signed(self, peer: PeerId, opened: object, envelope: bytes) -> None:
        body: Body | None = None
        if isinstance(opened, Promise | Leave) and opened.proposal is not None:
            body = self.world.registry.decode(Body, opened.proposal.body)
        if not isinstance(opened, Commitment | Results | Vote | Promise | Leave):
            raise Violated(f"{peer} signs {opened} for a leader")
        self.decide(Heard(peer, opened, envelope, body))

    # -- effects ----------------------------------------------------------------------------------------------

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Persist(entry):
                self._persist(entry)
            case Committed(commit, body, hash_, failed):
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
            case Ended(reason):
                self.ended = reason
            case Say(text):
                self.said.append(text)
                self.world.trace("said", self.name, text)

    def _probed(self, peer: PeerId) -> None:
        member = self.world.members.get(peer)
        here = member is not None and member.alive and not self.world.network.parted(peer, self.name)
        self.decide(Reached(peer, here and member is not None and member.reachable))

    def _persist(self, entry: Opened | Promise | Proposal) -> None:
        match entry:
            case Opened():
                if entry in self.journal.opened:
                    raise Violated(f"{self.name} opens attempt {entry.attempt} of round {entry.round} again")
                self.journal.opened.append(entry)
            case Promise():
                self.journal.promise = entry
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
        elif not isinstance(message, Welcome | Goodbye | AttemptFailed) and type(message).__name__ != "Records":
            raise Violated(f"{self.name} tells {message}")

    def _check_certificate(self, commit: Commit) -> None:
        for envelope in commit.votes:
            signer, opened = self.world.registry.open(envelope)
            if signer == self.name and isinstance(opened, Vote):
                check_record(self.journal.promise, opened, signer)
                self.world.chain.vote(signer, opened)
