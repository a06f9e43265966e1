"""What only a process can do: die, be killed, outlive nobody."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from node.training import process
from node.training.checkpoint import Checkpoints
from node.training.link import Failed, Load, Pause, Progress, Ready, Saved, Start, Train
from node.training.process import TrainerProcess
from protos.messages import Range
from tests.fakes.llama import llama_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT_S = 200.0
"""For all that a process does: torch and transformers are loaded from a disk that others read as well."""
SECONDS_MOST = 5
"""Of so many one is still."""

AGENT = """
import asyncio, sys
from node.training.process import TrainerProcess

async def main():
    trainer = TrainerProcess()
    await trainer.start()
    print(trainer.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def ended_within(pid: int, seconds: float) -> bool:
    """Wait for a process that is not our child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def test_it_leaves_signals_to_the_agent_trains_on_and_its_death_is_reported(tmp_path: Path) -> None:
    made = llama_run(tmp_path)
    trainer = TrainerProcess()

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S):
            await trainer.start()
            pid = trainer.pid
            assert pid is not None
            reports = trainer.reports()
            trainer.send(Start(str(made.spec_path), str(made.data_dir), 1))
            assert isinstance(await anext(reports), Ready)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(pid, number)
            trainer.send(Load(str(made.theta_path), 0, 0, True))
            trainer.send(Train(1, (Range(0, 3),), 6))
            steps: list[int] = []
            while not steps or steps[-1] < 3:  # where steps take long it tells of those in between, too
                report = await anext(reports)
                assert isinstance(report, Progress)
                steps.append(report.step)
            assert steps[0] == 0
            assert steps == sorted(steps)
            os.kill(pid, signal.SIGKILL)
            assert [report async for report in reports] == [Failed("the trainer ended by SIGKILL")]
            assert trainer.pid is None
            await trainer.stop()

    asyncio.run(main())


def test_while_it_is_paused_it_takes_no_processor_time(tmp_path: Path) -> None:
    """Whatever its threads do between steps, a second of a pause costs less than 2 % of a core."""
    made = llama_run(tmp_path)
    trainer = TrainerProcess()

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S):
            await trainer.start()
            assert trainer.pid is not None
            process = psutil.Process(trainer.pid)
            reports = trainer.reports()
            trainer.send(Start(str(made.spec_path), str(made.data_dir), 2))
            trainer.send(Load(str(made.theta_path), 0, 0, True))
            trainer.send(Train(1, (Range(0, 100_000),), 100_000))
            while not (isinstance(report := await anext(reports), Progress) and report.step > 0):
                pass
            trainer.send(Pause())
            while not (isinstance(report := await anext(reports), Progress) and report.paused):
                pass
            taken_s: list[float] = []
            while not taken_s or taken_s[-1] > 0.02:  # a computation's threads spin for a moment after its end
                assert len(taken_s) < SECONDS_MOST, f"it is never still: {taken_s}"
                before = process.cpu_times()
                await asyncio.sleep(1.0)
                after = process.cpu_times()
                taken_s.append(after.user + after.system - before.user - before.system)
            await trainer.stop()

    asyncio.run(main())


def test_told_to_stop_in_the_middle_it_leaves_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STOP_GRACE_S", LIMIT_S)  # a step and a disk take as long as the machine likes
    monkeypatch.setattr(process, "STOP_GRACE_MOST_S", LIMIT_S)
    made = llama_run(tmp_path)
    trainer = TrainerProcess()

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S):
            await trainer.start()
            child, reports = trainer._process, trainer.reports()
            trainer.send(
                Start(str(made.spec_path), str(made.data_dir), 1, run="run", checkpoints=str(tmp_path / "checkpoints"))
            )
            assert isinstance(await anext(reports), Ready)
            trainer.send(Load(str(made.theta_path), 0, 0, True, anchor="aa"))
            trainer.send(Train(1, (Range(0, 100_000),), 100_000))
            while not (isinstance(report := await anext(reports), Progress) and report.step > 0):
                pass
            await trainer.stop()
            assert child is not None
            assert child.returncode == 0
            assert [report async for report in reports if not isinstance(report, Progress | Saved)] == []

    asyncio.run(main())
    found, remarks = Checkpoints(tmp_path / "checkpoints").newest("run", made.spec.model.layout_digest)
    assert remarks == []
    assert found is not None
    assert found.position.steps > 0


def test_one_that_nobody_hears_any_more_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mute = tmp_path / "python"
    mute.write_text(f"#!{sys.executable} -IS\nimport os, signal, sys\nos.close(int(sys.argv[6]))\nsignal.pause()\n")
    mute.chmod(0o700)
    monkeypatch.setattr(process, "STOP_GRACE_S", 0.05)
    trainer = TrainerProcess(python=str(mute))

    async def main() -> None:
        async with asyncio.timeout(LIMIT_S):
            await trainer.start()
            assert [report async for report in trainer.reports()] == [Failed("the trainer ended by SIGKILL")]
            assert trainer.pid is None
            await trainer.stop()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("n_values", "seconds"), [(0, 3.0), (10**6, pytest.approx(3.12)), (10**7, pytest.approx(4.2)), (10**9, 6.0)]
)
def test_a_larger_model_has_more_time_to_write_and_a_whole_node_is_gone_in_ten_seconds(
    n_values: int, seconds: float
) -> None:
    assert process.grace_s(n_values) == seconds


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for a stranger's process by its descriptor")
def test_a_killed_agent_takes_its_trainer_along() -> None:
    agent = subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True)
    try:
        assert agent.stdout is not None
        trainer_pid = int(agent.stdout.readline())
    finally:
        agent.kill()
        agent.communicate()
    assert ended_within(trainer_pid, LIMIT_S)


def test_a_trainer_that_can_not_be_started_is_an_error() -> None:
    trainer = TrainerProcess(python="/nowhere/python")

    async def main() -> None:
        with pytest.raises(OSError, match="nowhere"):
            await trainer.start()
        await trainer.stop()

    asyncio.run(main())


def test_one_called_by_hand_says_what_it_is() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "node.training.trainer"], capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert found.returncode == 2
    assert "started by the agent" in found.stderr
