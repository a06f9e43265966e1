"""The agent's side of a trainer process: starts it, speaks with it over two pipes, and leaves nothing of it behind.

The process is spawned from the thread that runs the loop, which must be the agent's main thread: the kernel kills the
child when its parent *thread* ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio import StreamReader, StreamReaderProtocol
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

import node
from node.training.checkpoint import VALUE_BYTES_MOST
from node.training.link import (
    HEADER,
    Command,
    Failed,
    LinkError,
    Quit,
    Ready,
    Report,
    body_bytes,
    decode_report,
    encode,
)

STDERR = 2
STOP_GRACE_S = 3.0
STOP_GRACE_MOST_S = 6.0
SAVED_BYTES_PER_S = 1e8
"""Told to quit, it has so long for the step that it is in, and for its checkpoint at so slow a pace, together at most
so long: a whole node is gone within 10 seconds."""


class TrainerProcess:
    """A trainer in a process of its own (the `Trainer` port).

    Args:
        log: where its standard output and error go; this process's own standard error by default.
        python: the interpreter; ours by default.
    """

    def __init__(self, *, log: IO[bytes] | None = None, python: str = sys.executable) -> None:
        self._log = log
        self._python = python
        self._process: Process | None = None
        self._commands: asyncio.WriteTransport | None = None
        self._reader: StreamReader | None = None
        self._read_transport: asyncio.BaseTransport | None = None
        self._asked_to_end = False
        self._grace_s = STOP_GRACE_S

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Spawn it. Raises OSError where that fails."""
        await self.stop()
        loop = asyncio.get_running_loop()
        log = STDERR if self._log is None else self._log
        command_out, command_in = os.pipe()
        report_out, report_in = os.pipe()
        try:
            # From the folder that holds our own package: what lies where the user stands must not be imported.
            self._process = await asyncio.create_subprocess_exec(
                self._python,
                "-m",
                "node.training.trainer",
                "--in",
                str(command_out),
                "--out",
                str(report_in),
                "--parent",
                str(os.getpid()),
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(command_out, report_in),
                cwd=Path(node.__path__[0]).parent,
            )
        except BaseException:
            os.close(command_in)
            os.close(report_out)
            raise
        finally:
            os.close(command_out)
            os.close(report_in)
        self._asked_to_end = False
        self._reader = StreamReader(loop=loop)
        protocol = StreamReaderProtocol(self._reader, loop=loop)
        self._read_transport, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(report_out, "rb", 0))
        self._commands, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(command_in, "wb", 0))

    def send(self, command: Command) -> None:
        """Hand over a command; dropped where the process has ended."""
        self._asked_to_end |= isinstance(command, Quit)
        if self._commands is not None and not self._commands.is_closing():
            self._commands.write(encode(command))

    async def reports(self) -> AsyncIterator[Report]:
        """Reports until the process ends; a death that nobody asked for comes as a Failed."""
        process, reader = self._process, self._reader
        if process is None or reader is None:
            raise RuntimeError("the trainer is not started")
        while True:
            try:
                report = decode_report(await reader.readexactly(body_bytes(await reader.readexactly(HEADER.size))))
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            except LinkError as error:
                await self.stop()
                yield Failed(f"the trainer sent what is no report: {error}")
                return
            if isinstance(report, Ready):
                self._grace_s = grace_s(report.n_values)
            yield report
            if isinstance(report, Failed):
                await self.stop()
                return
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                returncode = await process.wait()
        except TimeoutError:  # it can't be heard any more
            process.kill()
            returncode = await process.wait()
        if not self._asked_to_end:
            yield Failed(f"the trainer ended {_how(returncode)}")

    async def stop(self) -> None:
        """Ask it to quit, and kill it where it hasn't after `grace_s`; its memory and pipes are gone afterwards."""
        process = self._process
        if process is None:
            return
        self.send(Quit())
        if self._commands is not None:
            self._commands.close()
        try:
            async with asyncio.timeout(self._grace_s):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
            if self._read_transport is not None:
                self._read_transport.close()


def grace_s(n_values: int) -> float:
    """So long a trainer of so many parameters may take from a Quit to its end."""
    return min(STOP_GRACE_S + VALUE_BYTES_MOST * n_values / SAVED_BYTES_PER_S, STOP_GRACE_MOST_S)


def _how(returncode: int) -> str:
    if returncode >= 0:
        return f"with exit code {returncode}"
    try:
        return f"by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"by signal {-returncode}"
