"""Child processes of ours: started so that none outlives us, their output in logs, ended in time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from coordinator.errors import MachineError

LOG_BYTES_MOST = 8 * 2**20
_TAIL_BYTES = 8192


class Child:
    """A process in a session of its own, so that a terminal's Ctrl-C reaches it through us alone."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self.log = log

    @classmethod
    async def start(
        cls, module: str, arguments: Sequence[str], log: Path, *, extra: Mapping[str, str] | None = None
    ) -> Child:
        """`python -m MODULE ARGUMENTS…` in our environment and `extra`, output appended to a log. Raises MachineError.

        `--parent-pid` is added: the child asks the kernel to be ended with us.
        """
        with _open_log(log) as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    module,
                    *arguments,
                    "--parent-pid",
                    str(os.getpid()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **(extra or {})},
                    start_new_session=True,
                )
            except OSError as error:
                raise MachineError(f"python -m {module} can't be started: {error.strerror}", "free memory") from error
        return cls(process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """To the whole session, as far as it still exists."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    async def stop(self, within_s: float) -> int:
        """SIGTERM to the process, and after `within_s` SIGKILL to whatever is left of its session."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return await self._process.wait()

    def last_line(self) -> str:
        """The last line of its log: why it ended, by our own rule."""
        return last_line(self.log)


def last_line(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _open_log(log: Path) -> IO[bytes]:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists() and log.stat().st_size > LOG_BYTES_MOST:
            log.replace(log.with_suffix(".log.1"))
        return log.open("ab")
    except OSError as error:
        raise MachineError(f"the log {log} can't be written: {error.strerror}", "free space in the folder") from error


class Process(Protocol):
    """What is supervised: a child, or its stand-in."""

    @property
    def log(self) -> Path: ...

    async def wait(self) -> int: ...

    async def stop(self, within_s: float) -> int: ...

    def last_line(self) -> str: ...


class Supervised:
    """One child that is started again, after a growing delay, for as long as it is wanted.

    The first start shows whether this machine can run it at all, and raises what `start` does. After that a start that
    fails is as a child that ended at once: a machine that is short of something for a moment ends nobody else.

    Args:
        start: starts it anew.
        say: told of each end, and of each start that fails after it.
    """

    FIRST_DELAY_S = 1.0
    DELAY_MOST_S = 60.0
    STEADY_S = 60.0
    """Who ran so long starts again after the first delay."""
    STOP_S = 2.5

    def __init__(self, name: str, start: Callable[[], Awaitable[Process]], say: Callable[[str], None]) -> None:
        self._name = name
        self._start = start
        self._say = say
        self._child: Process | None = None
        self.n_restarts = 0

    async def run(self) -> None:
        """Until cancelled, or the first start fails; the child has ended when this returns."""
        delay_s = self.FIRST_DELAY_S
        try:
            self._child = await self._start()
            while True:
                if self._child is not None:
                    began = time.monotonic()
                    what = await _end_of(self._child)
                    if time.monotonic() - began >= self.STEADY_S:
                        delay_s = self.FIRST_DELAY_S
                self._say(f"the {self._name} {what}; it starts again in {delay_s:.0f} s")
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, self.DELAY_MOST_S)
                self._child = None  # its number may be another's by the time that this ends
                try:
                    self._child = await self._start()
                    self.n_restarts += 1
                except Exception as error:
                    what = f"could not be started: {str(error) or repr(error)}"
        finally:
            if self._child is not None:
                await asyncio.shield(self._child.stop(self.STOP_S))


async def _end_of(child: Process) -> str:
    """Waits for it, and says how it was."""
    code = await child.wait()
    why = child.last_line()
    return f"ended with exit code {code}{': ' + why if why else ''} (log: {child.log})"
