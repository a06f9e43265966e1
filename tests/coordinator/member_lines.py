"""Members' lines to a leader, over loopback with real TLS, and what the leader gets to hear of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import grpc
import grpc.aio
import pytest

from coordinator.authority import Authority
from coordinator.leading import prober
from coordinator.leading import service as service_limits
from coordinator.leading.ports import Arrived, Inbound
from coordinator.leading.service import Service
from protos import limits
from protos.messages import Heartbeat, Hello, LeaderMessage, MemberMessage, MemberState, Signed
from protos.records import seal_record
from protos.services import LEADER_LINE
from protos.signing import Identity
from protos.wire import decode_leader_frame, encode_member_frame
from tests.coordinator.made import COORDINATOR, RUN, FakeClock, identity, record

ALICE, BOB, OBSERVER = identity(10), identity(11), identity(12)
TODAY = datetime.now(UTC)  # TLS looks at the calendar by itself
AUTHORITY = Authority.generate(RUN.peer, TODAY)


@dataclass
class Inbox:
    items: asyncio.Queue[Inbound] = field(default_factory=asyncio.Queue)
    open: asyncio.Event = field(default_factory=asyncio.Event)

    def post(self, item: Inbound) -> None:
        self.items.put_nowait(item)

    async def room(self) -> None:
        await self.open.wait()


@dataclass
class Member:
    """One member's end of its line, as gRPC gives it."""

    call: Any
    who: Identity

    async def say(self, message: MemberMessage | Signed) -> None:
        await self.call.write(encode_member_frame(message))

    async def hello(self, **changes: Any) -> None:
        envelope = seal_record(self.who, RUN.peer, record(self.who, RUN.peer))
        await self.say(replace(Hello(limits.PROTOCOL, envelope, 0, 0, b"", b"", False, False, "", 0), **changes))

    async def hears(self) -> LeaderMessage | Signed | None:
        raw = await self.call.read()
        return decode_leader_frame(raw) if isinstance(raw, bytes) else None


@dataclass
class Bench:
    inbox: Inbox
    port: int
    stack: contextlib.AsyncExitStack

    async def member(self, who: Identity, authority: Authority = AUTHORITY) -> Member:
        tls = authority.issue_own(who.peer, TODAY)
        credentials = grpc.ssl_channel_credentials(AUTHORITY.certificate_pem, tls.key, tls.certificate)
        options = [("grpc.ssl_target_name_override", COORDINATOR.peer), ("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.aio.secure_channel(f"127.0.0.1:{self.port}", credentials, options=options)
        await self.stack.enter_async_context(channel)
        line: Any = channel.stream_stream(LEADER_LINE, request_serializer=_as_is, response_deserializer=_as_is)
        return Member(line(), who)

    async def next(self) -> Any:
        return await self.inbox.items.get()

    async def arrives(self, who: Identity, **changes: Any) -> tuple[Member, Arrived]:
        member = await self.member(who)
        await member.hello(**changes)
        item = await self.next()
        assert isinstance(item, Arrived)
        return member, item


def _as_is(raw: bytes) -> bytes:
    return raw


@contextlib.asynccontextmanager
async def bench(**options: Any) -> AsyncIterator[Bench]:
    inbox = Inbox()
    inbox.open.set()
    tls = AUTHORITY.issue_own(COORDINATOR.peer, TODAY)
    options = {"beat_s": lambda: 1000.0, **options}  # a sign of life would come between what is awaited
    service = Service(RUN.peer, tls, inbox, FakeClock(), observer=lambda: OBSERVER.peer, **options)
    port = await service.start("127.0.0.1:0")
    try:
        async with contextlib.AsyncExitStack() as stack:
            yield Bench(inbox, port, stack)
    finally:
        await service.stop(0)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A goodbye is written however slow this machine is, and a ping answered."""
    monkeypatch.setattr(service_limits, "GOODBYE_S", 60.0)
    monkeypatch.setattr(prober, "ADDRESS_S", 60.0)
    monkeypatch.setattr(prober, "ALL_S", 60.0)


def served(scene: Callable[[Bench], Coroutine[Any, Any, None]], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), bench(**options) as made:
            await scene(made)

    asyncio.run(main())


def heartbeat() -> Heartbeat:
    return Heartbeat(0, 1, b"", b"", MemberState.JOINING, 0, 0, 0.0, 0.0, 0.0, 0, 0)
