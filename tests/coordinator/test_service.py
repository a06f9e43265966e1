"""The leader's lines over loopback with real TLS: who may speak, what is checked, and how a line ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import grpc
import grpc.aio
import pytest

from coordinator.authority import Authority, Tls
from coordinator.leading import lines as line_limits
from coordinator.leading import prober
from coordinator.leading import service as service_limits
from coordinator.leading.lines import Allowance, MemberLine
from coordinator.leading.ports import Arrived, Departed, Inbound, Observed, Renewed, Spoken
from coordinator.leading.prober import GrpcProber
from coordinator.leading.service import PortError, Service
from coordinator.leading.streams import Streams
from coordinator.rounds.events import DigestKnown, Heard, Instant
from protos import limits
from protos.calls import PingReply, PingRequest
from protos.messages import (
    Evaluation,
    ExchangeReport,
    Goodbye,
    Heartbeat,
    Hello,
    LeaderMessage,
    MemberMessage,
    MemberState,
    Promise,
    Proposal,
    Records,
    Signed,
    StateDigest,
    Vote,
)
from protos.records import seal_record
from protos.sealer import KeySealer
from protos.services import LEADER_LINE, STATE
from protos.signing import Identity, Purpose, seal
from protos.wire import decode, decode_leader_frame, encode, encode_leader_frame, encode_member_frame
from tests.coordinator.made import COORDINATOR, RUN, FakeClock, genesis, identity, next_commit, record

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


def test_a_member_that_goes_away_is_noticed() -> None:
    async def scene(made: Bench) -> None:
        member, item = await made.arrives(ALICE)
        member.call.cancel()
        departed = await made.next()
        assert isinstance(departed, Departed)
        assert departed.line is item.line

    served(scene)


def test_lines_that_broke_leave_their_room_to_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_limits, "LINES_MOST", 3)

    async def scene(made: Bench) -> None:
        for _ in range(10):
            member, item = await made.arrives(ALICE)
            member.call.cancel()
            departed = await made.next()
            assert isinstance(departed, Departed)
            assert departed.line is item.line

    served(scene)


def test_a_slow_reader_loses_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_limits, "QUEUE_BYTES", 4 * 2**20)

    async def scene(made: Bench) -> None:
        _, item = await made.arrives(ALICE)
        frame = bytes(2**20)
        for _ in range(40):  # nobody reads
            item.line.send(frame)
            await asyncio.sleep(0)
        departed = await made.next()
        assert isinstance(departed, Departed)
        assert departed.reason == "reads too slowly"

    served(scene)


def test_nothing_is_read_while_the_inbox_is_full() -> None:
    async def scene(made: Bench) -> None:
        member, _ = await made.arrives(ALICE)
        await member.say(heartbeat())
        await made.next()
        made.inbox.open.clear()
        await member.say(heartbeat())  # the read that was waiting may still take this one
        await member.say(heartbeat())
        await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(made.next())), 60)
        assert made.inbox.items.empty()
        made.inbox.open.set()
        assert isinstance(await made.next(), Spoken)

    served(scene)


def test_streams_on_which_nothing_is_said_hold_up_nobody_and_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line holds a thread: however many lie still, the next one is taken at once."""
    n_still, opened, all_opened = 60, list[MemberLine](), asyncio.Event()

    def note(streams: Streams, line: MemberLine) -> None:
        opened.append(line)
        if len(opened) == n_still:
            all_opened.set()
        take(streams, line)

    take = Streams.opened
    monkeypatch.setattr(Streams, "opened", note)
    monkeypatch.setattr(service_limits, "HELLO_S", 0.5)

    async def scene(made: Bench) -> None:
        still = [await made.member(identity(100 + number // 3)) for number in range(n_still)]
        await all_opened.wait()
        monkeypatch.setattr(service_limits, "HELLO_S", 60.0)  # for those who speak
        member, item = await made.arrives(ALICE)
        item.line.send(encode_leader_frame(Records((b"r",))))
        assert await member.hears() == Records((b"r",))
        for silent in still:
            said = await silent.hears()
            assert isinstance(said, Goodbye)
            assert (said.code, said.reason.partition(" within ")[0]) == ("protocol", "no hello")
            assert await silent.hears() is None

    served(scene)


def test_a_member_that_falls_silent_loses_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_limits, "GOODBYE_S", 0.05)

    async def scene(made: Bench) -> None:
        _, item = await made.arrives(ALICE)
        assert await made.next() == Departed(item.line, "no heartbeat in 0.05 s")

    served(scene, silence_s=lambda: 0.05)


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


# -- lines ---------------------------------------------------------------------------------------------------------


def test_an_allowance_refills_with_time_up_to_its_burst() -> None:
    allowance = Allowance(10.0, 20.0, Instant(0.0))
    assert allowance.take(20.0, Instant(0.0))
    assert not allowance.take(1.0, Instant(0.05))
    assert allowance.take(5.0, Instant(0.5))
    assert not allowance.take(21.0, Instant(1000.0))
    assert allowance.take(20.0, Instant(1000.0))


def test_who_says_too_much_is_told() -> None:
    line = MemberLine(ALICE.peer, Instant(0.0))
    n = 0
    while line.accepts(100, Instant(0.0)):
        n += 1
    assert n == line_limits.FRAMES_BURST
    assert line.accepts(100, Instant(1.0))


def test_nothing_follows_a_goodbye() -> None:
    async def main() -> list[bytes | None]:
        line = MemberLine(ALICE.peer, Instant(0.0))
        line.send(b"first")
        line.close(Goodbye("ended", "over\x00"))
        line.send(b"late")
        line.close(Goodbye("ended", "again"))
        return [await line.next_frame() for _ in range(3)]

    first, goodbye, end = asyncio.run(main())
    assert (first, end) == (b"first", None)
    assert goodbye is not None
    assert decode_leader_frame(goodbye) == Goodbye("ended", "over?")


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
