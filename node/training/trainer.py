"""The trainer process: `python -m node.training.trainer --in FD --out FD --parent PID`, started by the agent only.

It ends when the agent does: the kernel kills it (Linux), and everywhere the command pipe closes, which a thread of its
own watches for while a step runs, until the agent has told it to quit. SIGINT, SIGTERM and SIGHUP, which a terminal or
a service manager sends to all processes at once, are the agent's to decide about.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Thread
from typing import BinaryIO

from node.training.link import (
    HEADER,
    Command,
    Failed,
    LinkError,
    Quit,
    Report,
    Start,
    body_bytes,
    decode_command,
    encode,
)

_PR_SET_PDEATHSIG = 1
_REASON_CHARS = 1000


def main(arguments: list[str]) -> int:
    """Run until told to quit; 0 then, 1 after a fault, which is reported first."""
    match arguments:
        case ["--in", in_fd, "--out", out_fd, "--parent", parent] if in_fd.isdigit() and out_fd.isdigit():
            _die_with(int(parent))
            with os.fdopen(int(out_fd), "wb") as reports_out:
                return serve(int(in_fd), reports_out)
        case _:
            print("node.training.trainer is started by the agent, with its pipes", file=sys.stderr)
            return 2


def serve(commands_fd: int, reports_out: BinaryIO) -> int:
    """Carry out the commands that come from a pipe, and report to another."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    commands: SimpleQueue[Command] = SimpleQueue()
    started = Event()
    Thread(target=_read, args=(commands_fd, commands, started), daemon=True).start()

    def report(message: Report) -> None:
        reports_out.write(encode(message))
        reports_out.flush()

    try:
        # Here, not above: the pipe is watched, and the agent's death noticed, while torch is loaded.
        import torch

        from node.training import loop, model

        first = commands.get()
        if isinstance(first, Start):
            # The order of sums, and so the last bits of a step, depend on it.
            torch.set_num_threads(max(1, first.threads))
        trainer = loop.TrainerLoop(model.build_task, report, time.monotonic)
        if trainer.handle(first):
            started.set()
            loop.run(trainer, commands)
    except BrokenPipeError:
        return 1
    except Exception as error:
        # Whatever it is, the agent must hear of it, and starts a fresh process.
        traceback.print_exc()
        report(Failed(f"{type(error).__name__}: {error}"[:_REASON_CHARS]))
        return 1
    return 0


def _read(commands_fd: int, commands: SimpleQueue[Command], started: Event) -> None:
    """Hand commands over as they come; when the pipe closes the agent is gone, and so are we.

    After a Quit it closes as well, and what is going on is ended in order: a step, and then a checkpoint. While the
    trainer is starting there is nothing to keep, and it ends at once.

    By descriptor: a buffered file would hold its lock while it waits, and nobody could end the process in the meantime.
    """
    try:
        while header := _exactly(commands_fd, HEADER.size):
            command = decode_command(_exactly(commands_fd, body_bytes(header)))
            if not isinstance(command, Quit):
                commands.put(command)
                continue
            if not started.is_set():
                os._exit(0)
            commands.put(command)
            return
    except (LinkError, OSError) as error:
        print(f"the command pipe broke: {error}", file=sys.stderr)
    os._exit(1)


def _exactly(descriptor: int, n_bytes: int) -> bytes:
    """So many bytes; nothing at the end of the pipe."""
    parts: list[bytes] = []
    while n_bytes:
        part = os.read(descriptor, min(n_bytes, 2**16))
        if not part:
            return b""
        parts.append(part)
        n_bytes -= len(part)
    return b"".join(parts)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the agent's main thread ends; leave at once if it already has."""
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)  # all is on disk, and torch's own teardown takes seconds of those that there are for leaving
