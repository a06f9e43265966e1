"""The leader's shell: one task that asks the deciding code, carries its effects out in order, and sleeps until woken.

What must be on disk is on disk before anything after it is sent. What members merely report is written beside the
ledger. The driver alone supplies `now`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import assert_never

from coordinator.leading.addresses import Addresses
from coordinator.leading.errands import Errands
from coordinator.leading.fitting import frames
from coordinator.leading.learning import Learner
from coordinator.leading.observing import Observing
from coordinator.leading.ports import (
    Arrived,
    Audience,
    Clock,
    Decides,
    Departed,
    Inbound,
    Journal,
    Line,
    Observation,
    Observed,
    Prober,
    Renewed,
    Spoken,
)
from coordinator.leading.saying import Sayings, one_line
from coordinator.rounds.events import (
    Close,
    Committed,
    Connected,
    Disconnected,
    Effect,
    Ended,
    Event,
    Heard,
    Instant,
    Learn,
    Ordered,
    Orphaned,
    Persist,
    Probe,
    RecordChanged,
    Say,
    Seek,
    Tell,
    View,
    Woke,
)
from coordinator.rounds.ledger import Ledger, fold
from protos.messages import Goodbye, Heartbeat, PeerId, Standing, Welcome
from protos.wire import WireError

INBOX_MOST = 1024
"""Beyond so many unhandled items streams are not read any further."""
WAKE_FLOOR_S = 0.001
FAREWELL = "the coordinator stops; the run goes on without it"


class _Stop:
    """Ends the task after what came before it."""


class Driver:
    """Drives one leader. `run` is its only task; everything else may be called from the same event loop.

    Args:
        rounds: the deciding code, recovered from the journal by the caller.
        ledger: the folded ledger at its head.
        orders: those that were journalled and that no commit has carried yet.
        may_sign: raises where another process may lead by now.
        learner: asks members for commits that this leader lacks; None: nobody is asked.
        farewell: what members are told when it stops.
    """

    def __init__(
        self,
        rounds: Decides,
        ledger: Ledger,
        *,
        journal: Journal,
        prober: Prober,
        clock: Clock,
        audience: Audience,
        orders: Sequence[Ordered] = (),
        may_sign: Callable[[], None] = lambda: None,
        learner: Learner | None = None,
        farewell: str = FAREWELL,
    ) -> None:
        self._rounds = rounds
        self._ledger = ledger
        self._journal = journal
        self._clock = clock
        self._audience = audience
        self._may_sign = may_sign
        self._farewell = farewell
        self._addresses = Addresses()
        self._errands = Errands(
            prober,
            learner,
            clock,
            post=self._put,
            books=lambda: self._ledger,
            addresses=self._addresses.of,
            is_known=self._has_say,
        )
        self._lines: dict[PeerId, Line] = {}
        self._records: dict[PeerId, bytes] = {}
        self._sequences: dict[PeerId, int] = {}  # of the record that each peer's line was opened with
        self._observing = Observing()
        self._observer: PeerId | None = None
        self._sayings = Sayings()
        self._inbox: deque[Inbound | Event | _Stop] = deque()
        self._posted = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._wake_at: Instant | None = None
        self.ended = ""
        for order in orders:
            self._put(order)

    # -- what comes in ---------------------------------------------------------------------------------------------

    def post(self, item: Inbound) -> None:
        """Take in what a service has received and checked."""
        self._put(item)

    async def room(self) -> None:
        await self._has_room.wait()

    def order(self, ordered: Ordered) -> None:
        """The operator's word, opened and journalled by the caller."""
        self._put(ordered)

    def tell(self, event: Event) -> None:
        """Take in what no line has said."""
        self._put(event)

    def stop(self) -> None:
        """Have `run` say goodbye on all lines and return."""
        self._put(_Stop())

    def _put(self, item: Inbound | Event | _Stop) -> None:
        self._inbox.append(item)
        self._posted.set()
        if len(self._inbox) >= INBOX_MOST:
            self._has_room.clear()

    # -- what is known ---------------------------------------------------------------------------------------------

    def view(self) -> tuple[View, Instant]:
        """The leader's view, and the instant it is of."""
        now = self._clock.now()
        return self._rounds.view(now), now

    def explain(self, peer: PeerId) -> list[str]:
        return self._rounds.explain(peer)

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def n_lines(self) -> int:
        return len(self._lines)

    def heartbeats(self) -> dict[PeerId, Heartbeat]:
        """The newest of each member whose line is open."""
        return {peer: beat for peer, beat in self._observing.heartbeats.items() if peer in self._lines}

    def record_of(self, peer: PeerId) -> bytes | None:
        """The newest envelope of a member's record, of those whose line is open."""
        return self._records.get(peer)

    # -- the task --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until `stop`. A fault of the deciding code or of the journal ends it: nothing is decided past either."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._errands.end)
            await self._decide(Woke())
            while True:
                item = await self._next()
                if isinstance(item, _Stop):
                    break
                await self._take(item)
        self._say_goodbye(Goodbye("shutdown", self._farewell))

    async def _next(self) -> Inbound | Event | _Stop:
        """What has come, or Woke. An instant that passed while effects were carried out comes before what came then:
        the deciding code looks at it now, or it would take it for dealt with."""
        wait_s = None if self._wake_at is None else self._wake_at - self._clock.now()
        if wait_s is not None and wait_s <= 0:
            return Woke()
        if not self._inbox:
            try:
                async with asyncio.timeout(None if wait_s is None else max(WAKE_FLOOR_S, wait_s)):
                    await self._posted.wait()
            except TimeoutError:
                return Woke()
        item = self._inbox.popleft()
        if not self._inbox:
            self._posted.clear()
        if len(self._inbox) < INBOX_MOST // 2:
            self._has_room.set()
        return item

    async def _take(self, item: Inbound | Event) -> None:
        match item:
            case Arrived():
                await self._arrive(item)
            case Departed(line, reason):
                if self._is_current(line):
                    self._forget(line.peer)
                    await self._decide(Disconnected(line.peer, reason))
            case Renewed(line, record, envelope):
                if self._is_current(line):
                    self._records[line.peer] = envelope
                    self._addresses.here(line.peer, record.grpc)
                    await self._decide(RecordChanged(line.peer, record, envelope))
            case Observed(line, message):
                if self._is_current(line):
                    self._note(self._observing.report(line.peer, message, self._ledger))
            case Spoken(line, event):
                if self._is_current(line):
                    if isinstance(event, Heard) and isinstance(event.message, Heartbeat):
                        self._note(self._observing.heartbeat(event.peer, event.message))
                    await self._decide(event)
            case _:
                await self._decide(item)

    async def _arrive(self, item: Arrived) -> None:
        line = item.line
        if self._ledger.standing.get(line.peer) is Standing.BANNED:
            line.close(Goodbye("refused", "this peer is banned from the run"))
            return
        old = self._lines.get(line.peer)
        if old is not None and item.record.sequence < self._sequences[line.peer]:
            # Its hello was read late: the member has opened the other line since, and this one is dead.
            line.close(Goodbye("shutdown", "a newer line of this peer is open"))
            return
        if old is not None:
            # The newer line wins: after a crash the old one may look alive for a while. Two processes with one key
            # take the line from each other, and each is told so.
            old.close(Goodbye("superseded", "another line of this peer was opened; one process per identity"))
            await self._decide(Disconnected(line.peer, "superseded by a newer line"))
        self._lines[line.peer] = line
        self._records[line.peer] = item.envelope
        self._addresses.here(line.peer, item.record.grpc)
        self._sequences[line.peer] = item.record.sequence
        if item.hello.observer:
            self._observer = line.peer
        self._note(self._observing.hello(line.peer, item.hello))
        await self._decide(Connected(line.peer, item.hello, item.record))

    def _forget(self, peer: PeerId) -> None:
        """Its line has ended. Where it can be asked is remembered a while longer."""
        for of_lines in (self._lines, self._records, self._sequences):
            of_lines.pop(peer, None)
        self._observing.departed(peer)
        self._addresses.gone(peer, self._ledger.voters)

    def _has_say(self, peer: PeerId) -> bool:
        """Whether this peer has a seat or a vote, or is the observer."""
        ledger = self._ledger
        return peer == self._observer or peer in ledger.voters or ledger.seat_of(peer) is not None

    def _is_current(self, line: Line) -> bool:
        return self._lines.get(line.peer) is line

    async def _decide(self, event: Event) -> None:
        self._may_sign()
        now = self._clock.now()
        effects = self._rounds.handle(event, now)
        self._wake_at = self._rounds.next_wake(now)
        for effect in effects:
            await self._carry_out(effect)

    def _now_round(self) -> tuple[int, int]:
        return self._ledger.epoch, self._ledger.round

    async def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Persist(entry):
                await self._journal.persist(entry)
            case Committed():
                before = self._ledger
                after = fold(before, effect.body, effect.orders, effect.target)
                after = after.at(effect.commit_hash, effect.commit.digest)
                await self._journal.commit(effect, before, after)
                self._ledger = after
                self._audience.committed(effect, after)
            case Tell():
                self._tell(effect)
            case Close(peer, goodbye):
                if (line := self._lines.get(peer)) is not None:
                    line.close(goodbye)
            case Probe(peer, addresses):
                self._errands.probe(peer, addresses)
            case Orphaned(fork):
                await self._journal.orphan(fork)
                self._ledger = fork
            case Learn(peer):
                self._errands.learn(peer)
            case Seek(peers):
                # Those first who are likely to answer, and among them those whose word counts.
                counts = {*self._ledger.voters, *(seat.peer for seat in self._ledger.seats)}
                self._errands.seek(sorted(peers, key=lambda peer: (peer not in self._lines, peer not in counts)))
            case Ended(reason):
                self.ended = reason
                self._audience.ended(reason)
            case Say(text, by):
                if by is None or self._sayings.words_of(by, self._now_round(), counts=self._has_say(by)):
                    self._audience.said(one_line(text))
            case _:
                assert_never(effect)

    def _tell(self, effect: Tell) -> None:
        message = effect.message
        if isinstance(message, Welcome):
            message = replace(message, run_time_s=self._clock.run_time_s())
        lines = [self._lines[peer] for peer in effect.peers if peer in self._lines]
        if not lines:
            return
        try:
            told = frames(message, self._records_first())
        except WireError as error:
            # Somebody has sent what fits, and what is made of it doesn't: that must not end the leader.
            kind = type(message).__name__
            if self._sayings.once(("can't be told", kind), self._now_round()):
                self._audience.said(one_line(f"a {kind} can't be told to {len(lines)} members: {error}"))
            if isinstance(message, Welcome):  # without it a line is of no use
                for line in lines:
                    line.close(Goodbye("shutdown", "this leader has no welcome that could be read"))
            return
        for line in lines:
            for frame in told:
                line.send(frame)

    def _records_first(self) -> Iterator[bytes]:
        """The records of those whom a member has to find most: voters, seated members, the observer."""
        ledger, observer = self._ledger, self._observer
        wanted = (*ledger.voters, *(seat.peer for seat in ledger.seats), *((observer,) if observer else ()))
        return (self._records[peer] for peer in wanted if peer in self._records)

    def _note(self, observations: list[Observation]) -> None:
        for observation in observations:
            self._journal.observe(observation)
            self._audience.observed(observation)

    def _say_goodbye(self, goodbye: Goodbye) -> None:
        for line in self._lines.values():
            line.close(goodbye)
        self._lines.clear()
