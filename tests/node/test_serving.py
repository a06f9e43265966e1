"""Turns: so many at once, so many each, first come first served, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from node.serving import Turns
from protos.messages import PeerId
from tests.node.chain import peer

A, B, C, D = (peer(number) for number in range(4))


def play(scenario: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await scenario

    asyncio.run(limited())


def test_one_caller_has_its_share_and_no_more() -> None:
    async def scenario() -> None:
        turns = Turns(at_once=4, each=2)
        async with turns.turn(A) as first, turns.turn(A) as second:
            assert (first, second) == ("", "")
            async with turns.turn(A) as third:
                assert third == "2 transfers to you are under way"
            async with turns.turn(B) as other:
                assert other == ""
                assert turns.n_running == 3
        assert turns.n_running == 0
        async with turns.turn(A) as again:
            assert again == ""

    play(scenario())


def test_the_others_wait_in_their_order() -> None:
    async def scenario() -> None:
        turns = Turns(at_once=1, each=1, waiting=2)
        order: list[str] = []
        go = asyncio.Event()

        async def one(name: str, caller: PeerId) -> None:
            async with turns.turn(caller) as refusal:
                order.append(f"{name}{refusal and ': ' + refusal}")
                await go.wait()

        async with asyncio.TaskGroup() as group:
            for name, caller in (("a", A), ("b", B), ("c", C), ("d", D)):
                group.create_task(one(name, caller))
                await asyncio.sleep(0)
            assert order == ["a", "d: 1 transfers are under way and 2 wait"]
            go.set()
        assert order[2:] == ["b", "c"]
        assert turns.n_running == 0

    play(scenario())


def test_who_waits_too_long_is_told_and_who_gives_up_leaves_its_place() -> None:
    async def scenario() -> None:
        turns = Turns(at_once=1, each=1, waiting=2, wait_s=0.01)
        async with turns.turn(A):
            async with turns.turn(B) as refusal:
                assert "under way" in refusal
            waiting = asyncio.ensure_future(turns.turn(C).__aenter__())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        async with turns.turn(B) as refusal:
            assert refusal == ""
        assert turns.n_running == 0

    play(scenario())


def test_a_transfer_that_breaks_gives_its_turn_back() -> None:
    async def scenario() -> None:
        turns = Turns(at_once=1)
        with pytest.raises(RuntimeError):
            async with turns.turn(A):
                raise RuntimeError
        assert turns.n_running == 0

    play(scenario())


def test_a_turn_that_comes_as_waiting_for_it_ends_is_not_lost() -> None:
    async def scenario() -> None:
        turns = Turns(at_once=1, each=2, waiting=4, wait_s=60.0)
        inside, leave = asyncio.Event(), asyncio.Event()

        async def first() -> None:
            async with turns.turn(A):
                inside.set()
                await leave.wait()
            waiting.cancel()  # it has been given the turn, and has not run since

        async def second() -> None:
            async with turns.turn(B):
                pass

        holding = asyncio.create_task(first())
        await inside.wait()
        waiting = asyncio.create_task(second())
        await asyncio.sleep(0)
        leave.set()
        await asyncio.gather(holding, waiting, return_exceptions=True)
        assert waiting.cancelled()
        assert turns.n_running == 0

    play(scenario())
