"""Bytes in flight: never more than the limit, first come first served, and whoever leaves the queue blocks nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from node.peers.flight import InFlight


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(main())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_who_would_exceed_the_limit_waits_for_its_turn() -> None:
    async def scenario() -> None:
        flight = InFlight(100)
        assert await flight.take(60) == 60
        large, small = asyncio.create_task(flight.take(50)), asyncio.create_task(flight.take(10))
        await settle()
        assert not large.done()
        assert not small.done()  # it would have room, but large ones would wait for ever if it went first
        flight.give_back(60)
        assert await large == 50
        assert await small == 10
        assert (flight.n_bytes, flight.most_bytes) == (60, 60)

    play(scenario)


def test_what_is_larger_than_the_limit_goes_alone() -> None:
    async def scenario() -> None:
        flight = InFlight(100)
        assert await flight.take(1000) == 100
        waiting = asyncio.create_task(flight.take(1))
        await settle()
        assert not waiting.done()
        flight.give_back(100)
        assert await waiting == 1

    play(scenario)


def test_who_gives_up_waiting_lets_the_next_one_in() -> None:
    async def scenario() -> None:
        flight = InFlight(100)
        await flight.take(90)
        large, small = asyncio.create_task(flight.take(50)), asyncio.create_task(flight.take(10))
        await settle()
        large.cancel()
        assert await small == 10
        assert flight.n_bytes == 100

    play(scenario)


def test_who_gives_up_in_its_turn_gives_it_back() -> None:
    async def scenario() -> None:
        flight = InFlight(100)
        await flight.take(100)
        waiting = asyncio.create_task(flight.take(100))
        await settle()
        flight.give_back(100)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert flight.n_bytes == 0
        assert flight.most_bytes == 100

    play(scenario)


def test_room_that_is_there_is_had_at_once_unless_others_wait_for_theirs() -> None:
    async def main() -> None:
        flight = InFlight(10)
        assert flight.take_now(6) == 6
        assert flight.take_now(5) is None
        assert flight.n_bytes == 6
        waiting = asyncio.create_task(flight.take(8))
        await asyncio.sleep(0)
        assert flight.take_now(1) is None
        flight.give_back(6)
        assert await waiting == 8
        assert flight.take_now(2) == 2
        flight.give_back(10)
        assert flight.take_now(11) == 10
        assert flight.most_bytes == 10

    asyncio.run(main())
