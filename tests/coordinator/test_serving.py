"""A serving coordinator in one piece, without its observer: first contact, a line, orders, a restart, a quick end."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509 import load_der_x509_certificate

from coordinator import app, listening, operating
from coordinator.app import Outside, serve
from coordinator.bulletin import Bulletin
from coordinator.commanding import Wish, command
from coordinator.config import amend
from coordinator.control import Caller, find
from coordinator.errors import CoordinatorError, MachineError, StateError
from coordinator.folder import RunFolder, read_founded, read_identity
from coordinator.leading.driver import Driver
from coordinator.places import ServeOptions, find_places
from coordinator.rounds.events import Learned
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.machine import Rounds
from coordinator.rounds.orders import Orders
from coordinator.rounds.proposing import build_body
from protos import limits
from protos.hashes import body_hash, commit_hash
from protos.invite import parse
from protos.messages import (
    Addresses,
    AdmitResponse,
    Commit,
    Goodbye,
    Hello,
    Operator,
    Order,
    PeerId,
    Records,
    RunInfo,
    Vote,
    Welcome,
)
from protos.orders import Kind, open_order, open_spec, seal_order, seal_spec
from protos.records import seal_record
from protos.runspec import RunSpec
from protos.sealer import KeySealer
from protos.services import LEADER_LINE
from protos.signing import Identity, Purpose, unseal
from protos.wire import decode, decode_leader_frame, encode, encode_member_frame
from tests.coordinator.made import admit_request, csr, identity, make_run, record
from tests.coordinator.serving import ANY, END_S, Said, no_observer, serving

__all__ = ["no_observer"]

ALICE = identity(10)


async def fetch(http: str, path: str, data: bytes | None = None) -> bytes:
    async with aiohttp.ClientSession() as session:
        method = "GET" if data is None else "POST"
        async with session.request(method, f"http://{http}{path}", data=data) as response:
            assert response.status == 200, await response.text()
            return await response.read()


@dataclass
class Joined:
    operator: Operator
    addresses: Addresses
    credentials: grpc.ChannelCredentials


async def join(said: Said, who: Identity) -> Joined:
    """First contact and admission, verified from the invite alone, as a node does it."""
    invite = parse(said.shown[0].removeprefix("invite "))
    info = decode(RunInfo, await fetch(invite.hosts[0], "/v1/run"))
    operator = decode(Operator, unseal(info.operator, purpose=Purpose.OPERATOR, run=invite.run, signer=invite.run).body)
    addresses = decode(
        Addresses,
        unseal(info.addresses, purpose=Purpose.ADDRESSES, run=invite.run, signer=operator.coordinator).body,
    )
    key = generate_private_key(SECP256R1())
    raw = admit_request(who, operator, change=lambda request: replace(request, csr=csr(key)))
    response = decode(AdmitResponse, await fetch(invite.hosts[0], "/v1/admit", raw))
    credentials = grpc.ssl_channel_credentials(
        load_der_x509_certificate(operator.ca_certificate).public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        load_der_x509_certificate(response.certificate).public_bytes(Encoding.PEM),
    )
    return Joined(operator, addresses, credentials)


def _as_is(raw: bytes) -> bytes:
    return raw


@pytest.mark.usefixtures("no_observer")
def test_a_stranger_becomes_a_member_and_hears_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "LINES_GRACE_S", END_S)  # what is written last is written, however slow this machine is
    folder = make_run(tmp_path / "run")
    heard: list[Any] = []

    async def scene(said: Said) -> None:
        joined = await join(said, ALICE)
        run = joined.operator.run
        options = [("grpc.ssl_target_name_override", joined.operator.coordinator)]
        channel = grpc.aio.secure_channel(joined.addresses.grpc[0], joined.credentials, options=options)
        line: Any = channel.stream_stream(LEADER_LINE, request_serializer=_as_is, response_deserializer=_as_is)
        call = line()
        envelope = seal_record(ALICE, run, record(ALICE, run))
        await call.write(
            encode_member_frame(Hello(limits.PROTOCOL, envelope, 0, 0, b"", b"", False, False, "alice", 0))
        )
        while (first := decode_leader_frame(await call.read())) == Records(()):
            pass  # a sign of life of a slow machine
        heard.append(first)
        status = await operating.status(folder.path)
        (member,) = status["members"]
        assert (member["peer"], member["name"], status["serving"]) == (ALICE.peer, "alice", True)

        async def listen() -> None:
            try:
                while isinstance(raw := await call.read(), bytes):
                    heard.append(decode_leader_frame(raw))
            except grpc.RpcError:
                pass
            await channel.close(None)

        said.listening.append(asyncio.ensure_future(listen()))

    said = serving(folder.path, scene)
    welcome, *rest = heard
    assert isinstance(welcome, Welcome)
    assert welcome.run_time_s > 0
    assert rest[-1] == Goodbye("shutdown", "the coordinator stops; the run goes on without it")
    assert any("goes on without you" in text for text in said.said)
    assert any("works on this machine only" in text for text in said.said)
    assert not folder.serving.exists()
    assert folder.ledger.read_text().count("\n") == 1


def test_a_run_that_this_version_can_not_compute_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run")
    monkeypatch.setattr("coordinator.rounds.policy.NUMERICS_VERSION", 3)
    options = ServeOptions(folder.path, http=ANY, listen=ANY, dht=ANY)
    with pytest.raises(StateError, match="numerics_version is 2, this version computes with 3; serve it with"):
        asyncio.run(serve(options, lambda _: None, lambda _: None))


@pytest.mark.usefixtures("no_observer")
def test_one_process_serves_a_folder_and_the_next_one_takes_its_ports(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    pages: list[str] = []

    async def scene(said: Said) -> None:
        pages.append(said.shown[1])
        with pytest.raises(StateError, match=f"process {os.getpid()}"):
            await serve(ServeOptions(folder.path), print, print)

    def ports() -> dict[str, str]:
        found: dict[str, str] = json.loads(folder.ports.read_text())
        return found

    serving(folder.path, scene)
    first = ports()
    assert not any(first[name].endswith(":0") for name in ("http", "listen", "dht", "observer"))
    serving(folder.path, scene, http="", listen="", dht="")
    assert pages[0] == pages[1]
    assert ports() == first


def test_a_run_of_another_protocol_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could join it: an old node is told another version by us, a new one by the run's settings."""
    folder = make_run(tmp_path / "run")
    monkeypatch.setattr(limits, "PROTOCOL", limits.PROTOCOL + 1)
    with pytest.raises(StateError, match=r"made for protocol .* serve it with the version of Barnraise that made it"):
        asyncio.run(serve(ServeOptions(folder.path, ANY, ANY, ANY), print, print))


