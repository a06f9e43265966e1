"""First contact: what an invite leads to, what can answer in the coordinator's place, and coming back without it."""

from __future__ import annotations

import asyncio
import datetime
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web
from cryptography.hazmat.primitives.serialization import Encoding

from node import admission as admissions
from node.admission import CERTIFICATE_FILE, TLS_KEY_FILE, TOKEN_CONTEXT, Admission, admit
from node.errors import LocalStateError, NodeError, Refused, Unreachable
from node.racing import first_of
from protos import limits, wire
from protos.invite import Invite
from protos.messages import Addresses, AdmitRequest, AdmitResponse, Operator, PeerId, RunInfo
from protos.signing import Identity, Purpose, generate_seal_key, seal, unseal, unseal_from
from tests.fakes.certificates import Authority
from tests.node.runs import make_run

ME = Identity.from_private_bytes(b"m" * 32)
TODAY = datetime.datetime.now(datetime.UTC)
LONG_S = 1000.0
"""Longer than any test: who waits for so long waits for ever."""


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


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    (tmp_path / "run").mkdir()
    return Coordinator(tmp_path / "run")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "node").mkdir()
    return tmp_path / "node"


def join(invite: Invite, folder: Path, **options: object) -> Admission:
    return asyncio.run(ask(invite, folder, **options))


async def ask(invite: Invite, folder: Path, **options: object) -> Admission:
    given = {"seconds": lambda: 100.0, "connect_s": 60.0, "today": lambda: TODAY, **options}
    return await admit(invite, ME, folder, **given)  # type: ignore[arg-type]


async def joined(coordinator: Coordinator, folder: Path, **options: object) -> Admission:
    async with coordinator.serving() as host:
        return await ask(Invite(coordinator.run, (host,)), folder, **options)


