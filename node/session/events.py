"""What a member's deciding code is told, and what it asks for.

The driver opens and verifies envelopes before an event is made. Effects are carried out in order; `Persist` is on disk
(fsync) before any effect after it leaves the process. Work on bytes is an effect whose outcome comes back as an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aggregation.exchange import ExchangeEffect, ExchangeEvent
from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger
from protos.messages import (
    Body,
    Commit,
    Commitment,
    Deal,
    ExchangeReport,
    Goodbye,
    Heartbeat,
    Leave,
    Missing,
    PeerId,
    Plan,
    Prepare,
    Promise,
    Propose,
    Range,
    Refusal,
    Results,
    Signed,
    StateDigest,
    Vote,
    Welcome,
)

# -- events: the leader's line -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LineUp:
    """The leader answered. `body`, `ledger` and `signed` are those of the head's commit that it names, opened.

    `ledger` has the body's hash, and its head and digest are the commit's.
    """

    welcome: Welcome
    body: Body
    ledger: Ledger
    signed: tuple[tuple[PeerId, Vote | Leave], ...]


@dataclass(frozen=True, slots=True)
class LineDown:
    reason: str


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
class Proposed:
    """A Propose with all its envelopes opened. `plan`, `deal` are None for an empty round."""

    propose: Propose
    body: Body
    body_hash: bytes
    plan: Plan | None
    plan_hash: bytes
    deal: Deal | None
    commitments: Mapping[PeerId, Commitment]
    results: Mapping[PeerId, Results]


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


@dataclass(frozen=True, slots=True)
class AttemptOver:
    epoch: int
    round: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class SaidGoodbye:
    goodbye: Goodbye


# -- events: the trainer -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainerUp:
    """The trainer process is ready to load; its moments are empty."""


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


# -- events: work of the agent -----------------------------------------------------------------------------------


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
class Verified:
    """All results of a body are on disk, and a candidate of the next state stands beside the current one."""

    body_hash: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class VerifyFailed:
    body_hash: bytes
    reason: str


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
    reason: str


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
    | Planned
    | Dealt
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
    | Verified
    | VerifyFailed
    | Applied
    | Exchanged
    | LeaveAsked
    | PauseAsked
    | Woke
)

# -- effects -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TellLeader:
    """Send on the line; dropped if it is down (what must arrive is said again after LineUp)."""

    message: Signed | Heartbeat | Missing | Refusal | ExchangeReport | StateDigest


@dataclass(frozen=True, slots=True)
class Persist:
    """The voter's record, before anything after it is sent. A Leave is a last promise."""

    entry: Promise | Leave


@dataclass(frozen=True, slots=True)
class FetchState:
    """Fetch the full state after `commit` or a newer one from donors; StateFetched or StateFetchFailed follows."""

    commit: Commit
    body: Body


@dataclass(frozen=True, slots=True)
class FetchData:
    """Have the pieces of these batches on disk; DataReady follows (the driver retries, and says what it waits for)."""

    round: int
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class LoadAnchor:
    """The trainer takes θ of the held state. `nominal_step` is the schedule's clock at the round's start."""

    round: int
    nominal_step: int
    fresh_moments: bool


@dataclass(frozen=True, slots=True)
class StartTraining:
    round: int
    ranges: tuple[Range, ...]
    h: int


@dataclass(frozen=True, slots=True)
class PauseTraining:
    paused: bool


@dataclass(frozen=True, slots=True)
class Encode:
    """Stop after the current step and encode Δ; hash it; Encoded or EncodeFailed follows."""

    round: int


@dataclass(frozen=True, slots=True)
class BeginExchange:
    """Accept and send chunks of this attempt. The driver makes the work area for received rows."""

    plan: Plan
    plan_hash: bytes
    deal: Deal
    deal_envelope: bytes
    commitments: Mapping[PeerId, Commitment]


@dataclass(frozen=True, slots=True)
class InExchange:
    """An effect of the running exchange."""

    plan_hash: bytes
    effect: ExchangeEffect


@dataclass(frozen=True, slots=True)
class EndExchange:
    """Stop its streams and drop received rows; results stay to be served."""

    plan_hash: bytes


@dataclass(frozen=True, slots=True)
class Verify:
    """Fetch all results of the body (reducers first, then holders), step a candidate, and give its digest."""

    body: Body
    body_hash: bytes
    result_hashes: tuple[bytes, ...]
    reducers: tuple[tuple[PeerId, ...], ...]  # per chunk, whose result it is, then the others in line
    holders: tuple[PeerId, ...]
    plan_hash: bytes = b""  # of the attempt whose results they are, where it is known
    norms: tuple[float, ...] = ()
    """Per chunk the ‖·‖² that its reducers signed, which a vote vouches for; empty where a quorum has voted already."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Switch to the verified candidate (one rename), keep commit and ledger beside it; Applied follows."""

    commit: Commit
    body: Body
    commit_hash: bytes
    ledger: Ledger


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the process: exit code and the last line."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Say:
    text: str


Effect = (
    TellLeader
    | Persist
    | FetchState
    | FetchData
    | LoadAnchor
    | StartTraining
    | PauseTraining
    | Encode
    | BeginExchange
    | InExchange
    | EndExchange
    | Verify
    | Apply
    | Stop
    | Say
)


@dataclass(frozen=True, slots=True)
class View:
    """The member's own view, for `node status`."""

    state: str
    round: int
    epoch: int
    step: int
    h: int
    tokens_per_s: float
    inner_loss: float
    digest: bytes
    accepted: int  # rounds that counted this member, as the commits say
    rejected: Mapping[str, int]
    waiting_for: str
    since: Instant
    role: str
    reachable: bool | None  # as the leader's last plan has it; None before one named this member
    paused_by: tuple[str, ...]
