"""Real servers and callers over loopback, as patient as it takes; peers that do what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc

from node.peers.dialing import Dialer
from node.peers.grpc import Credentials, GrpcPeers
from node.peers.server import NodeServer
from protos.messages import ChunkHead, PeerId
from protos.signing import Identity
from tests.fakes.certificates import Authority
from tests.fakes.holder import FakeHolder

AUTHORITY = Authority()
ROW = bytes(5_000_000)
LONG_S = 1000.0
"""Longer than any test: how long something takes on this machine is nobody's fault."""
Handler = Callable[["grpc.aio.ServicerContext[bytes, bytes]"], Awaitable[None]]


def scenario(main: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(limited())


def new_peer() -> PeerId:
    return Identity.generate().peer


def patient(credentials: Credentials) -> Dialer:
    return Dialer(credentials, connect_s=LONG_S)


@asynccontextmanager
async def serving(
    holder: FakeHolder, peer: PeerId | None = None, no_progress_s: float = LONG_S
) -> AsyncIterator[tuple[PeerId, str]]:
    peer = peer or new_peer()
    server = NodeServer(AUTHORITY.issue(peer), holder, allowed=lambda _: "", no_progress_s=no_progress_s)
    port = await server.start("127.0.0.1:0")
    try:
        yield peer, f"127.0.0.1:{port}"
    finally:
        await server.stop()


@asynccontextmanager
async def calling(
    credentials: Credentials | None = None, no_progress_s: float = LONG_S, dialer: Dialer | None = None
) -> AsyncIterator[GrpcPeers]:
    credentials = credentials or AUTHORITY.issue(new_peer())
    peers = GrpcPeers(credentials, no_progress_s=no_progress_s, dialer=dialer or patient(credentials))
    try:
        yield peers
    finally:
        await peers.close()


@asynccontextmanager
async def raw_server(**handlers: Handler) -> AsyncIterator[tuple[PeerId, str]]:
    """A peer that does what a test wants, one handler a method (its name, a dot as two underscores)."""
    peer = new_peer()
    credentials = AUTHORITY.issue(peer)
    server = grpc.aio.server()
    for name, handler in handlers.items():
        service, method = name.split("__")

        async def handle(
            _: object, context: grpc.aio.ServicerContext[bytes, bytes], handler: Handler = handler
        ) -> None:
            await handler(context)

        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    f"barnraise.v1.{service}", {method: grpc.stream_stream_rpc_method_handler(handle, None, None)}
                ),
            )
        )
    tls = grpc.ssl_server_credentials([(credentials.key, credentials.certificate)], credentials.ca, True)
    port = server.add_secure_port("127.0.0.1:0", tls)
    await server.start()
    try:
        yield peer, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def source(chunk: int) -> tuple[ChunkHead, memoryview]:
    return ChunkHead(bytes(32), chunk, len(ROW), ()), memoryview(ROW)


async def ignore(_: bytes) -> None:
    pass


async def drop(_: bytes, __: bytes) -> None:
    pass


async def never(context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
    await asyncio.Event().wait()
