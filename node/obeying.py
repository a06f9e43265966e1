"""What this node does about the operator's orders: settings that change, fetched and kept, and states to go back to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from node.errors import NodeError
from node.files import replace_file, writing
from node.session import effects as fx
from node.session import events as ev
from node.specs import SpecsFolder
from node.state import StateStore
from protos.runspec import RunSpec

AGAIN_FIRST_S = 0.5
AGAIN_MAX_S = 30.0


class Obeying:
    """Carries out what a session asks for because of orders.

    Args:
        spec_file: where the trainer reads the RunSpec.
        ask: asks for a revision of the RunSpec; its envelope and what it says. Raises NodeError where nobody tells.
        amended: told of a RunSpec that is in force from now on.
        say: takes what a contributor would want to read.
    """

    def __init__(
        self,
        specs: SpecsFolder,
        store: StateStore,
        spec_file: Path,
        *,
        ask: Callable[[int], Awaitable[tuple[bytes, RunSpec]]],
        amended: Callable[[RunSpec], None],
        say: Callable[[str], None],
    ) -> None:
        self._specs, self._store, self._spec_file = specs, store, spec_file
        self._ask, self._amended, self._say = ask, amended, say
        self._in_force: RunSpec | None = None
        self._writing = asyncio.Lock()

    async def at_once(self, effect: fx.KeepSpec | fx.Amended) -> bool:
        """What is on disk before anything after it is done; False where an amendment isn't, and `in_time` is to have it
        there. A revision that could not be kept is fetched again after a restart.
        """
        match effect:
            case fx.KeepSpec(envelope, revision):
                try:
                    await asyncio.to_thread(self._specs.keep, envelope, revision)
                except NodeError as error:
                    self._say(f"revision {revision} of the run's settings is not kept here: {error}")
                return True
            case fx.Amended(spec):
                self._in_force = spec
                problem = await self._write(spec)
                if problem:
                    self._say(f"the trainer goes on by older settings until it can read others: {problem}")
                self._amended(spec)
                return not problem

    async def in_time(self, effect: fx.Restore | fx.FetchSpec | fx.Amended) -> ev.Event:
        """What takes time; its outcome."""
        match effect:
            case fx.Amended(spec):
                return await self._amend(spec)
            case fx.Restore(head, round_, body_hash):
                return await self._restore(head, round_, body_hash)
            case fx.FetchSpec(revision):
                return await self._fetch(revision)

    async def _write(self, spec: RunSpec) -> str:
        """Have a RunSpec where the trainer reads it, while it is in force; why that failed, or an empty string."""
        content = spec.to_bytes()

        def write() -> None:
            with writing(self._spec_file.parent, "the trainer's file of settings", len(content)):
                replace_file(self._spec_file, content)

        async with self._writing:
            try:
                if spec is self._in_force:
                    await asyncio.to_thread(write)
            except NodeError as error:
                return str(error)
        return ""

    async def _amend(self, spec: RunSpec) -> ev.Event:
        """Try again until the trainer can read it, or it is in force no more."""
        pause_s = AGAIN_FIRST_S
        await asyncio.sleep(pause_s)
        while await self._write(spec):
            pause_s = min(2 * pause_s, AGAIN_MAX_S)
            await asyncio.sleep(pause_s)
        if spec is self._in_force:
            self._amended(spec)
        return ev.Woke()

    async def _restore(self, head: bytes, round_: int, body_hash: bytes) -> ev.Event:
        try:
            ledger = await asyncio.to_thread(self._store.restore, head, body_hash)
        except NodeError as error:
            return ev.RestoreFailed(body_hash, str(error))
        if ledger is None:
            return ev.RestoreFailed(body_hash, f"the state after round {round_} is not kept here")
        return ev.Restored(body_hash, ledger)

    async def _fetch(self, revision: int) -> ev.Event:
        pause_s = AGAIN_FIRST_S
        while True:
            try:
                envelope, spec = await self._ask(revision)
            except NodeError as error:
                told = f"waiting for revision {revision} of the run's settings: {error}"
                self._say(f"{told}; asking again in {pause_s:g} s")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, AGAIN_MAX_S)
                continue
            with suppress(NodeError):  # it is fetched again after a restart
                await asyncio.to_thread(self._specs.keep, envelope, revision)
            return ev.SpecKnown(spec)
