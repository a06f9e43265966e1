"""A helper that can't be started again for a moment ends nobody else; one that never could be says so at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coordinator.children import Supervised
from coordinator.errors import MachineError


class Helper:
    """Ends when it is told to; counts how often it was stopped."""

    log = Path("helper.log")

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.n_stopped = 0

    async def wait(self) -> int:
        await self.over.wait()
        return 1

    async def stop(self, within_s: float) -> int:
        self.n_stopped += 1
        return 0

    def last_line(self) -> str:
        return "it fell over"


@pytest.mark.parametrize(
    "error",
    [
        MachineError("python -m node can't be started: Cannot allocate memory", "free memory"),
        OSError(24, "Too many open files"),
        RuntimeError("can't start new thread"),
    ],
)
def test_a_restart_that_fails_is_said_and_tried_again_later_each_time(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(Supervised, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(Supervised, "DELAY_MOST_S", 0.004)
    said: list[str] = []
    pauses: list[float] = []

    async def main() -> tuple[Supervised, list[Helper]]:
        helpers: list[Helper] = []
        again = asyncio.Event()
        n_starts = 0

        async def start() -> Helper:
            nonlocal n_starts
            n_starts += 1
            if 1 < n_starts < 5:
                raise error
            helpers.append(Helper())
            if len(helpers) == 2:
                again.set()
            return helpers[-1]

        slept = asyncio.sleep

        async def sleep(delay_s: float) -> None:
            pauses.append(delay_s)
            await slept(delay_s)

        monkeypatch.setattr("coordinator.children.asyncio.sleep", sleep)
        supervised = Supervised("helper", start, said.append)
        task = asyncio.ensure_future(supervised.run())
        async with asyncio.timeout(60):
            while not helpers:
                await slept(0)
            helpers[0].over.set()
            await again.wait()
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return supervised, helpers

    supervised, helpers = asyncio.run(main())
    assert pauses == [0.001, 0.002, 0.004, 0.004]
    assert supervised.n_restarts == 1
    assert said[0] == "the helper ended with exit code 1: it fell over (log: helper.log); it starts again in 0 s"
    assert said[1:] == [f"the helper could not be started: {error}; it starts again in 0 s"] * 3
    assert [helper.n_stopped for helper in helpers] == [0, 1]  # what had ended long ago may be another by its number


def test_nothing_is_stopped_that_could_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Supervised, "FIRST_DELAY_S", 0.0)

    async def main() -> Helper:
        first, failed, said = Helper(), asyncio.Event(), list[str]()
        first.over.set()
        left = [first]

        async def start() -> Helper:
            if not left:
                failed.set()
                raise MachineError("no more processes")
            return left.pop()

        task = asyncio.ensure_future(Supervised("helper", start, said.append).run())
        async with asyncio.timeout(60):
            await failed.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return first

    assert asyncio.run(main()).n_stopped == 0


def test_a_first_start_that_fails_is_raised() -> None:
    async def start() -> Helper:
        raise MachineError("there is no torch here")

    with pytest.raises(MachineError, match="no torch"):
        asyncio.run(Supervised("helper", start, print).run())
