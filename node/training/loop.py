"""The trainer's loop: a command changes what it does, a turn makes one step of it, reports go to whoever listens.

It reads no pipe and owns no process, so that a thread can run it as well. Between two steps it looks for commands and
never waits for one while there is something to train.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import assert_never

from node.training.device import peak_flops_of
from node.training.keeping import Keeper
from node.training.link import (
    Amend,
    Command,
    Declined,
    Encode,
    Evaluate,
    Evaluating,
    Load,
    Pause,
    Quit,
    Ready,
    Remark,
    Report,
    Resume,
    Start,
    Train,
    Written,
)
from node.training.shared import AreaGone
from node.training.task import Task
from node.training.work import Work
from protos.runspec import RunSpec

PROGRESS_S = 0.5
WRITTEN_S = 0.01
"""While it encodes: so often at most it says how far it is, so that the agent hashes at the same time."""


class TrainerLoop:
    """One rank's trainer.

    Args:
        build: makes the task of a RunSpec.
        report: takes each report; called from the thread that runs the loop.
        clock: seconds that only go forward.
    """

    def __init__(
        self, build: Callable[[RunSpec], Task], report: Callable[[Report], None], clock: Callable[[], float]
    ) -> None:
        self._build = build
        self._report = report
        self._clock = clock
        self._work: Work | None = None
        self._paused = False

    @property
    def has_work(self) -> bool:
        """Whether a turn would make a step."""
        return self._work is not None and not self._paused and self._work.n_left > 0

    def turn(self) -> None:
        """One inner step."""
        work = self._started()
        began_at = self._clock()
        work.step()
        ended_at = self._clock()
        work.train_s += ended_at - began_at
        if work.keeper is not None and work.keeper.is_due(ended_at):
            work.save()
        if work.n_left == 0 or ended_at - work.reported_at >= PROGRESS_S:
            self._say_progress(work, ended_at)

    def handle(self, command: Command) -> bool:
        """Carry a command out; False when the process should end. Raises whatever makes going on impossible."""
        match command:
            case Start():
                self._start(command)
            case Load():
                self._load(self._started(), command)
            case Train():
                work = self._started()
                # Without an anchor there is nothing to train: the Load of a later one is on its way.
                if not work.is_unloaded:
                    work.train(command)
                    self._say_progress(work, self._clock())
            case Encode():
                self._encode(self._started(), command)
            case Evaluate():
                self._evaluate(self._started(), command)
            case Amend(spec_path):
                self._started().amend(RunSpec.from_bytes(Path(spec_path).read_bytes()))
            case Pause() | Resume():
                self._paused = isinstance(command, Pause)
                if self._work is not None:
                    self._say_progress(self._work, self._clock())
            case Quit():
                if self._work is not None:
                    self._work.save()
                return False
            case _:
                assert_never(command)
        return True

    def _start(self, command: Start) -> None:
        if command.rank != 0 or command.ranks != 1:
            raise ValueError(f"rank {command.rank} of {command.ranks}: a node has one rank in this version")
        spec = RunSpec.from_bytes(Path(command.spec_path).read_bytes())
        task = self._build(spec)
        self._work = Work(spec, task, Path(command.data_dir))
        tokens_per_s = self._work.measure(self._clock)
        layout = self._work.layout
        ready = Ready(
            layout.n_values, layout.digest.hex(), tokens_per_s, peak_flops=peak_flops_of(task.parameters()[0][1])
        )
        if not command.checkpoints:
            self._report(ready)
            return
        keeper = self._work.keeper = Keeper(
            Path(command.checkpoints),
            run=command.run,
            layout=layout.digest.hex(),
            spec=spec.to_bytes(),
            n_values=layout.n_values,
            n_moments=0 if spec.inner.optimiser == "sgd" else 2,
            report=self._report,
            clock=self._clock,
        )
        self._report(replace(ready, moments_round=keeper.moments_round))
        keeper.say()

    def _load(self, work: Work, command: Load) -> None:
        try:
            work.load(command)
        except AreaGone:
            # The state has been replaced since: this round is over, and the next one's Load follows.
            work.unload(command)
            self._report(Remark(f"the state after round {command.round} was replaced before it could be trained on"))

    def _encode(self, work: Work, command: Encode) -> None:
        if problem := work.why_not(command):
            self._report(Declined(command.round, problem))
            return
        said_at = self._clock()

        def written(n_chunks: int) -> None:
            nonlocal said_at
            now = self._clock()
            if now - said_at >= WRITTEN_S:
                said_at = now
                self._report(Written(command.round, n_chunks))

        try:
            encoded, problem = work.encode(command, written, self._clock)
        except AreaGone as error:  # the round is over, and with it what its residual was to be written to
            self._report(Declined(command.round, str(error)))
            return
        if problem:
            self._report(Remark(f"the steps of round {command.round} went too far and do not count: {problem}"))
        # The moments are those that the next round begins with: at best they are on disk before anybody counts on it.
        saves_first = work.keeper is not None and work.keeper.is_quick
        if saves_first:
            work.save()
        self._report(encoded)
        if not saves_first:
            work.save()  # now, for it is the others' turn

    def _evaluate(self, work: Work, command: Evaluate) -> None:
        said_at = self._clock()

        def said(n_tokens: int) -> None:
            nonlocal said_at
            now = self._clock()
            if now - said_at >= PROGRESS_S:
                said_at = now
                self._report(Evaluating(command.round, n_tokens))

        try:
            self._report(work.evaluate(command, said))
        except AreaGone as error:
            self._report(Declined(command.round, str(error)))

    def _started(self) -> Work:
        if self._work is None:
            raise RuntimeError("the first command is Start")
        return self._work

    def _say_progress(self, work: Work, now: float) -> None:
        work.reported_at = now
        self._report(work.progress(paused=self._paused))


def run(loop: TrainerLoop, commands: SimpleQueue[Command]) -> None:
    """Commands as they come, steps in between, until a Quit."""
    while True:
        try:
            command = commands.get(block=not loop.has_work)
        except Empty:
            loop.turn()
            continue
        if not loop.handle(command):
            return
