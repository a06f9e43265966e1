"""How many streams one peer may have open, and how often it may say hello; over loopback with real TLS."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest

from coordinator.leading import service as service_limits
from coordinator.leading import streams as stream_limits
from coordinator.leading.lines import MemberLine
from coordinator.leading.ports import Arrived, Departed
from coordinator.leading.streams import HELLOS_BURST, HELLOS_PER_S, REPLACED, STREAMS_MOST, Streams
from coordinator.rounds.events import Instant
from protos.messages import Records
from protos.wire import encode_leader_frame
from tests.coordinator.made import identity
from tests.coordinator.member_lines import ALICE, BOB, Bench, served

START = Instant(0.0)


def lines(n: int) -> list[MemberLine]:
    return [MemberLine(ALICE.peer, START) for _ in range(n)]


def test_silent_streams_of_one_peer_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_limits, "LINES_MOST", 12)

    async def scene(made: Bench) -> None:
        silent = [await made.member(ALICE) for _ in range(15)]
        ends = asyncio.as_completed([member.call.details() for member in silent])
        told = [await next(ends) for _ in range(len(silent) - STREAMS_MOST)]  # in whichever order they came
        assert REPLACED in told
        member, item = await made.arrives(BOB)
        item.line.send(encode_leader_frame(Records((b"r",))))
        assert await member.hears() == Records((b"r",))
        assert sum(not member.call.done() for member in silent) == STREAMS_MOST
        for member in silent:
            member.call.cancel()
        for end in ends:
            await end

    served(scene)


def test_a_node_that_comes_back_gets_in_at_once_while_its_old_streams_look_alive() -> None:
    async def scene(made: Bench) -> None:
        arrivals: list[Arrived] = []
        for number in range(STREAMS_MOST):
            _, item = await made.arrives(ALICE, name=f"life {number}")
            arrivals.append(item)
        member = await made.member(ALICE)
        await member.hello(name="the next life")
        items = [await made.next(), await made.next()]
        (departed,) = [item for item in items if isinstance(item, Departed)]
        assert (departed.line, departed.reason) == (arrivals[0].line, REPLACED)
        (arrived,) = [item for item in items if isinstance(item, Arrived)]
        assert arrived.hello.name == "the next life"

    served(scene)


def test_hellos_of_one_peer_are_rationed_and_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_limits, "HELLOS_BURST", 2.0)

    async def scene(made: Bench) -> None:
        for _ in range(2):
            member, _ = await made.arrives(ALICE)
            member.call.cancel()
            assert isinstance(await made.next(), Departed)
        member = await made.member(ALICE)
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # it may hear the end while it writes
            await member.hello()
        assert await member.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await member.call.details() == service_limits.HELLOS
        await made.arrives(BOB)

    served(scene)


def test_a_silent_stream_ends_before_one_that_is_a_line() -> None:
    async def main() -> None:
        streams = Streams()
        line, *silent = lines(STREAMS_MOST)
        for each in (line, *silent):
            streams.opened(each)
        streams.greeted(line)
        newest = lines(STREAMS_MOST - 1)
        for each in newest:
            streams.opened(each)
        assert [each.dropped for each in (line, *silent, *newest)] == [
            "",
            *[REPLACED] * (STREAMS_MOST - 1),
            *[""] * (STREAMS_MOST - 1),
        ]
        for each in newest:
            streams.greeted(each)
        (last,) = lines(1)
        streams.opened(last)
        assert line.dropped == REPLACED, "all are lines: the oldest ends"
        for each in (line, *silent, *newest, last):
            streams.ended(each)
        assert (streams._of, streams._silent) == ({}, set())

    asyncio.run(main())


def test_a_hello_may_be_said_again_after_a_while_and_few_peers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_limits, "PEERS_KEPT", 5)
    streams = Streams()
    for number in range(100, 200):
        assert streams.may_greet(identity(number).peer, START)
    assert len(streams._hellos) == 5
    assert [streams.may_greet(ALICE.peer, START) for _ in range(int(HELLOS_BURST) + 1)] == [
        *[True] * int(HELLOS_BURST),
        False,
    ]
    assert streams.may_greet(ALICE.peer, Instant(1.0 / HELLOS_PER_S))
