"""A simulation that is watched from outside, and stopped at a moment that a test waits for."""

from __future__ import annotations

import json
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from coordinator.folder import RunFolder
from tests.e2e.runs import COORDINATOR, environment, left_over, simulate

GONE_S = 10.0
"""So long after its end at most, nothing of a simulation is left."""
Status = dict[str, Any]


class Simulation:
    """`coordinator simulate` with the same words each time, in one folder.

    Args:
        folder: of the run.
        words: of the command line.
    """

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self.words = folder, words
        self.process: subprocess.Popen[bytes] | None = None

    def to_its_end(self) -> Any:
        """Run it, or go on with it; its JSON document."""
        return simulate(self.folder, *self.words, limit_s=600.0)

    def stop_when(self, condition: Callable[[Status], bool], number: signal.Signals, limit_s: float = 120.0) -> int:
        """Start it, send it a signal once the condition holds of its status, and wait until nothing of it is left.

        Returns its exit code.
        """
        log = self.folder.with_name(f"{self.folder.name}.log")
        serving = RunFolder(self.folder).serving
        serving.unlink(missing_ok=True)  # of one that was killed
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*COORDINATOR, "simulate", "--data", str(self.folder), *self.words],
                stdout=output, stderr=output, env=environment(), start_new_session=True,
            )  # fmt: skip
        try:
            self._await(serving, condition, process, limit_s)
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            code = process.wait(30)
            _, alive = psutil.wait_procs(family, timeout=GONE_S)
        finally:
            process.kill()
        assert alive == [], "processes outlive the simulation"
        assert left_over(self.folder) == []
        return code

    def _await(
        self, serving: Path, condition: Callable[[Status], bool], process: subprocess.Popen[bytes], limit_s: float
    ) -> None:
        http, until = self._http(serving, process), time.monotonic() + limit_s
        while process.poll() is None and time.monotonic() < until:
            with urllib.request.urlopen(f"http://{http}/api/status", timeout=10) as answer:
                if condition(json.load(answer)):
                    return
            look_again(process)  # steps are no events
        raise AssertionError("the condition never held")

    def _http(self, serving: Path, process: subprocess.Popen[bytes]) -> str:
        """Where it answers, as soon as it does."""
        while process.poll() is None:
            try:
                return str(json.loads(serving.read_bytes())["http"])
            except (OSError, ValueError, KeyError):
                look_again(process)
        raise AssertionError(f"it ended with {process.returncode}")


def look_again(process: subprocess.Popen[bytes]) -> None:
    """Nobody tells us when a file appears or a step is made: in a moment, or as soon as the process has ended."""
    try:
        process.wait(0.05)
    except subprocess.TimeoutExpired:
        return


def in_training(n_committed: int, step: int) -> Callable[[Status], bool]:
    """Holds once somebody has made so many steps of the round after so many committed ones, or it is too late."""

    def holds(status: Status) -> bool:
        steps = [member["step"] for member in status["members"] if member["state"] == "training"]
        return int(status["n_committed"]) > n_committed or (
            status["n_committed"] == n_committed and any(each >= step for each in steps)
        )

    return holds


def exchanging(n_committed: int) -> Callable[[Status], bool]:
    """Holds once the round after so many committed ones is past its training."""

    def holds(status: Status) -> bool:
        return int(status["n_committed"]) > n_committed or (
            status["n_committed"] == n_committed and status["phase"] not in ("train", "TRAIN", "prepare", "PREPARE")
        )

    return holds


def history(folder: Path) -> list[tuple[str, list[tuple[str, Any, int]]]]:
    """What a run came to, round by round: digests, and who used which batches. Empty rounds change nothing."""
    rows = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    return [
        (row["state_digest"], sorted((m["peer"], m["batches"], m["steps"]) for m in row["members"] if m["accepted"]))
        for row in rows
        if row["outcome"] == "committed"
    ]
