"""Keeps a trainer alive and speaks with it for the driver: restarts it with growing pauses, and gives up in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from node.session import events as ev
from node.training.link import (
    Encode,
    Encoded,
    Evaluate,
    Evaluated,
    Failed,
    Load,
    Pause,
    Progress,
    Ready,
    Report,
    Resume,
    Start,
    Train,
    Trainer,
)
from protos.messages import Range

PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 30.0
FAILURES_MAX = 5
"""So many deaths in a row without an encoded round between them, and the node stops with a clear word."""


class TrainerGivenUp(Exception):
    """The trainer keeps dying: names the last reason and how often."""


class LayoutMismatch(Exception):
    """The model as it is built here is not the run's: another library version, or another machine's idea of it."""


class Supervisor:
    """One trainer, restarted when it dies.

    Args:
        trainer: the process, or its stand-in.
        start: the first command to every fresh one.
        layout_digest: what its model's layout must have, hex.
        post: takes the events.
        say: takes what a contributor would want to read.
    """

    def __init__(
        self,
        trainer: Trainer,
        start: Start,
        layout_digest: str,
        *,
        post: Callable[[ev.Event], None],
        say: Callable[[str], None],
    ) -> None:
        self._trainer, self._start, self._layout_digest = trainer, start, layout_digest
        self._post, self._say = post, say
        self._encoding: asyncio.Future[Encoded | None] | None = None
        self._evaluating: asyncio.Future[Evaluated | None] | None = None
        self._n_failures = 0
        self._up = asyncio.Event()
        self.tokens_per_s = 0.0
        self.n_restarts = 0

    async def run(self) -> None:
        """Until cancelled. Raises TrainerGivenUp or LayoutMismatch."""
        pause_s = PAUSE_FIRST_S
        try:
            while True:
                reason = await self._once()
                self._up.clear()
                self._drop_waiters()
                self._n_failures += 1
                self.n_restarts += 1
                self._post(ev.TrainerDown(reason))
                if self._n_failures >= FAILURES_MAX:
                    raise TrainerGivenUp(f"the trainer died {self._n_failures} times in a row: {reason}")
                self._say(f"the trainer is started again in {pause_s:g} s")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S) if self._n_failures > 1 else PAUSE_FIRST_S
        finally:
            self._drop_waiters()
            await self._trainer.stop()

    def load(self, theta_path: Path, round_: int, nominal_step: int, fresh_moments: bool) -> None:
        self._trainer.send(Load(str(theta_path), round_, nominal_step, fresh_moments))

    def train(self, round_: int, ranges: tuple[Range, ...], h: int) -> None:
        self._trainer.send(Train(round_, ranges, h))

    def pause(self, paused: bool) -> None:
        self._trainer.send(Pause() if paused else Resume())

    async def encode(self, round_: int, path: Path) -> Encoded | None:
        """Stop after the current step and encode; None if the trainer died over it, or before."""
        if not self._up.is_set():
            return None
        self._encoding = asyncio.get_running_loop().create_future()
        self._trainer.send(Encode(round_, str(path)))
        return await self._encoding

    async def evaluate(self, round_: int, theta_path: Path) -> Evaluated | None:
        """Validation loss of a state; None if the trainer died over it."""
        await self._up.wait()
        self._evaluating = asyncio.get_running_loop().create_future()
        self._trainer.send(Evaluate(round_, str(theta_path)))
        return await self._evaluating

    async def _once(self) -> str:
        """One trainer's life; the reason of its end."""
        try:
            await self._trainer.start()
        except OSError as error:
            return f"it can't be started: {error}"
        self._trainer.send(self._start)
        async for report in self._trainer.reports():
            if isinstance(report, Failed):
                return report.reason
            self._report(report)
        return "it ended"

    def _report(self, report: Report) -> None:
        match report:
            case Ready(_, layout_digest, tokens_per_s):
                if layout_digest != self._layout_digest:
                    wanted = self._layout_digest[:12]
                    raise LayoutMismatch(f"the model as built here has layout {layout_digest[:12]}, the run's {wanted}")
                self.tokens_per_s = tokens_per_s
                self._up.set()
                self._post(ev.TrainerUp())
            case Progress():
                self._post(
                    ev.Progressed(
                        report.round, report.step, report.tokens, report.loss, report.tokens_per_s, report.time_left_s
                    )
                )
            case Encoded():
                self._n_failures = 0
                if self._encoding is not None and not self._encoding.done():
                    self._encoding.set_result(report)
            case Evaluated():
                self._n_failures = 0
                if self._evaluating is not None and not self._evaluating.done():
                    self._evaluating.set_result(report)
            case Failed():
                pass

    def _drop_waiters(self) -> None:
        for waiter in (self._encoding, self._evaluating):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
