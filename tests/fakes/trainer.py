"""A trainer in a thread of this process: the real loop over a small task, without a process, pipes or transformers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from queue import SimpleQueue
from threading import Thread

from node.training.link import Command, Failed, Quit, Report
from node.training.loop import TrainerLoop
from node.training.task import Task
from protos.runspec import RunSpec
from tests.fakes.tiny import TinyTask


class Crashed(Exception):
    """What `crash` throws into the thread."""


class ThreadTrainer:
    """The `Trainer` port over a thread. `crash` is its `kill -9`: it ends between two steps and says nothing itself."""

    def __init__(self, build: Callable[[RunSpec], Task] = TinyTask.of) -> None:
        self._build = build
        self._commands: SimpleQueue[Command | Crashed] = SimpleQueue()
        self._reports: asyncio.Queue[Report | None] = asyncio.Queue()
        self._thread: Thread | None = None

    async def start(self) -> None:
        await self.stop()
        self._commands = SimpleQueue()
        self._reports = asyncio.Queue()
        loop, reports, commands = asyncio.get_running_loop(), self._reports, self._commands

        def say(report: Report | None) -> None:
            loop.call_soon_threadsafe(reports.put_nowait, report)

        self._thread = Thread(target=_serve, args=(self._build, commands, say), daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        self._commands.put(command)

    def crash(self) -> None:
        """Have it end as if killed."""
        self._commands.put(Crashed())

    async def reports(self) -> AsyncIterator[Report]:
        reports = self._reports
        while (report := await reports.get()) is not None:
            yield report
            if isinstance(report, Failed):
                return

    async def stop(self) -> None:
        thread = self._thread
        if thread is not None:
            self._commands.put(Quit())
            await asyncio.to_thread(thread.join)


def _serve(
    build: Callable[[RunSpec], Task],
    commands: SimpleQueue[Command | Crashed],
    say: Callable[[Report | None], None],
) -> None:
    trainer = TrainerLoop(build, say, time.monotonic)
    try:
        going = True
        while going:
            if commands.empty() and trainer.has_work:
                trainer.turn()
                continue
            command = commands.get()
            if isinstance(command, Crashed):
                raise command
            going = trainer.handle(command)
        say(None)
    except Crashed:
        say(Failed("the trainer ended by SIGKILL"))
    except Exception as error:
        say(Failed(f"{type(error).__name__}: {error}"))
