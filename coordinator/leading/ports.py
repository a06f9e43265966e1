"""What a leader's driver needs of the outside, and what comes to it: each port with a fake in tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from coordinator.rounds.events import Committed, Effect, Event, Instant, Opened, View
from coordinator.rounds.ledger import Ledger
from protos.messages import (
    Evaluation,
    ExchangeReport,
    Goodbye,
    Hello,
    PeerId,
    Promise,
    Proposal,
    Record,
)


class Decides(Protocol):
    """The deciding code: `coordinator.rounds.machine.Rounds`."""

    def handle(self, event: Event, now: Instant) -> list[Effect]: ...

    def next_wake(self, now: Instant) -> Instant | None: ...

    def explain(self, peer: PeerId) -> list[str]: ...

    def view(self, now: Instant) -> View: ...


@dataclass(frozen=True, slots=True)
class Observation:
    """What somebody measured or claims; `content` is JSON. It decides nothing.

    Kinds: `report` (an exchange, by subject "EPOCH.ROUND"), `evaluation` (by a state's digest), `digest` (a peer's
    state after a commit, by the commit's hash).
    """

    kind: str
    peer: PeerId
    subject: str
    content: Mapping[str, object]


class Line(Protocol):
    """One member's open line, as the service hands it over. Nothing here waits: a slow reader loses its line."""

    @property
    def peer(self) -> PeerId: ...

    def send(self, frame: bytes) -> None:
        """Queue an encoded frame; dropped once the line is closed."""

    def close(self, goodbye: Goodbye) -> None:
        """Say goodbye after what was sent, then end the line."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A member opened a line and said hello; certificate, record and protocol are checked, no answer given yet."""

    line: Line
    hello: Hello
    record: Record
    envelope: bytes  # of the record


@dataclass(frozen=True, slots=True)
class Departed:
    """A line has ended, whoever ended it."""

    line: Line
    reason: str


@dataclass(frozen=True, slots=True)
class Renewed:
    """A member's own record has changed."""

    line: Line
    record: Record
    envelope: bytes


@dataclass(frozen=True, slots=True)
class Observed:
    line: Line
    message: ExchangeReport | Evaluation


@dataclass(frozen=True, slots=True)
class Spoken:
    """A checked message on a line for the deciding code: Heard or DigestKnown."""

    line: Line
    event: Event


Inbound = Arrived | Departed | Renewed | Observed | Spoken


class Inbox(Protocol):
    """Where a service puts what comes in."""

    def post(self, item: Inbound) -> None: ...

    async def room(self) -> None:
        """Returns when more may be posted: whoever reads from a stream waits here first."""


class Journal(Protocol):
    async def persist(self, entry: Opened | Promise | Proposal) -> None:
        """Returns when it is on disk."""

    async def commit(self, effect: Committed, before: Ledger, after: Ledger) -> None:
        """Returns when it is on disk."""

    async def orphan(self, fork: Ledger) -> None:
        """The commits after this head are no part of the chain any more; they are kept. Returns when it is on disk."""

    def observe(self, observation: Observation) -> None:
        """Have it written soon; nobody waits for it."""


class Prober(Protocol):
    async def reaches(self, peer: PeerId, addresses: tuple[str, ...]) -> bool:
        """Whether this peer, and no other, answers at one of the addresses. Takes a bounded time; never raises."""


class Clock(Protocol):
    def now(self) -> Instant:
        """Local and monotonic."""

    def run_time_s(self) -> float:
        """The run's clock: seconds since the run's origin."""


class Audience(Protocol):
    """Whoever shows the run: told of what has happened, after it has. Must not wait and must not raise."""

    def said(self, text: str) -> None: ...

    def committed(self, effect: Committed, after: Ledger) -> None: ...

    def observed(self, observation: Observation) -> None: ...

    def ended(self, reason: str) -> None: ...
