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
    dealt: dict[PeerId, list[int]] = field(default_factory=dict)  # the chunks of each reducer
    results: dict[PeerId, tuple[Results, bytes]] = field(default_factory=dict)
    enough_at: Instant | None = None
    """Since when every chunk has results of enough replicas that agree: the others are not waited for much longer."""
    claims: dict[PeerId, set[PeerId]] = field(default_factory=dict)
    """Which senders' rows have not come, by each reducer's word; none: it can't combine what it has."""
    _tally: dict[int, dict[tuple[bytes, float], int]] = field(default_factory=dict)
    _agreed: set[int] = field(default_factory=set)
    proposal: Proposal | None = None
    body: Body | None = None
    body_hash: bytes = b""
    propose_envelope: bytes = b""
    votes: dict[PeerId, tuple[Vote, bytes]] = field(default_factory=dict)
    refused: dict[PeerId, str] = field(default_factory=dict)

    @property
    def reducers(self) -> tuple[PeerId, ...]:
        """Who has been dealt chunks."""
        return tuple(sorted(self.dealt))

    def members(self) -> tuple[PeerId, ...]:
        return tuple(member.peer for member in self.plan.members) if self.plan else ()

    def take(self, peer: PeerId, results: Results, envelope: bytes) -> None:
        """Keep a reducer's first word, and count whose words are the same for each chunk."""
        if peer in self.results:
            return
        self.results[peer] = results, envelope
        if [result.chunk for result in results.results] != self.dealt.get(peer):
            return  # a fault, which is looked into before anything is proposed
        for result in results.results:
            said = self._tally.setdefault(result.chunk, {})
            key = (result.hash, result.norm_sq)
            said[key] = said.get(key, 0) + 1
            if said[key] == min(self.enough, len(self.lines[result.chunk])):
                self._agreed.add(result.chunk)

    @property
    def enough(self) -> int:
        """So many replicas that say the same need no more to say it: one of them is honest."""
        return min(self.plan.f + 1, self.plan.replicas) if self.plan else 1

    def is_covered(self) -> bool:
        """Whether every chunk has a result."""
        return len(self._tally) == len(self.lines)

    def is_agreed(self) -> bool:
        """Whether every chunk has enough results that are the same."""
        return len(self._agreed) == len(self.lines)

    def is_stuck(self, out: Collection[PeerId]) -> bool:
        """Whether a chunk has nobody left who has reduced it or will."""
        left = {chunk for peer, chunks in self.dealt.items() if peer not in out for chunk in chunks}
        return len(left) < len(self.lines)

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
    applied = policy.planned_rule(spec, len(senders))
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
        rule=applied.rule,
        f=applied.f,
        fallback=applied.fallback,
        degraded=applied.degraded,
        codec=spec.codec.name,
        fragment=Range(0, spec.model.n_values),
        tau=0,
        privatise="identity",
        replicas=policy.replicas(spec, applied.f, len(senders), len(reducers)),
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
        attempt.dealt = proposing.chunks_of(attempt.lines, replicas)
