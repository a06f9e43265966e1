"""File descriptors: as many as the system gives, and never all of them for strangers who merely connect."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.leading import descriptors
from node.peers.dialing import Dialer
from node.peers.grpc import GrpcPeers
from node.peers.server import NodeServer
from node.ports import PeerFailed
from protos.messages import PeerId
from protos.signing import Identity
from tests.fakes.certificates import Authority
from tests.fakes.holder import FakeHolder

LIMIT = resource.RLIMIT_NOFILE
LONG_S = 1000.0
"""Longer than any test."""


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = resource.getrlimit(LIMIT)
    yield
    resource.setrlimit(LIMIT, before)


def test_the_limit_is_raised_to_what_the_system_gives() -> None:
    _, hard = resource.getrlimit(LIMIT)
    resource.setrlimit(LIMIT, (200, hard))
    assert descriptors.raise_limit() == resource.getrlimit(LIMIT)[0] == min(hard, descriptors.MOST)
    assert descriptors.raise_limit() == min(hard, descriptors.MOST)


@pytest.mark.parametrize(
    ("soft", "hard", "limit"),
    [
        (256, resource.RLIM_INFINITY, 2**20),
        (256, 2**30, 2**20),
        (256, 4096, 4096),
        (2**21, 2**22, 2**21),  # never lowered
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    ],
)
def test_a_huge_limit_is_cut_and_none_is_lowered(
    soft: int, hard: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = (soft, hard)

    def set_limit(_: int, limits: tuple[int, int]) -> None:
        nonlocal now
        now = limits

    monkeypatch.setattr(resource, "getrlimit", lambda _: now)
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    descriptors.raise_limit()
    assert now == (limit, hard)


@pytest.mark.parametrize(("allowed", "limit"), [(10_240, 8192), (0, 256)])
def test_a_system_that_gives_less_than_it_says_stops_nobody(
    allowed: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 256

    def set_limit(_: int, limits: tuple[int, int]) -> None:
        nonlocal now
        if limits[0] > allowed:
            raise ValueError("not allowed to raise maximum limit")
        now = limits[0]

    monkeypatch.setattr(resource, "getrlimit", lambda _: (now, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    assert descriptors.raise_limit() == now == limit


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextmanager
def connected(port: int) -> Iterator[list[socket.socket]]:
    """60 strangers without a certificate, who say nothing."""
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(60)]


def run_of(folder: Path, scenario: Callable[[int, Callable[[], GrpcPeers], PeerId], Coroutine[Any, Any, None]]) -> None:
    """A node's server with 42 descriptors, and callers of its run."""
    run, me = Authority(), Identity.generate().peer

    def caller() -> GrpcPeers:
        credentials = run.issue(Identity.generate().peer)
        return GrpcPeers(credentials, dialer=Dialer(credentials, connect_s=LONG_S))

    async def main() -> None:
        server = NodeServer(run.issue(me), FakeHolder(folder), allowed=lambda _: "")
        port = await server.start("127.0.0.1:0")
        try:
            await scenario(port, caller, me)
        finally:
            await server.stop()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_who_connects_and_says_nothing_takes_no_more_than_a_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a peer of the run is served."""
    monkeypatch.setattr(descriptors, "HANDSHAKE_S", LONG_S)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (42, 42))

    async def scenario(port: int, caller: Callable[[], GrpcPeers], me: PeerId) -> None:
        peers = caller()
        await peers.ping(me, [f"127.0.0.1:{port}"])
        with connected(port) as strangers:
            while sum(map(is_closed, strangers)) < 40:  # noqa: ASYNC110 - another thread closes them
                await asyncio.sleep(0.01)
            assert sum(map(is_closed, strangers)) < 60
            await peers.ping(me, [f"127.0.0.1:{port}"])
        await peers.close()

    run_of(tmp_path, scenario)


def test_who_connects_and_says_nothing_does_not_do_so_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And afterwards there is room again."""
    monkeypatch.setattr(descriptors, "HANDSHAKE_S", 1.0)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (42, 42))

    async def scenario(port: int, caller: Callable[[], GrpcPeers], me: PeerId) -> None:
        with connected(port) as strangers:
            while not all(map(is_closed, strangers)):  # noqa: ASYNC110 - another thread closes them
                await asyncio.sleep(0.01)
            late = caller()
            while True:
                try:
                    await late.ping(me, [f"127.0.0.1:{port}"])
                    break
                except PeerFailed:  # a slow machine's own handshake may take too long
                    await asyncio.sleep(0.01)
            await late.close()

    run_of(tmp_path, scenario)
