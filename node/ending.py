"""Runs the driver beside its helpers until it stops, and says in a contributor's words why a node ended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from node.driver import Driver, Stopped
from node.errors import LeaderAway, LocalStateError, MachineError, NodeError, Refused
from node.training.supervisor import LayoutMismatch, TrainerGivenUp


async def until_stopped(driver: Driver, works: Sequence[Coroutine[Any, Any, None]]) -> Stopped:
    """Run the driver and its helpers; whichever fails first ends all, and nothing of them is left."""
    helpers = [asyncio.create_task(work) for work in works]
    main = asyncio.create_task(driver.run())
    try:
        await asyncio.wait([main, *helpers], return_when=asyncio.FIRST_COMPLETED)
        ended = next((task for task in helpers if task.done()), None)
        if ended is not None and not main.done():
            raise _as_node_error(None if ended.cancelled() else ended.exception())
        return await main
    finally:
        for task in (main, *helpers):
            task.cancel()
        await asyncio.gather(main, *helpers, return_exceptions=True)


def error_of(stopped: Stopped) -> NodeError:
    """The error of a node that stopped with another code than 0."""
    match stopped.code:
        case 4:
            return LeaderAway(stopped.reason, "join again with the same --data once it is back")
        case 5:
            return Refused(stopped.reason, "ask the run's operator")
        case 6:
            return LocalStateError(stopped.reason, "stop the other process, or use another identity")
        case _:
            return NodeError(stopped.reason, "run again with -v and report it")


def _as_node_error(error: BaseException | None) -> BaseException:
    match error:
        case LayoutMismatch():
            return Refused(str(error), "install the versions of torch and transformers that the run uses")
        case TrainerGivenUp():
            return MachineError(str(error), "see trainer.log in the data folder")
        case None:
            return NodeError("a part of the node ended without a word", "report it")
        case _:
            return error
