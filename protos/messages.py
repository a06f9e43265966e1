"""Every body that two strangers exchange, as a frozen dataclass without protobuf: what the deciding code speaks.

Field names, order and types mirror the `.proto` files one to one; `protos.wire` converts. Hashes are 32 bytes.
Durations (`_s`) cross the wire, instants never do. Batch indices count batches of the run from its first one,
over all passes; a range is half open.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

PeerId = NewType("PeerId", str)
"""A libp2p peer id of an Ed25519 key, base58: the public key can be read from it."""

ZERO_HASH = bytes(32)


class MemberState(StrEnum):
    """What a member says that it is doing. The coordinator's view adds nothing to it but `gone`."""

    JOINING = "joining"  # connected, fetches the state
    WAITING = "waiting"  # holds the head's state, has no seat in this round
    TRAINING = "training"  # inner steps on its seat
    READY = "ready"  # reached H (or was told to stop), Δ encoded or about to be
    EXCHANGING = "exchanging"
    VOTING = "voting"  # fetches results, checks, has voted
    APPLYING = "applying"
    PAUSED = "paused"


class Standing(StrEnum):
    NEWCOMER = "newcomer"
    GOOD = "good"
    QUARANTINED = "quarantined"
    BANNED = "banned"


class Outcome(StrEnum):
    COMMITTED = "committed"
    EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class Envelope:
    """A signed body: the signature covers the exact bytes with purpose, run and plan."""

    purpose: str
    signer: PeerId
    plan: bytes  # plan hash of the attempt, or empty
    body: bytes
    signature: bytes  # 64 bytes, Ed25519


@dataclass(frozen=True, slots=True)
class Signed:
    """A signed message as it travels: its envelope's bytes; the envelope's purpose tells the kind."""

    envelope: bytes


# -- identity ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operator:
    """What the run key certifies beside the RunSpec: who leads, and which CA issues certificates."""

    run: PeerId
    coordinator: PeerId
    ca_certificate: bytes  # DER
    seal_key: bytes  # X25519 public key, 32 bytes: tokens are sealed to it


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the coordinator and its observer are now; signed by the coordinator's key."""

    sequence: int
    grpc: tuple[str, ...]  # HOST:PORT of the leader's line
    dht: tuple[str, ...]  # multiaddresses of bootstrap peers
    observer: PeerId
    observer_grpc: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The answer of `GET /v1/run`; three envelopes, all verified from the run id alone."""

    spec: bytes
    operator: bytes
    addresses: bytes
    protocol: int
    run_time_s: float  # the run's clock now: a duration since the run's origin


@dataclass(frozen=True, slots=True)
class AdmitRequest:
    run: PeerId
    peer: PeerId
    csr: bytes  # DER, ECDSA P-256
    protocol: int
    layout_digest: bytes
    sealed_token: bytes  # empty, or the invite token sealed to the run's seal key
    nonce: bytes
    name: str  # what the contributor wants to be called, may be empty
    observer: bool


@dataclass(frozen=True, slots=True)
class AdmitResponse:
    certificate: bytes  # DER
    run_time_s: float


@dataclass(frozen=True, slots=True)
class Token:
    """An invite token, signed by the coordinator (or run) key."""

    run: PeerId
    serial: bytes  # 16 bytes
    uses: int  # 0: unlimited
    valid_s: float  # from `issued_run_time_s`
    issued_run_time_s: float


@dataclass(frozen=True, slots=True)
class Record:
    """One owner's addresses and held state, as published in the DHT; a higher sequence is fresher."""

    peer: PeerId
    sequence: int
    grpc: tuple[str, ...]  # HOST:PORT, empty for a dial-out node
    dht: tuple[str, ...]
    epoch: int
    round: int
    head: bytes


# -- the chain ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Range:
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Seat:
    peer: PeerId
    ranges: tuple[Range, ...]
    batch_scale: int


@dataclass(frozen=True, slots=True)
class MemberEntry:
    """One planned member in a commit: whether it counted, with which batches, and why not."""

    peer: PeerId
    counted: bool
    reason: str
    steps: int
    tokens: int
    weight: float
    used: tuple[Range, ...]
    commitment_root: bytes
    delta_norm: float
    sum_lr: float
    inner_loss: float  # as the member says; NaN is never carried, 0 if unknown


@dataclass(frozen=True, slots=True)
class ReducerEntry:
    peer: PeerId
    n_chunks: int
    kib_s: float  # measured in this round, 0 if unknown


