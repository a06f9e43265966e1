"""All lines of a node: the coordinator's is always there, a stand-in's while it is followed, and each hears its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from node.leaderline import LeaderLine
from node.lines import Lines
from node.opening import Opener
from node.session import events as ev
from protos.messages import PeerId, Refusal
from protos.signing import Identity
from tests.fakes.peers import FakeNetwork, FakePeers, LeaderEnd
from tests.node.test_leaderline import HELLO, LEADER, ME, RUN, welcome

STAND_IN = Identity.from_private_bytes(bytes([9]) * 32).peer


class Bench:
    """A node's lines on a network in memory."""

    def __init__(self) -> None:
        self.network = FakeNetwork()
        self.ends = {peer: self.network.lead(peer) for peer in (LEADER.peer, STAND_IN)}
        self.events: asyncio.Queue[ev.Event] = asyncio.Queue()
        self.faults: list[BaseException] = []
        self.lines = Lines(LEADER.peer, self._line(LEADER.peer), self._line, self.faults.append)

    def _line(self, leader: PeerId) -> LeaderLine:
        async def where() -> tuple[PeerId, tuple[str, ...]]:
            return leader, ("here:1",)

        return LeaderLine(
            FakePeers(self.network, ME.peer), Opener(RUN.peer, LEADER.peer), where=where, hello=lambda: HELLO,
            post=self.events.put_nowait, learn=lambda _: None, jitter=lambda: 0.5, sleep=lambda _: asyncio.sleep(0),
        )  # fmt: skip

    async def welcomed(self, leader: PeerId) -> LeaderEnd:
        end = await self.ends[leader].get()
        assert await end.hear() == HELLO
        end.say(welcome(leader))
        event = await self.events.get()
        assert isinstance(event, ev.LineUp)
        assert event.welcome.leader == leader
        return end


def play(scenario: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        bench = Bench()
        async with asyncio.timeout(60):
            running = asyncio.create_task(bench.lines.run())
            try:
                await scenario(bench)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
        assert bench.faults == []
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_each_leader_hears_what_is_for_it_and_all_what_is_for_all() -> None:
    async def scenario(bench: Bench) -> None:
        coordinator = await bench.welcomed(LEADER.peer)
        bench.lines.follow((STAND_IN,))
        stand_in = await bench.welcomed(STAND_IN)
        everyone, one = Refusal(0, 1, 0, "all"), Refusal(0, 1, 0, "one")
        await bench.lines.say(one, STAND_IN)
        await bench.lines.say(everyone)
        assert await coordinator.hear() == everyone
        assert [await stand_in.hear(), await stand_in.hear()] == [one, everyone]

    play(scenario)


def test_a_stand_in_that_is_not_followed_any_more_loses_its_line_alone() -> None:
    async def scenario(bench: Bench) -> None:
        coordinator = await bench.welcomed(LEADER.peer)
        bench.lines.follow((STAND_IN,))
        stand_in = await bench.welcomed(STAND_IN)
        bench.lines.follow(())
        assert await stand_in.hear() is None
        await bench.lines.say(Refusal(0, 1, 0, "still here"))
        assert await coordinator.hear() == Refusal(0, 1, 0, "still here")
        bench.lines.follow((STAND_IN,))
        await bench.welcomed(STAND_IN)

    play(scenario)
