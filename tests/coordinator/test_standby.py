"""Standing by: who waits says for whom, one leads at a time, and who is put out signs and writes nothing more."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sqlalchemy import text

from coordinator import journal as journals
from coordinator import listening, moving, standby
from coordinator.app import OUTSIDE, serve
from coordinator.database import Database
from coordinator.errors import MachineError, StateError, UsageError
from coordinator.folder import RunFolder, read_founded, read_identity, write_json
from coordinator.journal import Journal
from coordinator.lead import Contender, Held, Lead, LeadLost
from coordinator.ledger_file import LedgerFile
from coordinator.places import ServeOptions
from coordinator.rounds.events import Opened
from coordinator.site import Whereabouts
from coordinator.standby import Here, Leading, Others, Standby, begin, keep_lead
from coordinator.web.server import WebServer
from coordinator.web.waiting import make_waiting_app
from coordinator.writer import Writer
from protos.messages import Addresses, PeerId
from protos.signing import Purpose, unseal
from protos.wire import decode
from tests.coordinator.made import RUN, Chained, FakeClock, append, journal, make_run, next_commit
from tests.coordinator.postgres import Server
from tests.coordinator.test_serving import ANY, Said, no_observer, serving

__all__ = ["no_observer"]

FIRST, SECOND = Here("first:1", "first:2", 1), Here("second:1", "second:2", 2)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "ASK_S", 0.02)
    monkeypatch.setattr(standby, "RETRY_S", 0.02)


@pytest.fixture
def url(postgres: Server) -> str:
    return postgres.new_database()


@dataclass
class Heard:
    """What was said, and a wait for a word in it."""

    lines: list[str] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, text: str) -> None:
        self.lines.append(text)
        self.came.set()

    async def wait_for(self, word: str) -> None:
        while not any(word in line for line in self.lines):
            self.came.clear()
            await self.came.wait()


def folder_at(path: Path) -> RunFolder:
    path.mkdir()
    return RunFolder(path)


def stands_by(path: Path, url: str, heard: Callable[[str], None], *, patient: bool = True) -> Standby:
    return Standby(folder_at(path), RUN.peer, url, SECOND, patient=patient, lease_s=5.0, say=heard)


@pytest.fixture
def first(url: str) -> Iterator[tuple[Journal, Chained]]:
    """A journal in which the first coordinator leads, with one commit, and the next one to append."""
    made, ledger = journal(url)
    made.begin_term(FIRST.name, 60.0)
    link = next_commit(ledger)
    append(made, link)
    yield made, next_commit(link.after)
    made.close()


@asynccontextmanager
async def waiting(by: Standby) -> AsyncIterator[asyncio.Task[Leading]]:
    """The standby's wait; what it leads in the end is closed."""
    task = asyncio.create_task(by.lead())
    try:
        async with asyncio.timeout(60):
            yield task
    finally:
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled() and task.exception() is None:
            task.result().journal.close()


def test_it_waits_by_name_and_takes_over_when_the_first_ends(
    first: tuple[Journal, Chained], url: str, tmp_path: Path
) -> None:
    made, link = first

    async def scene() -> None:
        heard = Heard()
        by = stands_by(tmp_path / "second", url, heard)
        async with waiting(by) as task:
            await heard.wait_for("waiting for the lock held by the coordinator at first:1 (process 1)")
            assert by.about() == {
                "ok": True,
                "standby": True,
                "run_id": RUN.peer,
                "waiting_for": "the lock held by the coordinator at first:1 (process 1), "
                "until it ends or is silent for 60 s",
            }
            assert not task.done()
            while ("second:1", "second:2") not in await asyncio.to_thread(made.coordinators):
                pass  # it has yet to tell where it is
            assert made.lead is not None
            assert ("second:1", "second:2") in made.lead.beat()
            made.close()
            leading = await task
            assert leading.journal.led_by() == SECOND.name
            assert (leading.lead.term, leading.lost, by.waiting_for) == (3, False, "")
            assert leading.journal.recover().ledger == link.before
            append(leading.journal, link)
            with pytest.raises(LeadLost):
                append(made, link)

    asyncio.run(scene())


def test_a_leader_that_lies_still_loses_its_session_and_can_write_nothing_after(
    first: tuple[Journal, Chained], url: str, tmp_path: Path
) -> None:
    """As one that is stopped, or whose line is half open: the server holds its session for alive."""
    made, link = first

    async def scene() -> None:
        made.begin_term(FIRST.name, 0.2)
        heard = Heard()
        async with waiting(stands_by(tmp_path / "second", url, heard)) as task:
            leading = await task
            assert any("first:1 (process 1) has been silent for" in line for line in heard.lines)
            with pytest.raises(LeadLost) as caught:
                made.persist(Opened(0, 2, 0))
            assert caught.value.exit_code == 6
            with pytest.raises(LeadLost):
                append(made, link)
            recovered = leading.journal.recover()
            assert (recovered.ledger, recovered.opened) == (link.before, -1)

    asyncio.run(scene())


