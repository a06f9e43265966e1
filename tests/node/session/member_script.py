"""A member's session spoken to by hand, and what a leader would say to it."""

from __future__ import annotations

from typing import Any, TypeVar

from coordinator.rounds import proposing
from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.proposing import Evidence
from coordinator.rounds.voter import Voter
from node.session import effects as fx
from node.session import events as ev
from node.session.machine import Session
from protos.hashes import body_hash, commit_hash
from protos.messages import (
    Body,
    Commit,
    MemberState,
    PeerId,
    Proposal,
    Propose,
    Signed,
    Vote,
    Welcome,
)
from tests.coordinator.rounds.cases import (
    COORDINATOR,
    NO_HASH,
    PEERS,
    REGISTRY,
    SPEC,
    beginning,
    body_of,
    empty_body,
    evidence_of,
    seated,
)
from tests.fakes.sealer import FakeSealer
from tests.sim.disk import digest_after

ME = PEERS[0]
LEDGER = seated(3)
T = TypeVar("T")


def events_of(evidence: Evidence) -> tuple[ev.Planned, ev.Dealt]:
    plan_envelope = REGISTRY.seal(COORDINATOR, evidence.plan)
    deal_envelope = REGISTRY.seal(COORDINATOR, evidence.deal)
    planned = ev.Planned(evidence.plan, evidence.plan_hash, plan_envelope)
    return planned, ev.Dealt(evidence.deal, deal_envelope, evidence.commitments)


def proposed(body: Body, evidence: Evidence | None, attempt: int = 0, leader: PeerId = COORDINATOR) -> ev.Proposed:
    proposal = Proposal(
        body=REGISTRY.encode(body),
        plan=REGISTRY.seal(COORDINATOR, evidence.plan) if evidence else b"",
        deal=REGISTRY.seal(COORDINATOR, evidence.deal) if evidence else b"",
        results=(),
        result_hashes=proposing.result_hashes(evidence, SPEC) if evidence else (),
    )
    ask = Propose(body.epoch, body.round, attempt, leader, 10.0, proposal, (PEERS[1], PEERS[2]))
    hash_ = body_hash(proposal.body)
    if evidence is None:
        return ev.Proposed(ask, body, hash_, None, b"", None, {}, {})
    return ev.Proposed(
        ask, body, hash_, evidence.plan, evidence.plan_hash, evidence.deal, evidence.commitments, evidence.results
    )


def committed(
    body: Body, ledger: Ledger, *, voters: tuple[PeerId, ...] = (PEERS[1], PEERS[2]), digest: bytes = b""
) -> ev.CommitHeard:
    raw = REGISTRY.encode(body)
    hash_ = body_hash(raw)
    digest = digest or digest_after(hash_, body, ledger.digest)
    votes = [(peer, Vote(body.epoch, body.round, 0, COORDINATOR, hash_, digest)) for peer in voters]
    commit = Commit(raw, digest, 0, tuple(REGISTRY.seal(peer, vote) for peer, vote in votes), (NO_HASH,) * 3)
    return ev.CommitHeard(commit, body, commit_hash(raw, digest), tuple(votes))


class Script:
    """A member, spoken to by hand."""

    def __init__(
        self, ledger: Ledger | None = LEDGER, *, me: PeerId = ME, voter: Voter | None = None, **more: Any
    ) -> None:
        self.me = me
        self.at = 0.0
        self.spec = more.pop("spec", SPEC)
        self.session = Session(
            me, self.spec, FakeSealer(REGISTRY, me), coordinator=COORDINATOR, voter=voter or Voter(me, None),
            ledger=ledger, now=Instant(0.0), **more,
        )  # fmt: skip
        self.did: list[fx.Effect] = []
        self.now_did: list[fx.Effect] = []

    def handle(self, event: ev.Event) -> list[fx.Effect]:
        self.now_did = self.session.handle(event, Instant(self.at))
        self.did += self.now_did
        wake = self.session.next_wake(Instant(self.at))
        assert wake > self.at if isinstance(event, ev.Woke) else wake >= self.at
        return self.now_did

    def wait(self, seconds: float) -> list[fx.Effect]:
        end, did = self.at + seconds, list[fx.Effect]()
        while (wake := self.session.next_wake(Instant(self.at))) <= end:
            self.at = wake
            did += self.handle(ev.Woke())
        self.at = end
        return did

    def leaders_fall_silent(self) -> None:
        """So long that a stand-in's numbers are heeded."""
        self.wait(2 * self.spec.deadlines.stand_in_s)

    def effects(self, kind: type[T], did: list[fx.Effect] | None = None) -> list[T]:
        return [effect for effect in (self.now_did if did is None else did) if isinstance(effect, kind)]

    def told(self, kind: type[T], did: list[fx.Effect] | None = None) -> list[T]:
        """What the leader was told of a kind."""
        found: list[T] = []
        for effect in self.effects(fx.TellLeader, did):
            message: object = effect.message
            if isinstance(message, Signed):
                signer, message = REGISTRY.open(message.envelope)
                assert signer == self.me
            if isinstance(message, kind):
                found.append(message)
        return found

    def state(self) -> MemberState:
        return self.session.state()

    # -- whole steps ------------------------------------------------------------------------------------------

    def line_up(self, ledger: Ledger | None = None, body: Body | None = None) -> list[fx.Effect]:
        """The leader's head is that of a ledger; the commit is made up where nobody looks at it."""
        ledger = ledger or LEDGER
        body = body or empty_body(beginning(), PEERS[:3])
        commit = Commit(REGISTRY.encode(body), ledger.digest, 0, (), ())
        welcome = Welcome(COORDINATOR, commit, ledger.to_bytes(), (), 0.0, 1.0)
        return self.handle(ev.LineUp(welcome, body, ledger, ()))

    def train(self, steps: int = 4) -> None:
        """Online, and so many steps into the round."""
        self.handle(ev.TrainerUp())
        self.line_up()
        self.handle(ev.DataReady(2))
        if steps:
            self.handle(ev.Progressed(2, steps, 8 * steps, 1.0, 8.0, 0.0))

    def encode(self, evidence: Evidence) -> None:
        """The trainer's answer, as the evidence has it committed to."""
        mine = evidence.commitments[self.me]
        self.handle(
            ev.Encoded(2, mine.steps, mine.tokens, mine.used, mine.sum_lr, mine.inner_loss, mine.root, mine.norms)
        )  # fmt: skip

    def commit(self, evidence: Evidence) -> None:
        """Planned, encoded and committed to."""
        self.handle(events_of(evidence)[0])
        self.encode(evidence)

    def verify(self, event: ev.Proposed | ev.CommitHeard) -> bytes:
        """The driver's answer to a Verify."""
        assert self.session.ledger is not None
        hash_ = event.body_hash if isinstance(event, ev.Proposed) else body_hash(event.commit.body)
        digest = digest_after(hash_, event.body, self.session.ledger.digest)
        self.handle(ev.Verified(hash_, digest))
        return digest


EVIDENCE = evidence_of(LEDGER, 3)
BODY = body_of(LEDGER, EVIDENCE)


def follow(script: Script, heard: ev.CommitHeard) -> None:
    """A commit as the driver and the leader bring it about."""
    script.handle(heard)
    if script.effects(fx.Verify):
        script.verify(heard)
    script.handle(ev.Applied(heard.commit_hash))