@pytest.mark.usefixtures("no_observer")
def test_a_remembered_port_of_the_observer_may_be_taken_for_a_moment(tmp_path: Path) -> None:
    """The observer of a coordinator that was killed is on its way out still."""
    folder = make_run(tmp_path / "run")

    async def nothing(said: Said) -> None:
        pass

    serving(folder.path, nothing)
    options = ServeOptions(folder.path)
    place = find_places(folder, options).observer
    assert place.remembered

    async def main() -> None:
        with listening.bind(place):
            waiting = asyncio.create_task(listening.reserve_soon(place))
            await asyncio.sleep(0)  # it has found it taken
            given = replace(place, remembered=False)
            with pytest.raises(MachineError, match="--observer"):
                await listening.reserve_soon(given)
            assert not waiting.done()
        assert (await waiting).port == place.port

    asyncio.run(main())


@pytest.mark.parametrize(
    ("listen", "observer"),
    [
        ("", "0.0.0.0:8473"),
        ("[::]:9000", "[::]:8473"),
        ("127.0.0.1:0", "127.0.0.1:0"),
        ("192.0.2.1:1", "192.0.2.1:8473"),
    ],
)
def test_the_observer_listens_where_the_leader_does(tmp_path: Path, listen: str, observer: str) -> None:
    """People open ports in their firewalls: none may be another one at each start."""
    places = find_places(RunFolder(tmp_path), ServeOptions(tmp_path, listen=listen))
    assert (str(places.observer), places.observer.asked) == (observer, False)


