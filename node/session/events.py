"""What a member's deciding code is told; what it asks for in turn is in `effects`.

The driver opens and verifies envelopes before an event is made. Work on bytes is an effect whose outcome comes back as
an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aggregation.exchange import ExchangeEvent
from coordinator.rounds.ledger import Ledger
from protos.messages import (
    Body,
    Commit,
    Commitment,
    Deal,
    Goodbye,
    Head,
    Inquiry,
    Leave,
    PeerId,
    Plan,
    Prepare,
    Propose,
    Range,
    Redeal,
    Results,
    Vote,
    Welcome,
)
from protos.orders import OpenedOrder
from protos.runspec import RunSpec

NOBODY = PeerId("")

# -- the leader's line --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LineUp:
    """The leader answered. `body`, `ledger` and `signed` are those of the head's commit that it names, opened.

    `ledger` has the body's hash, and its head and digest are the commit's.
    """

    welcome: Welcome
    body: Body
    ledger: Ledger
    signed: tuple[tuple[PeerId, Vote | Leave], ...]
    signed_head: HeadSigned | None = None
    orders: tuple[OpenedOrder, ...] = ()


@dataclass(frozen=True, slots=True)
class LineDown:
    reason: str
    leader: PeerId = NOBODY


@dataclass(frozen=True, slots=True)
class LeaderHeard:
    """A leader has said something on its line, if only that it is there."""

    leader: PeerId


@dataclass(frozen=True, slots=True)
class HeadSigned:
    """The coordinator's word on a head, verified; `envelope` is what is passed on."""

    head: Head
    envelope: bytes


@dataclass(frozen=True, slots=True)
class Led:
    """This node leads now in the coordinator's place, or has stopped."""

    leads: bool


@dataclass(frozen=True, slots=True)
class Planned:
    plan: Plan
    plan_hash: bytes
    envelope: bytes


@dataclass(frozen=True, slots=True)
class Dealt:
    deal: Deal
    envelope: bytes
    commitments: Mapping[PeerId, Commitment]  # opened and verified, by signer


@dataclass(frozen=True, slots=True)
class Redealt:
    """`leader` has signed it."""

    redeal: Redeal
    leader: PeerId


@dataclass(frozen=True, slots=True)
class Inquired:
    """The leader asks what of the rows of some senders, who are gone, is not here."""

    inquiry: Inquiry


@dataclass(frozen=True, slots=True)
class Proposed:
    """A Propose with all its envelopes opened. `plan`, `deal` are None for an empty round, `redeal` without one."""

    propose: Propose
    body: Body
    body_hash: bytes
    plan: Plan | None
    plan_hash: bytes
    deal: Deal | None
    commitments: Mapping[PeerId, Commitment]
    results: Mapping[PeerId, Results]
    redeal: Redeal | None = None
    orders: tuple[OpenedOrder, ...] = ()  # that the body carries


@dataclass(frozen=True, slots=True)
class Prepared:
    prepare: Prepare


@dataclass(frozen=True, slots=True)
class CommitHeard:
    """A commit; `signed` are its votes and leaves with valid signatures, not yet weighed."""

    commit: Commit
    body: Body
    commit_hash: bytes
    signed: tuple[tuple[PeerId, Vote | Leave], ...]
    leader: PeerId = NOBODY  # on whose line it came
    orders: tuple[OpenedOrder, ...] = ()  # that the body carries


@dataclass(frozen=True, slots=True)
class AttemptOver:
    epoch: int
    round: int
    attempt: int
    reason: str
    leader: PeerId = NOBODY


@dataclass(frozen=True, slots=True)
class SaidGoodbye:
    goodbye: Goodbye
    leader: PeerId = NOBODY


# -- the trainer --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainerUp:
    """The trainer process is ready to load. Its moments are those of a checkpoint of the round named; 0: none."""

    moments_round: int = 0
    tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainerDown:
    reason: str


@dataclass(frozen=True, slots=True)
class Progressed:
    round: int
    step: int
    tokens: int
    inner_loss: float
    tokens_per_s: float
    time_left_s: float


@dataclass(frozen=True, slots=True)
class Encoded:
    """The trainer stopped and encoded Δ. `root`, `norms` come from the agent's own hashing of the codes."""

    round: int
    steps: int
    tokens: int
    used: tuple[Range, ...]
    sum_lr: float
    inner_loss: float
    root: bytes
    norms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class EncodeFailed:
    round: int
    reason: str


# -- work of the agent --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DataReady:
    round: int


@dataclass(frozen=True, slots=True)
class StateFetched:
    """The full state after the ledger's head is on disk, verified against its digest."""

    ledger: Ledger


@dataclass(frozen=True, slots=True)
class StateFetchFailed:
    reason: str


@dataclass(frozen=True, slots=True)
class CommitsFetched:
    """Commits in their order, each naming the one before; their votes have valid signatures and are not weighed."""

    commits: tuple[CommitHeard, ...]


@dataclass(frozen=True, slots=True)
class CommitsFetchFailed:
    reason: str
    gone: bool
    """All who could have them have answered, and they have not: the state is needed."""


@dataclass(frozen=True, slots=True)
class Verified:
    """All results of a body are on disk, and a candidate of the next state stands beside the current one."""

    body_hash: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class VerifyFailed:
    body_hash: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Restored:
    """A state to go back to stands beside the current one, as what this body leads to; `ledger` is at its head."""

    body_hash: bytes
    ledger: Ledger


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    body_hash: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class SpecKnown:
    """A revision of the RunSpec, verified."""

    spec: RunSpec


@dataclass(frozen=True, slots=True)
class Applied:
    """The candidate is the state now."""

    commit_hash: bytes


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Something happened in the exchange of the attempt with this plan hash."""

    plan_hash: bytes
    event: ExchangeEvent


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """Stop. `keeps_seat`: without a word to the leader, to go on in the same seat when started again."""

    reason: str
    keeps_seat: bool = False


@dataclass(frozen=True, slots=True)
class PauseAsked:
    who: str  # "user", "battery", …: each reason is tracked on its own
    paused: bool


@dataclass(frozen=True, slots=True)
class Woke:
    pass


Event = (
    LineUp
    | LineDown
    | LeaderHeard
    | HeadSigned
    | Led
    | Planned
    | Dealt
    | Redealt
    | Inquired
    | Proposed
    | Prepared
    | CommitHeard
    | AttemptOver
    | SaidGoodbye
    | TrainerUp
    | TrainerDown
    | Progressed
    | Encoded
    | EncodeFailed
    | DataReady
    | StateFetched
    | StateFetchFailed
    | CommitsFetched
    | CommitsFetchFailed
    | Verified
    | VerifyFailed
    | Restored
    | RestoreFailed
    | SpecKnown
    | Applied
    | Exchanged
    | LeaveAsked
    | PauseAsked
    | Woke
)
