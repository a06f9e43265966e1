"""The limit on standing still: what moves and what is ours puts it off, and only itself becomes a TimeoutError."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest

from coordinator.leading import service
from node.peers.transport import Progress, channel_options, server_options
from protos.signing import Identity
from tests.fakes.loop import SkippingLoop, play

LIMIT_S = 30.0
ROUTERS_REMEMBER_S = 30.0
"""Those of the shortest memory forget a connection on which nothing has come for so long, and it is dead then."""


async def stand_still(progress: Progress) -> asyncio.Task[None]:
    """A task that stands still for as long as it may, from now on."""

    async def stand() -> None:
        async with progress:
            await asyncio.Event().wait()

    standing = asyncio.create_task(stand())
    await asyncio.sleep(0)
    return standing


def test_what_stands_still_is_over() -> None:
    async def scenario(loop: SkippingLoop) -> None:
        progress = Progress(LIMIT_S)
        standing = await stand_still(progress)
        await loop.skip(0.9 * LIMIT_S)
        assert not standing.done()
        await loop.skip(0.2 * LIMIT_S)
        assert progress.expired
        with pytest.raises(TimeoutError):
            await standing
        assert standing.cancelling() == 0

    play(scenario)


def test_whatever_moves_starts_it_anew() -> None:
    async def scenario(loop: SkippingLoop) -> None:
        progress = Progress(LIMIT_S)
        standing = await stand_still(progress)
        for _ in range(5):
            await loop.skip(0.9 * LIMIT_S)
            progress.moved()
        await loop.skip(0.9 * LIMIT_S)
        assert not standing.done()
        await loop.skip(0.2 * LIMIT_S)
        with pytest.raises(TimeoutError):
            await standing

    play(scenario)


def test_what_we_do_does_not_count() -> None:
    async def scenario(loop: SkippingLoop) -> None:
        progress = Progress(LIMIT_S)
        standing = await stand_still(progress)
        await loop.skip(0.5 * LIMIT_S)
        with progress.ours():
            with progress.ours():
                await loop.skip(3 * LIMIT_S)
            await loop.skip(3 * LIMIT_S)
        await loop.skip(0.9 * LIMIT_S)  # the whole limit is left after it
        assert not standing.done()
        await loop.skip(0.2 * LIMIT_S)
        with pytest.raises(TimeoutError):
            await standing

    play(scenario)


def test_whoever_cancels_it_is_not_told_of_a_limit() -> None:
    async def scenario(loop: SkippingLoop) -> None:
        for too_late in (False, True):
            progress = Progress(LIMIT_S)
            standing = await stand_still(progress)
            standing.cancel()
            if too_late:  # both at once
                progress._ring()
                loop.skipped_s += 2 * LIMIT_S
                progress._ring()
            with pytest.raises(asyncio.CancelledError):
                await standing
            assert progress.expired == too_late

    play(scenario)


def test_who_leaves_in_time_is_not_cancelled_later() -> None:
    async def scenario(loop: SkippingLoop) -> None:
        async with Progress(LIMIT_S) as progress:
            progress.moved()
        await loop.skip(5 * LIMIT_S)
        assert not progress.expired

    play(scenario)


@pytest.mark.parametrize("options", [server_options(), service.OPTIONS], ids=["a node's", "the leader's"])
def test_a_server_never_closes_a_link_for_our_own_pings(options: list[tuple[str, str | int]]) -> None:
    """Pings that a server holds for too many make it close the link, whatever it is carrying (GOAWAY)."""
    client, server = dict(channel_options(Identity.generate().peer)), dict(options)
    assert server["grpc.http2.max_ping_strikes"] == 0
    tolerated_ms = int(server["grpc.http2.min_ping_interval_without_data_ms"])
    assert tolerated_ms <= int(client["grpc.keepalive_time_ms"]) / 2
    assert int(client["grpc.keepalive_time_ms"]) < 1000 * ROUTERS_REMEMBER_S
    assert client["grpc.keepalive_permit_without_calls"] == server["grpc.keepalive_permit_without_calls"] == 1
    assert client["grpc.http2.max_pings_without_data"] == 0  # or they stop after two
    library = importlib.util.find_spec("grpc._cython.cygrpc")
    assert library is not None
    assert library.origin is not None
    known = Path(library.origin).read_bytes()
    assert [
        name for name in (*client, *server) if name.encode() not in known
    ] == []  # gRPC ignores what it doesn't know
