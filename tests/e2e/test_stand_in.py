"""The coordinator is killed, in real processes: the nodes go on under one of them, and it learns of that afterwards."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.network import Network, Rows, counted
from tests.e2e.runs import NODE, run

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(240)]

BACK_S = 60.0
"""So soon a coordinator that is back must have what was committed without it."""
LOOK_S = 0.5


def settings(n: int) -> tuple[str, ...]:
    return (
        "work.h=4",
        "work.batch_tokens=128",
        f"membership.start_contributors={n}",
        "deadlines.heartbeat_s=0.5",
        "deadlines.heartbeat_timeout_s=5",
        "deadlines.stand_in_s=2",
    )


def reach(network: Network, names: tuple[str, ...], round_: int, limit_s: float) -> None:
    """Wait until these nodes are in this round."""
    until = time.monotonic() + limit_s
    for name in names:
        while (asked := run(*NODE, "status", "--json", "--data", network.folder / name)).code or (
            asked.document()["round"] < round_
        ):
            assert time.monotonic() < until, network.log(name)
            time.sleep(LOOK_S)


def go_on_without(network: Network, names: tuple[str, ...], n_rounds: int, limit_s: float) -> int:
    """Kill the coordinator and wait until the nodes have committed so many rounds; the round that they are in."""
    network.kill_coordinator()
    began_in = max(int(network.status(name)["round"]) for name in names)
    reach(network, names, began_in + n_rounds, limit_s)
    leaders = {network.status(name)["leader"] for name in names}
    assert leaders <= {network.peer(name) for name in names}
    return began_in + n_rounds


def has_learnt(network: Network, round_: int) -> Rows:
    """The coordinator comes back, and has the rounds before this one in time, credits too."""
    network.serve()
    back_at = time.monotonic()
    rows = network.wait_for(lambda rows: bool(rows) and rows[-1]["round"] >= round_ - 1, BACK_S)
    assert time.monotonic() - back_at < BACK_S
    assert [row["round"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["commit_hash"] for row in rows[:-1]] == [row["previous_hash"] for row in rows[1:]]
    return rows


def test_three_nodes_go_on_one_restarts_meanwhile_and_the_coordinator_has_it_all_when_it_is_back(
    tmp_path: Path,
) -> None:
    names = ("ann", "bob", "eve")
    with Network(tmp_path, *settings(3)) as network:
        for name in names:
            network.join(name)
        network.wait_for(lambda rows: any(len(counted(row)) == 3 for row in rows))
        peers = {network.peer(name) for name in names}
        round_ = go_on_without(network, names, 3, 90.0)

        led = network.status("ann")["leader"]
        restarted = next(name for name in names if network.peer(name) != led)
        network.kill(restarted)
        network.join(restarted)
        reach(network, (restarted,), round_ + 1, 60.0)

        stranger = run(*NODE, "join", network.invite, "--data", tmp_path / "zoe", limit_s=60)
        assert stranger.code == 4, stranger.err
        assert "only it lets newcomers in" in stranger.err

        rows = has_learnt(network, round_)
        alone = [row for row in rows if row["leader"] in peers and row["outcome"] == "committed"]
        assert len(alone) >= 3
        assert all(counted(row) for row in alone)
        n_before = len(rows)
        coordinator = rows[0]["leader"]
        rows = network.wait_for(lambda rows: any(row["leader"] == coordinator for row in rows[n_before + 1 :]))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ten_rounds_of_five_nodes_without_the_coordinator(tmp_path: Path) -> None:
    names = ("ann", "bob", "cyd", "dan", "eve")
    with Network(tmp_path, *settings(5)) as network:
        for name in names:
            network.join(name)
        network.wait_for(lambda rows: any(len(counted(row)) == 5 for row in rows), 180.0)
        peers = {network.peer(name) for name in names}
        round_ = go_on_without(network, names, 10, 240.0)
        rows = has_learnt(network, round_)
        alone = [row for row in rows if row["leader"] in peers and row["outcome"] == "committed"]
        assert len(alone) >= 10
