"""A serving coordinator in one piece, without its observer, until a scene has been played."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from coordinator import app
from coordinator.app import OUTSIDE, Outside, serve
from coordinator.children import Child, Supervised
from coordinator.places import ServeOptions

ANY = "127.0.0.1:0"
END_S = 30.0
"""However busy this machine is: waiting for what does not come takes longer."""


@dataclass
class Said:
    said: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    invited: asyncio.Event = field(default_factory=asyncio.Event)
    listening: list[asyncio.Future[None]] = field(default_factory=list)
    """What hears of the end."""

    def show(self, text: str) -> None:
        self.shown.append(text)
        if len(self.shown) == 2:
            self.invited.set()


@pytest.fixture
def no_observer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The observer needs torch: a process that ends at once stands in, and is started again a minute later."""

    def starter(*_: object) -> Callable[[], Awaitable[Child]]:
        async def start() -> Child:
            return await Child.start("platform", [], tmp_path / "observer.log")

        return start

    monkeypatch.setattr(app, "starter", starter)
    monkeypatch.setattr(Supervised, "FIRST_DELAY_S", 60.0)


def serving(
    path: Path, scene: Callable[[Said], Coroutine[Any, Any, None]], outside: Outside = OUTSIDE, **changes: Any
) -> Said:
    """Serve the folder, play the scene, and stop with a signal as an operator would."""
    said = Said()
    options = ServeOptions(path, **{"http": ANY, "listen": ANY, "dht": ANY, **changes})

    async def main() -> None:
        task = asyncio.ensure_future(serve(options, said.said.append, said.show, outside))
        invited = asyncio.ensure_future(said.invited.wait())
        try:
            await asyncio.wait((task, invited), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await scene(said)
                os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(END_S):
                await task
                await asyncio.gather(*said.listening)
        finally:
            task.cancel()
            invited.cancel()
            loop = asyncio.get_running_loop()
            loop.remove_signal_handler(signal.SIGTERM)
            loop.remove_signal_handler(signal.SIGINT)

    asyncio.run(main())
    return said
