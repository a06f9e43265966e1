"""What strangers may hold of the HTTP listener: connections, places, memory, and how long the loop stands still."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from coordinator import listening
from coordinator.web import connections, pages, server
from coordinator.web.pages import make_app
from coordinator.web.server import WebServer
from tests.coordinator.test_web import FakeSite

PIECE = "61" * 32
BIG_BYTES = 8 * 2**20
"""More than sockets of both sides take in when nobody reads."""

Opened = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Opened]]


@asynccontextmanager
async def serving(site: FakeSite) -> AsyncIterator[Connect]:
    """A listener, and what connects to it; all is closed afterwards."""
    bound = listening.bind(listening.parse("127.0.0.1:0", "--http"))
    port = bound.getsockname()[1]
    web = WebServer(make_app(site))
    await web.start(bound)
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> Opened:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
        writers.append(writer)
        return reader, writer

    try:
        async with asyncio.timeout(60):
            yield connect
    finally:
        for writer in writers:
            writer.close()
        await web.stop()
        bound.close()


async def asked(connect: Connect, path: str, *headers: bytes, close: bool = True) -> tuple[int, bytes]:
    """Status and body of one GET."""
    reader, writer = await connect()
    lines = [b"GET %s HTTP/1.1" % path.encode(), b"Host: here", *([b"Connection: close"] if close else []), *headers]
    writer.write(b"\r\n".join(lines) + b"\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    return int(head.split(b" ")[1]), await reader.read()


async def is_ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


@dataclass
class Clock:
    """What is waited for is told by this one: it stands still while somebody is to be quick."""

    at: float = 0.0

    def monotonic(self) -> float:
        return self.at

    async def runs_until_ended(self, reader: asyncio.StreamReader) -> bool:
        ended = asyncio.ensure_future(is_ended(reader))
        while not ended.done():
            self.at += 0.1
            await asyncio.sleep(0)
        return ended.result()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(connections, "LOOKS_S", 0.02)
    made = Clock()
    monkeypatch.setattr(connections, "time", made)
    return made


def test_who_sends_no_whole_head_is_cut_off(clock: Clock) -> None:
    async def scene() -> None:
        async with serving(FakeSite()) as connect:
            silent, _ = await connect()
            half, writer = await connect()
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n")
            assert await clock.runs_until_ended(silent)
            assert await clock.runs_until_ended(half)
            assert (await asked(connect, "/healthz"))[0] == 200

    asyncio.run(scene())


def test_who_was_answered_may_ask_again_for_a_while(clock: Clock) -> None:
    async def scene() -> None:
        async with serving(FakeSite()) as connect:
            other, _ = await connect()
            reader, writer = await connect()
            writer.write(b"GET /v1/run HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b"run info")).startswith(b"HTTP/1.1 200")
            clock.at += (connections.HEAD_S + connections.IDLE_S) / 2
            assert await is_ended(other)
            writer.write(b"GET /v1/run HTTP/1.1\r\nHost: x\r\n\r\nGET /v1/")
            assert (await reader.readuntil(b"run info")).startswith(b"HTTP/1.1 200")
            clock.at += connections.IDLE_S
            assert await is_ended(reader)

    asyncio.run(scene())


def test_who_is_being_answered_is_not_cut_off(clock: Clock) -> None:
    inside = asyncio.Event()

    class Site(FakeSite):
        async def piece(self, hash_: bytes) -> bytes | None:
            inside.set()
            return await super().piece(hash_)

    async def scene() -> None:
        site = Site()
        site.gate = asyncio.Event()
        site.pieces[b"a" * 32] = b"piece"
        async with serving(site) as connect:
            answer = asyncio.ensure_future(asked(connect, f"/v1/data/{PIECE}"))
            await inside.wait()
            clock.at += connections.HEAD_S + connections.IDLE_S
            for _ in range(3):
                silent, _ = await connect()
                assert await clock.runs_until_ended(silent)
            site.gate.set()
            assert await answer == (200, b"piece")

    asyncio.run(scene())


def test_there_are_so_many_connections_and_who_says_nothing_makes_room(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MOST", 3)

    async def scene() -> None:
        async with serving(FakeSite()) as connect:
            silent = [await connect() for _ in range(3)]
            status, body = await asked(connect, "/healthz")
            assert (status, json.loads(body)["code"]) == (503, "busy")
            clock.at += connections.MAKES_ROOM_S
            assert (await asked(connect, "/healthz"))[0] == 200
            assert await is_ended(silent[0][0])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await silent[2][0].read()

    asyncio.run(scene())


def test_a_place_is_kept_until_the_piece_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PIECES_PER_CALLER", 2)
    monkeypatch.setattr(pages, "SENT_LEAST_BYTES_S", 2**40)
    monkeypatch.setattr(pages, "CALLS_BURST", 1e9)  # a quick machine asks often

    async def begun(connect: Connect, within_s: float) -> list[Opened]:
        """Two that ask for a piece, may take so long over it, and read no more than its head."""
        monkeypatch.setattr(pages, "SENT_S", within_s)
        slow = [await connect() for _ in range(2)]
        for reader, writer in slow:
            writer.write(f"GET /v1/data/{PIECE} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            await reader.readuntil(b"\r\n\r\n")
        monkeypatch.setattr(pages, "SENT_S", 60.0)  # for who takes it as fast as it can
        return slow

    async def answered(connect: Connect) -> tuple[int, bytes]:
        """As soon as there is a place."""
        while (answer := await asked(connect, f"/v1/data/{PIECE}"))[0] == 503:
            pass
        return answer

    async def scene() -> None:
        site = FakeSite()
        site.pieces[b"a" * 32] = os.urandom(BIG_BYTES)
        async with serving(site) as connect:
            slow = await begun(connect, 60.0)
            status, body = await asked(connect, f"/v1/data/{PIECE}")
            assert (status, json.loads(body)["code"]) == (503, "busy")
            for _, writer in slow:
                writer.close()
            assert await answered(connect) == (200, site.pieces[b"a" * 32])
            slow = await begun(connect, 0.3)
            assert await answered(connect) == (200, site.pieces[b"a" * 32])
            for reader, _ in slow:
                assert await _rest_bytes(reader) < BIG_BYTES

    asyncio.run(scene())


async def _rest_bytes(reader: asyncio.StreamReader) -> int:
    n = 0
    try:
        while part := await reader.read(2**20):
            n += len(part)
    except ConnectionError:
        pass
    return n


def test_a_long_ledger_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is put into words in a thread, a row at a time, since each call holds the interpreter until it is done."""
    rows = [{"round": number, "members": [{"peer": "x" * 52}]} for number in range(20)]
    made: list[tuple[Any, int]] = []
    dumps = json.dumps

    def noted(content: Any, **options: Any) -> str:
        made.append((content, threading.get_ident()))
        return dumps(content, **options)

    class Site(FakeSite):
        async def rows(self, after_round: int, limit: int) -> list[dict[str, Any]]:
            return rows

    async def scene() -> None:
        async with serving(Site()) as connect:
            monkeypatch.setattr(json, "dumps", noted)
            status, body = await asked(connect, "/api/ledger")
            assert (status, json.loads(body)) == (200, rows)
        assert [content for content, _ in made] == rows
        assert threading.get_ident() not in {thread for _, thread in made}

    asyncio.run(scene())


