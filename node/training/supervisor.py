"""Keeps a trainer alive and speaks with it for the driver: restarts one that died or hangs, and gives up in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeGuard, TypeVar

from node.session import events as ev
from node.training.checkpoint import VALUE_BYTES_MOST
from node.training.link import (
    Amend,
    Declined,
    Encode,
    Encoded,
    Evaluate,
    Evaluated,
    Evaluating,
    Failed,
    Load,
    Pause,
    Progress,
    Ready,
    Remark,
    Report,
    Resume,
    Saved,
    Start,
    Train,
    Trainer,
    Written,
)
from protos.messages import Range

Answer = TypeVar("Answer")

PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 30.0
FAILURES_MAX = 5
"""So many deaths in a row without an encoded round between them, and the node stops with a clear word."""
PATIENCE_S = 60.0
PATIENCE_STEPS = 10.0
PATIENCE_BYTES_PER_S = 1e8
"""A trainer that owes a report may be silent for so long, for so many of its steps, and for writing its contribution
and a checkpoint at so slow a pace; beyond it, it hangs."""
START_PATIENCE_S = 300.0
"""So long one may take until its model is built and measured."""
_PATIENCE_VALUE_BYTES = 4 + VALUE_BYTES_MOST


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
        step_tokens: tokens of one inner step.
        patience_s: the least time for which one that owes a report may be silent.
        start_patience_s: the time that a fresh one has to be ready.
    """

    def __init__(
        self,
        trainer: Trainer,
        start: Start,
        layout_digest: str,
        *,
        post: Callable[[ev.Event], None],
        say: Callable[[str], None],
        step_tokens: int,
        patience_s: float = PATIENCE_S,
        start_patience_s: float = START_PATIENCE_S,
    ) -> None:
        self._trainer, self._start, self._layout_digest = trainer, start, layout_digest
        self._post, self._say = post, say
        self._step_tokens, self._least_patience_s = step_tokens, patience_s
        self._patience_s, self._start_patience_s = patience_s, start_patience_s
        self._steps_s, self._batch_scale = 0.0, 1
        self._trains: int | None = None  # the round, until it is loaded with another anchor or encodes
        self._has_steps = False  # of that round
        self._owes = asyncio.Event()  # it has work of which it should report
        self._heard = asyncio.Event()
        self._hung = ""
        self._encodes = -1  # the round of `_encoding`
        self._encoding: asyncio.Future[Encoded | None] | None = None
        self._written: Callable[[int], None] = _nobody
        self._evaluates = -1  # the round of `_evaluating`
        self._evaluating: asyncio.Future[Evaluated | None] | None = None
        self._n_failures = 0
        self._up = asyncio.Event()
        self.tokens_per_s = 0.0
        self.peak_flops = 0.0
        """What its device can do at most; 0 where that is not known."""
        self.n_restarts = 0
        self.last_end = ""
        """Why the trainer ended the last time; empty while it never has."""
        self.checkpoint: dict[str, float] = {}
        """Where a restart would go on: round, step, and what writing it took; empty while there is none."""
        self.checkpoint_problem = ""

    async def run(self) -> None:
        """Until cancelled. Raises TrainerGivenUp or LayoutMismatch."""
        pause_s = PAUSE_FIRST_S
        try:
            while True:
                reason = await self._once()
                self._up.clear()
                self._owes.clear()
                self._trains, self._has_steps = None, False
                self._drop_waiters()
                self._n_failures += 1
                self.n_restarts += 1
                self.last_end = reason
                self._post(ev.TrainerDown(reason))
                if self._n_failures >= FAILURES_MAX:
                    raise TrainerGivenUp(f"the trainer died {self._n_failures} times in a row: {reason}")
                self._say(f"the trainer is started again in {pause_s:g} s")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S) if self._n_failures > 1 else PAUSE_FIRST_S
        finally:
            self._drop_waiters()
            await self._trainer.stop()

    def load(self, theta_path: Path, round_: int, nominal_step: int, fresh_moments: bool, anchor: bytes = b"") -> None:
        self._trains, self._has_steps = None, False
        self._trainer.send(Load(str(theta_path), round_, nominal_step, fresh_moments, anchor.hex()))
        self._settle()

    def train(self, round_: int, ranges: tuple[Range, ...], h: int, batch_scale: int = 1) -> None:
        self._trains, self._has_steps, self._batch_scale = round_, True, batch_scale
        self._trainer.send(Train(round_, ranges, h, batch_scale=batch_scale))
        self._settle()

    def amend(self) -> None:
        """The file of the RunSpec that it started with holds another revision now.

        One that is still starting may have read it before; this follows its Start.
        """
        self._trainer.send(Amend(self._start.spec_path))

    def pause(self, paused: bool) -> None:
        self._trainer.send(Pause() if paused else Resume())

    async def encode(self, command: Encode, written: Callable[[int], None]) -> Encoded | None:
        """Stop after the current step and encode; None if the trainer died over it, or before, or declined.

        `written` is told in between how many chunks lie in the area already.
        """
        if not self._up.is_set():
            return None
        if _is_open(self._encoding):
            self._encoding.set_result(None)  # of an earlier round: nobody needs it any more
        self._encodes, self._encoding = command.round, asyncio.get_running_loop().create_future()
        self._written = written
        if self._trains is not None and command.round >= self._trains:
            self._trains, self._has_steps = None, False
        self._trainer.send(command)
        self._settle()
        return await self._encoding

    async def evaluate(self, round_: int, theta_path: Path) -> Evaluated | None:
        """Validation loss of a state; None if the trainer died over it, or declined."""
        await self._up.wait()
        self._evaluates, self._evaluating = round_, asyncio.get_running_loop().create_future()
        self._trainer.send(Evaluate(round_, str(theta_path)))
        self._settle()
        return await self._evaluating

    async def _once(self) -> str:
        """One trainer's life; the reason of its end."""
        try:
            await self._trainer.start()
        except OSError as error:
            return f"it can't be started: {error}"
        self._trainer.send(self._start)
        self._hung = ""
        self._settle()
        watching = asyncio.create_task(self._watch(), name="trainer watch")
        try:
            async for report in self._trainer.reports():
                self._heard.set()
                if isinstance(report, Failed):
                    return self._hung or report.reason
                self._report(report)
            return self._hung or "it ended"
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self) -> None:
        """End a trainer that owes a report and says nothing. It is given two halves of the time: when this whole
        machine slept, the first is over before either side could do anything."""
        n_silent, patience_s = 0, 0.0
        while n_silent < 2:
            await self._owes.wait()
            self._heard.clear()
            patience_s = self.patience_s
            try:
                async with asyncio.timeout(patience_s / 2):
                    await self._heard.wait()
                n_silent = 0
            except TimeoutError:
                n_silent = n_silent + 1 if self._owes.is_set() else 0
        when = "in the middle of its work" if self._up.is_set() else "while it was starting"
        self._hung = f"it hangs: it said nothing for {patience_s:.0f} s {when}"
        await self._trainer.stop()

    @property
    def patience_s(self) -> float:
        """For so long it may be silent now; a step takes in `batch_scale` batches."""
        if not self._up.is_set():
            return self._start_patience_s
        return self._patience_s + self._steps_s * self._batch_scale

    def _settle(self) -> None:
        """Whether a report is due now: that it is ready, or of what it was asked for."""
        asked = _is_open(self._encoding) or _is_open(self._evaluating)
        if asked or self._has_steps or not self._up.is_set():
            self._owes.set()
        else:
            self._owes.clear()
        self._heard.set()

    def _report(self, report: Report) -> None:
        match report:
            case Ready(n_values, layout_digest, tokens_per_s, moments_round, peak_flops):
                if layout_digest != self._layout_digest:
                    wanted = self._layout_digest[:12]
                    raise LayoutMismatch(f"the model as built here has layout {layout_digest[:12]}, the run's {wanted}")
                self.tokens_per_s, self.peak_flops = tokens_per_s, peak_flops
                self._steps_s = PATIENCE_STEPS * self._step_tokens / tokens_per_s if tokens_per_s > 0 else 0.0
                writing_s = _PATIENCE_VALUE_BYTES * n_values / PATIENCE_BYTES_PER_S
                self._patience_s = self._least_patience_s + writing_s
                self._up.set()
                self._settle()
                self._post(ev.TrainerUp(moments_round, tokens_per_s))
            case Progress():
                if report.round == self._trains:
                    self._has_steps = report.step < report.n_steps and not report.paused
                    self._settle()
                self._post(
                    ev.Progressed(
                        report.round, report.step, report.tokens, report.loss, report.tokens_per_s, report.time_left_s
                    )
                )
            case Written(round_, n_chunks):
                if _is_open(self._encoding) and round_ == self._encodes:
                    self._written(n_chunks)
            case Encoded():
                self._n_failures = 0
                if _is_open(self._encoding) and report.round == self._encodes:
                    self._encoding.set_result(report)
                    self._settle()
            case Evaluated():
                self._n_failures = 0
                if _is_open(self._evaluating):
                    self._evaluating.set_result(report)
                    self._settle()
            case Declined(round_):
                if _is_open(self._encoding) and round_ == self._encodes:
                    self._encoding.set_result(None)
                if _is_open(self._evaluating) and round_ == self._evaluates:
                    self._evaluating.set_result(None)
                self._settle()
            case Saved():
                self._saved(report)
            case Remark(text):
                self._say(text)
            case Evaluating() | Failed():
                pass

    def _saved(self, report: Saved) -> None:
        """A disk that is full is said once, and once more when it has room again."""
        before, self.checkpoint_problem = self.checkpoint_problem, report.problem
        if report.problem:
            if report.problem != before:
                self._say(f"no checkpoint can be written ({report.problem}): a restart would cost this node's steps")
            return
        self.checkpoint = {"round": report.round, "step": report.step, "save_s": report.save_s}
        if before:
            self._say("checkpoints are written again")

    def _drop_waiters(self) -> None:
        self._written = _nobody
        if _is_open(self._encoding):
            self._encoding.set_result(None)
        if _is_open(self._evaluating):
            self._evaluating.set_result(None)


def _is_open(waiter: asyncio.Future[Answer] | None) -> TypeGuard[asyncio.Future[Answer]]:
    """Whether somebody waits for an answer that isn't there yet."""
    return waiter is not None and not waiter.done()


def _nobody(_: int) -> None:
    """Nothing is being encoded."""
