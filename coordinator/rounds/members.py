"""What the leader knows of each member from its line: presence, progress, reachability, and its story."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from coordinator.rounds import deadline
from coordinator.rounds.events import Instant, MemberView
from coordinator.rounds.ledger import Ledger
from protos.messages import Heartbeat, Hello, MemberState, PeerId, Record
from protos.runspec import DeadlineSpec

STORY_KEPT = 100
SPEED_STALE_ROUNDS = 8
"""After so many rounds without a step its last speed says nothing any more, and a member that was too slow may try."""
NAMED_MOST = 8
IDLE_KEPT = 0.9
"""What a round before weighs in the share of time idle."""
SPEEDS_KEPT = 3
"""Rounds of which a member's speed is the median."""
PLACE_KEPT_S = 15.0
"""So long a member that has held the state is remembered, and with it its place in the queue for a seat."""
JUST_AFTER_S = 1e-6
"""Presence ends right after its last instant."""


@dataclass(slots=True)
class Member:
    """One member's line as the leader sees it. Survives a broken line for a while."""

    peer: PeerId
    hello: Hello
    record: Record
    envelope: bytes  # of the record, as it is passed on to others
    connected: bool
    seen_at: Instant
    gone_at: Instant | None = None
    told_head_at: Instant | None = None
    astray_since: Instant | None = None
    """Since when it keeps another head than this leader's, or was told of that with the books."""
    reachable: bool | None = None
    state: MemberState = MemberState.JOINING
    head: bytes = b""
    round: int = 0
    step: int = 0
    tokens_per_s: float = 0.0
    n_lost: int = 0
    """How often it lost its progress in this round: it came back, or its trainer did."""
    n_gone: int = 0
    """How often its line was lost in this round."""
    finish_at: Instant | None = None
    """When it will have made its steps, as it announced when it last made one; None while it has announced nothing."""
    began: tuple[int, Instant] | None = None
    """The step at which it was first seen to work in this round, and when."""
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=SPEEDS_KEPT))
    """Tokens a second in the last rounds in which it made steps."""
    n_still: int = 0
    """Rounds in a row in which it made no step."""
    told_no_seat: str = ""
    busy_s: float = 0.0
    known_s: float = 0.0
    """For how long it said that it trains, of the time in which it was heard of; older rounds count less."""
    story: deque[str] = field(default_factory=lambda: deque(maxlen=STORY_KEPT))

    @property
    def observer(self) -> bool:
        return self.hello.observer

    @property
    def behind(self) -> bool:
        """It lost its progress in this round: nobody waits for it, but what it has in time counts."""
        return self.n_lost > 0

    @property
    def idle_share(self) -> float | None:
        """The share of its time in which it had nothing to train, as far as its heartbeats tell."""
        return 1.0 - self.busy_s / self.known_s if self.known_s > 0 else None

    @property
    def speed(self) -> float:
        """Tokens a second: of the last rounds, or what its trainer measured at its start; 0 if nobody knows."""
        if self.rates:
            return sorted(self.rates)[(len(self.rates) - 1) // 2]
        return self.tokens_per_s or self.hello.speed

    def stage(self, steps: int, enough: int = 1) -> tuple[object, ...]:
        """All of its progress that a decision can depend on: another heartbeat of the same stage changes nothing.

        `steps` its seat asks for, and `enough` of them make a contribution.
        """
        made = (self.step > 0, self.step >= enough, self.step >= steps)
        return self.round, self.state, self.head, made, self.n_lost

    def announce(self, heartbeat: Heartbeat, steps: int, step_tokens: int, now: Instant) -> bool:
        """Take in when it will have made its steps; whether that is news. Only a step made moves it."""
        if self.finish_at is not None and heartbeat.step <= self.step:
            return False
        if heartbeat.step > 0 and self.began is None:
            self.began = heartbeat.step, now
        pace = self.speed if self.rates else 0.0  # what it measured at its start says too little
        if self.began is not None and heartbeat.step >= self.began[0] + deadline.PACE_STEPS and now > self.began[1]:
            pace = (heartbeat.step - self.began[0]) * step_tokens / (now - self.began[1])
        left_s = deadline.time_left_s(heartbeat, steps, step_tokens, pace) if heartbeat.step > 0 else None
        if left_s is None:
            return False
        self.finish_at = Instant(now + left_s)
        return True


class Members:
    """All members that have said hello since this leader started."""

    def __init__(self, deadlines: DeadlineSpec, started_at: Instant) -> None:
        self._deadlines = deadlines
        self._started_at = started_at
        self._members: dict[PeerId, Member] = {}
        self._in_order: list[Member] | None = None
        self._due_at: Instant | None = Instant(started_at + deadlines.heartbeat_timeout_s)
        """No presence changes by itself before this instant."""

    def resume(self) -> None:
        """The run goes on: who has paused with it is waited for until it says that it pauses for itself."""
        for member in self._members.values():
            if member.state is MemberState.PAUSED:
                member.state = MemberState.WAITING

    def amend(self, deadlines: DeadlineSpec) -> None:
        """Other deadlines are in force."""
        self._deadlines = deadlines
        self._due_at = self._started_at  # whatever was expected may come at another time: it is looked for anew

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        """In the order of peer ids."""
        if self._in_order is None:
            self._in_order = [self._members[peer] for peer in sorted(self._members)]
        return iter(self._in_order)

    def get(self, peer: PeerId) -> Member | None:
        return self._members.get(peer)

    def connected(self, peer: PeerId, hello: Hello, record: Record, now: Instant) -> Member:
        """A line is open. What is known of its progress stays, so that a lost one shows."""
        member = self._members.get(peer)
        if member is None:
            member = self._members[peer] = Member(peer, hello, record, hello.record, True, now)
            self._in_order = None
        elif record.grpc != member.record.grpc:
            member.reachable = None
        member.hello, member.record, member.envelope = hello, record, hello.record
        member.connected, member.seen_at, member.gone_at = True, now, None
        member.head = hello.head if hello.holds_state else b""
        member.state = MemberState.WAITING if hello.holds_state else MemberState.JOINING
        member.told_head_at, member.astray_since = now, None
        self._expect_change(self._silent_at(member))
        return member

    def disconnected(self, peer: PeerId, now: Instant) -> Member | None:
        member = self._members.get(peer)
        if member is not None and member.connected:
            member.connected, member.gone_at = False, now
            member.n_gone += 1
            self._expect_change(self._given_up_at(peer))
        return member

    def heard(self, peer: PeerId, heartbeat: Heartbeat, round_: int, now: Instant) -> Member | None:
        member = self._members.get(peer)
        if member is None or not member.connected:
            return None
        if member.state is not MemberState.PAUSED:
            member.known_s += now - member.seen_at
            member.busy_s += now - member.seen_at if member.state is MemberState.TRAINING else 0.0
        member.seen_at = now
        self._expect_change(self._silent_at(member))
        if heartbeat.round == round_:
            if member.round == round_ and heartbeat.step < member.step:
                member.n_lost += 1
            member.round, member.step = round_, heartbeat.step
        member.state, member.head = heartbeat.state, heartbeat.head
        member.tokens_per_s = heartbeat.tokens_per_s
        return member

    def next_round(self, now: Instant) -> None:
        """Progress starts again; who has gone, is not waited for any more and has no place to lose is dropped."""
        for member in list(self._members.values()):
            member.n_still = 0 if member.step > 0 else member.n_still + 1
            if member.step > 0 and member.tokens_per_s > 0:
                member.rates.append(member.tokens_per_s)
            elif member.n_still >= SPEED_STALE_ROUNDS:
                member.rates.clear()
            member.step, member.n_lost, member.n_gone = 0, 0, 0
            member.finish_at = member.began = None
            member.busy_s, member.known_s = member.busy_s * IDLE_KEPT, member.known_s * IDLE_KEPT
            waits = member.head != b"" and member.gone_at is not None and now <= member.gone_at + PLACE_KEPT_S
            if not member.connected and not waits and not self.may_return(member.peer, now):
                del self._members[member.peer]
                self._in_order = None

    def are_new(self, now: Instant) -> bool:
        """Whether the leader has just started, so that members may not have found it yet."""
        return now < self._started_at + self._deadlines.heartbeat_timeout_s

    def fresh(self, peer: PeerId, now: Instant) -> bool:
        """Whether a member is there: its line is open, and it was heard of lately."""
        member = self._members.get(peer)
        return member is not None and member.connected and now <= self._silent_at(member)

    def may_return(self, peer: PeerId, now: Instant) -> bool:
        """Whether an absent peer is still waited for: it reconnects, or has not yet found this new leader."""
        member = self._members.get(peer)
        return (member is None or not member.connected) and now < self._given_up_at(peer)

    def expected(self, peer: PeerId, now: Instant) -> bool:
        """Whether a peer is there or may come back."""
        return self.fresh(peer, now) or self.may_return(peer, now)

    def holds(self, peer: PeerId, ledger: Ledger, now: Instant) -> bool:
        """Whether a member is there and has the head's state. While the run is paused, everybody is."""
        member = self._members.get(peer)
        return (
            member is not None
            and member.head == ledger.head
            and member.state is not MemberState.JOINING
            and (member.state is not MemberState.PAUSED or ledger.paused)
            and self.fresh(peer, now)
        )

    def holders(self, ledger: Ledger, now: Instant) -> list[Member]:
        """Members without observers that hold the head's state, in peer order."""
        return [member for member in self if not member.observer and self.holds(member.peer, ledger, now)]

    def next_change(self, now: Instant) -> Instant | None:
        """An instant after now before which no member's presence changes by itself; None if none ever does.

        Hearing of a member only puts its silence off, so the instant may come too early, and is then looked for anew.
        """
        if self._due_at is not None and self._due_at <= now:
            self._due_at = min((at for at in self._changes() if at > now), default=None)
        return self._due_at

    def view(self, ledger: Ledger) -> tuple[MemberView, ...]:
        return tuple(
            MemberView(
                peer=member.peer,
                name=member.hello.name,
                state=str(member.state) if member.connected else "gone",
                standing=str(ledger.standing.get(member.peer, "newcomer")),
                step=member.step,
                tokens_per_s=member.tokens_per_s,
                reachable=member.reachable,
                last_seen_at=member.seen_at,
                observer=member.observer,
                idle_share=member.idle_share,
            )
            for member in self
        )

    def _changes(self) -> Iterator[Instant]:
        yield Instant(self._started_at + self._deadlines.heartbeat_timeout_s)
        for member in self._members.values():
            at = self._silent_at(member) if member.connected else self._given_up_at(member.peer)
            yield Instant(at + JUST_AFTER_S)

    def _expect_change(self, at: Instant) -> None:
        if self._due_at is None or at + JUST_AFTER_S < self._due_at:
            self._due_at = Instant(at + JUST_AFTER_S)

    def _silent_at(self, member: Member) -> Instant:
        return Instant(member.seen_at + self._deadlines.heartbeat_timeout_s)

    def _given_up_at(self, peer: PeerId) -> Instant:
        member = self._members.get(peer)
        if member is None or member.gone_at is None:
            return Instant(self._started_at + self._deadlines.heartbeat_timeout_s)
        return Instant(member.gone_at + self._deadlines.gone_grace_s)


def named(peers: Collection[PeerId]) -> str:
    """Peers for people to read: the last six characters of some of them, and how many more."""
    return listed([peer[-6:] for peer in sorted(peers)])


def listed(items: Collection[str], separator: str = ", ") -> str:
    """Some of many items, and how many more, so that a sentence stays one."""
    some = list(items)[:NAMED_MOST]
    rest = len(items) - len(some)
    return separator.join([*some, f"and {rest} more"] if rest else some) or "nobody"
