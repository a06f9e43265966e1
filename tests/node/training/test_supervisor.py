"""A trainer that is kept alive: what belongs to which request, and one that hangs is ended and started again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from node.session import events as ev
from node.training.link import (
    Amend,
    Command,
    Declined,
    Encode,
    Encoded,
    Evaluated,
    Evaluating,
    Progress,
    Ready,
    Remark,
    Report,
    Saved,
    Start,
    Written,
)
from node.training.supervisor import LayoutMismatch, Supervisor
from protos.messages import Range
from tests.fakes.loop import SkippingLoop, play

LAYOUT = "ab" * 32
RANGES = (Range(0, 4),)
PATIENCE_S = 60.0
"""Longer than any machine stands still here; the loop's time is put forward where it is to pass."""
LIMIT_S = 30.0


class Puppet:
    """A trainer that says what a test has it say."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.n_starts = self.moments_round = 0
        self.layout = LAYOUT
        self.starts_slowly = False
        self.told = asyncio.Event()
        self._reports: asyncio.Queue[Report | None] = asyncio.Queue()

    async def start(self) -> None:
        self.n_starts += 1
        self._reports = asyncio.Queue()
        if not self.starts_slowly:
            self.is_ready()

    def is_ready(self) -> None:
        self.says(Ready(0, self.layout, 0.0, self.moments_round))

    def send(self, command: Command) -> None:
        self.commands.append(command)
        self.told.set()

    def says(self, report: Report) -> None:
        self._reports.put_nowait(report)

    async def reports(self) -> AsyncIterator[Report]:
        reports = self._reports
        while (report := await reports.get()) is not None:
            yield report

    async def stop(self) -> None:
        self._reports.put_nowait(None)


def encoded(round_: int) -> Encoded:
    return Encoded(round_, 2, 20, 0.1, 3.0, (Range(0, 2),), 0, 0.1)


def progress(round_: int, step: int, *, paused: bool = False) -> Progress:
    return Progress(round_, step, 4, 10 * step, 3.0, 10.0, 0.0, 0, paused)


class Watched:
    """A supervisor at work, and the events that it posted."""

    def __init__(self) -> None:
        self.puppet = Puppet()
        self.said: list[str] = []
        self.events: asyncio.Queue[ev.Event] = asyncio.Queue()
        self.supervisor = Supervisor(
            self.puppet, Start("spec", "data", 1), LAYOUT, post=self.events.put_nowait, say=self.said.append,
            step_tokens=10, patience_s=PATIENCE_S, start_patience_s=PATIENCE_S,
        )  # fmt: skip

    async def until(self, kind: type[ev.Event]) -> ev.Event:
        async with asyncio.timeout(LIMIT_S):
            while True:
                event = await self.events.get()
                if isinstance(event, kind):
                    return event


async def silence(loop: SkippingLoop, times: int = 1) -> None:
    """So many times the whole patience, in its two halves."""
    await loop.skip(0.0)  # what was said is heard before
    for _ in range(2 * times):
        await loop.skip(PATIENCE_S / 2)


def test_a_report_belongs_to_the_round_that_asked_for_it() -> None:
    async def main() -> None:
        watched = Watched()
        running = asyncio.create_task(watched.supervisor.run())
        await watched.until(ev.TrainerUp)
        heard: list[tuple[int, int]] = []
        first = asyncio.create_task(watched.supervisor.encode(Encode(1, "codes"), lambda n: heard.append((1, n))))
        await asyncio.sleep(0)
        second = asyncio.create_task(watched.supervisor.encode(Encode(2, "codes"), lambda n: heard.append((2, n))))
        await asyncio.sleep(0)
        for report in (Written(1, 3), encoded(1), Written(2, 4), Written(2, 9), encoded(2), Written(2, 9)):
            watched.puppet.says(report)
        async with asyncio.timeout(LIMIT_S):
            assert await first is None
            assert await second == encoded(2)
        assert heard == [(2, 4), (2, 9)]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


def test_a_trainer_with_another_model_than_the_runs_never_trains() -> None:
    async def main() -> None:
        watched = Watched()
        watched.puppet.layout = "cd" * 32
        with pytest.raises(LayoutMismatch, match=rf"layout {'cd' * 6}, the run's {LAYOUT[:12]}"):
            async with asyncio.timeout(LIMIT_S):
                await watched.supervisor.run()
        assert watched.events.empty()

    asyncio.run(main())


def test_a_trainer_that_hangs_is_ended_and_said() -> None:
    async def main(loop: SkippingLoop) -> None:
        watched = Watched()
        running = asyncio.create_task(watched.supervisor.run())
        await watched.until(ev.TrainerUp)
        watched.supervisor.train(1, RANGES, 4)
        watched.puppet.says(progress(1, 1))
        encoding = asyncio.create_task(watched.supervisor.encode(Encode(1, "codes"), lambda _: None))
        await silence(loop)
        down = await watched.until(ev.TrainerDown)
        assert isinstance(down, ev.TrainerDown)
        assert "hangs" in down.reason
        assert watched.supervisor.last_end == down.reason
        async with asyncio.timeout(LIMIT_S):
            assert await encoding is None
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    play(main)


def test_one_that_hangs_before_it_is_ready_is_ended_and_said() -> None:
    async def main(loop: SkippingLoop) -> None:
        watched = Watched()
        watched.puppet.starts_slowly = True
        running = asyncio.create_task(watched.supervisor.run())
        async with asyncio.timeout(LIMIT_S):
            await watched.puppet.told.wait()
        await silence(loop)
        down = await watched.until(ev.TrainerDown)
        assert isinstance(down, ev.TrainerDown)
        assert "while it was starting" in down.reason
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    play(main)


def test_one_that_hangs_in_an_evaluation_is_ended_and_one_that_is_slow_is_not() -> None:
    async def main(loop: SkippingLoop) -> None:
        watched = Watched()
        running = asyncio.create_task(watched.supervisor.run())
        await watched.until(ev.TrainerUp)
        slow = asyncio.create_task(watched.supervisor.evaluate(1, Path("theta")))
        for n_tokens in range(1, 9):
            await loop.skip(PATIENCE_S / 4)
            watched.puppet.says(Evaluating(1, n_tokens))
            await loop.skip(0.0)
        watched.puppet.says(Evaluated(1, 2.5, 9))
        async with asyncio.timeout(LIMIT_S):
            assert await slow == Evaluated(1, 2.5, 9)
        await silence(loop, 3)
        assert watched.puppet.n_starts == 1
        assert watched.events.empty()
        hanging = asyncio.create_task(watched.supervisor.evaluate(2, Path("theta")))
        await silence(loop)
        down = await watched.until(ev.TrainerDown)
        assert isinstance(down, ev.TrainerDown)
        assert "hangs" in down.reason
        async with asyncio.timeout(LIMIT_S):
            assert await hanging is None
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    play(main)


def test_the_patience_is_for_a_models_codes_and_its_checkpoint() -> None:
    async def main() -> None:
        watched = Watched()
        running = asyncio.create_task(watched.supervisor.run())
        await watched.until(ev.TrainerUp)
        watched.puppet.says(Ready(10**9, LAYOUT, 2.0))
        await watched.until(ev.TrainerUp)
        # Ten steps of ten tokens, and 16 bytes for each parameter at 100 MB/s.
        assert watched.supervisor.patience_s == pytest.approx(PATIENCE_S + 50.0 + 160.0)
        watched.supervisor.train(1, (Range(0, 8),), 1, batch_scale=8)  # each step takes in as many batches
        assert watched.supervisor.patience_s == pytest.approx(PATIENCE_S + 8 * 50.0 + 160.0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


def test_one_that_is_still_starting_hears_that_the_run_was_amended() -> None:
    async def main() -> None:
        watched = Watched()
        watched.puppet.starts_slowly = True
        running = asyncio.create_task(watched.supervisor.run())
        async with asyncio.timeout(LIMIT_S):
            await watched.puppet.told.wait()
        watched.supervisor.amend()
        assert watched.puppet.commands == [Start("spec", "data", 1), Amend("spec")]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


def test_what_is_declined_is_not_waited_for_and_ends_nothing_else() -> None:
    async def main(loop: SkippingLoop) -> None:
        watched = Watched()
        running = asyncio.create_task(watched.supervisor.run())
        await watched.until(ev.TrainerUp)
        watched.supervisor.train(2, RANGES, 4)
        late = asyncio.create_task(watched.supervisor.encode(Encode(1, "codes"), lambda _: None))
        await asyncio.sleep(0)
        watched.puppet.says(Declined(1, "round 2 has begun"))
        async with asyncio.timeout(LIMIT_S):
            assert await late is None
        gone = asyncio.create_task(watched.supervisor.evaluate(1, Path("theta")))
        await asyncio.sleep(0)
        watched.puppet.says(Declined(1, "it is gone"))
        async with asyncio.timeout(LIMIT_S):
            assert await gone is None
        await silence(loop)
        down = await watched.until(ev.TrainerDown)  # round 2 is trained, and nothing is heard of it
        assert isinstance(down, ev.TrainerDown)
        assert "hangs" in down.reason
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    play(main)


def test_a_trainer_without_work_may_be_silent() -> None:
    """Paused, done with its steps, or loaded with another anchor over them, whatever it still says of the old ones."""

    async def main(loop: SkippingLoop) -> None:
        for quiet in ("paused", "done", "loaded"):
            watched = Watched()
            running = asyncio.create_task(watched.supervisor.run())
            await watched.until(ev.TrainerUp)
            watched.supervisor.train(1, RANGES, 4)
            match quiet:
                case "paused":
                    watched.puppet.says(progress(1, 2, paused=True))
                case "done":
                    watched.puppet.says(progress(1, 4))
                case _:
                    watched.supervisor.load(Path("theta"), 1, 0, False)
                    watched.puppet.says(progress(1, 2))
            await watched.until(ev.Progressed)
            await silence(loop, 3)
            assert watched.puppet.n_starts == 1
            assert watched.events.empty()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    play(main)


def test_a_fresh_trainer_says_whose_moments_it_has() -> None:
    async def main() -> None:
        watched = Watched()
        watched.puppet.moments_round = 7
        running = asyncio.create_task(watched.supervisor.run())
        assert await watched.until(ev.TrainerUp) == ev.TrainerUp(7)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


def test_what_its_device_can_do_is_the_trainers_to_say() -> None:
    async def main() -> None:
        watched = Watched()
        running = asyncio.create_task(watched.supervisor.run())
        await watched.until(ev.TrainerUp)
        assert watched.supervisor.peak_flops == 0.0
        watched.puppet.says(Ready(0, LAYOUT, 8.0, peak_flops=67e12))
        await watched.until(ev.TrainerUp)
        assert (watched.supervisor.tokens_per_s, watched.supervisor.peak_flops) == (8.0, 67e12)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


def test_a_disk_without_room_is_said_once_and_so_is_its_end() -> None:
    async def main() -> None:
        watched = Watched()
        running = asyncio.create_task(watched.supervisor.run())
        await watched.until(ev.TrainerUp)
        full = "No space left on device"
        for report in (Saved(1, 4, 0.5), Saved(1, 8, 0.1, full), Saved(2, 8, 0.1, full), Remark("one was torn")):
            watched.puppet.says(report)
        watched.puppet.says(progress(2, 4))
        await watched.until(ev.Progressed)
        assert watched.supervisor.checkpoint == {"round": 1, "step": 4, "save_s": 0.5}
        assert watched.supervisor.checkpoint_problem == full
        assert [full in said for said in watched.said] == [True, False]
        for later in (Saved(3, 4, 0.5), Saved(4, 4, 0.5), progress(4, 4)):
            watched.puppet.says(later)
        await watched.until(ev.Progressed)
        assert watched.supervisor.checkpoint_problem == ""
        assert watched.said[1:] == ["one was torn", "checkpoints are written again"]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())
