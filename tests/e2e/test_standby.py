"""Two real coordinators on one real PostgreSQL, and a node between them: killed, stopped and continued in turn."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.coordinator.postgres import Server
from tests.e2e.network import Network, Rows
from tests.e2e.runs import COORDINATOR, environment

LEASE_S = 3
LIMIT_S = 60.0


class Coordinator:
    """One `coordinator serve`, its words read as they come."""

    def __init__(self, folder: Path, url: str, *words: str) -> None:
        self.folder = folder
        self._log = folder.with_suffix(".log")
        ports = [] if (folder / "ports.json").exists() else ["--http", "--listen", "--dht"]
        with self._log.open("ab") as log:
            log.write(b"-- started\n")
            self.process = subprocess.Popen(
                [
                    *COORDINATOR, "serve", "--data", str(folder), "--database", url, "--lease", str(LEASE_S),
                    *(word for port in ports for word in (port, "127.0.0.1:0")), *words,
                ],
                stdout=subprocess.PIPE, stderr=log, env=environment(), text=True,
            )  # fmt: skip

    @property
    def out(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    @property
    def http(self) -> str:
        return str(json.loads((self.folder / "ports.json").read_bytes())["http"])

    def leads(self) -> str:
        """Its invite, once it serves."""
        first = self.out.readline()
        assert first.startswith("invite "), self.said()
        return first.split()[1]

    def said(self) -> str:
        """What it has written to standard error since it was started last."""
        return self._log.read_text().rpartition("-- started\n")[2]

    def says(self, word: str) -> str:
        """What it has said, once the word is in it: the log is followed, not slept for."""
        with subprocess.Popen(["tail", "-n", "+1", "-F", str(self._log)], stdout=subprocess.PIPE, text=True) as tail:
            assert tail.stdout is not None
            try:
                for line in tail.stdout:
                    if word in line and line in self.said():
                        return line
            finally:
                tail.kill()
        raise AssertionError(self.said())

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        self.out.close()


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    made = Network(tmp_path, "work.h=5", "work.batch_tokens=256", "evaluation.max_tokens=1024")
    yield made
    made.__exit__()


def get(http: str, path: str) -> Any:
    with urllib.request.urlopen(f"http://{http}{path}", timeout=10) as answer:
        return json.load(answer)


def rows_once(at: Coordinator, condition: Callable[[Rows], bool], network: Network) -> Rows:
    """The ledger once the condition holds of it; looked at whenever the coordinator says something."""
    until = time.monotonic() + LIMIT_S
    with urllib.request.urlopen(f"http://{at.http}/api/events", timeout=LIMIT_S) as events:
        for line in events:  # a comment comes every few seconds
            if line.startswith(b"data:") and condition(rows := get(at.http, "/api/ledger?after=0")):
                return list(rows)
            assert network.nodes["node"].poll() is None, network.log("node")
            assert time.monotonic() < until, f"{at.said()}\n{network.log('node')}"
    raise AssertionError(at.said())


def committed(rows: Rows) -> int:
    return sum(1 for row in rows if row["outcome"] == "committed")


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_second_coordinator_takes_over_from_a_killed_and_from_a_stopped_one(
    network: Network, postgres: Server
) -> None:
    url = postgres.new_database()
    one, two = network.run_folder, network.folder / "second"
    shutil.copytree(one, two)
    first = Coordinator(one, url)
    alone = first.leads()
    second = Coordinator(two, url, "--standby")
    try:
        second.says("waiting for the lock held by the coordinator at ")
        health = get(second.http, "/healthz")
        assert health["standby"]
        assert first.http in health["waiting_for"]
        with pytest.raises(urllib.error.HTTPError, match="503"):
            get(second.http, "/v1/run")
        both = next(word for word in first.says("an invite for all is ").split() if word.startswith("barnraise://"))
        assert both == f"{alone},{second.http}"
        network.invite = alone  # of the other address the node hears from the coordinator itself
        network.join("node")
        before = rows_once(first, lambda rows: committed(rows) >= 2, network)

        # Killed: the lock is free at once.
        first.process.kill()
        first.process.wait()
        assert second.leads() == f"{alone.split('@')[0]}@{second.http},{first.http}"
        after = rows_once(second, lambda rows: committed(rows) >= committed(before) + 2, network)
        assert continues(before, after)
        assert get(second.http, "/api/status")["serving"]

        # Stopped: the one that was killed is back as the standby, and waits for the lease to end.
        first.out.close()
        first = Coordinator(one, url, "--standby")
        first.says("waiting for the lock held by the coordinator at ")
        second.process.send_signal(signal.SIGSTOP)
        first.leads()
        assert "its session is ended" in first.said()
        last = rows_once(first, lambda rows: committed(rows) >= committed(after) + 1, network)
        assert continues(after, last)
        second.process.send_signal(signal.SIGCONT)
        assert second.process.wait(LIMIT_S) == 6
        assert "leads no longer" in second.said().splitlines()[-1]
        assert network.nodes["node"].poll() is None
        end = rows_once(first, lambda rows: committed(rows) >= committed(last) + 1, network)
        assert continues(last, end)
    finally:
        first.end()
        second.end()


def continues(before: Rows, after: Rows) -> bool:
    """Whether the later rows are one chain, which begins with the earlier ones."""
    key = [row["commit_hash"] for row in after]
    return key[: len(before)] == [row["commit_hash"] for row in before] and all(
        later["previous_hash"] == earlier["commit_hash"] for earlier, later in itertools.pairwise(after)
    )
