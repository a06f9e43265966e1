"""What the leader's deciding code is told, and what it asks for.

A driver opens and verifies envelopes before an event is made. Signing is deterministic (Ed25519), so the deciding code
is given a `Sealer` and hands out finished envelopes. Effects are carried out in order; a `Persist` is on disk before
any effect after it leaves the process. All effects are safe to repeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType, Protocol

from protos.messages import (
    AttemptFailed,
    Body,
    Commit,
    Commitment,
    Goodbye,
    Heartbeat,
    Hello,
    Inquiry,
    Leave,
    Missing,
    PeerId,
    Promise,
    Proposal,
    Record,
    Records,
    Refusal,
    Results,
    Signed,
    SignedMessage,
    Vote,
    Welcome,
)

if TYPE_CHECKING:
    from coordinator.rounds.ledger import Ledger
    from coordinator.rounds.proposing import Evidence
    from protos.orders import OpenedOrder

Instant = NewType("Instant", float)
"""A moment on the local monotonic clock, in seconds. Never crosses the wire."""


class Sealer(Protocol):
    """Makes bytes of messages: a pure function of the message and this process's key.

    Both raise ValueError for what no bytes may hold.
    """

    def encode(self, message: object) -> bytes:
        """The wire bytes of an unsigned message."""

    def seal(self, message: SignedMessage) -> bytes:
        """The envelope of a message by this process's key; plan hash from its `plan` field, if it has one."""


# -- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connected:
    """A member opened its line and said hello; its certificate and record are verified."""

    peer: PeerId
    hello: Hello
    record: Record


@dataclass(frozen=True, slots=True)
class Disconnected:
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Reached:
    """The outcome of a Probe: whether the peer can be connected to at its advertised address."""

    peer: PeerId
    reachable: bool


@dataclass(frozen=True, slots=True)
class RecordChanged:
    """A member's own record has changed; `envelope` is its signed form, to be passed on."""

    peer: PeerId
    record: Record
    envelope: bytes = b""


@dataclass(frozen=True, slots=True)
class Heard:
    """A message on a member's line. `envelope` is its signed form, empty for unsigned kinds.

    For a Promise or Leave with a proposal, and only then, `body` is that proposal's decoded body, `orders` are those
    that it carries, opened, and `evidence` is what it shows, or `fault` why that doesn't open.
    """

    peer: PeerId
    message: Heartbeat | Commitment | Results | Missing | Vote | Refusal | Promise | Leave
    envelope: bytes
    body: Body | None = None
    orders: tuple[OpenedOrder, ...] = ()
    evidence: Evidence | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class DigestKnown:
    """The observer computed the digest that a proposal leads to."""

    body_hash: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class Learned:
    """A commit that others have made without this leader. `signed` are its valid votes and leaves, not yet weighed.

    `orders` are those that the body carries, opened, `target` the books that a rollback among them goes back to.
    """

    commit: Commit
    body: Body
    commit_hash: bytes
    signed: tuple[tuple[PeerId, Vote | Leave], ...]
    orders: tuple[OpenedOrder, ...] = ()
    target: Ledger | None = None


@dataclass(frozen=True, slots=True)
class Branched:
    """Commits from a fork on, each verified, that make another branch than this leader's: the larger of the two.

    `fork` are the books where the two part.
    """

    fork: Ledger
    commit: Commit  # the fork's
    chain: tuple[Learned, ...]


@dataclass(frozen=True, slots=True)
class Sought:
    """The outcome of a Seek: everybody who is known was asked for newer commits. What was found came before this."""


@dataclass(frozen=True, slots=True)
class StepDown:
    """The stand-in ends after its attempt: the coordinator is back, or another stand-in's turn came before."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ordered:
    """The operator's order, opened and journalled: a commit is to carry it.

    `target`: for a rollback the books at the commit to go back to, with head and digest.
    """

    order: OpenedOrder
    target: Ledger | None = None


@dataclass(frozen=True, slots=True)
class Woke:
    """The instant of `next_wake` has come."""


Event = (
    Connected
    | Disconnected
    | Reached
    | RecordChanged
    | Heard
    | DigestKnown
    | Learned
    | Branched
    | Sought
    | StepDown
    | Ordered
    | Woke
)

# -- effects -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to peers on their lines; who has none is passed over. A Welcome's run time is set as it leaves."""

    peers: tuple[PeerId, ...]
    message: Signed | Welcome | Inquiry | Commit | AttemptFailed | Records


@dataclass(frozen=True, slots=True)
class Close:
    """Say goodbye on a line and close it."""

    peer: PeerId
    goodbye: Goodbye


@dataclass(frozen=True, slots=True)
class Probe:
    """Try to connect to a peer's advertised addresses; answer with Reached."""

    peer: PeerId
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Opened:
    """This leader uses this attempt number now; it must never use it for anything else after a restart."""

    epoch: int
    round: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Persist:
    """Journal this before anything after it is sent.

    Opened: an attempt's number. Promise: the coordinator's own voter record. Proposal: what this leader proposed.
    """

    entry: Opened | Promise | Proposal


@dataclass(frozen=True, slots=True)
class Committed:
    """A round is over. Append to the ledger before anything after it is sent.

    `failed` are its failed attempts, `orders` those that its body carries, opened, `target` the books that a rollback
    among them goes back to.
    """

    commit: Commit
    body: Body
    commit_hash: bytes
    failed: tuple[AttemptFailed, ...]
    orders: tuple[OpenedOrder, ...] = ()
    target: Ledger | None = None


@dataclass(frozen=True, slots=True)
class Orphaned:
    """The commits after this head are no part of the chain any more: the other branch follows, one Committed each."""

    fork: Ledger


@dataclass(frozen=True, slots=True)
class Learn:
    """Ask a member for the commits that it has named and this leader lacks; Learned or Branched may follow."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Seek:
    """Ask everybody whose address is known for commits after the head; Sought follows."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The run has reached its end: members have been told by the last commit."""

    reason: str


@dataclass(frozen=True, slots=True)
class Say:
    """Something changed that an operator would want to read.

    Attributes:
        by: whose own words it carries, where it does: that one may bring it about as often as its line lets it.
    """

    text: str
    by: PeerId | None = None


Effect = Tell | Close | Probe | Persist | Committed | Orphaned | Learn | Seek | Ended | Say


@dataclass(frozen=True, slots=True)
class MemberView:
    """One member as the leader sees it, for status."""

    peer: PeerId
    name: str
    state: str
    standing: str
    step: int
    tokens_per_s: float
    reachable: bool | None
    last_seen_at: Instant
    observer: bool
    idle_share: float | None = None


@dataclass(frozen=True, slots=True)
class View:
    """The leader's view, for status; `deadline_at` None when nothing is waited for with a deadline."""

    epoch: int
    round: int
    phase: str
    waiting_for: str
    deadline_at: Instant | None
    attempt: int
    members: tuple[MemberView, ...]
    tokens: int
    head: bytes
    n_committed: int
