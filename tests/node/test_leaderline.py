"""The line to the leader: opened again with growing pauses, and what comes on it handed on as events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from coordinator.founding import genesis_commit
from node.leaderline import PAUSE_FIRST_S, PAUSE_MAX_S, LeaderLine
from node.opening import Opener
from node.peers.dialing import CONNECT_S
from node.ports import PeerFailed
from node.session import events as ev
from protos.messages import AttemptFailed, Goodbye, Hello, PeerId, Records, Refusal, Welcome
from protos.signing import Identity
from tests.coordinator.made import spec
from tests.fakes.loop import SkippingLoop
from tests.fakes.peers import FakeNetwork, FakePeers, LeaderEnd

RUN, LEADER, ME = (Identity.from_private_bytes(bytes([n]) * 32) for n in (1, 2, 3))
COMMIT, _, LEDGER = genesis_commit(RUN, LEADER.peer, spec())
HELLO = Hello(1, b"record", 0, 0, b"", b"", False, False, "me", 0)
REFUSAL = Refusal(0, 1, 0, "because")


def welcome(leader: PeerId = LEADER.peer, records: tuple[bytes, ...] = ()) -> Welcome:
    return Welcome(leader, COMMIT, LEDGER.to_bytes(), records, 12.5, 1.0)


class Bench:
    """A member's line on a network in memory. Its pauses end when `go_on` says so; `pauses` are those that began."""

    def __init__(self) -> None:
        self.network = FakeNetwork()
        self.lines = self.network.lead(LEADER.peer)
        self.events: asyncio.Queue[ev.Event] = asyncio.Queue()
        self.learnt: list[bytes] = []
        self.run_times: list[float] = []
        self.pauses: asyncio.Queue[float] = asyncio.Queue()
        self._going_on = asyncio.Event()
        self.known = True
        self.line = LeaderLine(
            FakePeers(self.network, ME.peer), Opener(RUN.peer, LEADER.peer), where=self._where, hello=lambda: HELLO,
            post=self.events.put_nowait, learn=self.learnt.extend, jitter=lambda: 0.5, sleep=self._sleep,
        )  # fmt: skip
        self.line.run_time_s = self.run_times.append

    async def _where(self) -> tuple[PeerId, tuple[str, ...]]:
        if not self.known:
            raise PeerFailed(LEADER.peer, "nobody knows where it is")
        return LEADER.peer, ("leader:1",)

    async def _sleep(self, pause_s: float) -> None:
        self.pauses.put_nowait(pause_s)
        self._going_on.clear()
        await self._going_on.wait()

    async def opened(self) -> LeaderEnd:
        """The leader's end of the next line, after its hello."""
        end = await self.lines.get()
        assert await end.hear() == HELLO
        return end

    async def welcomed(self) -> LeaderEnd:
        end = await self.opened()
        end.say(welcome())
        assert isinstance(await self.events.get(), ev.LineUp)
        return end

    async def down(self) -> tuple[str, float]:
        """Why the line went down, and how long it pauses now."""
        event = await self.events.get()
        assert isinstance(event, ev.LineDown)
        return event.reason, await self.pauses.get()

    def go_on(self) -> None:
        self._going_on.set()


def play(
    scenario: Callable[[Bench], Coroutine[Any, Any, None]],
    loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.SelectorEventLoop,
) -> None:
    async def main() -> None:
        bench = Bench()
        async with asyncio.timeout(60):
            running = asyncio.create_task(bench.line.run())
            try:
                await scenario(bench)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


async def skip(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkippingLoop)
    await loop.skip(seconds)


def test_what_the_leader_says_becomes_events() -> None:
    async def scenario(bench: Bench) -> None:
        end = await bench.opened()
        end.say(welcome(records=(b"a record",)))
        up = await bench.events.get()
        assert isinstance(up, ev.LineUp)
        assert (up.ledger, up.body.round) == (LEDGER, 0)
        assert (bench.learnt, bench.run_times) == ([b"a record"], [12.5])
        end.say(Records((b"another",)))
        end.say(AttemptFailed(0, 1, 2, "why"))
        heard, over = ev.LeaderHeard(LEADER.peer), ev.AttemptOver(0, 1, 2, "why", LEADER.peer)
        assert [await bench.events.get() for _ in range(3)] == [heard, heard, over]
        assert bench.learnt == [b"a record", b"another"]

    play(scenario)


def test_nothing_is_said_before_the_welcome_nor_after_the_line_broke() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.line.say(REFUSAL)
        end = await bench.opened()
        await bench.line.say(REFUSAL)
        end.say(welcome())
        await bench.events.get()
        await bench.line.say(Refusal(0, 1, 7, "heard"))
        assert await end.hear() == Refusal(0, 1, 7, "heard")
        end.break_off()
        assert "broke off" in (await bench.down())[0]
        await bench.line.say(REFUSAL)
        assert end._heard.empty()

    play(scenario)


