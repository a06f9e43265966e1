"""A network as an operator and contributors run it: `coordinator serve` and `node join`, awaited by its own events."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.e2e.runs import COORDINATOR, NODE, end_all, environment, found, run, serving

STOP_S = 20.0
Rows = list[dict[str, Any]]


class Network:
    """One coordinator and its nodes in a folder; a context manager that ends them all.

    Args:
        folder: for everything.
        settings: `--set` words of `coordinator init`.
        serve: more words of `coordinator serve`.
    """

    def __init__(self, folder: Path, *settings: str, serve: Sequence[str] = ()) -> None:
        self.folder, self._serve = folder, tuple(serve)
        self.run_folder = found(folder, settings)
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.coordinator: subprocess.Popen[bytes] | None = None
        self.invite = ""

    def __enter__(self) -> Network:
        self.serve()
        return self

    def __exit__(self, *_: object) -> None:
        end_all([*self.nodes.values(), *([self.coordinator] if self.coordinator else [])], STOP_S)

    def serve(self) -> None:
        """Start the coordinator, again on the ports of the last time, and wait for its invite."""
        words = [*COORDINATOR, "serve", "--data", str(self.run_folder), *self._serve]
        if not self.invite:
            words += [word for name in ("--http", "--listen", "--dht") for word in (name, "127.0.0.1:0")]
        self.coordinator, self.invite = serving(words, self.folder / "coordinator.log")

    def join(self, name: str, *words: str) -> None:
        """Start a node, in the folder of its name."""
        join = [*NODE, "join", self.invite, "--data", str(self.folder / name), "--name", name, "--threads", "1"]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.nodes[name] = subprocess.Popen(
                [*join, "--listen", "127.0.0.1:0", "--dht", "127.0.0.1:0", *words],
                stdout=log,
                stderr=log,
                env=environment(),
            )

    def kill(self, name: str) -> None:
        """SIGKILL the node's agent; its trainer and DHT helper must follow by themselves."""
        self.nodes[name].kill()
        self.nodes.pop(name).wait()

    def kill_coordinator(self) -> None:
        assert self.coordinator is not None
        self.coordinator.kill()
        self.coordinator.wait()
        if self.coordinator.stdout is not None:
            self.coordinator.stdout.close()

    def peer(self, name: str) -> str:
        return str(self.status(name)["peer"])

    def status(self, name: str) -> dict[str, Any]:
        answer: dict[str, Any] = run(*NODE, "status", "--json", "--data", self.folder / name).document()
        return answer

    def rows(self) -> Rows:
        """The ledger so far, over HTTP."""
        with urllib.request.urlopen(f"http://{self._http()}/api/ledger?after=0", timeout=10) as answer:
            rows: Rows = json.load(answer)
        return rows

    def wait_for(self, condition: Callable[[Rows], bool], limit_s: float = 90.0) -> Rows:
        """The ledger once the condition holds of it; looked at whenever the coordinator says something."""
        until_s = time.monotonic() + limit_s
        with urllib.request.urlopen(f"http://{self._http()}/api/events", timeout=limit_s) as events:
            for line in events:
                if line.startswith(b"data:") and condition(rows := self.rows()):
                    return rows
                if time.monotonic() > until_s:
                    break
        logs = "\n".join(f"-- {name}\n{self.log(name)}" for name in ("coordinator", *self.nodes))
        raise AssertionError(f"not within {limit_s:g} s, or the coordinator stopped speaking\n{logs}")

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-3000:]

    def _http(self) -> str:
        return self.invite.rpartition("@")[2].split(",")[0].split("?")[0]


def counted(row: dict[str, Any]) -> set[str]:
    """The peers whose contributions a round counted."""
    return {member["peer"] for member in row["members"] if member["accepted"]}


def children_of(pid: int) -> list[int]:
    """Living descendants of a process."""
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"
