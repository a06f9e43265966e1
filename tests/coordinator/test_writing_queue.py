"""The one thread that appends: who waits in its queue, for how long, and what that says of the lead."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from sqlalchemy import select

from coordinator import database, writer
from coordinator.admission import Admission
from coordinator.authority import Authority
from coordinator.errors import MachineError
from coordinator.journal import Journal
from coordinator.lead import BEATS_PER_LEASE, Lead, LeadLost
from coordinator.leading.ports import Observation
from coordinator.rounds.events import Opened
from coordinator.standby import keep_lead
from coordinator.writer import Writer
from protos.messages import Operator, PeerId
from protos.signing import generate_seal_key
from tests.coordinator.made import COORDINATOR, RUN, TODAY, FakeClock, admit_request, identity, journal, spec

ALICE, BOB = identity(10), identity(11)


class Slow:
    """A journal whose thread stands still at `gate`; notes what it is given."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.bunches: list[list[str]] = []
        self.done: list[Any] = []
        self.error: Exception | None = None

    def observe(self, observations: Sequence[Observation], at_run_s: float) -> None:
        self.gate.wait(10)
        self.bunches.append([each.subject for each in observations])
        self.done.append(self.bunches[-1])
        if self.error is not None:
            raise self.error

    def persist(self, entry: object) -> None:
        self.done.append(entry)


def written(scene: Callable[[Slow, Writer], Any]) -> Slow:
    async def main() -> Slow:
        slow = Slow()
        made = Writer(cast(Journal, slow), FakeClock())
        async with asyncio.timeout(10):
            await scene(slow, made)
            slow.gate.set()
            await made.close()
        return slow

    return asyncio.run(main())


def said(number: int) -> Observation:
    return Observation("digest", ALICE.peer, str(number), {"digest": "aa"})


async def turns(n: int = 3) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


def test_an_append_waits_for_one_bunch_however_many_come() -> None:
    entry = Opened(0, 1, 0)

    async def scene(slow: Slow, made: Writer) -> None:
        for number in range(5):
            made.observe(said(number))
            await turns()
        appending = asyncio.ensure_future(made.persist(entry))
        await turns()
        for number in range(5, 8):
            made.observe(said(number))
            await turns()
        slow.gate.set()
        await appending
        await made.flushed()
        assert slow.done == [["0"], entry, ["1", "2", "3", "4", "5", "6", "7"]]

    written(scene)


def test_what_was_observed_before_a_flush_can_be_read_after_it() -> None:
    async def scene(slow: Slow, made: Writer) -> None:
        await made.flushed()
        made.observe(said(0))
        await turns()
        made.observe(said(1))
        flushing = asyncio.ensure_future(made.flushed())
        await turns()
        assert not flushing.done()
        slow.gate.set()
        await flushing
        assert slow.bunches == [["0"], ["1"]]
        made.observe(said(2))

    assert written(scene).bunches == [["0"], ["1"], ["2"]]


def test_a_bunch_that_fails_is_logged_and_the_next_one_written(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(slow: Slow, made: Writer) -> None:
        slow.error = MachineError("the disk is full")
        slow.gate.set()
        made.observe(said(0))
        await made.flushed()
        slow.error = None
        made.observe(said(1))
        await made.flushed()

    assert written(scene).bunches == [["0"], ["1"]]
    assert "observations were not written: the disk is full" in caplog.text


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "OBSERVATIONS_WAITING_MOST", 3)

    async def scene(slow: Slow, made: Writer) -> None:
        made.observe(said(0))
        await turns()
        for number in range(1, 10):
            made.observe(said(number))

    assert written(scene).bunches == [["0"], ["1", "2", "3"]]


# -- the lead ------------------------------------------------------------------------------------------------------


class Held:
    """A lead on a server, whose own clock is told what it says."""

    is_local = False
    lease_s = 0.05

    def __init__(self) -> None:
        self.n_checks = 0
        self.lost_at = 10**9
        self.on_check: Callable[[], None] = lambda: None
        self.abandoned: list[str] = []
        self.errors: list[Exception] = []

    def beat(self) -> list[tuple[str, str]]:
        if self.errors:
            raise self.errors.pop()
        return [("second:1", "second:2")]

    def check(self) -> None:
        self.n_checks += 1
        self.on_check()
        if self.n_checks >= self.lost_at:
            raise LeadLost("nothing reached the database")

    def abandon(self, why: str) -> None:
        self.abandoned.append(why)


class Met(Exception):
    """Ends the wait of a test."""


def met(others: Sequence[tuple[str, str]]) -> None:
    assert others == [("second:1", "second:2")]
    raise Met


