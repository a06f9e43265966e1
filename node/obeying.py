"""What this node does about the operator's orders: settings that change, fetched and kept, and states to go back to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from node.errors import NodeError
from node.files import replace_file
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

    async def at_once(self, effect: ev.KeepSpec | ev.Amended) -> None:
        """What is on disk before anything after it is done."""
        match effect:
            case ev.KeepSpec(envelope, revision):
                await asyncio.to_thread(self._specs.keep, envelope, revision)
            case ev.Amended(spec):
                await asyncio.to_thread(replace_file, self._spec_file, spec.to_bytes())
                self._amended(spec)

    async def in_time(self, effect: ev.Restore | ev.FetchSpec) -> ev.Event:
        """What takes time; its outcome."""
        match effect:
            case ev.Restore(head, round_, body_hash):
                return await self._restore(head, round_, body_hash)
            case ev.FetchSpec(revision):
                return await self._fetch(revision)

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
