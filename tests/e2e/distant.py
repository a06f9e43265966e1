"""A network whose coordinator and nodes are on hosts of the lab, as real ones are: no loopback between them."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from coordinator.control import Caller, find
from coordinator.folder import RunFolder
from node.control import ask
from node.identity import KEY_FILE, load
from tests.e2e.lab import Lab
from tests.e2e.runs import COORDINATOR, NODE, end_all, environment, found, serving

STOP_S = 25.0
LOOK_S = 0.1
"""Between two looks at a file that another process writes."""
Rows = list[dict[str, Any]]
T = TypeVar("T")


class Distant:
    """One coordinator on a host of the lab, and nodes on others; a context manager that ends them all.

    Args:
        lab: the hosts.
        folder: for everything.
        host: the coordinator's.
        settings: `--set` words of `coordinator init`.
        serve: words of `coordinator serve`.
    """

    def __init__(self, lab: Lab, folder: Path, *settings: str, host: str = "c0", serve: Sequence[str] = ()) -> None:
        self.lab, self.folder, self.host, self._serve = lab, folder, host, tuple(serve)
        self.run_folder = found(folder, settings)
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._hosts: dict[str, str] = {}
        self.coordinator: subprocess.Popen[bytes] | None = None
        self.invite = ""

    def __enter__(self) -> Distant:
        self.serve()
        return self

    def __exit__(self, *_: object) -> None:
        end_all([*self.nodes.values(), *([self.coordinator] if self.coordinator else [])], STOP_S)

    def serve(self) -> None:
        """Start the coordinator on its host, as an operator would, and take the invite that it prints."""
        command = self.lab.within(self.host, *COORDINATOR, "serve", "--data", str(self.run_folder), *self._serve)
        self.coordinator, self.invite = serving(command, self.folder / "coordinator.log")

    def join(self, name: str, *words: str, host: str = "", invite: str = "") -> None:
        """Start a node, in the folder of its name; on the host of the same name unless another is named."""
        join = [*NODE, "join", invite or self.invite, "--data", str(self.folder / name), "--name", name]
        self._hosts[name] = host or name
        command = self.lab.within(self._hosts[name], *join, "--threads", "1", *words)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.nodes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment())

    def status(self, name: str) -> dict[str, Any]:
        """What `node status --json` says, asked on the node's host."""
        return self.lab.inside(self._hosts[name], lambda: asyncio.run(ask(self.folder / name, "status")))

    def peer(self, name: str) -> str:
        """A node's peer id, as its folder has it."""
        return str(load(self.folder / name / KEY_FILE).peer)

    def digests(self) -> dict[str, dict[str, str]]:
        """Per commit what digest each peer said that it holds after it."""
        return self._asked(Caller.digests)

    def head(self) -> int:
        """The newest committed round, as the coordinator knows it now: its file waits for evaluations."""
        return max(int(row["round"]) for row in self._asked(Caller.ledger))

    def _asked(self, what: Callable[[Caller], Awaitable[T]]) -> T:
        """What the coordinator answers on its own host."""

        async def asked() -> T:
            serving = find(RunFolder(self.run_folder))
            assert serving is not None
            async with Caller(serving) as caller:
                return await what(caller)

        return self.lab.inside(self.host, lambda: asyncio.run(asked()))

    def kill_coordinator(self) -> None:
        """As `kill -9` does; its observer follows by itself."""
        assert self.coordinator is not None
        self.coordinator.kill()
        self.coordinator.wait()
        if self.coordinator.stdout is not None:
            self.coordinator.stdout.close()
        self.coordinator = None

    def end(self, name: str) -> None:
        """SIGTERM, and wait."""
        node = self.nodes.pop(name)
        node.send_signal(signal.SIGTERM)
        node.wait(STOP_S)

    def rows(self) -> Rows:
        """The ledger so far, from the file that the coordinator keeps."""
        try:
            lines = (self.run_folder / "ledger.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_for(self, condition: Callable[[Rows], bool], limit_s: float = 90.0) -> Rows:
        """The ledger once the condition holds of it."""
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s:
            if condition(rows := self.rows()):
                return rows
            self._check()
            time.sleep(LOOK_S)
        logs = "\n".join(f"-- {name}\n{self.log(name)}" for name in ("coordinator", *self.nodes))
        raise AssertionError(f"not within {limit_s:g} s: {len(self.rows())} rounds\n{logs}")

    def wait_until(self, condition: Callable[[], bool], what: str, limit_s: float) -> None:
        until_s = time.monotonic() + limit_s
        while not condition():
            self._check()
            assert time.monotonic() < until_s, f"not within {limit_s:g} s: {what}"
            time.sleep(LOOK_S)

    def _check(self) -> None:
        """No node has ended by a fault."""
        ended = [name for name, process in self.nodes.items() if process.poll() not in (None, 0)]
        assert not ended, f"{ended} ended\n{self.log(ended[0])}"

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-3000:]