def test_a_sign_of_life_that_waits_behind_appends_ends_nothing() -> None:
    async def scene(slow: Slow, made: Writer) -> None:
        held = Held()
        held.on_check = lambda: slow.gate.set() if held.n_checks > 2 * BEATS_PER_LEASE else None
        blocking = asyncio.ensure_future(made.run(lambda: slow.gate.wait(10)))
        with pytest.raises(Met):
            await keep_lead(cast(Lead, held), made, met)
        assert held.abandoned == []
        await blocking

    written(scene)


def test_its_own_clock_ends_the_lead_while_the_thread_stands_still() -> None:
    async def scene(slow: Slow, made: Writer) -> None:
        held = Held()
        held.lost_at = 3
        blocking = asyncio.ensure_future(made.run(lambda: slow.gate.wait(10)))
        with pytest.raises(LeadLost):
            await keep_lead(cast(Lead, held), made, met)
        assert held.abandoned == ["nothing reached the database"]
        slow.gate.set()
        await blocking

    written(scene)


def test_a_sign_of_life_that_fails_is_given_again_while_there_is_a_lease() -> None:
    async def scene(slow: Slow, made: Writer) -> None:
        held = Held()
        held.errors = [MachineError("canceling statement due to lock timeout")] * 2
        with pytest.raises(Met):
            await keep_lead(cast(Lead, held), made, met)
        held.errors = [MachineError("canceling statement due to lock timeout")] * 9
        held.lost_at = held.n_checks + 3
        with pytest.raises(LeadLost):
            await keep_lead(cast(Lead, held), made, met)
        await made.run(lambda: None)  # a beat that was given up may be under way still, and takes an error
        held.errors = [LeadLost("another term has begun")]
        held.lost_at = 10**9
        with pytest.raises(LeadLost, match="another term"):
            await keep_lead(cast(Lead, held), made, met)

    written(scene)


# -- admissions ----------------------------------------------------------------------------------------------------


def rows_of(kept: Journal) -> list[tuple[str, str, bool, float]]:
    table = database.admissions.c
    wanted = select(table.peer, table.name, table.observer, table.at_run_s).order_by(table.id)
    with kept._database.reading() as connection:
        return [(row.peer, row.name, row.observer, row.at_run_s) for row in connection.execute(wanted)]


def test_who_comes_back_unchanged_has_one_row(tmp_path: Path) -> None:
    kept, _ = journal(tmp_path / "j.sqlite")

    def admit(peer: PeerId, name: str, at_run_s: float, *, observer: bool = False, token: str = "") -> None:
        assert kept.admit(peer, name, f"c{at_run_s}", token, 0, observer=observer, at_run_s=at_run_s)

    for at_run_s in (1.0, 2.0, 3.0):
        admit(ALICE.peer, "alice", at_run_s)
    admit(BOB.peer, "bob", 4.0)
    admit(ALICE.peer, "alice", 5.0)
    assert rows_of(kept) == [(ALICE.peer, "alice", False, 5.0), (BOB.peer, "bob", False, 4.0)]
    assert kept.run_time_s() == 5.0
    admit(ALICE.peer, "alicia", 6.0)
    admit(ALICE.peer, "alicia", 7.0, token="aa")
    assert [(name, at) for _, name, _, at in rows_of(kept)] == [
        ("alice", 5.0),
        ("bob", 4.0),
        ("alicia", 6.0),
        ("alicia", 7.0),
    ]
    assert kept.names() == {ALICE.peer: "alicia", BOB.peer: "bob"}
    for peer, at_run_s in ((ALICE.peer, 8.0), (BOB.peer, 9.0), (ALICE.peer, 10.0)):
        admit(peer, "", at_run_s, observer=True)
        assert kept.observer() == peer  # the last one that came, so each has a row
    kept.close()


def test_a_request_that_is_repeated_fills_no_disk(tmp_path: Path) -> None:
    kept, _ = journal(tmp_path / "j.sqlite")
    authority = Authority.generate(RUN.peer, TODAY)
    private, public = generate_seal_key()
    admission = Admission(
        spec(), RUN.peer, COORDINATOR.peer, authority, private, kept,
        allowed=frozenset, banned=lambda peer: False, today=lambda: TODAY,
    )  # fmt: skip
    raw = admit_request(ALICE, Operator(RUN.peer, COORDINATOR.peer, authority.certificate_der, public))
    certificates = {admission.admit(raw, float(number)).response.certificate for number in range(5)}
    assert len(certificates) == 5
    assert len(rows_of(kept)) == 1
    assert kept.admitted(ALICE.peer)
    kept.close()
