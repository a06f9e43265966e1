"""One attempt to commit a round, as its leader keeps it: what has been signed so far, and by whom."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from coordinator.rounds import policy, proposing
from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.proposing import Evidence
from protos.messages import (
    Body,
    Commitment,
    Deal,
    Excluded,
    PeerId,
    Plan,
    PlanMember,
    Promise,
    Proposal,
    Range,
    Results,
    Vote,
)
from protos.runspec import RunSpec


class Phase(StrEnum):
    """Where the current round is. TRAIN is outside any attempt; the others are an attempt's, in this order."""

    TRAIN = "train"
    PREPARE = "prepare"  # waits for promises of this number
    COMMITMENT = "commitment"  # planned; waits for the senders' commitments
    EXCHANGE = "exchange"  # dealt; waits for the reducers' results
    VOTE = "vote"  # proposed; waits for a quorum
    ENDED = "ended"


@dataclass(slots=True)
class Attempt:
    """The current attempt. Fields fill in the order of the phases."""

    number: int
    deadline_at: Instant
    empty: str = ""
    """Why it is to make an empty round, if it is."""
    promises: dict[PeerId, Promise] = field(default_factory=dict)
    plan: Plan | None = None
    plan_hash: bytes = b""
    plan_envelope: bytes = b""
    losses: dict[PeerId, int] = field(default_factory=dict)
    """How often each sender had lost its progress when it was planned: once more, and its contribution is gone."""
    commitments: dict[PeerId, tuple[Commitment, bytes]] = field(default_factory=dict)
    declined: dict[PeerId, str] = field(default_factory=dict)
    """Members that can't do their part in the exchange, and why."""
    outbid: int = -1
    """The highest number that keeps a member from taking part in this attempt."""
    deal: Deal | None = None
    deal_envelope: bytes = b""
    lines: tuple[tuple[PeerId, ...], ...] = ()
    included: tuple[PeerId, ...] = ()
    reducers: tuple[PeerId, ...] = ()  # who has been dealt chunks
    results: dict[PeerId, tuple[Results, bytes]] = field(default_factory=dict)
    claims: dict[PeerId, set[PeerId]] = field(default_factory=dict)
    proposal: Proposal | None = None
    body: Body | None = None
    body_hash: bytes = b""
    propose_envelope: bytes = b""
    votes: dict[PeerId, tuple[Vote, bytes]] = field(default_factory=dict)
    refused: dict[PeerId, str] = field(default_factory=dict)

    def members(self) -> tuple[PeerId, ...]:
        return tuple(member.peer for member in self.plan.members) if self.plan else ()

    def evidence(self) -> Evidence | None:
        """What the exchange has left so far. `commitments` are those that the deal lists."""
        if self.plan is None or self.deal is None:
            return None
        return Evidence(
            self.plan,
            self.plan_hash,
            self.deal,
            {peer: commitment for peer, (commitment, _) in sorted(self.commitments.items())},
            {peer: results for peer, (results, _) in sorted(self.results.items())},
        )


def plan_for(
    ledger: Ledger,
    spec: RunSpec,
    *,
    attempt: int,
    leader: PeerId,
    senders: Mapping[PeerId, int],
    reducers: Mapping[PeerId, int],
) -> Plan:
    """The plan of an attempt; senders and reducers come with their records' sequence numbers."""
    records = {**reducers, **senders}
    applied = policy.applied_rule(spec, len(senders))
    return Plan(
        run=ledger.run,
        epoch=ledger.epoch,
        round=ledger.round + 1,
        attempt=attempt,
        leader=leader,
        previous=ledger.head,
        anchor_digest=ledger.digest,
        spec_revision=ledger.spec_revision,
        members=tuple(PlanMember(peer, records[peer], peer in reducers, peer in senders) for peer in sorted(records)),
        rule=applied.rule if applied else spec.rule.name,
        f=applied.f if applied else 0,
        fallback=applied.fallback if applied else "",
        degraded=applied.degraded if applied else "",
        codec=spec.codec.name,
        fragment=Range(0, spec.model.n_values),
        tau=0,
        privatise="identity",
        replicas=spec.rule.replicas,
        commitment_s=spec.deadlines.commitment_s,
        exchange_s=spec.deadlines.exchange_s,
        vote_s=spec.deadlines.vote_s,
    )


def deal_for(attempt: Attempt, ledger: Ledger, spec: RunSpec, reducers: Collection[PeerId]) -> None:
    """Deal: the included set of the commitments that came, and who reduces; the attempt keeps what follows from it."""
    commitments = {peer: attempt.commitments[peer][0] for peer in sorted(attempt.commitments)}
    excluded = policy.excluded(commitments, {seat.peer: seat for seat in ledger.seats}, spec)
    attempt.deal = Deal(
        plan=attempt.plan_hash,
        number=0,
        commitments=tuple(attempt.commitments[peer][1] for peer in commitments),
        excluded=tuple(Excluded(peer, excluded[peer]) for peer in sorted(excluded)),
        bandwidths=proposing.bandwidths(ledger, reducers),
    )
    included = {peer: commitment for peer, commitment in commitments.items() if peer not in excluded}
    attempt.included = tuple(included)
    if included:
        n_chunks = policy.grid(spec).n_chunks
        attempt.lines = policy.lines(attempt.plan_hash, included, attempt.deal.bandwidths, n_chunks)
        replicas = attempt.plan.replicas if attempt.plan else 1
        attempt.reducers = tuple(sorted({peer for line in attempt.lines for peer in line[:replicas]}))
