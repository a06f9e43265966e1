"""Runs the node's tools (`python -m node tool …`) as processes: what needs torch is done there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coordinator.errors import CoordinatorError, MachineError, StateError, error_for_exit_code
from coordinator.folder import RunFolder

_ANSWER_BYTES_MOST = 4 * 2**20
_LINE_BYTES_MOST = 2**20
STILL_EVERY_S = 25
_REMEDY = "see what it said above"


async def init(wish: Path, to: Path, say: Callable[[str], None]) -> Mapping[str, Any]:
    """Pack data and make the first state in a folder; gives the whole RunSpec as JSON."""
    answer = await run("init", {"config": str(wish), "to": str(to)}, say)
    spec = answer.get("spec")
    if not isinstance(spec, dict):
        raise CoordinatorError("node tool init gave no RunSpec")
    packed = answer.get("packed")
    if isinstance(packed, dict):
        skipped = f", {packed['n_skipped']} skipped" if packed.get("n_skipped") else ""
        say(
            f"packed {packed.get('n_texts')} texts{skipped}: {packed.get('n_train_tokens'):,} tokens to train on, "
            f"{packed.get('n_val_tokens'):,} to validate on"
        )
    return spec


async def evaluate(folder: RunFolder, theta: Path, say: Callable[[str], None]) -> Mapping[str, Any]:
    """`val_loss` and `n_tokens` of a state."""
    arguments = {"spec": str(folder.spec_json), "data": str(folder.data), "theta": str(theta)}
    return await run("evaluate", arguments, say)


async def export(
    folder: RunFolder, theta: Path, to: Path, meta: Mapping[str, Any], say: Callable[[str], None]
) -> Mapping[str, Any]:
    """Write a state as a folder that transformers loads."""
    arguments = {
        "spec": str(folder.spec_json),
        "theta": str(theta),
        "to": str(to),
        "meta": json.dumps(meta),
    }
    return await run("export", arguments, say)


def newest_state(folder: RunFolder) -> tuple[Path, str]:
    """The file of θ of the newest state that the observer holds, or of the first state; and its place's name."""
    current = folder.observer / "state" / "CURRENT"
    with contextlib.suppress(OSError):
        name = current.read_text(encoding="utf-8").strip()
        theta = current.parent / Path(name).name / "theta.bin"
        if theta.is_file():
            return theta, name
    theta = folder.state / "theta.bin"
    if not theta.is_file():
        raise StateError(
            f"{folder.path} holds no state", f"serve the run for a while: coordinator serve --data {folder.path}"
        )
    return theta, ""


async def run(name: str, arguments: Mapping[str, str], say: Callable[[str], None]) -> dict[str, Any]:
    """One tool; its one JSON document. What it says on standard error is passed on.

    Raises the error that its exit code stands for, with its last line as cause.
    """
    words = [word for key, value in arguments.items() for word in (f"--{key}", value)]
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "node", "tool", name, *words, "--parent-pid", str(os.getpid())),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=_LINE_BYTES_MOST,
        )
    except OSError as error:
        raise MachineError(f"node tool {name} can't be started: {error.strerror}", "free memory") from error
    still = asyncio.create_task(_say_still(name, say))
    try:
        answer, last = await asyncio.gather(_all(process.stdout), _passed_on(process.stderr, say))
        code = await process.wait()
    finally:
        still.cancel()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if code < 0:
        raise MachineError(
            f"node tool {name} was ended by a signal: {signal.strsignal(-code) or -code}",
            "free memory, and see the system's log: where there is none left the kernel ends the largest process",
        )
    if code:
        raise error_for_exit_code(code, last or f"node tool {name} ended with exit code {code}")
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise CoordinatorError(f"node tool {name} printed no JSON document", _REMEDY) from error
    if not isinstance(found, dict):
        raise CoordinatorError(f"node tool {name} printed no JSON object", _REMEDY)
    return found


async def _say_still(name: str, say: Callable[[str], None]) -> None:
    """A line now and then, so that long work doesn't look like a hang."""
    waited_s = 0
    while True:
        await asyncio.sleep(STILL_EVERY_S)
        waited_s += STILL_EVERY_S
        say(f"node tool {name} is at work, {waited_s} s so far")


async def _all(stream: asyncio.StreamReader | None) -> bytes:
    """All of the stream, as far as it is of a reasonable length."""
    found = bytearray()
    while stream is not None and (part := await stream.read(65536)):
        if len(found) <= _ANSWER_BYTES_MOST:
            found += part
    return bytes(found)


async def _passed_on(stream: asyncio.StreamReader | None, say: Callable[[str], None]) -> str:
    """Pass each line on; the last one."""
    last = ""
    while stream is not None:
        try:
            raw = await stream.readline()
        except ValueError:  # longer than any line should be
            continue
        if not raw:
            break
        if text := raw.decode(errors="replace").rstrip():
            say(text)
            last = text
    return last
