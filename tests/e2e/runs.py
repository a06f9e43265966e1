"""Runs commands as a user does, in real processes, and looks at what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

COORDINATOR = (sys.executable, "-m", "coordinator")
NODE = (sys.executable, "-m", "node")
LIMIT_S = 280.0
GONE_S = 10.0
"""So soon whoever outlives its parent has found that out and ended."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        """The last line of standard error: cause and remedy, where something failed."""
        return next((line for line in reversed(self.err.splitlines()) if line.strip()), "")

    def document(self) -> Any:
        """The one JSON document on standard output; fails the test with what was said if there is none."""
        assert self.code == 0, self.err[-4000:]
        return json.loads(self.out)


def run(*words: str | Path, limit_s: float = LIMIT_S, cwd: Path | None = None) -> Ended:
    """Run a command to its end; one that doesn't end in time is killed and fails the test."""
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        timeout=limit_s,
        cwd=cwd,
        env=environment(),
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def environment() -> dict[str, str]:
    """A quiet one: one thread a process, nothing from a terminal, nothing from a hub."""
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "default"}


def simulate(data: Path, *words: str, limit_s: float = LIMIT_S) -> Any:
    """A whole run in a folder; its JSON document."""
    return run(*COORDINATOR, "simulate", "--json", "--data", data, *words, limit_s=limit_s).document()


def found(folder: Path, settings: Sequence[str]) -> Path:
    """A run's folder, made by `coordinator init` in this one with `--set` words, on a text that compresses well.

    Nobody's training is cut unless a setting says so: how long a step takes is the shared machine's affair here.
    """
    text, made = folder / "text", folder / "run"
    text.mkdir(parents=True)
    for index in range(8):
        (text / f"{index}.txt").write_text("".join(f"{index}: line {line * index}\n" for line in range(6000)))
    sets = [
        word for setting in ("rule.degraded=true", "deadlines.deadline_k=0", *settings) for word in ("--set", setting)
    ]
    ended = run(*COORDINATOR, "init", "--data", made, "--data-path", text, *sets)
    assert ended.code == 0, ended.err
    return made


def serving(command: Sequence[str], log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A started coordinator and the invite that it prints; what it says goes to the log."""
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, env=environment())
    assert process.stdout is not None
    first = process.stdout.readline().decode()
    assert first.startswith("invite "), log.read_text()[-3000:]
    return process, first.split()[1]


def end_all(processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> None:
    """SIGTERM for all that still run; one that is not gone in time is killed and fails the test."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        finally:
            if process.stdout is not None:
                process.stdout.close()


def ledger(data: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data / "ledger.jsonl").read_text().splitlines()]


def left_over(mark: Path | str) -> list[str]:
    """Command lines of processes that name this folder, other than ourselves, and live on."""
    found: dict[psutil.Process, str] = {}
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        if process.pid != os.getpid() and str(mark) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found[process] = line
    _, alive = psutil.wait_procs(list(found), timeout=GONE_S)
    return [found[process] for process in alive if not is_zombie(process)]


def is_zombie(process: psutil.Process) -> bool:
    """Whether it has ended, and nobody has asked how; also where somebody has."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
