"""A network as people run it: nodes and the coordinator are killed and come back, and the run goes on."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.e2e.network import Network, children_of, counted
from tests.e2e.runs import COORDINATOR, NODE, left_over, run

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(240)]


def test_killed_nodes_and_a_killed_coordinator_come_back(tmp_path: Path) -> None:
    settings = ("work.h=6", "work.batch_tokens=256", "membership.start_contributors=3", "deadlines.heartbeat_s=0.5")
    with Network(tmp_path, *settings) as network:
        names = ("ann", "bob", "eve")
        for name in names:
            network.join(name)
        network.wait_for(lambda rows: any(len(counted(row)) == 3 for row in rows))
        peers = {name: network.peer(name) for name in names}

        helpers = children_of(network.nodes["bob"].pid)
        assert len(helpers) >= 2, "a trainer and the DHT's helper"
        network.kill("bob")
        _, alive = psutil.wait_procs([psutil.Process(pid) for pid in helpers if psutil.pid_exists(pid)], timeout=20)
        assert alive == [], "helpers outlive their agent"
        n_before = len(network.rows())
        without = {peers["ann"], peers["eve"]}
        rows = network.wait_for(lambda rows: sum(counted(row) == without for row in rows[n_before:]) >= 2)

        network.join("bob")
        n_before = len(rows)
        rows = network.wait_for(lambda rows: any(peers["bob"] in counted(row) for row in rows[n_before:]))
        assert network.peer("bob") == peers["bob"], "the identity survives"

        n_before = len(rows)
        network.kill_coordinator()
        network.serve()
        rows = network.wait_for(lambda rows: any(len(counted(row)) == 3 for row in rows[n_before:]))
        assert [row["round"] for row in rows] == list(range(1, len(rows) + 1))
        assert [row["commit_hash"] for row in rows[:-1]] == [row["previous_hash"] for row in rows[1:]]

        used = [
            batch
            for row in rows
            for member in row["members"]
            if member["accepted"]
            for start, count in member["batches"]
            for batch in range(start, start + count)
        ]
        assert len(set(used)) == len(used), "a batch counted twice"

        n_before = len(rows)
        assert run(*NODE, "leave", "--data", tmp_path / "eve").code == 0
        assert network.nodes["eve"].wait(30) == 0
        without = {peers["ann"], peers["bob"]}
        rows = network.wait_for(lambda rows: any(counted(row) == without for row in rows[n_before:]))
        status = run(*COORDINATOR, "status", "--json", "--data", network.run_folder).document()
        assert {member["name"] for member in status["members"] if member["state"] != "gone"} >= {"ann", "bob"}
    assert left_over(tmp_path) == []
