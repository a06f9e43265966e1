"""Processes of ours: started again after they end, ended with us, and found if they stay."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from coordinator.children import LOG_BYTES_MOST, Child, Supervised, last_line
from coordinator.leftovers import MARK, end_leftovers, marked
from coordinator.parent import ORPHANED, is_alive

ROOT = Path(__file__).parents[2]
SLEEPER = "import time; print('ready', flush=True); time.sleep(60)"


def test_a_child_that_ends_is_started_again_and_both_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Supervised, "FIRST_DELAY_S", 0.01)
    said: list[str] = []
    started: list[Child] = []

    async def start() -> Child:
        started.append(await Child.start("platform", [], tmp_path / "logs" / "child.log"))
        return started[-1]

    async def main() -> Supervised:
        supervised = Supervised("helper", start, said.append)
        thrice = asyncio.Event()

        def note(text: str) -> None:
            said.append(text)
            if len(said) == 3:
                thrice.set()

        supervised = Supervised("helper", start, note)
        task = asyncio.ensure_future(supervised.run())
        async with asyncio.timeout(60):
            await thrice.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return supervised

    supervised = asyncio.run(main())
    assert supervised.n_restarts >= 2
    assert all("the helper ended with exit code 0" in text and "child.log" in text for text in said)
    assert not any(is_alive(child.pid) for child in started)


def test_stopping_ends_a_child_that_will_not_hear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    (tmp_path / "deaf.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(ready)!r}, 'w').close()\ntime.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def main() -> int:
        child = await Child.start("deaf", [], tmp_path / "deaf.log")
        await asyncio.to_thread(ready.read_bytes)
        return await child.stop(0.05)

    assert asyncio.run(main()) == -signal.SIGKILL


def test_the_last_line_is_why_it_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) == ""
    log.write_bytes(b"x" * 10_000 + b"\nfirst\n  the disk is full; free space  \n\n")
    assert last_line(log) == "the disk is full; free space"


def test_a_long_log_is_put_aside(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    with log.open("wb") as file:
        file.truncate(LOG_BYTES_MOST + 1)

    async def main() -> None:
        await (await Child.start("platform", [], log)).wait()

    asyncio.run(main())
    assert log.stat().st_size < 1000
    assert (tmp_path / "child.log.1").stat().st_size == LOG_BYTES_MOST + 1


def test_a_child_ends_with_its_parent() -> None:
    child = f"import os; from coordinator.parent import end_with; end_with(os.getppid()); {SLEEPER}"
    parent = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE, text=True)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        grandchild = psutil.Process(pid)
        process.kill()
    grandchild.wait(timeout=60)
    assert not is_alive(pid)


def test_a_child_of_another_parent_ends_at_once() -> None:
    code = f"from coordinator.parent import end_with; end_with(1); {SLEEPER}"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert found.returncode == -ORPHANED


def test_what_stays_is_named_and_ended() -> None:
    mark = f"test-{os.getpid()}"
    said: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPER],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, MARK: mark},
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert [each.pid for each in marked(mark)] == [process.pid]
        from coordinator import leftovers

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(leftovers, "WAIT_S", 0.0)
            names = asyncio.run(end_leftovers(mark, said.append))
    assert process.returncode == -signal.SIGKILL
    assert len(names) == len(said) == 1
    assert str(process.pid) in names[0]
    assert asyncio.run(end_leftovers(mark, said.append)) == []


def test_an_orphan_stops_cleanly_however_often_it_is_told() -> None:
    """The kernel tells it once for each thread that its parent had."""
    code = (
        "import asyncio\n"
        "from coordinator.app import on_signals\n"
        "async def main():\n"
        "    stop = on_signals(lambda text: None)\n"
        "    print('ready', flush=True)\n"
        "    await stop.wait()\n"
        "    print('stopping', flush=True)\n"
        "    await asyncio.to_thread(input)\n"
        "    print('clean', flush=True)\n"
        "asyncio.run(main())\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(ORPHANED)
        assert child.stdout.readline() == "stopping\n"
        child.send_signal(ORPHANED)
        out, _ = child.communicate("\n", timeout=60)
    finally:
        child.kill()
    assert out == "clean\n"
    assert child.returncode == 0