@dataclass(frozen=True, slots=True)
class StandingChange:
    peer: PeerId
    standing: Standing
    reason: str


@dataclass(frozen=True, slots=True)
class Body:
    """A commit's body: the round's outcome and all that the next round needs."""

    run: PeerId
    epoch: int
    round: int
    previous: bytes  # commit hash of the head it extends
    attempt: int  # first attempt that proposed it
    leader: PeerId  # and its leader
    spec_revision: int
    fragment: Range  # of the flat vector
    tau: int
    anchor_digest: bytes
    outcome: Outcome
    reason: str
    members: tuple[MemberEntry, ...]
    reducers: tuple[ReducerEntry, ...]
    rule: str
    f: int
    fallback: str
    degraded: str
    codec: str
    results_root: bytes  # ZERO_HASH when empty
    clip_factor: float
    aggregate_norm: float
    numerics_version: int
    h: int
    lr: float  # inner lr of the round's last nominal step
    outer_lr: float
    outer_momentum: float
    returned: tuple[Range, ...]
    standing: tuple[StandingChange, ...]
    orders: tuple[bytes, ...]
    seats: tuple[Seat, ...]
    voters: tuple[PeerId, ...]  # longest in the run first; the coordinator always among them
    ledger_hash: bytes  # of the folded ledger after this body


@dataclass(frozen=True, slots=True)
class Signature:
    peer: PeerId
    signature: bytes


@dataclass(frozen=True, slots=True)
class Head:
    """The coordinator's word that a quorum made this commit: a newcomer starts from it. Signed."""

    epoch: int
    round: int
    head: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class Order:
    """The operator's word on the run, carried in commits and obeyed under any leader. Signed.

    `pause`, `resume` and `evict` may be signed by the coordinator's key, all kinds by the run key.
    """

    run: PeerId
    number: int  # counts up; a lower one than the last is an old order said again
    kind: str  # "pause", "resume", "end", "amend", "rollback", "evict"
    peer: PeerId  # whom evict means, or resume takes back, else empty
    round: int  # end: the last round; amend: the first of the new revision; rollback: the round to go back to
    spec: bytes  # amend: envelope of the next RunSpec; rollback: the hash of the commit to go back to
    reason: str


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit: body bytes, the digest of the state it leads to, and what a quorum signed in one attempt."""

    body: bytes
    digest: bytes
    attempt: int
    votes: tuple[bytes, ...]  # envelopes of Vote, and of Leave for who left; commit 0: one of Genesis by the run key
    result_hashes: tuple[bytes, ...]  # leaves of results_root


@dataclass(frozen=True, slots=True)
class Genesis:
    """What the run key signs for commit 0."""

    body_hash: bytes
    digest: bytes


# -- an attempt --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanMember:
    peer: PeerId
    record_sequence: int
    reducer: bool  # reachable: combines chunks
    sender: bool  # has a seat and contributes
    reserve: bool = False  # reduces only what others can't: the last in every chunk's line


@dataclass(frozen=True, slots=True)
class Plan:
    """What the leader signs at FORM. The hash of its bytes is carried by every message of the attempt."""

    run: PeerId
    epoch: int
    round: int
    attempt: int
    leader: PeerId
    previous: bytes
    anchor_digest: bytes
    spec_revision: int
    members: tuple[PlanMember, ...]  # in sorted peer order
    rule: str
    f: int
    fallback: str
    degraded: str
    codec: str
    fragment: Range
    tau: int
    privatise: str  # "identity"
    replicas: int
    commitment_s: float
    exchange_s: float
    vote_s: float


@dataclass(frozen=True, slots=True)
class Commitment:
    """A sender's word on its encoded Δ: signed, one for each attempt, the root the same in all of a round."""

    plan: bytes
    root: bytes  # aggregation.digest.contribution_root over the chunks' roots
    norms: tuple[float, ...]  # ‖·‖² of each decoded chunk, fp64
    steps: int
    tokens: int
    used: tuple[Range, ...]
    sum_lr: float
    inner_loss: float


@dataclass(frozen=True, slots=True)
class Excluded:
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Bandwidth:
    peer: PeerId
    kib_s: float


