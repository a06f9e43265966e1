"""Stands by: waits for the right to lead, says for whom, and takes it when it is free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import inspect

from coordinator import database, lead, moving
from coordinator.database import RESTORE, Database
from coordinator.errors import MachineError, StateError
from coordinator.folder import RunFolder, read_json, write_json
from coordinator.journal import Journal
from coordinator.lead import BEATS_PER_LEASE, Contender, Held, Lead, LeadLost
from coordinator.ledger_file import last_round
from coordinator.places import is_place
from coordinator.site import Whereabouts
from coordinator.writer import Writer
from protos import limits
from protos.invite import Invite
from protos.messages import PeerId

T = TypeVar("T")

ASK_S = 1.0
"""The database is asked for the lock for so long at a time; in between we look whether its holder lives."""
RETRY_S = 2.0
MEET_S = 30.0
LOST_AT = "lost_at"
"""In `term.json`: the head of a database that is an older copy than the folder."""


@dataclass(frozen=True, slots=True)
class Here:
    """What a coordinator tells others of itself."""

    http: str
    line: str
    pid: int

    @property
    def name(self) -> str:
        return f"the coordinator at {self.http} (process {self.pid})"


@dataclass(frozen=True, slots=True)
class Leading:
    """A journal whose term has begun.

    Attributes:
        lost: the database is older than what this folder knows: what was signed in the current round may be missing.
    """

    journal: Journal
    lead: Lead
    lost: bool


class Standby:
    """Waits for the lead on one database.

    Args:
        patient: wait for as long as another one leads; else raise as soon as that one is seen alive.
        say: told for whom we wait, when that changes.
    """

    def __init__(
        self,
        folder: RunFolder,
        run: PeerId,
        place: str,
        here: Here,
        *,
        patient: bool,
        lease_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._folder, self._run, self._here = folder, run, here
        self._database = Database(place)
        self._patient, self._lease_s, self._say = patient, lease_s, say
        self.waiting_for = ""

    def about(self) -> dict[str, Any]:
        """For monitors."""
        return {"ok": True, "standby": True, "run_id": self._run, "waiting_for": self.waiting_for}

    async def lead(self) -> Leading:
        """Returns when this process leads. Raises StateError, or MachineError where the database can't be reached."""
        contender = Contender(self._database, self._run)
        loop = asyncio.get_running_loop()
        began_at = met_at = loop.time()
        reached = noted = False
        leading: Leading | None = None
        try:
            while True:
                try:
                    found = await _finished(partial(contender.ask, ASK_S if reached else 0.0))
                    reached = True
                    if isinstance(found, Lead):
                        leading = await _finished(partial(self._begin, found))
                        if leading is not None:
                            self.waiting_for = ""
                            return leading
                    else:
                        self._name(found, waited_s=loop.time() - began_at)
                        if self._patient and (not noted or loop.time() - met_at > MEET_S):
                            await _finished(self._meet)
                            noted, met_at = True, loop.time()
                        continue
                except MachineError as error:
                    if not reached or not self._patient:
                        raise
                    self._wait(f"the database: {error.cause}")
                await asyncio.sleep(RETRY_S)
        finally:
            contender.close()
            if leading is None:
                self._database.close()

    def _name(self, held: Held, *, waited_s: float) -> None:
        who = held.holder or "another coordinator"
        if held.ended:
            self._say(f"{who} has been silent for {held.silent_s:.0f} s: its session is ended")
        elif not self._patient and held.holder and held.silent_s < waited_s:  # it has given a sign of life since
            raise StateError(
                f"{who} leads the run from {self._database.where}",
                "start this one with --standby to have it take over when that one ends",
            )
        self._wait(f"the lock held by {who}, until it ends or is silent for {held.lease_s:g} s")

    def _wait(self, text: str) -> None:
        if text != self.waiting_for:
            self.waiting_for = text
            self._say(f"waiting for {text}")

    def _meet(self) -> None:
        """Have the leader name us to nodes."""
        opened = self._database
        with opened.explained(), opened.engine.begin() as connection:
            if inspect(connection).has_table(database.coordinators.name):
                lead.meet(connection, opened, self._here.http, self._here.line)

    def _begin(self, held: Lead) -> Leading | None:
        """Begin a term with the lock; None where the database holds no run yet, and others are to bring it."""
        try:
            if not moving.holds_run(self._database):
                if self._patient:
                    held.close()
                    self._wait(f"a coordinator without --standby, to move the run's journal to {self._database.where}")
                    return None
                if not self._folder.journal.exists():
                    raise StateError(f"the database {self._database.where} holds no run", RESTORE)
                moving.move(self._folder, held, self._run)
                self._say(f"the journal has been moved to {self._database.where}")
            leading = begin(
                Journal.open(self._database, self._run, with_lead=held), self._folder, self._here, self._lease_s
            )
            if moving.put_aside(self._folder):
                self._say(f"{self._folder.journal} is {moving.MOVED} now: it is not used any more")
            return leading
        except BaseException:
            held.close()
            raise