@pytest.fixture
def closed() -> Iterator[str]:
    """An address at which nobody listens, nor can before the end of the test."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def test_an_invite_leads_to_spec_addresses_and_a_certificate(coordinator: Coordinator, folder: Path) -> None:
    admission = asyncio.run(joined(coordinator, folder, name="ada"))
    assert admission.spec == coordinator.spec
    assert admission.operator == coordinator.operator
    assert admission.addresses == coordinator.addresses
    assert admission.credentials.peer == ME.peer
    assert admission.credentials.ca == coordinator.authority.pem
    assert admission.run_offset_s == pytest.approx(1134.5)
    assert admission.fresh
    (request,) = coordinator.requests
    assert (request.peer, request.name, request.observer, request.sealed_token) == (ME.peer, "ada", False, b"")
    assert stat.S_IMODE((folder / TLS_KEY_FILE).stat().st_mode) == 0o600


def test_a_token_is_sealed_to_the_run_and_to_this_peer(coordinator: Coordinator, folder: Path) -> None:
    async def main() -> None:
        async with coordinator.serving() as host:
            await ask(Invite(coordinator.run, (host,), b"the token"), folder, observer=True)

    asyncio.run(main())
    (request,) = coordinator.requests
    assert request.observer
    assert b"the token" not in request.sealed_token
    context = b"\0".join((TOKEN_CONTEXT, coordinator.run.encode(), ME.peer.encode()))
    assert unseal_from(coordinator.seal_private, request.sealed_token, context=context) == b"the token"


def test_the_context_of_a_token_is_the_coordinators() -> None:
    from coordinator.admission import token_context

    run = Identity.from_private_bytes(b"r" * 32).peer
    assert token_context(run, ME.peer) == b"\0".join((TOKEN_CONTEXT, run.encode(), ME.peer.encode()))


def test_a_returning_node_needs_no_coordinator(coordinator: Coordinator, folder: Path, closed: str) -> None:
    first = asyncio.run(joined(coordinator, folder))
    again = join(Invite(coordinator.run, (closed,)), folder)
    assert again.credentials == first.credentials
    assert again.spec == first.spec
    assert again.addresses == first.addresses
    assert again.run_offset_s is None
    assert not again.fresh


def test_a_returning_node_keeps_its_certificate_and_takes_what_is_new(
    coordinator: Coordinator, folder: Path, closed: str
) -> None:
    first = asyncio.run(joined(coordinator, folder))
    coordinator.sequence = 9
    again = asyncio.run(joined(coordinator, folder))
    assert len(coordinator.requests) == 1
    assert again.credentials == first.credentials
    assert again.addresses.sequence == 9
    assert join(Invite(coordinator.run, (closed,)), folder).addresses.sequence == 9


def test_a_certificate_near_its_end_is_renewed_and_used_up_if_it_can_not_be(
    coordinator: Coordinator, folder: Path, closed: str
) -> None:
    coordinator.valid_for = datetime.timedelta(days=10)
    first = asyncio.run(joined(coordinator, folder))
    coordinator.refusal = (403, "the invite is used up")
    assert asyncio.run(joined(coordinator, folder)).credentials == first.credentials
    coordinator.refusal = None
    coordinator.valid_for = datetime.timedelta(days=90)
    renewed = asyncio.run(joined(coordinator, folder))
    assert renewed.credentials.certificate != first.credentials.certificate
    assert len(coordinator.requests) == 2
    later = TODAY + datetime.timedelta(days=91)
    with pytest.raises(Unreachable):
        join(Invite(coordinator.run, (closed,)), folder, today=lambda: later)


@pytest.mark.parametrize("file", [CERTIFICATE_FILE, TLS_KEY_FILE, "ca.pem", "run.bin"])
@pytest.mark.parametrize("damage", [b"", b"nonsense"])
def test_a_damaged_file_of_an_earlier_admission_is_asked_for_anew(
    coordinator: Coordinator, folder: Path, file: str, damage: bytes
) -> None:
    asyncio.run(joined(coordinator, folder))
    (folder / file).write_bytes(damage)
    assert asyncio.run(joined(coordinator, folder)).credentials.peer == ME.peer
    assert len(coordinator.requests) == 2


def test_a_folder_of_another_run_is_refused(coordinator: Coordinator, folder: Path, tmp_path: Path) -> None:
    asyncio.run(joined(coordinator, folder))
    (tmp_path / "other").mkdir()
    other = Coordinator(tmp_path / "other")
    with pytest.raises(LocalStateError, match=r"another run.*--data"):
        asyncio.run(joined(other, folder))


def test_a_refusal_says_what_the_coordinator_says(coordinator: Coordinator, folder: Path) -> None:
    coordinator.refusal = (403, "this run is by invitation;\n ask for one")
    with pytest.raises(Refused, match=r"by invitation; ask for one\b") as error:
        asyncio.run(joined(coordinator, folder))
    assert error.value.exit_code == 5
    assert os.listdir(folder) == []
    coordinator.refusal = (503, "busy")
    with pytest.raises(Unreachable, match="busy"):
        asyncio.run(joined(coordinator, folder))


def by_another(kind: Purpose) -> Callable[[Coordinator], Callable[[RunInfo], RunInfo]]:
    """One of the three envelopes, signed by a stranger."""
    stranger = Identity.generate()

    def bend(coordinator: Coordinator) -> Callable[[RunInfo], RunInfo]:
        body = {
            Purpose.RUNSPEC: coordinator.spec.to_bytes(),
            Purpose.OPERATOR: wire.encode(coordinator.operator),
            Purpose.ADDRESSES: wire.encode(coordinator.addresses),
        }[kind]
        envelope = seal(stranger, kind, coordinator.run, body)
        name = {Purpose.RUNSPEC: "spec", Purpose.OPERATOR: "operator", Purpose.ADDRESSES: "addresses"}[kind]
        return lambda info: replace(info, **{name: envelope})  # type: ignore[arg-type]

    return bend


@pytest.mark.parametrize("kind", [Purpose.RUNSPEC, Purpose.OPERATOR, Purpose.ADDRESSES])
def test_what_a_stranger_signed_is_refused(coordinator: Coordinator, folder: Path, kind: Purpose) -> None:
    coordinator.bend = by_another(kind)(coordinator)
    with pytest.raises(Refused, match=f"is not run {coordinator.run}.*signed by") as error:
        asyncio.run(joined(coordinator, folder))
    assert "invite" in error.value.remedy
    assert coordinator.requests == []


def test_another_runs_coordinator_at_the_address_is_refused(coordinator: Coordinator, folder: Path) -> None:
    async def main() -> None:
        async with coordinator.serving() as host:
            await ask(Invite(Identity.generate().peer, (host,)), folder)

    with pytest.raises(Refused, match="is not run"):
        asyncio.run(main())


@pytest.mark.parametrize(("protocol", "remedy"), [(limits.PROTOCOL + 1, "update"), (0, "install the version")])
def test_another_protocol_is_refused_with_what_to_do(
    coordinator: Coordinator, folder: Path, protocol: int, remedy: str
) -> None:
    coordinator.bend = lambda info: replace(info, protocol=protocol)
    with pytest.raises(Refused, match=remedy):
        asyncio.run(joined(coordinator, folder))


def test_settings_that_this_version_can_not_read_are_refused(coordinator: Coordinator, folder: Path) -> None:
    raw = coordinator.spec.to_bytes().replace(b'{"codec"', b'{"coming_soon":1,"codec"')
    envelope = seal(coordinator.run_key, Purpose.RUNSPEC, coordinator.run, raw)
    coordinator.bend = lambda info: replace(info, spec=envelope)
    with pytest.raises(Refused, match=r"coming_soon.*install the version"):
        asyncio.run(joined(coordinator, folder))


@pytest.mark.parametrize(
    ("field", "other", "said"),
    [
        (b'"numerics_version":1', b'"numerics_version":2', "numerics_version is 2, this version computes with 1"),
        (b'"name":"default"', b'"name":"oracle"', "rule.name is 'oracle', which is no rule"),
    ],
)
def test_settings_that_this_version_can_not_compute_are_refused(
    coordinator: Coordinator, folder: Path, field: bytes, other: bytes, said: str
) -> None:
    """Else it would train, and find in the first exchange that it can neither combine nor check."""
    raw = coordinator.spec.to_bytes()
    assert field in raw
    envelope = seal(coordinator.run_key, Purpose.RUNSPEC, coordinator.run, raw.replace(field, other))
    coordinator.bend = lambda info: replace(info, spec=envelope)
    with pytest.raises(Refused, match=rf"{said}.*install the version"):
        asyncio.run(joined(coordinator, folder))


def test_older_settings_than_were_seen_do_not_replace_them(coordinator: Coordinator, folder: Path, closed: str) -> None:
    old = coordinator.spec
    coordinator.spec = make_run(coordinator.folder, revision=2)
    asyncio.run(joined(coordinator, folder))
    coordinator.spec = old
    for admission in (asyncio.run(joined(coordinator, folder)), join(Invite(coordinator.run, (closed,)), folder)):
        assert admission.spec.revision == 2


@pytest.mark.parametrize("whose", ["another peer", "another authority", "another key"])
def test_a_certificate_that_is_not_ours_is_refused(coordinator: Coordinator, folder: Path, whose: str) -> None:
    other = Authority()
    stranger = Identity.generate().peer

    def admit_wrongly(raw: bytes) -> bytes:
        request = wire.decode(AdmitRequest, unseal(raw, purpose=Purpose.ADMIT, run=coordinator.run).body)
        match whose:
            case "another peer":
                certificate = coordinator.authority.sign(request.csr, stranger)
            case "another authority":
                certificate = other.sign(request.csr, request.peer)
            case _:
                certificate = coordinator.authority.certify(request.peer, other.key.public_key()).public_bytes(
                    Encoding.DER
                )
        return wire.encode(AdmitResponse(certificate, 1.0))

    coordinator.admit = admit_wrongly  # type: ignore[method-assign]
    with pytest.raises(Refused, match="no good"):
        asyncio.run(joined(coordinator, folder))
    assert os.listdir(folder) == []


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


def test_all_errors_end_in_cause_and_remedy(coordinator: Coordinator, folder: Path) -> None:
    coordinator.refusal = (403, "no")
    with pytest.raises(NodeError) as error:
        asyncio.run(joined(coordinator, folder))
    assert str(error.value) == f"{error.value.cause}; {error.value.remedy}"
