"""Signals to a node: at any moment of its start the first one ends it cleanly, later it leaves; a second: at once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from node import signals as module
from node.driver import Stopped
from node.parent import ORPHANED
from node.session import events as ev
from node.signals import OWNERS, Signals


@pytest.fixture(autouse=True)
def threads_may_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a machine that stands still for a moment ends this process."""
    monkeypatch.setattr(module, "THREADS_S", 1000.0)


def tell(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@contextmanager
def handled() -> Iterator[Signals]:
    before = [(number, signal.getsignal(number)) for number in (*OWNERS, ORPHANED)]
    try:
        yield Signals()
    finally:
        for number, handler in before:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, handler)


def ran(node: Callable[[Signals], Coroutine[Any, Any, Stopped]]) -> Stopped:
    """How this node ends, whose process this is."""

    async def main() -> Stopped:
        with handled() as signals:
            return await signals.run(node(signals))

    return asyncio.run(main())


async def forever() -> Stopped:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


@pytest.mark.parametrize("number", [*OWNERS, ORPHANED])
def test_what_is_being_started_ends_at_the_first_one(number: signal.Signals) -> None:
    cleaned: list[str] = []

    async def node(_: Signals) -> Stopped:
        try:
            tell(number)
            return await forever()
        finally:
            await asyncio.to_thread(cleaned.append, "cleaned")

    stopped = ran(node)
    why = "the program that started this node is gone" if number is ORPHANED else "left on a signal"
    assert stopped == Stopped(0, f"{why}, before this node took part")
    assert cleaned == ["cleaned"]


def test_what_its_threads_are_at_is_over_before_anything_is_closed() -> None:
    started, gate = threading.Event(), threading.Event()
    done: list[str] = []

    def work() -> None:
        started.set()
        assert gate.wait(60)
        done.append("work")

    async def node() -> Stopped:
        loop = asyncio.get_running_loop()
        working = loop.run_in_executor(None, work)
        assert await asyncio.to_thread(started.wait, 60)
        tell(signal.SIGTERM)
        try:
            await working
        finally:
            loop.call_later(0.02, gate.set)
        raise AssertionError

    async def main() -> None:
        with handled() as signals:
            await signals.run(node())
            assert done == ["work"]
            assert await asyncio.to_thread(len, done) == 1  # there are threads for what is closed

    asyncio.run(main())


@pytest.mark.parametrize("number", [*OWNERS, ORPHANED])
def test_who_takes_part_leaves(number: signal.Signals) -> None:
    async def node(signals: Signals) -> Stopped:
        asked: asyncio.Future[ev.LeaveAsked] = asyncio.get_running_loop().create_future()
        signals.leaves_by(asked.set_result)
        tell(number)
        leaving = await asked
        assert leaving.keeps_seat == (number is ORPHANED)
        return Stopped(0, leaving.reason)

    assert "took part" not in ran(node).reason


def test_a_start_that_goes_on_all_the_same_is_left_at_its_end() -> None:
    async def node(signals: Signals) -> Stopped:
        tell(signal.SIGTERM)
        try:
            await forever()
        except asyncio.CancelledError:  # a library may
            asked: list[ev.LeaveAsked] = []
            signals.leaves_by(asked.append)
            return Stopped(0, asked[0].reason)
        raise AssertionError

    assert ran(node) == Stopped(0, "left on a signal")


@pytest.mark.parametrize("early", [True, False])
def test_a_second_one_ends_the_process_at_once(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: asyncio.Queue[int] = asyncio.Queue()
    monkeypatch.setattr(os, "_exit", codes.put_nowait)

    async def node(signals: Signals) -> Stopped:
        if not early:
            asked = asyncio.Event()
            signals.leaves_by(lambda _: asked.set())
            tell(signal.SIGTERM)
            await asked.wait()
            tell(signal.SIGINT)
            return Stopped(await codes.get(), "")
        try:
            tell(signal.SIGHUP)
            return await forever()
        finally:
            tell(signal.SIGTERM)
            assert await codes.get() == 130

    assert ran(node).code == (0 if early else 130)


def test_a_window_that_closes_tells_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shell and the kernel: that is no wish to end at once."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)

    async def node(signals: Signals) -> Stopped:
        asked = asyncio.Event()
        signals.leaves_by(lambda _: asked.set())
        for _ in range(3):
            tell(signal.SIGHUP)
            await asked.wait()
            await asyncio.sleep(0)
        return Stopped(0, "")

    ran(node)
    assert codes == []


def test_threads_that_go_on_for_long_hold_no_leaving_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hash or copy a whole state: whatever they write may be cut off anywhere."""
    ended: list[int] = []
    done = threading.Event()
    monkeypatch.setattr(module, "THREADS_S", 0.01)

    def end(code: int) -> None:
        ended.append(code)
        done.set()

    monkeypatch.setattr(os, "_exit", end)

    async def node(_: Signals) -> Stopped:
        asyncio.get_running_loop().run_in_executor(None, done.wait)
        tell(signal.SIGTERM)
        return await forever()

    assert ran(node).code == 0
    assert ended == [0]


def test_orphaned_more_than_once_is_no_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says it once for each thread that the parent had."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    heard: list[ev.LeaveAsked] = []

    async def node(signals: Signals) -> Stopped:
        signals.leaves_by(heard.append)
        while len(heard) < 2:
            tell(ORPHANED)
            await asyncio.sleep(0)
        return Stopped(0, "")

    ran(node)
    assert codes == []


def test_what_fails_or_is_cancelled_otherwise_comes_out() -> None:
    async def failing(_: Signals) -> Stopped:
        raise ZeroDivisionError

    async def cancelled(_: Signals) -> Stopped:
        raise asyncio.CancelledError

    with pytest.raises(ZeroDivisionError):
        ran(failing)
    with pytest.raises(asyncio.CancelledError):
        ran(cancelled)