@dataclass(frozen=True, slots=True)
class Deal:
    """The included set: commitments' envelopes by sorted sender, numbered; it only shrinks. Signed by the leader.

    Who reduces what follows from `seed = tagged_hash("deal", roots…)` and `bandwidths` by `aggregation.chunks.deal`.
    """

    plan: bytes
    number: int
    commitments: tuple[bytes, ...]
    excluded: tuple[Excluded, ...]
    bandwidths: tuple[Bandwidth, ...]  # the reducers, sorted by peer


@dataclass(frozen=True, slots=True)
class Moved:
    """One chunk that a reducer is out of the line of."""

    chunk: int
    reducer: PeerId


@dataclass(frozen=True, slots=True)
class Redeal:
    """What has changed since the deal of an attempt: cumulative, numbered from 1; the highest number holds. Signed.

    A chunk's reducers are those of the first `replicas` of its line that are neither `lost` nor `moved` out of it, and
    where they are fewer than min(f + 1, replicas) the next in line (`aggregation.exchange.reducers_of`).
    """

    plan: bytes
    number: int
    excluded: tuple[Excluded, ...]  # senders that are out since the deal, sorted: the set only shrinks
    lost: tuple[PeerId, ...]  # reducers out of every line, sorted
    moved: tuple[Moved, ...]  # sorted by chunk and reducer
    set_number: int  # the number of the redeal that last changed `excluded`; 0: none did
    exchange_s: float


@dataclass(frozen=True, slots=True)
class Inquiry:
    """The leader asks reducers which rows of these senders, who are gone, have not come."""

    plan: bytes
    senders: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Receipt:
    """A reducer's word that it holds these chunks of a sender, checked. Signed."""

    plan: bytes
    sender: PeerId
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChunkResult:
    chunk: int
    hash: bytes
    norm_sq: float


@dataclass(frozen=True, slots=True)
class Results:
    """A reducer's results of all chunks that it was dealt. Signed."""

    plan: bytes
    set_hash: bytes
    results: tuple[ChunkResult, ...]
    kib_s: float


@dataclass(frozen=True, slots=True)
class Lack:
    """One chunk of one sender that has not come."""

    chunk: int
    sender: PeerId


@dataclass(frozen=True, slots=True)
class Missing:
    """A reducer's claim that rows have not come; or its answer to an inquiry, which may name none."""

    plan: bytes
    lacks: tuple[Lack, ...]
    asked: tuple[PeerId, ...] = ()  # the senders that the leader asked about; empty: a claim of its own
    unable: bool = False  # it can't take rows in or combine them, and no sender is to blame


@dataclass(frozen=True, slots=True)
class Proposal:
    """A body to vote on, with what a voter needs to check it. Re-proposed byte for byte in later attempts."""

    body: bytes
    plan: bytes  # envelope of the first attempt's Plan (empty for an empty round)
    deal: bytes  # envelope of its Deal
    results: tuple[bytes, ...]  # envelopes of Results
    result_hashes: tuple[bytes, ...]
    redeal: bytes = b""  # envelope of the last Redeal, if there was one


@dataclass(frozen=True, slots=True)
class Propose:
    """The leader asks for votes on a proposal under the number of its current attempt. Signed."""

    epoch: int
    round: int
    attempt: int
    leader: PeerId
    vote_s: float
    proposal: Proposal
    holders: tuple[PeerId, ...]  # who may hold results, besides the reducers


@dataclass(frozen=True, slots=True)
class Vote:
    """I hold all of it, and this is the state it gives. Signed."""

    epoch: int
    round: int
    attempt: int
    leader: PeerId
    body_hash: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """A voter's reasons for not signing (or promising)."""

    epoch: int
    round: int
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """A leader asks for promises for a number. Signed."""

    epoch: int
    round: int
    attempt: int
    leader: PeerId


@dataclass(frozen=True, slots=True)
class Promise:
    """A voter will heed no lower number, nor another leader of this one. Signed.

    Carries its head, and the proposal that it signed in this round with the attempt of that vote (-1: none).
    """

    epoch: int
    round: int
    attempt: int
    leader: PeerId
    head: bytes
    voted_attempt: int
    proposal: Proposal | None


@dataclass(frozen=True, slots=True)
class Leave:
    """A last promise, above every number: my range returns and my weight is out of this round's quorum. Signed.

    Like a promise it carries the proposal that the member signed in this round: a quorum may hang on it. It counts for
    no attempt that the member had promised not to heed: `attempt` and `leader` are its last promise (-1, "": none).
    """

    epoch: int
    round: int
    attempt: int
    leader: PeerId
    head: bytes
    voted_attempt: int
    proposal: Proposal | None


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    epoch: int
    round: int
    attempt: int
    reason: str


