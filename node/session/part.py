"""A member's part in the round that runs now: its training, and its side of the leader's newest attempt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aggregation.codec import frame_bytes
from aggregation.exchange import Combined, Exchange
from aggregation.exchange import Redealt as Changed
from coordinator.rounds import leases, policy
from coordinator.rounds.events import Instant
from coordinator.rounds.proposing import Evidence, result_norms
from coordinator.rounds.redealing import Lines, reducers_now
from node.session.effects import Verify
from node.session.events import Dealt, Encoded, Planned, Proposed, Redealt
from protos.messages import Commitment, Deal, PeerId, Range
from protos.runspec import RunSpec

COMBINED_KEPT = 4
"""Attempts of a round of which is kept what was combined in them: the proposal of an earlier one may come again."""

RANGES_SHOWN = 3


@dataclass(slots=True)
class Training:
    """The trainer's progress in one round. A trainer that died starts the round again from the anchor."""

    round: int
    anchor: bytes = b""  # digest of the state that it starts from
    revision: int = 1  # of the RunSpec that it is under
    ranges: tuple[Range, ...] = ()
    batch_scale: int = 1
    steps: int = 0  # that its seat asks for, since the anchor
    loaded: bool = False
    data_asked: bool = False
    data_ready: bool = False
    started: bool = False
    step: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    inner_loss: float = 0.0
    time_left_s: float = 0.0
    encoding: bool = False
    encoded: Encoded | None = None  # once a round: all its attempts use the same Δ

    def goes_on_in(self, other: Training) -> bool:
        """Whether what was trained is kept in the next round, which its seat and its anchor are the same in.

        The lease may have grown, and all attempts of that round use a Δ of its own.
        """
        same = (self.anchor, self.revision, self.batch_scale) == (other.anchor, other.revision, other.batch_scale)
        if not (self.loaded and same and leases.begins_with(other.ranges, self.ranges)):
            return False
        other.loaded, other.step, other.tokens = True, self.step, self.tokens
        other.inner_loss, other.tokens_per_s = self.inner_loss, self.tokens_per_s
        return True

    def waiting_for(self) -> str:
        """Until it has started."""
        if self.data_ready:
            return "the trainer"
        spans = ", ".join(f"{span.start} to {span.start + span.count - 1}" for span in self.ranges[:RANGES_SHOWN])
        return f"training data: batches {spans}{', …' if len(self.ranges) > RANGES_SHOWN else ''}"

    def lost(self) -> None:
        """The trainer is gone. What was encoded is on file and still holds, and so do its steps."""
        self.loaded = self.started = self.encoding = False
        if self.encoded is None:
            self.step = self.tokens = 0


@dataclass(slots=True)
class Part:
    """This member's side of one attempt."""

    planned: Planned
    began_at: Instant
    dealt: Dealt | None = None
    exchange: Exchange | None = None
    exchange_ends_at: Instant | None = None
    lines: Lines = ()
    set_hash: bytes = b""
    """The name of the included set, once it is dealt."""
    redealt: Redealt | None = None
    """The newest redeal, which may have come before the deal."""
    n_shrinks: int = 0
    stalls_at: Instant | None = None
    """Until then nobody can have stalled: something new has just been dealt."""

    @property
    def number(self) -> int:
        return self.planned.plan.attempt

    def is_sender(self, me: PeerId) -> bool:
        return any(member.peer == me and member.sender for member in self.planned.plan.members)

    def waiting_for(self) -> str:
        """Whom the exchange waits for and for how long at most, for people."""
        redealt, whom = self.redealt, self.exchange.waiting_for() if self.exchange is not None else ""
        limit_s = redealt.redeal.exchange_s if redealt is not None else self.planned.plan.exchange_s
        return f"{whom}, {limit_s:g} s at most" if whom else "the leader's proposal"

    def evidence(self, dealt: Dealt, redealt: Redealt | None = None) -> Evidence:
        """What a deal and the redeals after it show before there are results."""
        redeal = redealt.redeal if redealt is not None else None
        return Evidence(self.planned.plan, self.planned.plan_hash, dealt.deal, dealt.commitments, {}, redeal)