def test_a_sign_of_life_is_seen(first: tuple[Journal, Chained], url: str) -> None:
    made, _ = first
    opened = Database(url)
    contender = Contender(opened, RUN.peer)
    held = contender.ask()
    assert isinstance(held, Held)
    assert made.led_by() == FIRST.name
    assert made.lead is not None
    began_at = time.monotonic()
    made.lead.beat()
    again = contender.ask(0.001)
    assert isinstance(again, Held)
    assert (again.holder, again.term, again.lease_s, again.ended) == (FIRST.name, 2, 60.0, False)
    assert 0.0 <= again.silent_s < time.monotonic() - began_at + 1.0  # another clock tells it
    contender.close()
    opened.close()


def test_who_is_not_to_wait_is_refused_once_the_other_is_seen_alive(
    first: tuple[Journal, Chained], url: str, tmp_path: Path
) -> None:
    made, _ = first

    async def scene() -> None:
        heard = Heard()
        by = stands_by(tmp_path / "second", url, heard, patient=False)

        async def live() -> None:
            assert made.lead is not None
            while True:
                await asyncio.to_thread(made.lead.beat)

        living = asyncio.create_task(live())
        with pytest.raises(StateError, match=r"first:1 \(process 1\) leads the run from .*--standby"):
            await by.lead()
        living.cancel()
        await asyncio.wait((living,))

    asyncio.run(scene())


def test_a_database_that_goes_away_is_waited_for(postgres: Server, tmp_path: Path) -> None:
    """The server itself is restarted under a leader and a standby: one of them leads afterwards."""
    url = postgres.new_database()
    made, ledger = journal(url)

    async def scene() -> None:
        heard = Heard()
        async with waiting(stands_by(tmp_path / "second", url, heard)) as task:
            await heard.wait_for("waiting for the lock")
            postgres.stop()
            await heard.wait_for("waiting for the database: ")
            postgres.start()
            leading = await task
            with pytest.raises(LeadLost):
                append(made, next_commit(ledger))
            append(leading.journal, next_commit(ledger))

    asyncio.run(scene())
    made.close()


