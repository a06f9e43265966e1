"""What the leader and the members of the benchmark's all-reduce say to each other, over pipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from node.peers.transport import Credentials
from node.stages import Stage
from protos.messages import Body, Commitment, Deal, PeerId, Plan, Results
from protos.runspec import RunSpec


@dataclass(frozen=True, slots=True)
class Case:
    """One way to do the all-reduce."""

    name: str
    spec: RunSpec
    replicas: int
    centred: bool = False  # whether the rule starts from the last results


@dataclass(frozen=True, slots=True)
class Setup:
    """What a member is born with."""

    rank: int
    n_peers: int
    seed: int
    private_key: bytes
    run: PeerId
    credentials: Credentials
    cases: tuple[Case, ...]
    folder: str
    loop: str
    profile: bool
    body: Body
    group: str = ""  # the file of a control group that the process joins; its vectors then are mapped files
    outer: bool = False  # whether a turn ends with the outer step


@dataclass(frozen=True, slots=True)
class Listening:
    """Member: this is who and where I am."""

    peer: PeerId
    address: str


@dataclass(frozen=True, slots=True)
class Meet:
    """Leader: these are the others."""

    addresses: Mapping[PeerId, str]


@dataclass(frozen=True, slots=True)
class Begin:
    """Leader: the next all-reduce; make the values for it."""

    case: int
    plan: Plan
    plan_hash: bytes
    watched: bool  # whether to look at the memory all the time, which takes time


@dataclass(frozen=True, slots=True)
class Ready:
    """Member: they are made."""


@dataclass(frozen=True, slots=True)
class Start:
    """Leader: from this instant of the machine's monotonic clock on."""

    at: float


@dataclass(frozen=True, slots=True)
class Committed:
    envelope: bytes


@dataclass(frozen=True, slots=True)
class Dealt:
    deal: Deal
    envelope: bytes
    commitments: Mapping[PeerId, Commitment]
    lines: tuple[tuple[PeerId, ...], ...]


@dataclass(frozen=True, slots=True)
class Reported:
    results: Results | None


@dataclass(frozen=True, slots=True)
class Agreed:
    """Leader: these are the results, and their body's hash."""

    body_hash: bytes
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """Member: I hold the mean."""


@dataclass(frozen=True, slots=True)
class Measure:
    """Leader: all have ended, so what measuring takes is nobody's time."""


@dataclass(frozen=True, slots=True)
class Done:
    """Member: what I have, and when I had it."""

    ended_at: float
    cpu_s: float
    digest: bytes
    relative_error: float
    held_bytes: int
    private_bytes: int
    marks: Mapping[str, float]  # seconds from the start to each milestone
    stages: Mapping[str, Stage] = field(default_factory=dict)
    state_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Failed:
    why: str


@dataclass(frozen=True, slots=True)
class Close:
    pass
