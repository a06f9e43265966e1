"""The driver beside its helpers: whichever fails first ends all, and why is said in a contributor's words."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from node.driver import Driver, Stopped
from node.ending import error_of, until_stopped
from node.errors import LeaderAway, LocalStateError, MachineError, NodeError, Refused
from node.training.supervisor import LayoutMismatch, TrainerGivenUp


class FakeDriver:
    """Runs until it is told to stop, and takes a moment to close."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.closed = False

    async def run(self) -> Stopped:
        try:
            await self.stop.wait()
            return Stopped(0, "done")
        finally:
            await asyncio.sleep(0)
            self.closed = True


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def ending(
    scenario: Callable[[FakeDriver], list[Coroutine[Any, Any, None]]], *, cancelled: bool = False
) -> tuple[FakeDriver, Stopped | BaseException]:
    """What `until_stopped` makes of these helpers; nothing may be left of any of them."""

    async def main() -> tuple[FakeDriver, Stopped | BaseException]:
        driver = FakeDriver()
        running = asyncio.create_task(until_stopped(cast(Driver, driver), scenario(driver)))
        if cancelled:
            await asyncio.sleep(0)
            running.cancel()
        (outcome,) = await asyncio.gather(running, return_exceptions=True)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return driver, outcome

    return asyncio.run(main())


def test_the_drivers_end_ends_the_helpers() -> None:
    def scenario(driver: FakeDriver) -> list[Coroutine[Any, Any, None]]:
        driver.stop.set()
        return [forever(), forever()]

    assert ending(scenario)[1] == Stopped(0, "done")


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (LayoutMismatch("another layout"), Refused, "another layout; install the versions"),
        (TrainerGivenUp("it died 5 times"), MachineError, "it died 5 times; see trainer.log"),
        (ZeroDivisionError("ours"), ZeroDivisionError, "ours"),
        (None, NodeError, "without a word"),
    ],
)
def test_a_helpers_end_ends_the_driver(fault: BaseException | None, kind: type[BaseException], words: str) -> None:
    async def helper() -> None:
        if fault is not None:
            raise fault

    driver, outcome = ending(lambda _: [forever(), helper()])
    assert type(outcome) is kind
    assert words in str(outcome)
    assert driver.closed


def test_who_is_cancelled_leaves_nothing_running() -> None:
    driver, outcome = ending(lambda _: [forever()], cancelled=True)
    assert isinstance(outcome, asyncio.CancelledError)
    assert driver.closed


@pytest.mark.parametrize(("code", "kind"), [(4, LeaderAway), (5, Refused), (6, LocalStateError), (1, NodeError)])
def test_each_code_has_its_error(code: int, kind: type[NodeError]) -> None:
    error = error_of(Stopped(code, "the reason"))
    assert type(error) is kind
    assert error.exit_code == code
    assert str(error).startswith("the reason; ")


def test_who_waited_too_long_for_the_coordinator_may_join_again() -> None:
    error = error_of(Stopped(4, "the coordinator has been away for 7 days: the state is kept for its return"))
    assert str(error).endswith("its return; join again with the same --data once it is back")
