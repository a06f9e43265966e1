"""A leader's machine spoken to by hand, and the phases it is brought to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from coordinator.rounds.attempt import Phase
from coordinator.rounds.events import (
    Connected,
    Effect,
    Event,
    Heard,
    Instant,
    Reached,
    Tell,
    Woke,
)
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.machine import Rounds
from coordinator.rounds.voter import Voter
from protos.hashes import body_hash, plan_hash
from protos.messages import (
    Body,
    Commit,
    Commitment,
    Heartbeat,
    Hello,
    Leave,
    MemberState,
    PeerId,
    Plan,
    Prepare,
    Promise,
    Proposal,
    Propose,
    Record,
    Results,
    Signed,
    Vote,
)
from protos.runspec import RunSpec
from tests.coordinator.rounds.cases import (
    COORDINATOR,
    NO_HASH,
    PEERS,
    SPEC,
    commitment,
    results_of,
    seated,
)
from tests.fakes.evidence import carried_evidence
from tests.fakes.sealer import FakeSealer, Registry

OBSERVER = PEERS[30]
T = TypeVar("T")
DIGEST = bytes([7]) * 32


class Script:
    """A leader, spoken to by hand. Everything it does is in `did`, the last event's part in `now_did`."""

    def __init__(
        self,
        ledger: Ledger,
        spec: RunSpec = SPEC,
        *,
        me: PeerId = COORDINATOR,
        registry: Registry | None = None,
        **more: Any,
    ) -> None:
        self.registry = registry or Registry()
        self.spec, self.me = spec, me
        self.at = 0.0
        commit = Commit(b"body", ledger.digest, 0, (), ())
        voter = more.pop("voter", None) or Voter(me, None)
        self.rounds = Rounds(
            me, spec, ledger, commit, FakeSealer(self.registry, me), now=Instant(0.0), coordinator=COORDINATOR,
            voter=voter, relay=more.pop("relay", False), **more,
        )  # fmt: skip
        self.did: list[Effect] = []
        self.now_did: list[Effect] = []

    # -- saying -----------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Effect]:
        self.now_did = self.rounds.handle(event, Instant(self.at))
        self.rounds.check()
        wake = self.rounds.next_wake(Instant(self.at))
        assert wake is None or wake > self.at
        self.did += self.now_did
        return self.now_did

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass as a driver does: woken at each instant that the machine names. All that it did meanwhile."""
        end, did = self.at + seconds, list[Effect]()
        while (wake := self.rounds.next_wake(Instant(self.at))) is not None and wake <= end:
            self.at = wake
            did += self.handle(Woke())
        self.at = end
        return did

    def connect(self, *peers: PeerId, holds: bool = True, grpc: tuple[str, ...] = ("here:1",)) -> None:
        head = self.rounds.ledger.head
        for peer in peers:
            hello = Hello(1, peer.encode(), 0, 0, head, NO_HASH, holds, peer == OBSERVER, "", 0)
            self.handle(Connected(peer, hello, Record(peer, 1, grpc, (), 0, 0, NO_HASH)))
            if grpc:
                self.handle(Reached(peer, True))

    def beat(self, peer: PeerId, state: MemberState, step: int = 0, **changes: Any) -> list[Effect]:
        ledger = self.rounds.ledger
        heartbeat = Heartbeat(
            0, changes.pop("round", ledger.round + 1), changes.pop("head", ledger.head), NO_HASH, state, step, 0, 1.0,
            1.0, 0.0, 0, 0,
        )  # fmt: skip
        return self.handle(Heard(peer, replace(heartbeat, **changes), b""))

    def ready(self, *peers: PeerId) -> None:
        for peer in peers:
            self.beat(peer, MemberState.READY, self.spec.work.h)

    def keep_alive(self, *peers: PeerId) -> None:
        """Heartbeats that change nothing."""
        for peer in peers:
            member = self.rounds.members.get(peer)
            assert member is not None
            self.beat(peer, member.state, member.step)

    def say(self, peer: PeerId, message: Any) -> list[Effect]:
        signed = isinstance(message, Commitment | Results | Vote | Promise | Leave)
        body, evidence, fault = None, None, ""
        if isinstance(message, Promise | Leave) and message.proposal is not None:
            body = self.registry.decode(Body, message.proposal.body)
            evidence, fault = carried_evidence(self.registry, message.proposal, body)
        envelope = self.registry.seal(peer, message) if signed else b""
        return self.handle(Heard(peer, message, envelope, body, evidence=evidence, fault=fault))

    # -- hearing ----------------------------------------------------------------------------------------------

    def told(self, kind: type[T], did: list[Effect] | None = None) -> list[tuple[tuple[PeerId, ...], T]]:
        """Messages of a kind among what was done, with whom they were for."""
        found: list[tuple[tuple[PeerId, ...], T]] = []
        for effect in self.now_did if did is None else did:
            if isinstance(effect, Tell):
                message: object = effect.message
                if isinstance(message, Signed):
                    _, message = self.registry.open(message.envelope)
                if isinstance(message, kind):
                    found.append((effect.peers, message))
        return found

    def last(self, kind: type[T]) -> T:
        return self.told(kind, self.did)[-1][1]

    def effects(self, kind: type[T], did: list[Effect] | None = None) -> list[T]:
        return [effect for effect in (self.now_did if did is None else did) if isinstance(effect, kind)]

    def phase(self) -> Phase:
        return self.rounds.phase

    @property
    def waiting_for(self) -> str:
        return self.rounds.view(Instant(self.at)).waiting_for

    # -- whole steps ------------------------------------------------------------------------------------------

    def commit_to_plan(self, *peers: PeerId, **changes: Any) -> None:
        plan = self.last(Plan)
        hash_ = plan_hash(self.registry.encode(plan))
        for peer in peers:
            self.say(peer, commitment(self.rounds.ledger, peer, hash_, self.spec, **changes))

    def results(self) -> dict[PeerId, Results]:
        """What the reducers of the current attempt would report."""
        attempt = self.rounds._attempt
        assert attempt is not None
        evidence = attempt.evidence()
        assert evidence is not None
        return results_of(evidence, self.spec)

    def reduce(self) -> None:
        for peer, results in self.results().items():
            self.say(peer, results)

    def vote(self, *peers: PeerId, digest: bytes = DIGEST) -> None:
        propose = self.last(Propose)
        hash_ = body_hash(propose.proposal.body)
        for peer in peers:
            self.say(peer, Vote(propose.epoch, propose.round, propose.attempt, propose.leader, hash_, digest))

    def promise(self, peer: PeerId, voted: int = -1, proposal: Proposal | None = None) -> None:
        asked = self.last(Prepare)
        self.say(
            peer,
            Promise(
                asked.epoch, asked.round, asked.attempt, asked.leader, self.rounds.ledger.head, voted, proposal
            ),
        )  # fmt: skip


def training(n: int, spec: RunSpec = SPEC, *, observer: bool = True, **more: Any) -> Script:
    """Round 2: n members have seats and are here."""
    script = Script(seated(n, spec), spec, **more)
    script.connect(*PEERS[:n], *([OBSERVER] if observer else []))
    for peer in PEERS[:n]:
        script.beat(peer, MemberState.TRAINING, 1)
    return script


def exchanging(n: int, **more: Any) -> Script:
    script = training(n, **more)
    script.ready(*PEERS[:n])
    script.commit_to_plan(*PEERS[:n])
    assert script.phase() is Phase.EXCHANGE
    return script


def voting(n: int, **more: Any) -> Script:
    script = exchanging(n, **more)
    script.reduce()
    assert script.phase() is Phase.VOTE
    return script


def leave(script: Script, attempt: int = -1, leader: PeerId = COORDINATOR, **changes: Any) -> Leave:
    ledger = script.rounds.ledger
    return replace(Leave(0, ledger.round + 1, attempt, leader, ledger.head, -1, None), **changes)
