"""A coordinator's first contact, played over HTTP on loopback; and a node that asks for admission."""

from __future__ import annotations

import asyncio
import datetime
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from node.admission import Admission, admit
from protos import limits, wire
from protos.invite import Invite
from protos.messages import Addresses, AdmitRequest, AdmitResponse, Operator, PeerId, RunInfo
from protos.signing import Identity, Purpose, generate_seal_key, seal, unseal
from tests.fakes.certificates import Authority
from tests.node.runs import make_run

ME = Identity.from_private_bytes(b"m" * 32)
TODAY = datetime.datetime.now(datetime.UTC)


@dataclass
class Coordinator:
    """Plays the coordinator's first contact; a test bends what it says."""

    folder: Path
    run_key: Identity = field(default_factory=Identity.generate)
    key: Identity = field(default_factory=Identity.generate)
    authority: Authority = field(default_factory=Authority)
    sequence: int = 5
    valid_for: datetime.timedelta = datetime.timedelta(days=90)
    refusal: tuple[int, str] | None = None
    bend: Callable[[RunInfo], RunInfo] = lambda info: info
    requests: list[AdmitRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seal_private, self.seal_public = generate_seal_key()
        self.spec = make_run(self.folder)

    @property
    def run(self) -> PeerId:
        return self.run_key.peer

    @property
    def operator(self) -> Operator:
        return Operator(self.run, self.key.peer, self.authority.der, self.seal_public)

    @property
    def addresses(self) -> Addresses:
        return Addresses(self.sequence, ("127.0.0.1:7001",), (), PeerId(""), ())

    def info(self) -> RunInfo:
        return self.bend(
            RunInfo(
                seal(self.run_key, Purpose.RUNSPEC, self.run, self.spec.to_bytes()),
                seal(self.run_key, Purpose.OPERATOR, self.run, wire.encode(self.operator)),
                seal(self.key, Purpose.ADDRESSES, self.run, wire.encode(self.addresses)),
                limits.PROTOCOL,
                1234.5,
            )
        )

    def admit(self, raw: bytes) -> bytes:
        envelope = unseal(raw, purpose=Purpose.ADMIT, run=self.run)
        request = wire.decode(AdmitRequest, envelope.body)
        assert envelope.signer == request.peer
        self.requests.append(request)
        certificate = self.authority.sign(request.csr, request.peer, valid_for=self.valid_for)
        return wire.encode(AdmitResponse(certificate, 1234.5))

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        async def run(_: web.Request) -> web.Response:
            return web.Response(body=wire.encode(self.info()))

        async def take(request: web.Request) -> web.Response:
            if self.refusal is not None:
                status, reason = self.refusal
                return web.json_response({"code": "x", "reason": reason}, status=status)
            return web.Response(body=self.admit(await request.read()))

        async with serving(("GET", "/v1/run", run), ("POST", "/v1/admit", take)) as host:
            yield host


@asynccontextmanager
async def serving(*routes: tuple[str, str, Callable[..., object]]) -> AsyncIterator[str]:
    app = web.Application()
    for method, path, handler in routes:
        app.router.add_route(method, path, handler)  # type: ignore[arg-type]
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "{}:{}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()


def join(invite: Invite, folder: Path, **options: object) -> Admission:
    return asyncio.run(ask(invite, folder, **options))


async def ask(invite: Invite, folder: Path, **options: object) -> Admission:
    given = {"seconds": lambda: 100.0, "connect_s": 60.0, "today": lambda: TODAY, **options}
    return await admit(invite, ME, folder, **given)  # type: ignore[arg-type]


async def joined(coordinator: Coordinator, folder: Path, **options: object) -> Admission:
    async with coordinator.serving() as host:
        return await ask(Invite(coordinator.run, (host,)), folder, **options)


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    (tmp_path / "run").mkdir()
    return Coordinator(tmp_path / "run")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "node").mkdir()
    return tmp_path / "node"


@pytest.fixture
def closed() -> Iterator[str]:
    """An address at which nobody listens, nor can before the end of the test."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"
