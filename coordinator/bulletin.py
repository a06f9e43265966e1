"""What the run shows of itself: status, rows, events and the ledger's file, kept up to date as things happen."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from coordinator.errors import CoordinatorError
from coordinator.journal import Journal
from coordinator.leading.driver import Driver
from coordinator.leading.ports import Observation
from coordinator.ledger_file import LedgerFile
from coordinator.rounds.events import Committed, Instant, View
from coordinator.rounds.ledger import Ledger
from coordinator.rows import round_rows
from protos.messages import Body, Outcome, PeerId, Vote
from protos.orders import OpenedOrder
from protos.runspec import RunSpec
from protos.sealer import open_signed
from protos.signing import SignatureError
from protos.wire import WireError

SAID_KEPT = 200
FOLLOWERS_MOST = 64
EVENTS_WAITING_MOST = 256
READ_AGAIN_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""After so long the journal is read again where that failed; the last one is repeated."""


class Follower:
    """Someone who reads events: a bounded queue that forgets the oldest."""

    def __init__(self) -> None:
        self._events: deque[tuple[str, Any]] = deque(maxlen=EVENTS_WAITING_MOST)
        self._there = asyncio.Event()

    def tell(self, kind: str, content: Any) -> None:
        self._events.append((kind, content))
        self._there.set()

    async def next(self) -> tuple[str, Any]:
        while not self._events:
            self._there.clear()
            await self._there.wait()
        return self._events.popleft()


class Restarts(Protocol):
    n_restarts: int


