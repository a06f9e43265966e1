"""What the coordinator must not forget, each append durable before it returns.

What a decision rests on (commits, promises, admissions, orders) stands apart from observations, which no decision rests
on. Appends come from one thread (`writer.Writer`), so nobody waits for a lock; readers come from any.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, delete, func, insert, inspect, select

from coordinator import database
from coordinator.database import RESTORE, Database
from coordinator.errors import StateError
from coordinator.leading.ports import Observation
from coordinator.rounds.events import Opened
from coordinator.rounds.ledger import Ledger, LedgerError, fold, genesis
from protos.hashes import commit_hash
from protos.messages import ZERO_HASH, AttemptFailed, Body, Commit, PeerId, Promise, Proposal
from protos.wire import WireError, decode, encode

SCHEMA_VERSION = 1
_RECORDS_KEPT = 16
"""Promises, openings and proposals of so many rounds are kept; they matter in the current one."""
_LINKS_CHECKED = 256

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
    orphaned: bool


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a leader needs to go on."""

    commit: Commit
    body: Body
    ledger: Ledger
    epoch: int  # the latest that this leader has opened for the current round, or the head's
    opened: int  # highest attempt opened in the current round of that epoch, -1: none
    promise: Promise | None  # own voter record, of the current round or an earlier one
    paused: bool
    run_time_s: float  # the latest instant of the run's clock that the journal knows