@pytest.mark.usefixtures("no_observer")
def test_a_pause_survives_a_restart(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    waiting: list[str] = []

    async def paused(said: Said) -> None:
        assert "is obeyed, as of round 1" in await command(folder.path, Wish(Kind.PAUSE))

    async def look(said: Said) -> None:
        found = find(folder)
        assert found is not None
        async with Caller(found) as caller:
            waiting.append((await caller.status())["waiting_for"])
            assert [row["round"] for row in await caller.ledger()] == [0, 1]
        assert "is obeyed, as of round 2" in await command(folder.path, Wish(Kind.RESUME))

    serving(folder.path, paused)
    serving(folder.path, look)
    assert "paused" in waiting[0]


def amending(folder: RunFolder, ledger: Ledger, *sets: str) -> Learned:
    """A commit with an amendment that was never given here: another coordinator's, from before this copy of the folder
    was put back."""
    founded, run = read_founded(folder), read_identity(folder.keys / "run.pem")
    coordinator = read_identity(folder.keys / "coordinator.pem")
    spec = amend(founded.spec, sets)
    raw = seal_order(run, Order(founded.run, 1, "amend", PeerId(""), 0, seal_spec(run, spec), ""))
    order = open_order(raw, run=founded.run, coordinator=coordinator.peer)
    body = build_body(
        ledger, founded.spec, coordinator.peer, attempt=1, leader=coordinator.peer, evidence=None, reason="by order",
        seated=(), left=(), orders=Orders((order,), None, {1: founded.spec}),
    )  # fmt: skip
    content = encode(body)
    vote = Vote(0, body.round, 1, coordinator.peer, body_hash(content), ledger.digest)
    envelope = KeySealer(coordinator, founded.run).seal(vote)
    commit = Commit(content, ledger.digest, 1, (envelope,), ())
    signed = ((coordinator.peer, vote),)
    return Learned(commit, body, commit_hash(content, ledger.digest), signed, (order,))


async def settings(said: Said, run: PeerId, revision: int = 0) -> RunSpec:
    invite = parse(said.shown[0].removeprefix("invite "))
    info = decode(RunInfo, await fetch(invite.hosts[0], f"/v1/run?revision={revision}" if revision else "/v1/run"))
    return open_spec(info.spec, run)


@pytest.mark.usefixtures("no_observer")
def test_an_amendment_that_was_only_learned_is_known_now_and_after_a_restart_and_lines_are_served_by_it(
    tmp_path: Path,
) -> None:
    """What is in force decides how long a line may be silent, and not what the run began with."""
    folder = make_run(tmp_path / "run", "deadlines.heartbeat_s=0.05", "deadlines.heartbeat_timeout_s=0.2")
    run, drivers = read_founded(folder).run, list[Driver]()

    async def watch(_: Bulletin, driver: Driver) -> None:
        drivers.append(driver)

    async def is_kept_while_silent(said: Said) -> None:
        joined = await join(said, ALICE)
        options = [("grpc.ssl_target_name_override", joined.operator.coordinator)]
        async with grpc.aio.secure_channel(joined.addresses.grpc[0], joined.credentials, options=options) as channel:
            line: Any = channel.stream_stream(LEADER_LINE, request_serializer=_as_is, response_deserializer=_as_is)
            call = line()
            hello = Hello(
                limits.PROTOCOL, seal_record(ALICE, run, record(ALICE, run)), 0, 0, b"", b"", False, False, "", 0
            )
            await call.write(encode_member_frame(hello))
            assert isinstance(decode_leader_frame(await call.read()), Welcome)
            heard: list[Any] = []

            async def listen() -> None:
                while isinstance(raw := await call.read(), bytes):
                    heard.append(decode_leader_frame(raw))

            with pytest.raises(TimeoutError):  # the first settings let it be silent for less
                await asyncio.wait_for(listen(), 0.6)
            assert Records(()) not in heard, "nor does the coordinator say sooner that it is there"

    async def learns(said: Said) -> None:
        (driver,) = drivers
        assert (await settings(said, run)).revision == 1
        slower = ("deadlines.heartbeat_s=10", "deadlines.heartbeat_timeout_s=30")
        driver.tell(amending(folder, driver.ledger, *slower))
        while driver.ledger.spec_revision != 2:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        found = find(folder)
        assert found is not None
        async with Caller(found) as caller:
            status = await caller.status()
        assert (status["newest_revision"], status["next_order"], status["orders_waiting"]) == (2, 2, [])
        await comes_back(said)

    async def comes_back(said: Said) -> None:
        assert (await settings(said, run)).deadlines.heartbeat_s == 10
        assert (await settings(said, run, 1)).revision == 1
        await is_kept_while_silent(said)

    serving(folder.path, learns, Outside(watch=watch))
    serving(folder.path, comes_back)


@pytest.mark.usefixtures("no_observer")
def test_a_fault_of_the_deciding_code_ends_the_process_and_frees_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run")

    def broken(*_: object) -> list[Any]:
        raise AssertionError("an invariant is broken")

    monkeypatch.setattr(Rounds, "handle", broken)

    async def scene(said: Said) -> None:
        await asyncio.sleep(0)

    with pytest.raises(CoordinatorError, match="an invariant is broken") as caught:
        serving(folder.path, scene)
    assert caught.value.exit_code == 1
    assert not folder.serving.exists()
    monkeypatch.undo()
    assert find(RunFolder(folder.path)) is None
