"""Builds a node out of its parts and runs it until it has left: `node join`, and `node observe` for the observer."""

from __future__ import annotations

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import IO

from aggregation.rules.sorting import compile_networks
from coordinator.leading import descriptors
from node import identity as identities
from node import memory
from node.admission import Admission, admit
from node.clock import RunClock
from node.config import NodeOptions
from node.display import Display
from node.driver import Stopped
from node.ending import error_of, until_stopped
from node.files import writing
from node.folder import open_folder
from node.member import Member
from node.network import connect
from node.outside import MACHINE, Outside
from node.record import advertised_hosts
from node.signals import Signals
from protos.signing import Identity

TOKEN_FILE = "observer-token"


async def join(options: NodeOptions, outside: Outside = MACHINE) -> str:
    """Take part until told to leave; the last line to say. Raises NodeError with the contract's exit code."""
    signals = None
    if outside.owns_process:
        descriptors.raise_limit()
        signals = Signals()
    async with AsyncExitStack() as stack:
        node = _Node(options, outside, stack, signals)
        stopped = await (node.run() if signals is None else signals.run(node.run()))
    if stopped.code == 0:
        return stopped.reason
    raise error_of(stopped)


async def show_identity(folder: Path) -> str:
    path = folder / identities.KEY_FILE
    identity = await asyncio.to_thread(identities.load, path)
    return f"{identity.peer}  {path}"


async def export_identity(folder: Path, to: Path) -> str:
    identity = await asyncio.to_thread(identities.export, folder, to)
    return f"the key of {identity.peer} is in {to}: whoever has it is this contributor"


async def import_identity(folder: Path, source: Path) -> str:
    await asyncio.to_thread(identities.make_folder, folder)
    identity = await asyncio.to_thread(identities.import_key, folder, source)
    return f"{folder} is {identity.peer} now"


def _open_log(path: Path) -> IO[bytes]:
    with writing(path.parent, "the trainer's log", 4096):
        return path.open("ab")


async def _compiled() -> None:
    """The rules' networks in numba's cache: a hit as a rule, else seconds, which no round should wait for.

    In a thread of its own, which needs nothing of this node: who is told to go doesn't wait for it.
    """
    compiler = ThreadPoolExecutor(1, thread_name_prefix="compiler")
    try:
        await asyncio.get_running_loop().run_in_executor(compiler, compile_networks)
    finally:
        compiler.shutdown(wait=False)


class _Node:
    """One node of one run, from admission to leaving."""

    def __init__(self, options: NodeOptions, outside: Outside, stack: AsyncExitStack, signals: Signals | None) -> None:
        self._options, self._outside, self._stack, self._signals = options, outside, stack, signals
        self._clock = RunClock(outside.seconds)
        self._display: Display | None = None

    async def run(self) -> Stopped:
        options = self._options
        await asyncio.to_thread(identities.make_folder, options.data)
        lock = await asyncio.to_thread(identities.FolderLock, options.data)
        self._stack.callback(lock.release)
        identity = await asyncio.to_thread(identities.load_or_make, options.data, self._say)
        self._say(f"this node is {identity.peer}; its key and state are in {options.data}")
        await _compiled()
        admission = await self._admitted(identity)
        self._admission, self._identity = admission, identity
        if admission.run_offset_s is not None:
            self._clock.is_off_by(admission.run_offset_s)
        return await self._take_part()

    async def _admitted(self, identity: Identity) -> Admission:
        options = self._options
        invite = options.invite
        if options.run_dir is not None:
            token = await asyncio.to_thread((options.run_dir / TOKEN_FILE).read_bytes)
            invite = type(invite)(invite.run, invite.hosts, token)
        return await admit(
            invite,
            identity,
            options.data,
            seconds=self._outside.seconds,
            name=options.name,
            observer=options.observer,
            today=self._outside.today,
        )

    async def _take_part(self) -> Stopped:
        """Build all parts, run their tasks, and end them in order when the session says stop."""
        options, admission, identity, stack = self._options, self._admission, self._identity, self._stack
        pool = ThreadPoolExecutor(max(2, os.cpu_count() or 2), thread_name_prefix="bytes")
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        folder = await open_folder(
            options,
            identity.peer,
            options.invite.run,
            admission.operator.coordinator,
            admission.spec,
            pool,
            stack,
            seconds=self._outside.seconds,
            say=self._say,
        )
        hosts = await asyncio.to_thread(advertised_hosts, options)
        if not hosts:
            self._say("this machine has no address that others could connect to: the node only dials out")
        host = hosts[0] if hosts else ""
        network = await connect(
            options,
            admission,
            identity,
            host,
            self._outside,
            stack,
            no_progress_s=folder.spec.deadlines.no_progress_s,
            run_time_s=self._clock,
            say=self._say,
        )
        log = await asyncio.to_thread(_open_log, options.data / "trainer.log")
        stack.callback(log.close)
        member = Member(
            options,
            admission,
            identity,
            self._outside,
            folder,
            network,
            pool,
            log,
            reachable=bool(hosts),
            clock=self._clock,
            say=self._say,
        )
        self._display = display = Display(member.view, self._outside.seconds)
        if self._signals is not None:
            self._signals.leaves_by(member.driver.post)
        await member.start(stack)
        tasks = member.tasks()
        if self._outside.owns_process:
            memory.settle()
            tasks.append(display.run())
        return await until_stopped(member.driver, tasks)

    # -- small things -----------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        if self._outside.say is not None:
            self._outside.say(text)
        elif self._display is not None:
            self._display.say(text)
        else:
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)