def begin(journal: Journal, folder: RunFolder, here: Here, lease_s: float) -> Leading:
    """Begin a term, and look whether the database is as new as the folder.

    One that isn't stays an old copy until a commit follows its head, however often it is begun from: terms and
    `ledger.jsonl` are those of the copy by then. That is noted before the lost terms are passed.
    """
    term = journal.begin_term(here.name, lease_s)
    remembered = read_json(folder.term) or {}
    known = remembered.get("term")
    body = journal.recover().body
    head = (body.epoch, body.round)
    last = last_round(folder.ledger)
    lost = (
        (isinstance(known, int) and known > term - 1)
        or (last is not None and head < last)
        or remembered.get(LOST_AT) == list(head)
    )
    note = {LOST_AT: list(head)} if lost else {}
    if isinstance(known, int) and known > term:
        write_json(folder.term, {"term": known, **note})
        term = journal.begin_term(here.name, lease_s, above=known)
    write_json(folder.term, {"term": term, **note})
    if journal.lead is None:
        raise RuntimeError("a journal whose term has begun leads")
    return Leading(journal, journal.lead, lost)


class Others:
    """The run's other coordinators, as they come to be known to the one that leads.

    Args:
        here, line: what leads.
        whereabouts: names the others to nodes.
        met: (http, line) of each that was there lately. Each has written its own, so what is no address is passed over.
    """

    def __init__(self, here: Here, line: str, whereabouts: Whereabouts, met: Sequence[tuple[str, str]]) -> None:
        self._here, self._line, self._whereabouts = here, line, whereabouts
        self.http: tuple[str, ...] = ()
        self._take(met)

    def learn(self, met: Sequence[tuple[str, str]], run: PeerId, say: Callable[[str], None]) -> None:
        """Take in who is there now; whoever is new is said, with the invite that names it."""
        before = self.http
        self._take(met)
        if new := [http for http in self.http if http not in before]:
            say(f"stands by: {', '.join(new)}; an invite for all is {Invite(run, (self._here.http, *self.http))}")

    def _take(self, met: Sequence[tuple[str, str]]) -> None:
        others = [each for each in met if each[0] != self._here.http and all(map(is_place, each))]
        others = others[: limits.ADDRESSES - 1]
        self.http = tuple(http for http, _ in others)
        self._whereabouts.others = tuple(line for _, line in others if line != self._line)


async def keep_lead(held: Lead, writer: Writer, met: Callable[[Sequence[tuple[str, str]]], None]) -> None:
    """Give signs of life until cancelled; raises LeadLost, within a lease, where the lead is gone.

    A sign of life waits its turn behind what else is appended, and each append is one, too. So how long it waits says
    nothing: the lead is lost once nothing has reached the database for a lease.
    """
    if held.is_local:
        return
    pause_s = held.lease_s / BEATS_PER_LEASE
    while True:
        await asyncio.sleep(pause_s)
        beating = asyncio.ensure_future(writer.run(held.beat))
        try:
            while not (await asyncio.wait((beating,), timeout=pause_s))[0]:
                held.check()
            try:
                met(beating.result())
            except MachineError:
                held.check()  # the next one may do better, as long as there is a lease
        except LeadLost as lost:
            held.abandon(lost.cause)  # the writing thread may still wait for the database
            raise
        finally:
            beating.cancel()


async def _finished(work: Callable[[], T]) -> T:
    """Do it in a thread; who is cancelled meanwhile still waits for the thread."""
    doing = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait((doing,))
        if not doing.cancelled() and doing.exception() is None:
            match doing.result():  # the lock is not kept for nobody
                case Lead() as held:
                    held.close()
                case Leading(journal):
                    journal.close()
        raise
