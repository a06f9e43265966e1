"""The leader's service over loopback with real TLS: who may speak, what is checked, and who answers a ping."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from coordinator.authority import Authority, Tls
from coordinator.leading.ports import Departed, Observed, Renewed, Spoken
from coordinator.leading.prober import GrpcProber
from coordinator.leading.service import PortError, Service
from coordinator.rounds.events import DigestKnown, Heard
from protos import limits
from protos.calls import PingReply, PingRequest
from protos.messages import (
    Evaluation,
    ExchangeReport,
    Goodbye,
    Hello,
    Promise,
    Proposal,
    Records,
    Signed,
    StateDigest,
    Vote,
)
from protos.records import seal_record
from protos.sealer import KeySealer
from protos.services import STATE
from protos.signing import Identity, Purpose, seal
from protos.wire import decode, encode, encode_leader_frame, encode_member_frame
from tests.coordinator.made import COORDINATOR, RUN, FakeClock, genesis, next_commit, record
from tests.coordinator.member_lines import (
    ALICE,
    AUTHORITY,
    BOB,
    OBSERVER,
    TODAY,
    Bench,
    Inbox,
    _patient,
    heartbeat,
    served,
)

__all__ = ["_patient"]


def test_a_line_from_hello_to_goodbye() -> None:
    async def scene(made: Bench) -> None:
        member, item = await made.arrives(ALICE, name="alice's machine")
        assert (item.line.peer, item.hello.name, item.record.peer) == (ALICE.peer, "alice's machine", ALICE.peer)
        item.line.send(encode_leader_frame(Records((b"r",))))
        assert await member.hears() == Records((b"r",))
        await member.say(heartbeat())
        assert await made.next() == Spoken(item.line, Heard(ALICE.peer, heartbeat(), b""))
        report = ExchangeReport(0, 1, 5, 6, 1.0, 2.0, 3.0)
        await member.say(report)
        assert await made.next() == Observed(item.line, report)
        item.line.close(Goodbye("ended", "the run is over"))
        assert await member.hears() == Goodbye("ended", "the run is over")
        assert await member.hears() is None
        assert isinstance(await made.next(), Departed)

    served(scene)


def test_what_is_signed_is_opened_and_belongs_to_its_signer() -> None:
    async def scene(made: Bench) -> None:
        member, item = await made.arrives(ALICE)
        link = next_commit(genesis()[2])
        proposal = Proposal(link.commit.body, b"", b"", (), ())
        promise = Promise(0, 1, 1, COORDINATOR.peer, b"h" * 32, 0, proposal)
        envelope = KeySealer(ALICE, RUN.peer).seal(promise)
        await member.say(Signed(envelope))
        assert await made.next() == Spoken(item.line, Heard(ALICE.peer, promise, envelope, link.body))
        false = replace(promise, proposal=replace(proposal, plan=KeySealer(BOB, RUN.peer).seal(promise), deal=b"deal"))
        await member.say(Signed(KeySealer(ALICE, RUN.peer).seal(false)))
        spoken = await made.next()
        assert isinstance(spoken, Spoken)
        assert isinstance(spoken.event, Heard)
        assert spoken.event.evidence is None
        assert spoken.event.fault, "its line stands, and the deciding code hears why it doesn't hold up"
        vote = Vote(0, 1, 0, COORDINATOR.peer, b"b" * 32, b"d" * 32)
        await member.say(Signed(KeySealer(BOB, RUN.peer).seal(vote)))
        said = await member.hears()
        assert isinstance(said, Goodbye)
        assert said.code == "protocol"
        assert BOB.peer in said.reason
        departed = await made.next()
        assert isinstance(departed, Departed)

    served(scene)


def test_the_observer_says_what_others_may_not() -> None:
    async def scene(made: Bench) -> None:
        member, item = await made.arrives(OBSERVER, observer=True)
        await member.say(StateDigest(b"b" * 32, 0, b"d" * 32))
        assert await made.next() == Spoken(item.line, DigestKnown(b"b" * 32, b"d" * 32))
        evaluation = Evaluation(0, 1, b"d" * 32, 2.0, 10)
        await member.say(evaluation)
        assert await made.next() == Observed(item.line, evaluation)
        newer = record(OBSERVER, RUN.peer, sequence=2, grpc=("127.0.0.1:5",))
        envelope = seal_record(OBSERVER, RUN.peer, newer)
        await member.say(Records((envelope,)))
        assert await made.next() == Renewed(item.line, newer, envelope)

    served(scene)


ENVELOPE_OF_BOB = seal_record(BOB, RUN.peer, record(BOB, RUN.peer))


@pytest.mark.parametrize(
    ("changes", "code", "reason"),
    [
        ({"protocol": 9}, "refused", "protocol 9"),
        ({"observer": True}, "refused", "observer"),
        ({"record": ENVELOPE_OF_BOB}, "protocol", "record"),
        ({"record": b"rubbish"}, "protocol", "record"),
        ({"holds_state": True}, "protocol", "state"),
    ],
)
def test_a_bad_hello_is_answered_with_why(changes: dict[str, Any], code: str, reason: str) -> None:
    async def scene(made: Bench) -> None:
        member = await made.member(ALICE)
        await member.hello(**changes)
        said = await member.hears()
        assert isinstance(said, Goodbye)
        assert said.code == code
        assert reason in said.reason
        assert made.inbox.items.empty()

    served(scene)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff\xff\xff",
        encode_member_frame(Evaluation(0, 1, b"d" * 32, 2.0, 10)),
        encode_member_frame(StateDigest(b"b" * 32, 0, b"d" * 32)),
        encode_member_frame(Records((ENVELOPE_OF_BOB,))),
        encode_member_frame(Signed(b"no envelope")),
        encode_member_frame(Signed(seal(ALICE, Purpose.TOKEN, RUN.peer, b"x"))),
        encode_member_frame(Signed(seal(ALICE, Purpose.VOTE, RUN.peer, b"x" * 40))),
        encode_member_frame(Hello(limits.PROTOCOL, b"r", 0, 0, b"", b"", False, False, "", 0)),
    ],
)
def test_misbehaviour_closes_the_line_with_why(frame: bytes) -> None:
    async def scene(made: Bench) -> None:
        member, item = await made.arrives(ALICE)
        await member.call.write(frame)
        said = await member.hears()
        assert isinstance(said, Goodbye)
        assert said.code == "protocol"
        assert said.reason
        departed = await made.next()
        assert isinstance(departed, Departed)
        assert departed.line is item.line

    served(scene)


def test_a_line_begins_with_hello() -> None:
    async def scene(made: Bench) -> None:
        member = await made.member(ALICE)
        await member.say(heartbeat())
        said = await member.hears()
        assert isinstance(said, Goodbye)
        assert "hello" in said.reason

    served(scene)


def test_a_certificate_of_another_authority_gets_no_line() -> None:
    async def scene(made: Bench) -> None:
        member = await made.member(ALICE, Authority.generate(RUN.peer, TODAY))
        with contextlib.suppress(asyncio.InvalidStateError, grpc.RpcError):
            await member.hello()  # depends on how far the handshake has come
        with pytest.raises((grpc.RpcError, asyncio.InvalidStateError)):
            await member.call.read()
        assert made.inbox.items.empty()

    served(scene)


def test_a_taken_port_is_an_error() -> None:
    async def main() -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            tls = AUTHORITY.issue_own(COORDINATOR.peer, TODAY)
            service = Service(RUN.peer, tls, Inbox(), FakeClock(), observer=lambda: None)
            with pytest.raises(PortError):
                await service.start(f"127.0.0.1:{port}")

    asyncio.run(main())


# -- the prober ----------------------------------------------------------------------------------------------------


async def _pinged(tls: Tls, answer: Callable[[PingRequest], PingReply], peer: Identity) -> bool:
    async def ping(raw: bytes, _context: Any) -> bytes:
        return encode(answer(decode(PingRequest, raw)))

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(ping)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(STATE, {"Ping": handler}),))
    credentials = grpc.ssl_server_credentials([(tls.key, tls.certificate)], AUTHORITY.certificate_pem, True)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        prober = GrpcProber(AUTHORITY.issue_own(COORDINATOR.peer, TODAY))
        return await prober.reaches(peer.peer, ("nonsense", f"127.0.0.1:{port}"))
    finally:
        await server.stop(None)


def test_a_peer_that_answers_is_reached() -> None:
    tls = AUTHORITY.issue_own(ALICE.peer, TODAY)
    assert asyncio.run(_pinged(tls, lambda request: PingReply(request.nonce, ALICE.peer), ALICE))


def test_another_peer_another_nonce_and_nobody_are_not() -> None:
    tls = AUTHORITY.issue_own(ALICE.peer, TODAY)
    assert not asyncio.run(_pinged(tls, lambda request: PingReply(request.nonce, BOB.peer), BOB))
    assert not asyncio.run(_pinged(tls, lambda request: PingReply(b"other", ALICE.peer), ALICE))
    foreign = Authority.generate(RUN.peer, TODAY).issue_own(ALICE.peer, TODAY)
    assert not asyncio.run(_pinged(foreign, lambda request: PingReply(request.nonce, ALICE.peer), ALICE))

    async def nobody() -> bool:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            return await GrpcProber(tls).reaches(ALICE.peer, (f"127.0.0.1:{closed.getsockname()[1]}",))

    assert not asyncio.run(nobody())
