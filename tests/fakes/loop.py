"""An event loop whose time is put forward by hand, so that no limit hangs on how fast a machine is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop whose time stands still until it is put forward, however long what it does takes."""

    skipped_s = 0.0

    def time(self) -> float:
        return self.skipped_s

    async def skip(self, seconds: float) -> None:
        """Put the time forward, and let what is due then happen."""
        self.skipped_s += seconds
        for _ in range(3):
            await asyncio.sleep(0)


def play(scenario: Callable[[SkippingLoop], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SkippingLoop)
        runner.run(scenario(loop))


async def until(condition: Callable[[], bool]) -> None:
    """Give way to the loop (and other threads) until it holds, whatever the loop's clock does."""
    while not condition():
        await asyncio.to_thread(time.sleep, 0.001)
