"""What a member's deciding code asks for.

Effects are carried out in order; `Persist` is on disk (fsync) before any effect after it leaves the process. Of the
outcome of work on bytes an event tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aggregation.exchange import ExchangeEffect
from coordinator.rounds.ledger import Ledger
from node.session.events import NOBODY, CommitHeard
from protos.messages import (
    Body,
    Commit,
    Commitment,
    Deal,
    ExchangeReport,
    Heartbeat,
    Leave,
    Missing,
    PeerId,
    Plan,
    Promise,
    Range,
    Refusal,
    Signed,
    StateDigest,
)
from protos.runspec import RunSpec


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