# -- the leader's line -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a member on a line that it opened to the leader."""

    protocol: int
    record: bytes  # envelope of Record
    epoch: int
    round: int
    head: bytes
    digest: bytes
    holds_state: bool
    observer: bool
    name: str
    abstain_round: int  # this member lost its votes of that round and abstains (0: none)
    tokens: int = 0  # committed in the chain that it holds: of two branches the one with more is followed
    speed: float = 0.0  # tokens a second that its trainer has measured, 0: none yet


@dataclass(frozen=True, slots=True)
class Welcome:
    """The leader's first answer: where the chain is now, and the books after it."""

    leader: PeerId
    commit: Commit
    ledger: bytes  # the folded ledger after that commit
    records: tuple[bytes, ...]
    run_time_s: float
    heartbeat_s: float
    signed_head: bytes = b""  # envelope of the newest Head that the coordinator has signed


@dataclass(frozen=True, slots=True)
class Heartbeat:
    epoch: int
    round: int
    head: bytes
    digest: bytes
    state: MemberState
    step: int
    tokens: int
    tokens_per_s: float
    inner_loss: float
    time_left_s: float
    bytes_sent: int  # all gRPC traffic since the start, measured at the transport
    bytes_received: int


@dataclass(frozen=True, slots=True)
class ExchangeReport:
    """What one member's exchange streams carried in a round, measured at the transport, and how its trainer spent it,
    measured by its session; an observation.

    Seconds in which the trainer had nothing to do and in which it worked, from the commit before to this one; its
    owner's pauses are in neither. Both are 0 where nothing was measured, or where an older node reports.
    """

    epoch: int
    round: int
    bytes_sent: int
    bytes_received: int
    train_s: float
    exchange_s: float
    apply_s: float
    idle_s: float = 0.0
    worked_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The observer's figure for the state after a round; an observation."""

    epoch: int
    round: int
    digest: bytes
    val_loss: float
    n_tokens: int


@dataclass(frozen=True, slots=True)
class StateDigest:
    """The observer's computed digest for a proposal, on which the coordinator votes."""

    body_hash: bytes
    attempt: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Records:
    records: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The leader closes a line: why, and whether coming back helps."""

    code: str  # "refused", "superseded", "ended", "shutdown", "protocol"
    reason: str


MemberMessage = (
    Hello
    | Heartbeat
    | Commitment
    | Results
    | Missing
    | Vote
    | Refusal
    | Promise
    | Leave
    | ExchangeReport
    | Evaluation
    | StateDigest
    | Records
)
"""What a member says on the leader's line."""

LeaderMessage = (
    Welcome | Plan | Deal | Redeal | Inquiry | Propose | Prepare | Commit | AttemptFailed | Records | Goodbye
)
"""What the leader says on it."""

SignedMessage = (
    Plan | Commitment | Deal | Redeal | Receipt | Results | Propose | Vote | Prepare | Promise | Leave | Head | Order
)
"""Messages that can be evidence: they travel as envelopes only."""


# -- between nodes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChunkHead:
    """Announces one chunk of a contribution on a stream; its bytes follow in parts."""

    plan: bytes
    chunk: int
    n_bytes: int
    path: tuple[bytes, ...]  # Merkle path from the chunk's root to the commitment's root


@dataclass(frozen=True, slots=True)
class Part:
    """At most `limits.PART_BYTES` of the thing announced before, in order."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask a holder for things by hash: encoded results, state chunks, data pieces."""

    kind: str  # "result", "state", "piece"
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class FetchHead:
    """Announces one fetched thing; `n_bytes` -1 says that the holder does not have it."""

    hash: bytes
    n_bytes: int


@dataclass(frozen=True, slots=True)
class StateOffer:
    """What a donor holds: the state after `commit`, as the hashes of its chunks; verified against the digest.

    `ledger` is the folded ledger after that commit as bytes, verified against the body's `ledger_hash`. The commit's
    `result_hashes`, verified against the body's `results_root`, are what the results of that round are fetched by.
    """

    commit: Commit
    ledger: bytes
    theta_hashes: tuple[bytes, ...]
    momentum_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CommitsAfter:
    epoch: int
    round: int
    n_most: int
