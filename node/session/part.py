"""A member's part in the round that runs now: its training, and its side of the leader's newest attempt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aggregation.codec import frame_bytes
from aggregation.exchange import Exchange
from coordinator.rounds import policy
from coordinator.rounds.events import Instant
from coordinator.rounds.proposing import Evidence
from node.session.events import Dealt, Encoded, Planned, Proposed
from protos.messages import Commitment, Deal, PeerId
from protos.runspec import RunSpec

Lines = tuple[tuple[PeerId, ...], ...]
"""Per chunk, the reducers in line."""


@dataclass(slots=True)
class Training:
    """The trainer's progress in one round. A trainer that died starts the round again from the anchor."""

    round: int
    loaded: bool = False
    data_ready: bool = False
    started: bool = False
    step: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    inner_loss: float = 0.0
    time_left_s: float = 0.0
    encoding: bool = False
    encoded: Encoded | None = None  # once a round: all its attempts use the same Δ

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

    @property
    def number(self) -> int:
        return self.planned.plan.attempt

    def is_sender(self, me: PeerId) -> bool:
        return any(member.peer == me and member.sender for member in self.planned.plan.members)

    def evidence(self, dealt: Dealt) -> Evidence:
        """What a deal shows before there are results."""
        return Evidence(self.planned.plan, self.planned.plan_hash, dealt.deal, dealt.commitments, {})


def exchange_for(me: PeerId, evidence: Evidence, lines: Lines, spec: RunSpec) -> Exchange:
    """The exchange of a deal: who sends and what weighs how much follows from the commitments, as do the lines."""
    included = evidence.included()
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
    return Evidence(proposed.plan, plan_hash, proposed.deal, proposed.commitments, proposed.results)
