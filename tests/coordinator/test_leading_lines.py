"""Lines to a leader over loopback with real TLS: who reads or says too little or too much, and how a line ends."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.leading import lines as line_limits
from coordinator.leading import service as service_limits
from coordinator.leading.lines import Allowance, MemberLine
from coordinator.leading.ports import Departed, Spoken
from coordinator.leading.streams import Streams
from coordinator.rounds.events import Instant
from protos.messages import Goodbye, Records
from protos.wire import decode_leader_frame, encode_leader_frame
from tests.coordinator.made import identity
from tests.coordinator.member_lines import ALICE, Bench, _patient, heartbeat, served

__all__ = ["_patient"]


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
