"""What the coordinator must not forget, each append durable before it returns.

What a decision rests on (commits, promises, admissions, orders) stands apart from observations, which no decision rests
on. Appends come from one thread (`writer.Writer`), so nobody waits for a lock, and each belongs to a term (`lead`).
Readers come from any.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, delete, func, insert, inspect, select, update

from coordinator import database
from coordinator.aside import Aside, note_admission, note_orders
from coordinator.books import broken_link, refold
from coordinator.database import RESTORE, Database
from coordinator.errors import StateError
from coordinator.lead import CLOSING_S, LEASE_S, Contender, Held, Lead
from coordinator.leading.learning import Past
from coordinator.leading.ports import Observation
from coordinator.rounds.events import Opened
from coordinator.rounds.ledger import Ledger, LedgerError
from protos.hashes import commit_hash
from protos.messages import AttemptFailed, Body, Commit, PeerId, Promise, Proposal
from protos.orders import OpenedOrder
from protos.wire import WireError, decode, encode

SCHEMA_VERSION = 1
_RECORDS_KEPT = 16
"""Promises, openings and proposals of so many rounds are kept; they matter in the current one."""
_LINKS_CHECKED = 256
_UNDONE = "undone"
"""The kind of the rows that say which rounds a rollback has undone; what is in force is the chain's to say."""

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Entry:
    """One commit of the ledger with what its row needs of the books around it."""

    commit: Commit
    body: Body
    commit_hash: bytes
    failed: tuple[AttemptFailed, ...]
    nominal_step: int
    tokens: int
    orphaned: bool  # on a branch that was given up
    undone: bool  # of the chain, but before a rollback and after what that goes back to


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a leader needs to go on."""

    commit: Commit
    body: Body
    ledger: Ledger
    epoch: int  # the latest that this leader has opened for the current round, or the head's
    opened: int  # highest attempt opened in the current round of that epoch, -1: none
    promise: Promise | None  # own voter record, of the current round or an earlier one
    run_time_s: float  # the latest instant of the run's clock that the journal knows
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)  # the highest attempt opened, by epoch and round
    signed: dict[int, int] = field(default_factory=dict)  # the last round with an own voter record, by epoch


class Journal(Aside):
    """All methods raise StateError for a damaged database and MachineError where the disk refuses.

    Appends need a term (`begin_term`, or the one given to `open`) and raise LeadLost once another one has begun.
    """

    def __init__(self, opened: Database, run: PeerId) -> None:
        super().__init__(opened, run)
        self.lead: Lead | None = None

    # -- life ------------------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls, place: Path | str, run: PeerId, commit: Commit, body: Body, ledger: Ledger, *, origin_unix_s: float
    ) -> Journal:
        """A new database with commit 0. `origin_unix_s` is the instant from which the run's clock counts."""
        journal = cls(Database(place), run)
        journal.begin_term("the founding")
        with journal._appending() as connection:
            if connection.execute(select(func.count()).select_from(database.facts)).scalar_one():
                raise StateError(
                    f"the database {journal._database.where} holds a run already", "give another --database"
                )
            facts = {"schema": str(SCHEMA_VERSION), "run": run, "origin_unix_s": repr(origin_unix_s)}
            connection.execute(
                insert(database.facts), [{"name": name, "value": value} for name, value in facts.items()]
            )
            journal._insert_commit(connection, commit, body, ledger, (), nominal_step=0, at_run_s=0.0)
        return journal

    @classmethod
    def open(cls, place: Path | str | Database, run: PeerId, *, with_lead: Lead | None = None) -> Journal:
        """Open and check: readable, whole, of this schema and this run."""
        if isinstance(place, Path) and not place.exists():
            raise StateError(f"the database {place} is missing", RESTORE)
        journal = cls(place if isinstance(place, Database) else Database(place), run)
        journal.lead = with_lead
        try:
            journal._check()
        except BaseException:
            journal._database.close()
            raise
        return journal

    def close(self) -> None:
        """Give the lead back, if this journal has it, and close the database."""
        if self.lead is not None:
            self.lead.close()
        self._database.close()

    def begin_term(self, holder: str, lease_s: float = LEASE_S, *, above: int = 0) -> int:
        """Lead from here on, under this name, in a term higher than any before and than `above`; its number.

        Raises StateError where another coordinator leads.
        """
        if self.lead is None:
            contender = Contender(self._database, self.run)
            found = contender.ask(CLOSING_S)
            contender.close()
            if isinstance(found, Held):
                raise StateError(
                    f"the database {self._database.where} is led from by {found.holder or 'another coordinator'}",
                    "give the order there, or serve with --standby",
                )
            self.lead = found
        return self.lead.begin(holder, lease_s, above=above)

    def check_lead(self) -> None:
        """Raises LeadLost where this process may sign and send nothing more, as far as it can tell by itself."""
        if self.lead is not None:
            self.lead.check()

    @contextmanager
    def _appending(self) -> Iterator[Connection]:
        if self.lead is None:
            raise RuntimeError("a term is begun before anything is appended")
        with self.lead.appending() as connection:
            yield connection

    def _check(self) -> None:
        self._database.check()
        with self._database.reading() as connection:
            if not inspect(connection).has_table(database.facts.name):
                raise StateError(f"the database {self._database.where} holds no run", RESTORE)
            rows = connection.execute(select(database.facts.c.name, database.facts.c.value)).all()
        facts = {str(row.name): str(row.value) for row in rows}
        if facts.get("schema") != str(SCHEMA_VERSION):
            raise StateError(
                f"the database {self._database.where} has schema {facts.get('schema')}, not {SCHEMA_VERSION}",
                "use the version of Barnraise that wrote it",
            )
        if facts.get("run") != self.run:
            raise StateError(
                f"the database {self._database.where} is of run {facts.get('run')}", "give this run's --database"
            )

    # -- appends ---------------------------------------------------------------------------------------------------

    def persist(self, entry: Opened | Promise | Proposal) -> None:
        """What must be on disk before anything that follows from it is sent."""
        with self._appending() as connection:
            match entry:
                case Opened(epoch, round_, attempt):
                    connection.execute(insert(database.opened).values(epoch=epoch, round=round_, attempt=attempt))
                case Promise():
                    connection.execute(insert(database.promises).values(round=entry.round, content=encode(entry)))
                case Proposal():
                    round_ = decode(Body, entry.body).round
                    connection.execute(insert(database.proposals).values(round=round_, content=encode(entry)))

    def append(
        self,
        commit: Commit,
        body: Body,
        before: Ledger,
        after: Ledger,
        failed: Sequence[AttemptFailed],
        at_run_s: float,
        *,
        went_back_to: int | None = None,
        orders: Sequence[OpenedOrder] = (),
    ) -> None:
        """The next commit of the ledger. Repeating it changes nothing.

        `went_back_to`: the round that a rollback in it goes back to. `orders`: those that its body carries; of a commit
        that others have made they may never have been given here, and are known from now on.
        """
        with self._appending() as connection:
            is_it = database.commits.c.hash == after.head.hex()
            known = connection.execute(select(database.commits.c.orphaned).where(is_it)).first()
            if known is not None:
                if known.orphaned:  # the branch that was given up once is followed again
                    connection.execute(update(database.commits).where(is_it).values(orphaned=False))
                    self._keep_books(connection, after)
                return
            self._insert_commit(
                connection, commit, body, after, failed, nominal_step=before.nominal_step, at_run_s=at_run_s
            )
            if went_back_to is not None:
                span = json.dumps([went_back_to, body.round])
                connection.execute(insert(database.orders).values(kind=_UNDONE, content=span, at_run_s=at_run_s))
            note_orders(connection, orders, at_run_s)
            for table in (database.opened, database.promises, database.proposals):
                connection.execute(delete(table).where(table.c.round < body.round - _RECORDS_KEPT))

    def _insert_commit(
        self,
        connection: Connection,
        commit: Commit,
        body: Body,
        ledger: Ledger,
        failed: Sequence[AttemptFailed],
        *,
        nominal_step: int,
        at_run_s: float,
    ) -> None:
        rows = [
            {"epoch": each.epoch, "round": each.round, "attempt": each.attempt, "reason": each.reason}
            for each in failed
        ]
        connection.execute(
            insert(database.commits).values(
                hash=ledger.head.hex(),
                epoch=body.epoch,
                round=body.round,
                content=encode(commit),
                failed=json.dumps(rows),
                nominal_step=nominal_step,
                tokens=ledger.tokens,
                at_run_s=at_run_s,
                orphaned=False,
            )
        )
        self._keep_books(connection, ledger)

    def _keep_books(self, connection: Connection, ledger: Ledger) -> None:
        connection.execute(delete(database.ledgers))
        connection.execute(insert(database.ledgers).values(hash=ledger.head.hex(), content=ledger.to_bytes()))

    def orphan(self, fork: Ledger) -> None:
        """Another branch goes on from this head: the commits after it stay, but are no part of the chain any more."""
        chain = database.commits.c
        with self._appending() as connection:
            later = chain.round > fork.round
            connection.execute(update(database.commits).where(later, chain.orphaned.is_(False)).values(orphaned=True))
            self._keep_books(connection, fork)

    def observe(self, observations: Sequence[Observation], at_run_s: float) -> None:
        """What somebody measured or claims: beside the ledger, never in it."""
        rows = [
            {
                "kind": each.kind,
                "peer": each.peer,
                "subject": each.subject,
                "content": json.dumps(each.content, allow_nan=False),
                "at_run_s": at_run_s,
            }
            for each in observations
        ]
        if rows:
            with self._appending() as connection:
                connection.execute(insert(database.observations), rows)

    def order(self, kind: str, envelope: bytes, at_run_s: float) -> None:
        """What the operator ordered, before it is obeyed."""
        with self._appending() as connection:
            connection.execute(insert(database.orders).values(kind=kind, content=envelope.hex(), at_run_s=at_run_s))

    def orders(self) -> list[bytes]:
        """The envelopes of all orders that were ever given here, or that a commit has brought, oldest first."""
        rows = database.orders.c
        wanted = select(rows.content).where(rows.kind != _UNDONE).order_by(rows.id)
        with self._database.reading() as connection:
            try:
                return [bytes.fromhex(content) for content in connection.execute(wanted).scalars()]
            except ValueError as error:
                told = f"the database {self._database.where} is damaged: an order is none"
                raise StateError(told, RESTORE) from error

    def _undone(self, connection: Connection) -> list[tuple[int, int]]:
        """Of each rollback the round that it went back to, and its own."""
        wanted = select(database.orders.c.content).where(database.orders.c.kind == _UNDONE)
        spans = [json.loads(content) for content in connection.execute(wanted).scalars()]
        return [(int(first), int(last)) for first, last in spans]

    def admit(
        self, peer: PeerId, name: str, certificate: str, token: str, token_uses: int, *, observer: bool, at_run_s: float
    ) -> bool:
        """Record an admission; False if the token (serial in hex) is used up by other peers, and nothing is recorded.

        A peer uses a token once, however often it comes back.
        """
        with self._appending() as connection:
            return note_admission(
                connection, peer, name, certificate, token, token_uses, observer=observer, at_run_s=at_run_s
            )

    # -- reads -----------------------------------------------------------------------------------------------------

    def recover(self) -> Recovered:
        """The newest commit, its ledger, and what this leader promised; verified as far as hashes go."""
        with self._database.reading() as connection:
            head = connection.execute(
                select(database.commits.c.hash, database.commits.c.content)
                .where(database.commits.c.orphaned.is_(False))
                .order_by(database.commits.c.epoch.desc(), database.commits.c.round.desc())
                .limit(1)
            ).first()
            if head is None:
                raise StateError(f"the database {self._database.where} holds no commit", RESTORE)
            commit, body = self._decode(head.hash, head.content)
            stored = connection.execute(
                select(database.ledgers.c.content).where(database.ledgers.c.hash == head.hash)
            ).scalar()
            used = database.opened.c
            rows = connection.execute(
                select(used.epoch, used.round, func.max(used.attempt)).group_by(used.epoch, used.round)
            )
            numbers = {(int(epoch), int(round_)): int(attempt) for epoch, round_, attempt in rows}
            # An epoch that was opened on a branch which was given up is none that was opened after the head.
            chain = database.commits.c
            given_up = set(connection.execute(select(chain.epoch).where(chain.orphaned.is_(True)).distinct()).scalars())
            later = [each for each, round_ in numbers if round_ == body.round + 1 and each not in given_up]
            epoch = max([body.epoch, *later])
            opened = numbers.get((epoch, body.round + 1))
            contents = connection.execute(select(database.promises.c.content).order_by(database.promises.c.id))
            promise: bytes | None = None
            signed: dict[int, int] = {}
            for promise in contents.scalars():
                record = self._decoded(Promise, promise)
                signed[record.epoch] = max(record.round, signed.get(record.epoch, -1))
            instants = [
                connection.execute(select(func.max(table.c.at_run_s))).scalar()
                for table in (database.commits, database.admissions, database.observations, database.orders)
            ]
        self._check_links()
        return Recovered(
            commit=commit,
            body=body,
            ledger=self._ledger(stored, body, bytes.fromhex(head.hash), commit.digest),
            epoch=epoch,
            opened=-1 if opened is None else int(opened),
            promise=None if promise is None else self._decoded(Promise, promise),
            run_time_s=max((float(at) for at in instants if at is not None), default=0.0),
            numbers=numbers,
            signed=signed,
        )

    def run_time_s(self) -> float:
        """The latest instant of the run's clock that the journal knows."""
        return self.recover().run_time_s

    def entries(self, after_round: int = -1, limit: int | None = None) -> list[Entry]:
        """Commits of later rounds, oldest first."""
        wanted = select(database.commits).where(database.commits.c.round > after_round).order_by(database.commits.c.id)
        with self._database.reading() as connection:
            rows = connection.execute(wanted if limit is None else wanted.limit(limit)).all()
            spans = self._undone(connection)
        entries: list[Entry] = []
        for row in rows:
            commit, body = self._decode(row.hash, row.content)
            failed = tuple(AttemptFailed(**each) for each in json.loads(row.failed))
            hash_ = bytes.fromhex(row.hash)
            undone = not row.orphaned and any(first < body.round < last for first, last in spans)
            entries.append(Entry(commit, body, hash_, failed, row.nominal_step, row.tokens, bool(row.orphaned), undone))
        return entries

    def heads(self) -> list[tuple[int, int, bytes]]:
        """Epoch, round and hash of the chain's commits, the newest first."""
        chain = database.commits.c
        wanted = (
            select(chain.epoch, chain.round, chain.hash)
            .where(chain.orphaned.is_(False))
            .order_by(chain.epoch.desc(), chain.round.desc())
        )
        with self._database.reading() as connection:
            return [(int(row.epoch), int(row.round), bytes.fromhex(row.hash)) for row in connection.execute(wanted)]

    def at(self, head: bytes) -> Past | None:
        """A commit of the chain and the books after it, folded anew; None if it is none of the chain."""
        chain: list[tuple[Commit, Body]] = []
        for entry in self.entries():
            if entry.orphaned:
                continue
            chain.append((entry.commit, entry.body))
            if entry.commit_hash == head:
                return Past(entry.commit, refold(chain, head))
        return None

    # -- inside ----------------------------------------------------------------------------------------------------

    def _ledger(self, stored: bytes | None, body: Body, head: bytes, digest: bytes) -> Ledger:
        try:
            if stored is not None:
                ledger = Ledger.from_bytes(stored)
                if ledger.hash() == body.ledger_hash:
                    return ledger.at(head, digest)
            return refold(((each.commit, each.body) for each in self.entries() if not each.orphaned), head)
        except LedgerError as error:
            raise StateError(f"the ledger in {self._database.where} is damaged: {error}", RESTORE) from error

    def _check_links(self) -> None:
        newest = (
            select(database.commits)
            .where(database.commits.c.orphaned.is_(False))
            .order_by(database.commits.c.epoch.desc(), database.commits.c.round.desc())
            .limit(_LINKS_CHECKED)
        )
        with self._database.reading() as connection:
            rows = connection.execute(newest).all()
        bodies = [(row.hash, self._decode(row.hash, row.content)[1]) for row in rows]
        if fault := broken_link(bodies, to_the_beginning=len(bodies) < _LINKS_CHECKED):
            raise StateError(f"the chain in {self._database.where} {fault}", RESTORE)

    def _decode(self, hash_: str, content: bytes) -> tuple[Commit, Body]:
        commit = self._decoded(Commit, content)
        if commit_hash(commit.body, commit.digest).hex() != hash_:
            raise StateError(f"the database {self._database.where} is damaged: a commit doesn't have its hash", RESTORE)
        return commit, self._decoded(Body, commit.body)

    def _decoded(self, cls: type[M], raw: bytes) -> M:
        try:
            return decode(cls, raw)
        except WireError as error:
            raise StateError(f"the database {self._database.where} is damaged: {error}", RESTORE) from error
