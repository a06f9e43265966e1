"""The run without a seat: follows every commit and reports the validation loss of the state after it."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from node.folder import EVALUATED_PREFIX
from node.generations import NO_LINKS
from node.state import StateStore
from node.training.supervisor import Supervisor
from protos.messages import Evaluation
from protos.runspec import RunSpec

PENDING_MAX = 16
"""States that may wait for their evaluation; each keeps a link to its θ. Beyond it the oldest is passed over."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A state to evaluate. A state's file is never written to again, so a link holds it after the store drops it."""

    epoch: int
    round: int
    digest: bytes
    theta: Path
    source: Path | None = None
    """Where its θ is copied from first: the file system has no links."""


class Evaluator:
    """Evaluates states one after the other in the observer's own trainer.

    Args:
        trainer: its supervisor.
        work: a folder on the store's file system, for links.
        report: takes each figure.
        say: takes what an operator would want to read.
    """

    def __init__(
        self,
        spec: RunSpec,
        store: StateStore,
        trainer: Supervisor,
        work: Path,
        report: Callable[[Evaluation], Awaitable[None]],
        say: Callable[[str], None],
    ) -> None:
        self._spec, self._store, self._trainer, self._work = spec, store, trainer, work
        self._report, self._say = report, say
        self._pending: list[_Pending] = []
        self._running: _Pending | None = None
        self._changed = asyncio.Event()
        self._last: Evaluation | None = None

    def amend(self, spec: RunSpec) -> None:
        """Other settings are in force."""
        self._spec = spec

    def state_changed(self) -> None:
        """Another state is the current one: evaluate it if it is its turn."""
        held = self._store.current
        every = self._spec.evaluation.every_rounds
        if held is None or not every or held.ledger.round % every:
            return
        epoch, round_, digest = held.ledger.epoch, held.ledger.round, held.digest
        known = [(each.epoch, each.round, each.digest) for each in (*self._pending, self._running) if each is not None]
        if (epoch, round_, digest) in known:
            return
        # Another state of this round, before a rollback or of another branch, may wait still.
        theta = self._work / f"{EVALUATED_PREFIX}{epoch}-{round_}-{digest.hex()[:16]}"
        source = None
        try:
            theta.unlink(missing_ok=True)
            os.link(held.theta, theta)
        except OSError as error:
            if error.errno not in NO_LINKS:
                self._pass_over(round_, error)
                return
            source = held.theta
        self._pending.append(_Pending(epoch, round_, digest, theta, source))
        while len(self._pending) > PENDING_MAX:
            with suppress(OSError):
                self._pending.pop(0).theta.unlink(missing_ok=True)
        self._changed.set()

    async def say_again(self) -> None:
        """The line to the leader is new: the last figure may have been lost with the old one."""
        if self._last is not None:
            await self._report(self._last)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._pending:
                pending = self._running = self._pending.pop(0)
                try:
                    await self._evaluate(pending)
                finally:
                    self._running = None
                    with suppress(OSError):  # of no use to anybody, and in nobody's way
                        pending.theta.unlink(missing_ok=True)

    def _pass_over(self, round_: int, error: OSError) -> None:
        self._say(f"the state after round {round_} is not evaluated: {error.strerror or error}")

    async def _evaluate(self, pending: _Pending) -> None:
        if pending.source is not None:
            try:
                await asyncio.to_thread(shutil.copyfile, pending.source, pending.theta)
            except OSError as error:
                self._pass_over(pending.round, error)
                return
        evaluated = await self._trainer.evaluate(pending.round, pending.theta)
        if evaluated is None:
            self._say(f"the state after round {pending.round} could not be evaluated")
            return
        if not evaluated.n_tokens:
            self._say(f"the validation loss after round {pending.round} is not finite")
            return
        self._last = Evaluation(pending.epoch, pending.round, pending.digest, evaluated.val_loss, evaluated.n_tokens)
        self._say(f"validation loss after round {pending.round}: {evaluated.val_loss:.4f}")
        await self._report(self._last)
