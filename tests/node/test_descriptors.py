"""File descriptors: as many as the system gives, and never all of them for strangers who merely connect."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.leading import descriptors
from node.peers.grpc import GrpcPeers
from node.peers.server import NodeServer
from protos.signing import Identity
from tests.fakes.certificates import Authority
from tests.fakes.holder import FakeHolder

LIMIT = resource.RLIMIT_NOFILE


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


def test_who_connects_and_says_nothing_takes_no_more_than_a_share_and_not_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a certificate, while a peer of the run is served; and afterwards there is room again."""
    monkeypatch.setattr(descriptors, "HANDSHAKE_S", 1.0)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (42, 42))
    run, me, other = Authority(), Identity.generate().peer, Identity.generate().peer

    async def main() -> None:
        server = NodeServer(run.issue(me), FakeHolder(tmp_path), allowed=lambda _: "")
        port = await server.start("127.0.0.1:0")
        peers = GrpcPeers(run.issue(other))
        await peers.ping(me, [f"127.0.0.1:{port}"])
        strangers: list[socket.socket] = []
        try:
            for _ in range(60):
                strangers.append(await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port)))
            while sum(map(is_closed, strangers)) < 40:  # noqa: ASYNC110 - another thread closes them
                await asyncio.sleep(0.01)
            assert sum(map(is_closed, strangers)) < 60
            await peers.ping(me, [f"127.0.0.1:{port}"])
            while not all(map(is_closed, strangers)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            late = GrpcPeers(run.issue(Identity.generate().peer))
            await late.ping(me, [f"127.0.0.1:{port}"])
            await late.close()
        finally:
            for stranger in strangers:
                stranger.close()
            await peers.close()
            await server.stop()

    asyncio.run(asyncio.wait_for(main(), 20))
