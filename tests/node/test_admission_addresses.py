"""First contact where an invite names several addresses: who answers nothing, or nonsense, is passed by."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web

from node import admission as admissions
from node.errors import Refused, Unreachable
from node.racing import first_of
from protos.invite import Invite
from protos.signing import Identity
from tests.node.contact import Coordinator, ask, closed, coordinator, folder, serving

__all__ = ["closed", "coordinator", "folder"]  # fixtures

LONG_S = 1000.0
"""Longer than any test: who waits for so long waits for ever."""


def test_every_address_that_fails_says_why_and_a_later_one_will_do(
    coordinator: Coordinator, folder: Path, closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = socket.getaddrinfo

    def no_such_name(host: str, *asked: object, **how: object) -> object:
        if host == "host.invalid":
            raise socket.gaierror(socket.EAI_NONAME, "no such name")  # whatever this machine's resolver is like
        return find(host, *asked, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", no_such_name)

    async def no_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\x15\x03\x01\x00\x02\x02\x0a")
        writer.close()

    async def hello(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    async def gone(_: web.Request) -> web.Response:
        return web.Response(status=404, text="nothing here")

    async def main() -> None:
        other = await asyncio.start_server(no_http, "127.0.0.1", 0)
        async with (
            other,
            serving(("GET", "/v1/run", hello)) as talking,
            serving(("GET", "/v1/run", gone)) as empty,
            coordinator.serving() as host,
        ):
            silent = "{}:{}".format(*other.sockets[0].getsockname())
            hosts = (closed, silent, talking, empty, "host.invalid:80")
            with pytest.raises(Unreachable) as error:
                await ask(Invite(coordinator.run, hosts), folder)
            assert f"{closed}: connection refused" in error.value.tried
            assert f"{silent}: it answers, but not with HTTP as a coordinator does" in error.value.tried
            assert f"{talking}: it answers, but is no coordinator" in error.value.tried
            assert f"{empty}: nothing here" in error.value.tried
            assert "host.invalid:80: name not found" in error.value.tried
            assert error.value.exit_code == 4
            assert (await ask(Invite(coordinator.run, (*hosts[:3], host)), folder)).fresh

    asyncio.run(main())


@contextmanager
def mute(host: str = "127.0.0.1") -> Iterator[str]:
    """An address at which connections open and nothing is ever said."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        listener.listen()
        yield f"{host}:{listener.getsockname()[1]}"


def test_a_host_is_tried_beside_those_that_do_not_answer(
    coordinator: Coordinator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admissions, "first_of", partial(first_of, overlap_s=0.01))
    monkeypatch.setattr(admissions, "ANSWER_S", LONG_S)

    async def main() -> None:
        with ExitStack() as stack:
            silent = [stack.enter_context(mute()) for _ in range(15)]
            async with coordinator.serving() as host, asyncio.timeout(60):
                assert (await ask(Invite(coordinator.run, (*silent, host)), folder)).fresh

    asyncio.run(main())


@pytest.mark.slow
def test_a_name_whose_first_address_leads_nowhere_is_reached_by_the_second(
    coordinator: Coordinator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where IPv6 is half configured: packets to the first one vanish."""
    monkeypatch.setattr(admissions, "ANSWER_S", LONG_S)

    async def main() -> None:
        async with coordinator.serving() as host, asyncio.timeout(60):
            port = int(host.rpartition(":")[2])
            ways = [(socket.AF_INET6, ("::1", port, 0, 0)), (socket.AF_INET, ("127.0.0.1", port))]
            found = [(family, socket.SOCK_STREAM, 6, "", where) for family, where in ways]
            with vanishing("::1", port):
                monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
                assert (await ask(Invite(coordinator.run, (f"run.example:{port}",)), folder, connect_s=LONG_S)).fresh

    asyncio.run(main())


@contextmanager
def vanishing(host: str, port: int) -> Iterator[None]:
    """A listener whose queue is full, so that the kernel answers nobody who comes now."""
    with ExitStack() as stack:
        try:
            listener = stack.enter_context(socket.socket(socket.AF_INET6))
            listener.bind((host, port))
        except OSError as error:
            pytest.skip(f"no IPv6 on this machine: {error}")
        listener.listen(0)
        for _ in range(3):
            filler = stack.enter_context(socket.socket(socket.AF_INET6))
            filler.setblocking(False)
            filler.connect_ex((host, port))
        yield


def test_another_runs_coordinator_at_one_address_is_passed_by(
    coordinator: Coordinator, folder: Path, closed: str, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = Coordinator(tmp_path / "other")

    async def main() -> None:
        async with other.serving() as wrong, coordinator.serving() as right:
            assert (await ask(Invite(coordinator.run, (wrong, right)), folder)).spec == coordinator.spec
            with pytest.raises(Refused, match="is not run"):
                await ask(Invite(Identity.generate().peer, (closed, wrong)), tmp_path)

    asyncio.run(main())


def test_an_endless_answer_is_not_taken_in(coordinator: Coordinator, folder: Path) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(100):
            await response.write(bytes(100_000))
        return response

    async def main() -> None:
        async with serving(("GET", "/v1/run", endless)) as host:
            await ask(Invite(coordinator.run, (host,)), folder)

    with pytest.raises(Unreachable):
        asyncio.run(main())
