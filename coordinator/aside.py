"""What a journal holds beside the chain: the run's origin, observations, admissions, coordinators."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from sqlalchemy import Connection, insert, inspect, select, update

from coordinator import database
from coordinator.database import RESTORE, Database
from coordinator.errors import StateError
from coordinator.lead import look, met
from coordinator.leading.ports import Observation
from protos.messages import PeerId
from protos.orders import OpenedOrder


class Aside:
    """Reads that need no term; errors as a journal's."""

    def __init__(self, opened: Database, run: PeerId) -> None:
        self._database = opened
        self.run = run

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

    def coordinators(self) -> list[tuple[str, str]]:
        """(http, line) of each coordinator of the run that was there lately, the newest first."""
        with self._database.reading() as connection:
            if not inspect(connection).has_table(database.coordinators.name):
                return []
            return met(connection, self._database)

    def led_by(self) -> str:
        """Who leads from this database now, by name; empty: nobody, or it is a file, whose folder has a lock."""
        if self._database.is_sqlite:
            return ""
        with self._database.reading() as connection:
            held, holds = look(connection, self.run)
        return (held.holder or "another coordinator") if holds else ""


def note_admission(
    connection: Connection,
    peer: PeerId,
    name: str,
    certificate: str,
    token: str,
    token_uses: int,
    *,
    observer: bool,
    at_run_s: float,
) -> bool:
    """As `Journal.admit`, in its transaction.

    A member that comes back as it was the last time changes its row: who asks again and again fills no disk.
    """
    table, uses = database.admissions, database.token_uses
    if token:
        used_by = list(connection.execute(select(uses.c.peer).where(uses.c.token == token)).scalars())
        if peer not in used_by:
            if token_uses and len(used_by) >= token_uses:
                return False
            connection.execute(insert(uses).values(token=token, peer=peer))
    is_its = table.c.peer == peer
    last = connection.execute(select(table).where(is_its).order_by(table.c.id.desc()).limit(1)).first()
    if last is not None and not observer and (last.name, last.observer, last.token) == (name, False, token):
        again = update(table).where(table.c.id == last.id)
        connection.execute(again.values(certificate=certificate, at_run_s=at_run_s))
        return True
    row = {"peer": peer, "name": name, "observer": observer, "certificate": certificate, "token": token}
    connection.execute(insert(table).values(**row, at_run_s=at_run_s))
    return True


def note_orders(connection: Connection, orders: Sequence[OpenedOrder], at_run_s: float) -> None:
    """The orders of a commit that are not here yet: a revision of the settings is in force by its number, and has to be
    found again."""
    content = {each.envelope.hex(): each for each in orders}
    if not content:
        return
    rows = database.orders.c
    known = set(connection.execute(select(rows.content).where(rows.content.in_(list(content)))).scalars())
    for raw, each in content.items():
        if raw not in known:
            values = {"kind": each.order.kind, "content": raw, "at_run_s": at_run_s}
            connection.execute(insert(database.orders).values(**values))