class Bulletin:
    """The driver's audience. What it reads of the journal it reads in other threads.

    Args:
        val_loss: the newest that is known, from the journal.
        empty: how many of the last rounds in a row were empty, and why the last one was.
        flushed: returns when what was observed so far can be read back from the journal.
        say: where an operator reads.
        carried: is told of the orders of each commit.
    """

    def __init__(
        self,
        run: PeerId,
        leader: PeerId,
        spec: RunSpec,
        journal: Journal,
        file: LedgerFile,
        *,
        val_loss: float | None = None,
        empty: tuple[int, str] = (0, ""),
        flushed: Callable[[], Awaitable[None]],
        say: Callable[[str], None],
        carried: Callable[[Sequence[OpenedOrder]], None] = lambda _: None,
    ) -> None:
        self._run = run
        self._leader = leader
        self._spec = spec
        self._journal = journal
        self._file = file
        self._flushed = flushed
        self._say = say
        self._carried = carried
        self._followers: list[Follower] = []
        self._said: deque[str] = deque(maxlen=SAID_KEPT)
        self._changed = asyncio.Event()
        self._news: list[int] = []
        self.val_loss = val_loss
        self._n_empty, self._empty_reason = empty
        self._empty_said = ""  # the last reason that was said since a round was committed, without its particulars
        self.end_reason = ""
        self._watched: dict[str, Restarts] = {}
        self._writing: asyncio.Future[None] | None = None

    def watch(self, name: str, process: Restarts) -> None:
        """Show how often a helper process has been started again."""
        self._watched[name] = process

    # -- the driver's audience -------------------------------------------------------------------------------------

    def said(self, text: str) -> None:
        self._said.append(text)
        self._say(text)
        self._tell("say", {"text": text})

    def committed(self, effect: Committed, after: Ledger) -> None:
        self._carried(effect.orders)
        self._file.committed(effect.body.round)
        self._news.append(effect.body.round)
        self._changed.set()
        self._count_empty(effect.body)

    def observed(self, observation: Observation) -> None:
        if observation.kind == "evaluation":
            loss = observation.content["val_loss"]
            self.val_loss = float(loss) if isinstance(loss, float | int) else None
            self._changed.set()
        elif observation.kind == "report":
            self._changed.set()

    def ended(self, reason: str) -> None:
        self.end_reason = reason
        self._tell("ended", {"reason": reason})

    def _count_empty(self, body: Body) -> None:
        """A round that takes nothing in is said with its reason; when the next ones end like it, that is in status."""
        if body.outcome is not Outcome.EMPTY:
            self._n_empty, self._empty_reason, self._empty_said = 0, "", ""
            return
        self._n_empty, self._empty_reason = self._n_empty + 1, body.reason
        if (kind := body.reason.partition(" (")[0]) != self._empty_said:
            self._empty_said = kind
            self.said(f"round {body.round} is empty: {body.reason}")

    # -- what is shown ---------------------------------------------------------------------------------------------

    async def rows(self, after_round: int = -1, limit: int | None = None) -> list[dict[str, Any]]:
        await self._flushed()
        return await asyncio.to_thread(round_rows, self._journal, self._spec, self._leader, after_round, limit)

    async def digests(self) -> dict[str, dict[str, str]]:
        """By commit hash, what each peer said that its state's digest is after it; "differing" if it said two."""
        await self._flushed()
        return await asyncio.to_thread(said_digests, self._journal)

    def follow(self) -> Follower | None:
        """A new follower, or None where there are too many."""
        if len(self._followers) >= FOLLOWERS_MOST:
            return None
        follower = Follower()
        self._followers.append(follower)
        return follower

    def unfollow(self, follower: Follower) -> None:
        if follower in self._followers:
            self._followers.remove(follower)

    def status(self, driver: Driver) -> dict[str, Any]:
        view, now = driver.view()
        return {**status_of(self._run, self._leader, view, now), "val_loss": self.val_loss, **self._more(driver)}

    def _more(self, driver: Driver) -> dict[str, Any]:
        beats = driver.heartbeats()
        return {
            "ended": self.end_reason,
            "empty_rounds": self._n_empty,
            "empty_reason": self._empty_reason,
            "said": list(self._said)[-20:],
            "bytes_sent": sum(beat.bytes_sent for beat in beats.values()),
            "bytes_received": sum(beat.bytes_received for beat in beats.values()),
            "restarts": {name: each.n_restarts for name, each in self._watched.items()},
        }

    # -- its task --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write lines and tell followers as things change, until cancelled; then write what still waits.

        What can't be read for a moment is shown later. Raises LeadLost, and MachineError where the file can't be
        written.
        """
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                await self._publish(await self._changed_rows())
        finally:
            await asyncio.shield(self._finish())

    async def _finish(self) -> None:
        """Write what still waits; a line that was written too early for its evaluation is put right now."""
        if self._writing is not None:
            await asyncio.wait((self._writing,))
        try:
            try:
                rows = await self._rows_to_show()
                has_gaps = self._file.has_gaps or any(row["val_loss"] is None for row in rows)
                whole = await self.rows() if has_gaps else []
            except CoordinatorError as error:
                self.said(f"the ledger's last lines are written at the next start: {error.cause}")
                return
            await self._publish(rows, all_of_them=True)
            if has_gaps:
                await asyncio.to_thread(self._file.rewrite, whole)
        finally:
            self._file.close()

    async def _changed_rows(self) -> list[dict[str, Any]]:
        """As `_rows_to_show`, as soon as the journal can be read. Raises LeadLost."""
        n_failed = 0
        while True:
            try:
                return await self._rows_to_show()
            except CoordinatorError as error:
                self._journal.check_lead()
                if not n_failed:
                    self.said(f"the ledger is shown later: {error.cause}")
            await asyncio.sleep(READ_AGAIN_S[min(n_failed, len(READ_AGAIN_S) - 1)])
            n_failed += 1

    async def _rows_to_show(self) -> list[dict[str, Any]]:
        """The rows from the first that is new, or has yet to be written."""
        n_news = len(self._news)
        first = min([*self._file.waiting, *self._news], default=None)
        if first is None:
            return []
        rows = await self.rows(first - 1)
        del self._news[:n_news]
        return rows

    async def _publish(self, rows: list[dict[str, Any]], *, all_of_them: bool = False) -> None:
        if not rows:
            return
        # It waits for the disk. A thread can't be cancelled: `_finish` waits for this one.
        self._writing = asyncio.ensure_future(asyncio.to_thread(self._file.write, rows, all_of_them=all_of_them))
        await asyncio.shield(self._writing)
        for row in rows:
            self._tell("round", row)

    def _tell(self, kind: str, content: Any) -> None:
        for follower in self._followers:
            follower.tell(kind, content)


def said_digests(journal: Journal) -> dict[str, dict[str, str]]:
    """By commit hash, each peer's digest after it: as its vote names it, and as its hellos and heartbeats do."""
    found: dict[str, dict[str, str]] = {}

    def note(commit_hash: str, peer: PeerId, digest: str) -> None:
        said = found.setdefault(commit_hash, {})
        said[peer] = digest if said.get(peer, digest) == digest else "differing"

    for entry in journal.entries():
        for envelope in entry.commit.votes:
            with contextlib.suppress(SignatureError, WireError):  # a genesis or a leave names no digest
                opened = open_signed(envelope, journal.run, kind=Vote)
                if isinstance(opened.message, Vote):
                    note(entry.commit_hash.hex(), opened.signer, opened.message.digest.hex())
    for each in journal.observations("digest"):
        note(each.subject, each.peer, str(each.content["digest"]))
    return found


def status_of(run: PeerId, leader: PeerId, view: View, now: Instant) -> dict[str, Any]:
    """The contract's status of a run that is served; `val_loss` is added by the caller."""
    members = [
        {
            "peer": member.peer,
            "name": member.name,
            "state": member.state,
            "standing": member.standing,
            "step": member.step,
            "tokens_per_s": member.tokens_per_s,
            "reachable": member.reachable,
            "last_seen_s": max(0.0, now - member.last_seen_at),
            "observer": member.observer,
            "idle_share": member.idle_share,
        }
        for member in view.members
    ]
    return {
        "run_id": run,
        "round": view.round,
        "epoch": view.epoch,
        "phase": str(view.phase),
        "deadline_in_s": None if view.deadline_at is None else max(0.0, view.deadline_at - now),
        "leader": leader,
        "members": members,
        "tokens": view.tokens,
        "head": view.head.hex(),
        "waiting_for": view.waiting_for,
        "attempt": view.attempt,
        "n_committed": view.n_committed,
        "serving": True,
    }