def test_who_begins_right_after_another_has_ended_waits_for_its_lock(
    first: tuple[Journal, Chained], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server keeps a closed session's lock until it has seen that it is gone."""
    monkeypatch.setattr(journals, "CLOSING_S", 60.0)
    made, _ = first
    after, onlooker = Journal.open(url, RUN.peer), Database(url)
    waits = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
    with ThreadPoolExecutor(1) as pool, onlooker.engine.connect() as looking:
        beginning = pool.submit(after.begin_term, SECOND.name)
        while not looking.execute(waits).scalar_one():
            assert not beginning.done()
        made.close()
        assert beginning.result() == 3
    after.close()
    onlooker.close()


# -- a leader's own doubts -----------------------------------------------------------------------------------------


def test_its_own_clock_ends_a_lease(url: str) -> None:
    """After a stop it may not sign, though its session may be whole: the other one may have begun meanwhile."""
    journal(url)[0].close()
    opened, clock = Database(url), FakeClock()
    lead = Contender(opened, RUN.peer, seconds=clock.now).ask(60.0)
    assert isinstance(lead, Lead)
    lead.begin("the first", 10.0)
    clock.at = 9.0
    lead.check()
    lead.beat()
    clock.at = 18.0
    lead.check()
    clock.at = 19.5
    with pytest.raises(LeadLost, match="nothing reached the database for 10 s, and its lease is 10 s"):
        lead.check()
    with pytest.raises(LeadLost):
        lead.beat()
    lead.close()
    opened.close()


def test_a_leader_whose_database_is_silent_stops_and_its_append_ends(first: tuple[Journal, Chained], url: str) -> None:
    made, link = first
    made.begin_term(FIRST.name, 0.2)
    other = Database(url)

    async def scene() -> None:
        writer = Writer(made, FakeClock())
        with other.engine.connect() as blocking:
            blocking.execute(text("SELECT * FROM leadership FOR UPDATE"))
            assert made.lead is not None
            with pytest.raises(LeadLost, match=r"nothing reached the database for .* its lease is 0\.2 s"):
                await keep_lead(made.lead, writer, lambda _: None)
            async with asyncio.timeout(60):
                await writer.close()  # the thread is free
            blocking.rollback()

    asyncio.run(scene())
    other.close()
    assert made.recover().ledger == link.before


@pytest.mark.usefixtures("no_observer")
def test_a_leader_that_loses_its_session_ends_with_6(postgres: Server, tmp_path: Path) -> None:
    folder, url = make_run(tmp_path / "run"), postgres.new_database()

    async def scene() -> None:
        said = Said()
        options = ServeOptions(folder.path, ANY, ANY, ANY, database=url, lease_s=0.5)
        until = asyncio.Event()
        serving_it = asyncio.create_task(
            serve(options, said.said.append, said.show, replace(OUTSIDE, until=lambda _: until))
        )
        async with asyncio.timeout(60):
            await said.invited.wait()
            postgres.run(
                "SELECT pg_terminate_backend(l.pid) FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid "
                "WHERE l.locktype = 'advisory' AND a.application_name = 'barnraise'"
            )
            await serving_it

    with pytest.raises(LeadLost, match="leads no longer") as caught:
        asyncio.run(scene())
    assert caught.value.exit_code == 6
    assert not folder.serving.exists()
    assert not folder.journal.exists()  # it was moved


# -- what a standby brings along -----------------------------------------------------------------------------------


def test_the_journal_moves_to_an_empty_database_whole(url: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    run = read_founded(folder).run
    for _ in range(3):
        served = begin(Journal.open(folder.journal, run), folder, FIRST, 5.0)
        served.journal.close()
    source = Journal.open(folder.journal, run)
    source.begin_term("before")
    source.order("pause", b"an order", 1.0)
    source.admit(PeerId("somebody"), "a name", "1", "aa", 1, observer=False, at_run_s=2.0)
    before = source.recover()
    source.close()
    copied = tmp_path / "copy"
    shutil.copytree(folder.path, copied)

    async def scene() -> None:
        waits, moves = Heard(), Heard()
        patient = Standby(RunFolder(copied), run, url, SECOND, patient=True, lease_s=5.0, say=waits)
        first = Standby(folder, run, url, FIRST, patient=False, lease_s=60.0, say=moves)
        async with waiting(patient) as task:
            await waits.wait_for("waiting for a coordinator without --standby, to move the run's journal")
            leading = await first.lead()
            await waits.wait_for("waiting for the lock held by the coordinator at first:1")
            assert any("the journal has been moved" in line for line in moves.lines)
            made = leading.journal
            assert (leading.lead.term, leading.lost) == (6, False)  # terms count on
            after = made.recover()
            assert (after.commit, after.ledger, made.orders()) == (before.commit, before.ledger, [b"an order"])
            assert made.origin_unix_s() > 0
            assert made.admitted(PeerId("somebody"))
            assert not made.admit(PeerId("another"), "", "2", "aa", 1, observer=False, at_run_s=3.0)  # used up
            made.order("resume", b"another", 4.0)  # numbers go on where they were
            append(made, next_commit(after.ledger))
            assert not folder.journal.exists()
            assert (folder.path / moving.MOVED).exists()
            made.close()
            second = await task
            assert second.journal.recover().body.round == 1
            assert not RunFolder(copied).journal.exists()

    asyncio.run(scene())


def test_an_empty_database_is_no_new_run_once_the_journal_has_moved(url: str, tmp_path: Path) -> None:
    """The database was lost: going on from commit 0 would sign everything a second time."""
    by = stands_by(tmp_path / "second", url, lambda _: None, patient=False)
    with pytest.raises(StateError, match="holds no run"):
        asyncio.run(by.lead())


def test_an_old_copy_of_the_database_is_recognised(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    run = read_founded(folder).run

    def start() -> Leading:
        return begin(Journal.open(folder.journal, run), folder, FIRST, 5.0)

    leading = start()
    assert not leading.lost
    leading.journal.close()
    backup = tmp_path / "backup.sqlite"
    shutil.copy(folder.journal, backup)
    for _ in range(2):
        leading = start()
        assert not leading.lost
        leading.journal.close()
    last = leading.lead.term
    shutil.copy(backup, folder.journal)
    leading = start()
    assert leading.lost
    assert leading.lead.term > last  # a process of the lost terms can append nothing
    leading.journal.close()
    for _ in range(2):
        leading = start()
        assert leading.lost, "it stays one until a commit follows its head"
        leading.journal.close()
    leading = start()
    append(leading.journal, next_commit(leading.journal.recover().ledger))
    leading.journal.close()
    leading = start()
    assert not leading.lost
    leading.journal.close()


def test_a_crash_between_two_terms_forgets_no_old_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy's terms have caught up then, though what was signed in the lost ones is still unknown."""
    folder = make_run(tmp_path / "run")
    run = read_founded(folder).run
    backup = tmp_path / "backup.sqlite"
    shutil.copy(folder.journal, backup)
    for _ in range(3):
        begin(Journal.open(folder.journal, run), folder, FIRST, 5.0).journal.close()
    shutil.copy(backup, folder.journal)

    def only_the_first(path: Path, content: Mapping[str, Any]) -> None:
        write_json(path, content)
        monkeypatch.setattr(standby, "write_json", crash)

    def crash(*_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(standby, "write_json", only_the_first)
    journal_ = Journal.open(folder.journal, run)
    with pytest.raises(SystemExit):
        begin(journal_, folder, FIRST, 5.0)
    journal_.close()
    monkeypatch.setattr(standby, "write_json", write_json)
    leading = begin(Journal.open(folder.journal, run), folder, FIRST, 5.0)
    assert leading.lost
    leading.journal.close()


def test_a_database_that_lacks_a_round_of_the_ledger_s_file_is_an_old_copy(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    run = read_founded(folder).run
    row = {"epoch": 0, "round": 1, "val_loss": 1.0}
    LedgerFile(folder.ledger, [{**row, "round": 0}]).close()
    leading = begin(Journal.open(folder.journal, run), folder, FIRST, 5.0)
    assert not leading.lost
    leading.journal.close()
    LedgerFile(folder.ledger, [row]).close()
    leading = begin(Journal.open(folder.journal, run), folder, FIRST, 5.0)
    assert leading.lost
    leading.journal.close()
    LedgerFile(folder.ledger, [{**row, "round": 0}]).close()  # as the start itself makes it from the database
    leading = begin(Journal.open(folder.journal, run), folder, FIRST, 5.0)
    assert leading.lost
    leading.journal.close()


@pytest.mark.usefixtures("no_observer")
def test_standby_needs_a_server(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")

    async def scene(said: Said) -> None:
        raise AssertionError("it must not serve")

    with pytest.raises(UsageError, match="--standby needs a database that both coordinators reach"):
        serving(folder.path, scene, standby=True)
    with pytest.raises(MachineError, match="can't be used"):
        serving(folder.path, scene, standby=True, database="postgresql://nobody@localhost:1/none")


# -- what nodes see ------------------------------------------------------------------------------------------------


def test_a_standby_answers_monitors_and_sends_nodes_on() -> None:
    async def scene() -> None:
        bound = listening.bind(listening.parse("127.0.0.1:0", "--http"))
        web = WebServer(make_waiting_app(lambda: {"ok": True, "standby": True, "waiting_for": "the lock held by X"}))
        await web.start(bound)
        where = f"http://127.0.0.1:{bound.getsockname()[1]}"
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{where}/healthz") as answer:
                assert (answer.status, await answer.json()) == (
                    200,
                    {"ok": True, "standby": True, "waiting_for": "the lock held by X"},
                )
            for method, path in (("GET", "/v1/run"), ("POST", "/v1/admit"), ("GET", "/"), ("GET", "/api/status")):
                async with session.request(method, f"{where}{path}") as answer:
                    assert answer.status == 503
                    assert "Retry-After" in answer.headers
                    assert "waiting for the lock held by X" in (await answer.json())["reason"]
        await web.stop()

    asyncio.run(scene())


def test_nodes_are_told_of_the_others(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    founded = read_founded(folder)
    identity = read_identity(folder.keys / "coordinator.pem")
    clock = FakeClock(at=1.0)
    whereabouts = Whereabouts(founded, identity, ("first:2",), clock)

    def told() -> Addresses:
        envelope = whereabouts.envelope(None, None)
        return decode(
            Addresses, unseal(envelope, purpose=Purpose.ADDRESSES, run=founded.run, signer=identity.peer).body
        )

    others = Others(FIRST, "first:2", whereabouts, [("first:1", "first:2")])
    before = told()
    assert (others.http, before.grpc) == ((), ("first:2",))
    heard: list[str] = []
    clock.at = 2.0
    for _ in range(2):  # said once
        others.learn([("second:1", "second:2"), ("first:1", "first:2")], founded.run, heard.append)
    assert (others.http, told().grpc) == (("second:1",), ("first:2", "second:2"))
    assert told().sequence > before.sequence
    assert len(heard) == 1
    assert f"barnraise://{founded.run}@first:1,second:1" in heard[0]