def test_so_many_read_the_ledger_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "LEDGERS_AT_ONCE", 1)
    inside, gate = asyncio.Event(), asyncio.Event()

    class Site(FakeSite):
        async def rows(self, after_round: int, limit: int) -> list[dict[str, Any]]:
            inside.set()
            await gate.wait()
            return [{"round": 1}]

    async def scene() -> None:
        async with serving(Site()) as connect:
            first = asyncio.ensure_future(asked(connect, "/api/ledger"))
            await inside.wait()
            assert (await asked(connect, "/api/ledger"))[0] == 503
            gate.set()
            assert await first == (200, b'[{"round": 1}]')
            assert (await asked(connect, "/api/ledger"))[0] == 200

    asyncio.run(scene())


def test_a_secret_that_is_no_text_is_refused_like_any_other() -> None:
    async def scene() -> None:
        async with serving(FakeSite()) as connect:
            status, body = await asked(connect, "/api/digests", b"Authorization: Bearer \xff\xfe")
            assert (status, json.loads(body)["code"]) == (401, "not_operator")
            assert (await asked(connect, "/api/digests", b"Authorization: Bearer guess"))[0] == 403

    asyncio.run(scene())


def test_few_are_admitted_at_once_and_a_crowd_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "ADMISSIONS_WAITING_MOST", 5)
    gate = asyncio.Event()

    class Site(FakeSite):
        n_inside = n_most = 0

        async def admit(self, raw: bytes) -> bytes:
            self.n_inside += 1
            self.n_most = max(self.n_most, self.n_inside)
            await gate.wait()
            self.n_inside -= 1
            return b"admitted"

    async def post(connect: Connect) -> int:
        reader, writer = await connect()
        writer.write(b"POST /v1/admit HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx")
        status = int((await reader.readuntil(b"\r\n\r\n")).split(b" ")[1])
        if status == 503:
            gate.set()
        return status

    async def scene() -> None:
        site = Site()
        async with serving(site) as connect:
            statuses = await asyncio.gather(*(post(connect) for _ in range(8)))
            assert set(statuses) == {200, 503}
            assert statuses.count(200) >= 5
            assert site.n_most == pages.ADMISSIONS_AT_ONCE

    asyncio.run(scene())
