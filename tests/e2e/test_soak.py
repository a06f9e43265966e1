"""Runs that go on for long: nothing leaks; and while something dies all the time nothing differs, all is counted once.

python -m pytest tests/e2e/test_soak.py -k flat --soak-s 3600     an hour at six nodes
python -m pytest tests/e2e/test_soak.py -k deaths --kills 200     the nightly one
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from node.control import ask
from tests.e2e.network import Network, children_of
from tests.e2e.runs import left_over, simulate

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(0)]

SOAKED = ("ann", "bob", "eve", "joe", "kim", "lea")
WARM_ROUNDS = 24
"""Caches, pools and kept results fill first."""
KILL_EVERY = 4
KILLS_A_RUN = 50
GROWTH_BYTES_MOST = 24 * 2**20
"""Of a process from the first third of the time to the last, on top of 5 %: allocators settle slowly."""
GROWTH_MOST = 6
"""The same for descriptors, threads and tasks: connections come and go."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process has at a moment."""

    memory: int  # bytes that are its own
    descriptors: int
    threads: int
    tasks: int  # of its event loop; 0 where nobody tells


def usage(pid: int, tasks: int = 0) -> Usage:
    process = psutil.Process(pid)
    return Usage(process.memory_full_info().uss, process.num_fds(), process.num_threads(), tasks)


def usages(network: Network) -> dict[str, Usage]:
    """Of each process of the network, by node and kind."""
    assert network.coordinator is not None
    found = {"coordinator": usage(network.coordinator.pid)}
    for name, process in network.nodes.items():
        found[name] = usage(process.pid, asyncio.run(ask(network.folder / name, "status"))["tasks"])
        for child in children_of(process.pid):
            kind = "trainer" if "node.training.trainer" in psutil.Process(child).cmdline() else "helper"
            found[f"{name}'s {kind}"] = usage(child)
    return found


def after_rounds(network: Network, n_rounds: int) -> None:
    """Return as soon as so many more rounds have ended; of one there are several events."""
    ended: set[int] = set()
    host = network.invite.rpartition("@")[2].split(",")[0].split("?")[0]
    with urllib.request.urlopen(f"http://{host}/api/events", timeout=300) as events:
        for line in events:
            if line.startswith(b"data:") and "commit_hash" in (row := json.loads(line[5:])):
                ended.add(row["round"])
            if len(ended) >= n_rounds:
                return
    raise AssertionError(f"the coordinator stopped speaking\n{network.log('coordinator')}")


def growths(samples: list[Mapping[str, Usage]]) -> list[str]:
    """What has grown from the first third of the samples to the last one."""
    third = max(1, len(samples) // 3)
    found: list[str] = []
    for name in samples[0]:
        for what, most in (
            ("memory", GROWTH_BYTES_MOST),
            *((w, GROWTH_MOST) for w in ("descriptors", "threads", "tasks")),
        ):
            before, after = (
                statistics.median(getattr(sample[name], what) for sample in part)
                for part in (samples[:third], samples[-third:])
            )
            if after > 1.05 * before + most:
                found.append(f"{what} of {name}: {before} → {after}")
    return found


def test_everything_stays_flat(tmp_path: Path, soak_s: float) -> None:
    settings = ("work.h=20", "work.batch_tokens=256", f"membership.start_contributors={len(SOAKED)}")
    with Network(tmp_path, *settings) as network:
        for name in SOAKED:
            network.join(name)
        after_rounds(network, WARM_ROUNDS)
        samples: list[Mapping[str, Usage]] = []
        until = time.monotonic() + soak_s
        while time.monotonic() < until:
            after_rounds(network, 3)
            samples.append(usages(network))
        assert len(samples) >= 6
        assert growths(samples) == []
    assert left_over(tmp_path) == []


def test_runs_of_many_deaths(tmp_path: Path, n_kills: int) -> None:
    """One run after the other, until so many have died: a machine with other work brings fewer back in a round."""
    n_died = seed = 0
    while n_died < n_kills:
        seed += 1
        n_died += killed_in_a_run(tmp_path / f"run{seed}", min(n_kills - n_died, KILLS_A_RUN), seed)


def killed_in_a_run(folder: Path, n_kills: int, seed: int) -> int:
    """How many died in a run, of which nothing else may be seen."""
    rounds = KILL_EVERY * (n_kills + 3)
    words = ["--nodes", "5", "--rounds", str(rounds), "--steps", "25", "--kill-every", str(KILL_EVERY)]
    result = simulate(folder, *words, "--seed", str(seed), limit_s=300.0 + 30.0 * rounds)
    rows = [row for row in result["rounds"] if row["outcome"] == "committed"]
    assert len(rows) == rounds
    assert result["kills"]
    assert result["digests_equal"] is True
    assert result["val_loss"] < result["initial_val_loss"]
    counted = [{member["peer"] for member in row["members"] if member["accepted"]} for row in rows]
    assert min(map(len, counted)) >= 2
    assert max(map(len, counted)) == 5
    batches = [
        batch
        for row in rows
        for member in row["members"]
        if member["accepted"]
        for start, count in member["batches"]
        for batch in range(start, start + count)
    ]
    assert len(set(batches)) == len(batches)
    assert left_over(folder) == []
    return len(result["kills"])