def test_pauses_grow_while_nobody_welcomes_and_start_again_after_a_welcome() -> None:
    async def scenario(bench: Bench) -> None:
        bench.known = False
        wanted_s = PAUSE_FIRST_S
        for _ in range(10):
            reason, pause_s = await bench.down()
            wanted_s = min(2 * wanted_s, PAUSE_MAX_S)
            assert (reason, pause_s) == (f"{LEADER.peer}: nobody knows where it is", wanted_s)
            bench.go_on()
        assert wanted_s == PAUSE_MAX_S
        assert 1.5 * PAUSE_MAX_S + CONNECT_S < 30, "a leader that is back is found within half a minute"
        bench.known = True
        for _ in range(3):  # lines that were welcomed and break never make it wait longer
            bench.go_on()
            end = await bench.welcomed()
            end.break_off()
            assert (await bench.down())[1] == PAUSE_FIRST_S
        bench.go_on()
        end = await bench.opened()
        end.close()
        assert await bench.down() == (f"{LEADER.peer}: the leader closed the line", 2 * PAUSE_FIRST_S)

    play(scenario)


def test_jitter_spreads_the_pause_over_half_to_one_and_a_half() -> None:
    async def scenario(bench: Bench) -> None:
        for fraction in (0.0, 1.0):
            bench.line._jitter = partial(float, fraction)
            end = await bench.welcomed()
            end.break_off()
            assert (await bench.down())[1] == PAUSE_FIRST_S * (0.5 + fraction)
            bench.go_on()

    play(scenario)


def test_a_goodbye_says_why_and_is_no_broken_line() -> None:
    async def scenario(bench: Bench) -> None:
        end = await bench.welcomed()
        goodbye = Goodbye("superseded", "another process has this key")
        end.say(goodbye)
        assert await bench.events.get() == ev.SaidGoodbye(goodbye, LEADER.peer)
        assert await bench.pauses.get() == PAUSE_FIRST_S
        assert bench.events.empty()

    play(scenario)


def test_a_leader_that_stops_for_a_while_is_tried_again() -> None:
    async def scenario(bench: Bench) -> None:
        end = await bench.welcomed()
        goodbye = Goodbye("shutdown", "back soon")
        end.say(goodbye)
        end.close()
        assert await bench.events.get() == ev.SaidGoodbye(goodbye, LEADER.peer)
        await bench.down()
        bench.go_on()
        await bench.welcomed()

    play(scenario)


def test_a_leader_that_falls_silent_has_lost_its_line() -> None:
    async def scenario(bench: Bench) -> None:
        bench.line._silence_s = lambda: 10.0
        end = await bench.welcomed()
        await skip(9.0)
        assert bench.events.empty()
        await skip(2.0)
        assert "said nothing for 10 s" in (await bench.down())[0]
        assert await end.hear() is None, "its end is closed, and a new line is tried"
        bench.go_on()
        await bench.welcomed()

    play(scenario, SkippingLoop)


def test_a_limit_that_changes_holds_for_the_silence_that_runs_already() -> None:
    async def scenario(bench: Bench) -> None:
        limit_s = 10.0
        bench.line._silence_s = lambda: limit_s
        end = await bench.welcomed()
        limit_s = 20.0
        await skip(15.0)
        limit_s = 40.0
        await skip(15.0)
        assert bench.events.empty()
        end.say(AttemptFailed(0, 1, 2, "why"))
        assert await bench.events.get() == ev.LeaderHeard(LEADER.peer)

    play(scenario, SkippingLoop)


def test_nonsense_ends_the_line() -> None:
    async def scenario(bench: Bench) -> None:
        end = await bench.welcomed()
        end.say(welcome(leader=ME.peer))
        assert "in the name of" in (await bench.down())[0]
        bench.go_on()
        end = await bench.opened()
        bad = welcome()
        end.say(Welcome(bad.leader, bad.commit, b"no ledger", (), 0.0, 1.0))
        assert "Welcome: the ledger is not the one" in (await bench.down())[0]
        assert await end.hear() is None

    play(scenario)


def test_closing_says_what_is_queued() -> None:
    async def scenario(bench: Bench) -> None:
        end = await bench.welcomed()
        await bench.line.say(REFUSAL)
        await bench.line.close()
        assert [await end.hear(), await end.hear()] == [REFUSAL, None]
        await bench.line.say(REFUSAL)  # dropped

    play(scenario)


def test_a_welcome_that_does_not_hold_sets_no_clock_and_teaches_nothing() -> None:
    async def scenario(bench: Bench) -> None:
        end = await bench.opened()
        false = welcome(records=(b"record",))
        end.say(Welcome(false.leader, false.commit, b"{}", false.records, 1e8, 1.0))
        reason, _ = await bench.down()
        assert "Welcome" in reason
        assert (bench.run_times, bench.learnt) == ([], [])

    play(scenario)
