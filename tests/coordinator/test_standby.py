"""Standing by: who waits says for whom, one leads at a time, and who is put out signs and writes nothing more."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from sqlalchemy import text

from coordinator import journal as journals
from coordinator import listening
from coordinator.app import OUTSIDE, serve
from coordinator.database import Database
from coordinator.errors import MachineError, StateError, UsageError
from coordinator.folder import read_founded, read_identity
from coordinator.journal import Journal
from coordinator.lead import Contender, Held, Lead, LeadLost
from coordinator.places import ServeOptions
from coordinator.rounds.events import Opened
from coordinator.site import Whereabouts
from coordinator.standby import Others, keep_lead
from coordinator.web.server import WebServer
from coordinator.web.waiting import make_waiting_app
from coordinator.writer import Writer
from protos.messages import Addresses
from protos.signing import Purpose, unseal
from protos.wire import decode
from tests.coordinator.made import RUN, Chained, FakeClock, append, journal, make_run, next_commit
from tests.coordinator.postgres import Server, url
from tests.coordinator.serving import ANY, Said, no_observer, serving
from tests.coordinator.standing_by import FIRST, SECOND, Heard, _quick, first, stands_by, waiting

__all__ = ["_quick", "first", "no_observer", "url"]


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


@pytest.mark.usefixtures("no_observer")
def test_standby_needs_a_server(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")

    async def scene(said: Said) -> None:
        raise AssertionError("it must not serve")

    with pytest.raises(UsageError, match="--standby needs a database that both coordinators reach"):
        serving(folder.path, scene, standby=True)
    with pytest.raises(MachineError, match="can't be used"):
        serving(folder.path, scene, standby=True, database="postgresql://nobody@localhost:1/none")


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
