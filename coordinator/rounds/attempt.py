"""One attempt to commit a round, as its leader keeps it: what has been signed so far, and by whom."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from coordinator.rounds import policy, proposing, redealing
from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.moves import Moves, Word
from coordinator.rounds.proposing import Evidence
from coordinator.rounds.redealing import Lines
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
    Redeal,
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
    lines: Lines = ()
    included: tuple[PeerId, ...] = ()
    """Who is dealt in, without those that the exchange has lost since."""
    reducing: Lines = ()
    """Who reduces each chunk now."""
    dealt: dict[PeerId, list[int]] = field(default_factory=dict)  # the chunks of each reducer now
    moves: Moves = field(default_factory=Moves)
    redeal: Redeal | None = None
    redeal_envelope: bytes = b""
    results: dict[PeerId, tuple[Results, bytes]] = field(default_factory=dict)
    """The reducers' words on the chunks and the set that are dealt now."""
    faults: dict[PeerId, str] = field(default_factory=dict)
    """What was wrong with what reducers reported."""
    enough_at: Instant | None = None
    """Since when every chunk has results of enough replicas that agree: the others are not waited for much longer."""
    _sets: list[bytes] = field(default_factory=list)  # names of the included sets, newest last
    _ever_dealt: dict[PeerId, set[int]] = field(default_factory=dict)
    _tally: dict[int, dict[Word, set[PeerId]]] = field(default_factory=dict)
    _agreed: set[int] = field(default_factory=set)
    _disputed: set[int] = field(default_factory=set)
    proposal: Proposal | None = None
    body: Body | None = None
    body_hash: bytes = b""
    propose_envelope: bytes = b""
    votes: dict[PeerId, tuple[Vote, bytes]] = field(default_factory=dict)
    refused: dict[PeerId, str] = field(default_factory=dict)
    rejected: set[PeerId] = field(default_factory=set)
    """Those of them whom no higher number keeps from a vote: they won't have the proposal."""
    bound: dict[PeerId, int] = field(default_factory=dict)
    """The higher numbers that keep voters from promising this one, as they say."""

    @property
    def reducers(self) -> tuple[PeerId, ...]:
        """Who has been dealt chunks."""
        return tuple(sorted(self.dealt))

    def members(self) -> tuple[PeerId, ...]:
        return tuple(member.peer for member in self.plan.members) if self.plan else ()

    def take(self, peer: PeerId, results: Results, envelope: bytes) -> str:
        """Keep a reducer's first word on what is dealt now; what is wrong with it, or an empty string.

        One on what was dealt before, by who has not heard of a change, counts for nothing and is no fault.
        """
        chunks = [result.chunk for result in results.results]
        if results.set_hash == self._sets[-1] and chunks == self.dealt.get(peer):
            if peer not in self.results:
                self.results[peer] = results, envelope
                self.moves.claims.pop(peer, None)
                self._count(peer, results)
            return ""
        if results.set_hash not in self._sets:
            return f"results of {peer} are for another set"
        if not set(chunks) <= self._ever_dealt.get(peer, set()):
            return f"results of {peer} are not for the chunks dealt to it"
        return ""

    def _count(self, peer: PeerId, results: Results) -> None:
        for result in results.results:
            said = self._tally.setdefault(result.chunk, {})
            camp = said.setdefault((result.hash, result.norm_sq), set())
            camp.add(peer)
            if len(said) > 1:
                self._disputed.add(result.chunk)
            if len(camp) >= self.needed(result.chunk):
                self._agreed.add(result.chunk)

    def needed(self, chunk: int) -> int:
        """So many replicas of a chunk must say the same: one of them is honest, or there are no more of them."""
        return min(self.enough, len(self.reducing[chunk]))

    @property
    def enough(self) -> int:
        return redealing.enough(self.plan) if self.plan else 1

    def camps(self, chunk: int) -> list[tuple[Word, set[PeerId]]]:
        """Who says what of a chunk, the largest camp first."""
        return sorted(self._tally.get(chunk, {}).items(), key=lambda camp: (-len(camp[1]), camp[0]))

    def disputed(self) -> list[int]:
        """Chunks on which replicas differ."""
        return sorted(self._disputed)

    def is_settled(self, chunk: int) -> bool:
        """Whether a chunk has enough results that are the same."""
        return chunk in self._agreed

    def is_agreed(self) -> bool:
        """Whether every chunk has enough results that are the same."""
        return len(self._agreed) == len(self.lines)

    def deal_out(self) -> None:
        """Work out who reduces what of which set now; of the reducers' words those that are still on that stay."""
        if self.plan is None:
            return
        self.reducing = redealing.reducers_now(self.plan, self.lines, self.redeal)
        self.dealt = redealing.chunks_of(self.reducing)
        evidence = self.evidence()
        if evidence is None:
            return
        self.included = tuple(evidence.included())
        if (name := evidence.set_hash()) not in self._sets:
            self._sets.append(name)
        for peer, chunks in self.dealt.items():
            self._ever_dealt.setdefault(peer, set()).update(chunks)
        words, self.results = self.results, {}
        self._tally, self._agreed, self._disputed, self.enough_at = {}, set(), set(), None
        for peer, (results, envelope) in words.items():
            self.take(peer, results, envelope)

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
            self.redeal,
        )


def plan_for(
    ledger: Ledger,
    spec: RunSpec,
    *,
    attempt: int,
    leader: PeerId,
    senders: Mapping[PeerId, int],
    reducers: Mapping[PeerId, int],
    reserves: Collection[PeerId] = (),
) -> Plan:
    """The plan of an attempt; senders and reducers come with their records' sequence numbers.

    `reserves` are those of the reducers that reduce only what the others can't.
    """
    records = {**reducers, **senders}
    members = tuple(
        PlanMember(peer, records[peer], peer in reducers, peer in senders, peer in reserves) for peer in sorted(records)
    )
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
        members=members,
        rule=applied.rule,
        f=applied.f,
        fallback=applied.fallback,
        degraded=applied.degraded,
        codec=spec.codec.name,
        fragment=Range(0, spec.model.n_values),
        tau=0,
        privatise="identity",
        replicas=policy.replicas(spec, applied.f, len(senders), redealing.n_sharing(members)),
        commitment_s=spec.deadlines.commitment_s,
        exchange_s=spec.deadlines.exchange_s,
        vote_s=spec.deadlines.vote_s,
    )


def deal_for(attempt: Attempt, ledger: Ledger, spec: RunSpec, reducers: Collection[PeerId]) -> None:
    """Deal: the included set of the commitments that came, and who reduces; the attempt keeps what follows from it."""
    commitments = {peer: attempt.commitments[peer][0] for peer in sorted(attempt.commitments)}
    excluded = policy.excluded(commitments, ledger, spec)
    attempt.deal = Deal(
        plan=attempt.plan_hash,
        number=0,
        commitments=tuple(attempt.commitments[peer][1] for peer in commitments),
        excluded=tuple(Excluded(peer, excluded[peer]) for peer in sorted(excluded)),
        bandwidths=proposing.bandwidths(ledger, reducers),
    )
    evidence = attempt.evidence()
    if evidence is not None and evidence.dealt():
        attempt.lines = proposing.lines_of(evidence, spec)
        attempt.deal_out()
