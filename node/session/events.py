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
    Head,
    Heartbeat,
    Inquiry,
    Leave,
    Missing,
    PeerId,
    Plan,
    Prepare,
    Promise,
    Propose,
    Range,
    Redeal,
    Refusal,
    Results,
    Signed,
    StateDigest,
    Vote,
    Welcome,
)
from protos.orders import OpenedOrder
from protos.runspec import RunSpec

NOBODY = PeerId("")

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


# -- events: the trainer -----------------------------------------------------------------------------------------


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

# -- effects -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TellLeader:
    """Send on the lines; dropped on one that is down (what must arrive is said again after LineUp).

    `leader` alone is told, where one is named: a leader passes over what is of another one's attempt.
    """

    message: Signed | Heartbeat | Missing | Refusal | ExchangeReport | StateDigest
    leader: PeerId = NOBODY


@dataclass(frozen=True, slots=True)
class Follow:
    """Have lines to these stand-ins and to no others, beside the one to the coordinator, which is always tried."""

    leaders: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Lead:
    """Begin to lead in the coordinator's place, from the state that is held; Led follows."""


@dataclass(frozen=True, slots=True)
class StepDown:
    """Lead no longer than the current attempt; Led follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class KeepHead:
    """Keep the newest head that the coordinator has signed."""

    envelope: bytes


@dataclass(frozen=True, slots=True)
class Persist:
    """The voter's record, before anything after it is sent. A Leave is a last promise."""

    entry: Promise | Leave


@dataclass(frozen=True, slots=True)
class FetchState:
    """Fetch a full state from donors: that after `commit`, one from which it follows, or a newer one.

    StateFetched or StateFetchFailed follows.
    """

    commit: Commit
    body: Body
    newer_than: int = -1
    """An older state than of the round after this one is of no use."""
    anew: bool = False
    """What was held is of another branch: nothing that follows from it will do."""


@dataclass(frozen=True, slots=True)
class FetchCommits:
    """Fetch the commits that follow from a held head, towards the newest; CommitsFetched or -Failed follows."""

    epoch: int
    round: int
    head: bytes
    newest: CommitHeard
    n_tries: int = 0
    """Earlier tries from the same head: others are asked first then."""


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
    """Train on this lease, so many batches a step. What was used of it since the anchor stays used."""

    round: int
    ranges: tuple[Range, ...]
    h: int
    batch_scale: int = 1


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
    replay: bool = False
    """They are of an earlier round: who was there has them, or nobody has them any more."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Have the state after the commit with this hash as a candidate: what a body that goes back to it leads to."""

    head: bytes
    round: int
    body_hash: bytes


@dataclass(frozen=True, slots=True)
class FetchSpec:
    """Have a revision of the RunSpec; SpecKnown follows (the driver retries, and says what it waits for)."""

    revision: int


@dataclass(frozen=True, slots=True)
class KeepSpec:
    """Keep a revision of the RunSpec on disk: it is in force now or later."""

    envelope: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Amended:
    """Another revision of the RunSpec is in force: whoever works by it does so from now on."""

    spec: RunSpec


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
    | Follow
    | Lead
    | StepDown
    | KeepHead
    | Persist
    | FetchState
    | FetchCommits
    | FetchData
    | LoadAnchor
    | StartTraining
    | PauseTraining
    | Encode
    | BeginExchange
    | InExchange
    | EndExchange
    | Verify
    | Restore
    | FetchSpec
    | KeepSpec
    | Amended
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
    leader: str = ""  # whom this member follows: the coordinator or a stand-in, maybe itself
    idle_share: float | None = None  # of the trainer's time in the last rounds; None before there were any