class Journal:
    """All methods raise StateError for a damaged database and MachineError where the disk refuses."""

    def __init__(self, opened: Database, run: PeerId) -> None:
        self._database = opened
        self.run = run

    # -- life ------------------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls, place: Path | str, run: PeerId, commit: Commit, body: Body, ledger: Ledger, *, origin_unix_s: float
    ) -> Journal:
        """A new database with commit 0. `origin_unix_s` is the instant from which the run's clock counts."""
        journal = cls(Database(place), run)
        with journal._database.appending() as connection:
            database.metadata.create_all(connection)
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
    def open(cls, place: Path | str, run: PeerId) -> Journal:
        """Open and check: readable, whole, of this schema and this run."""
        if isinstance(place, Path) and not place.exists():
            raise StateError(f"the database {place} is missing", RESTORE)
        journal = cls(Database(place), run)
        journal._check()
        return journal

    def close(self) -> None:
        self._database.close()

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
        with self._database.appending() as connection:
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
    ) -> None:
        """The next commit of the ledger. Repeating it changes nothing."""
        with self._database.appending() as connection:
            known = select(database.commits.c.id).where(database.commits.c.hash == after.head.hex())
            if connection.execute(known).first() is not None:
                return
            self._insert_commit(
                connection, commit, body, after, failed, nominal_step=before.nominal_step, at_run_s=at_run_s
            )
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
        connection.execute(delete(database.ledgers))
        connection.execute(insert(database.ledgers).values(hash=ledger.head.hex(), content=ledger.to_bytes()))

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
            with self._database.appending() as connection:
                connection.execute(insert(database.observations), rows)

    def order(self, kind: str, content: Mapping[str, Any], at_run_s: float) -> None:
        """What the operator ordered, before it is obeyed."""
        with self._database.appending() as connection:
            connection.execute(
                insert(database.orders).values(kind=kind, content=json.dumps(content), at_run_s=at_run_s)
            )

    def admit(
        self, peer: PeerId, name: str, certificate: str, token: str, token_uses: int, *, observer: bool, at_run_s: float
    ) -> bool:
        """Record an admission; False if the token (serial in hex) is used up by other peers, and nothing is recorded.

        A peer uses a token once, however often it comes back.
        """
        with self._database.appending() as connection:
            if token:
                used_by = list(
                    connection.execute(
                        select(database.token_uses.c.peer).where(database.token_uses.c.token == token)
                    ).scalars()
                )
                if peer not in used_by:
                    if token_uses and len(used_by) >= token_uses:
                        return False
                    connection.execute(insert(database.token_uses).values(token=token, peer=peer))
            connection.execute(
                insert(database.admissions).values(
                    peer=peer, name=name, observer=observer, certificate=certificate, token=token, at_run_s=at_run_s
                )
            )
            return True

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
            epoch = connection.execute(
                select(func.max(database.opened.c.epoch)).where(database.opened.c.round == body.round + 1)
            ).scalar()
            epoch = body.epoch if epoch is None else max(body.epoch, int(epoch))
            opened = connection.execute(
                select(func.max(database.opened.c.attempt)).where(
                    database.opened.c.epoch == epoch, database.opened.c.round == body.round + 1
                )
            ).scalar()
            promise = connection.execute(
                select(database.promises.c.content).order_by(database.promises.c.id.desc()).limit(1)
            ).scalar()
            order = connection.execute(
                select(database.orders.c.kind)
                .where(database.orders.c.kind.in_(("pause", "resume")))
                .order_by(database.orders.c.id.desc())
                .limit(1)
            ).scalar()
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
            paused=order == "pause",
            run_time_s=max((float(at) for at in instants if at is not None), default=0.0),
        )

    def origin_unix_s(self) -> float:
        with self._database.reading() as connection:
            value = connection.execute(
                select(database.facts.c.value).where(database.facts.c.name == "origin_unix_s")
            ).scalar()
        try:
            origin = float(value) if value is not None else math.nan
        except ValueError:
            origin = math.nan
        if not math.isfinite(origin):
            raise StateError(f"the database {self._database.where} doesn't say when the run began", RESTORE)
        return origin

    def run_time_s(self) -> float:
        """The latest instant of the run's clock that the journal knows."""
        return self.recover().run_time_s

    def entries(self, after_round: int = -1, limit: int | None = None) -> list[Entry]:
        """Commits of later rounds, oldest first."""
        wanted = select(database.commits).where(database.commits.c.round > after_round).order_by(database.commits.c.id)
        with self._database.reading() as connection:
            rows = connection.execute(wanted if limit is None else wanted.limit(limit)).all()
        entries: list[Entry] = []
        for row in rows:
            commit, body = self._decode(row.hash, row.content)
            failed = tuple(AttemptFailed(**each) for each in json.loads(row.failed))
            hash_ = bytes.fromhex(row.hash)
            entries.append(Entry(commit, body, hash_, failed, row.nominal_step, row.tokens, bool(row.orphaned)))
        return entries

    def observations(self, kind: str, subjects: Sequence[str] | None = None) -> list[Observation]:
        """Oldest first; of these subjects only, where they are given."""
        wanted = (
            select(database.observations)
            .where(database.observations.c.kind == kind)
            .order_by(database.observations.c.id)
        )
        if subjects is not None:
            wanted = wanted.where(database.observations.c.subject.in_(list(subjects)))
        with self._database.reading() as connection:
            return [
                Observation(row.kind, PeerId(row.peer), row.subject, json.loads(row.content))
                for row in connection.execute(wanted)
            ]

    def admitted(self, peer: PeerId) -> bool:
        """Whether this peer has been let in before, as a member."""
        wanted = (
            select(database.admissions.c.id)
            .where(database.admissions.c.peer == peer, database.admissions.c.observer.is_(False))
            .limit(1)
        )
        with self._database.reading() as connection:
            return connection.execute(wanted).first() is not None

    def observer(self) -> PeerId | None:
        """The peer that was admitted last as the observer."""
        wanted = (
            select(database.admissions.c.peer)
            .where(database.admissions.c.observer)
            .order_by(database.admissions.c.id.desc())
            .limit(1)
        )
        with self._database.reading() as connection:
            peer = connection.execute(wanted).scalar()
        return None if peer is None else PeerId(peer)

    def names(self) -> dict[PeerId, str]:
        """What admitted peers want to be called."""
        wanted = select(database.admissions.c.peer, database.admissions.c.name).order_by(database.admissions.c.id)
        with self._database.reading() as connection:
            return {PeerId(row.peer): str(row.name) for row in connection.execute(wanted)}

    # -- inside ----------------------------------------------------------------------------------------------------

    def _ledger(self, stored: bytes | None, body: Body, head: bytes, digest: bytes) -> Ledger:
        try:
            if stored is not None:
                ledger = Ledger.from_bytes(stored)
                if ledger.hash() == body.ledger_hash:
                    return ledger.at(head, digest)
            return self._refold(head)
        except LedgerError as error:
            raise StateError(f"the ledger in {self._database.where} is damaged: {error}", RESTORE) from error

    def _refold(self, head: bytes) -> Ledger:
        """The ledger folded from commit 0, for when the stored one doesn't fit."""
        ledger: Ledger | None = None
        for entry in self.entries():
            if entry.orphaned:
                continue
            if ledger is None:
                ledger = genesis(entry.body.run, entry.body.leader)
            else:
                ledger = fold(ledger, entry.body)
            if ledger.hash() != entry.body.ledger_hash:
                raise LedgerError(f"the books after round {entry.body.round} are not what its commit names")
            ledger = ledger.at(entry.commit_hash, entry.commit.digest)
        if ledger is None or ledger.head != head:
            raise LedgerError("the chain doesn't lead to its head")
        return ledger

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
        for (_, later), (hash_, _) in pairwise(bodies):
            if later.previous.hex() != hash_:
                raise StateError(
                    f"the chain in {self._database.where} is broken before round {later.round}: a commit is missing",
                    RESTORE,
                )
        if len(bodies) < _LINKS_CHECKED and bodies[-1][1].previous != ZERO_HASH:
            raise StateError(f"the chain in {self._database.where} has lost its beginning", RESTORE)

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