class CombinedHere:
    """What this member has combined in a round: against it goes what is said to come of the very same rows."""

    def __init__(self) -> None:
        self._by_set: dict[bytes, dict[int, Combined]] = {}  # newest last

    def note(self, set_hash: bytes, combined: Combined) -> None:
        self._by_set.setdefault(set_hash, {})[combined.chunk] = combined
        while len(self._by_set) > COMBINED_KEPT:
            del self._by_set[next(iter(self._by_set))]

    def faults(self, evidence: Evidence | None) -> list[str]:
        """The first result that is not the one of the same rows here, or nothing."""
        mine = self._by_set.get(evidence.set_hash(), {}) if evidence is not None and self._by_set else {}
        for peer, results in sorted(evidence.results.items() if evidence is not None and mine else ()):
            for result in results.results:
                own = mine.get(result.chunk)
                if own is not None and (own.hash, own.norm_sq) != (result.hash, result.norm_sq):
                    return [f"the result of chunk {result.chunk} by {peer} is not what its rows give here"]
        return []


def redealt_for(evidence: Evidence, lines: Lines, spec: RunSpec) -> Changed:
    """What the redeal of the evidence changes in the exchange of its deal."""
    redeal = evidence.redeal
    if redeal is None:
        raise ValueError("there was no redeal")
    weights = {str(peer): weight for peer, weight in policy.weights(evidence.included(), spec).items()}
    reducers = reducers_now(evidence.plan, lines, redeal)
    return Changed(redeal.number, evidence.set_number, weights, reducers)


def exchange_for(me: PeerId, evidence: Evidence, lines: Lines, spec: RunSpec) -> Exchange:
    """The exchange of a deal: who sends and what weighs how much follows from the commitments, as do the lines."""
    included = evidence.dealt()
    weights = policy.weights(included, spec)
    codec, grid = spec.codec, policy.grid(spec)
    return Exchange(
        str(me),
        evidence.plan_hash,
        evidence.deal.number,
        {str(peer): commitment.root for peer, commitment in included.items()},
        {str(peer): weight for peer, weight in weights.items()},
        lines,
        [frame_bytes(codec.name, grid.size(chunk), codec.block) for chunk in range(grid.n_chunks)],
        evidence.plan.replicas,
    )


def included_of(deal: Deal, commitments: Mapping[PeerId, Commitment]) -> Mapping[PeerId, Commitment]:
    """The commitments that count: all of the deal's but the excluded ones."""
    out = {entry.peer for entry in deal.excluded}
    return {peer: commitments[peer] for peer in sorted(commitments) if peer not in out}


def evidence_of(proposed: Proposed, plan_hash: bytes) -> Evidence | None:
    """What a proposal shows, or None for an empty round."""
    if proposed.plan is None or proposed.deal is None:
        return None
    return Evidence(proposed.plan, plan_hash, proposed.deal, proposed.commitments, proposed.results, proposed.redeal)


def verify_of(proposed: Proposed, evidence: Evidence | None, lines: Lines, spec: RunSpec) -> Verify:
    """What a vote on a proposal takes. `lines` are its reducers; asked first are those whose signed result it is, for
    others may never have combined it."""
    norms: tuple[float, ...] = ()
    if evidence is not None:
        norms, reducers = result_norms(evidence, spec), reducers_now(evidence.plan, lines, evidence.redeal)
        lines = tuple(
            (*sorted(first, key=lambda peer: peer not in evidence.results), *(p for p in line if p not in first))
            for line, first in zip(lines, reducers, strict=True)
        )
    proposal, holders = proposed.propose.proposal, proposed.propose.holders
    return Verify(proposed.body, proposed.body_hash, proposal.result_hashes, lines, holders, proposed.plan_hash, norms)
