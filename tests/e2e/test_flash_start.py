"""Real nodes that start in the same moment come to one view and one chain.

    pytest -m long tests/e2e/test_flash_start.py

does it 30 times, with four to eight nodes.
"""

from __future__ import annotations

import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.e2e.network import Network, counted
from tests.e2e.runs import left_over

WITHIN_S = 0.2
SETTINGS = ("work.h=6", "work.batch_tokens=256", "deadlines.heartbeat_s=0.5")

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(400)]


def one_chain(folder: Path, n: int) -> None:
    """Start so many nodes within 200 ms, and wait until a round counts them all and another one follows it."""
    with Network(folder, *SETTINGS) as network:
        for number in range(n):
            network.join(f"n{number}")
            network.nodes[f"n{number}"].send_signal(signal.SIGSTOP)  # a busy machine takes longer to start eight
        began_at = time.monotonic()
        for node in network.nodes.values():
            node.send_signal(signal.SIGCONT)
        assert time.monotonic() - began_at < WITHIN_S
        rows = network.wait_for(lambda rows: any(len(counted(row)) == n for row in rows[:-1]), limit_s=240)
        assert [row["round"] for row in rows if row["round"]] == list(range(1, rows[-1]["round"] + 1))
        assert {row["epoch"] for row in rows} == {0}
        assert len({row["leader"] for row in rows if row["round"]}) == 1
        for before, after in pairwise(rows):
            assert after["previous_hash"] == before["commit_hash"]
        for name in network.nodes:
            n_before = len(network.rows())
            held = network.status(name)["digest"]
            newest = [row["state_digest"] for row in network.rows()[n_before - 2 :]]
            assert held in newest, "all hold a state of one chain, and none an old one"
    assert left_over(folder) == []


@pytest.mark.parametrize("n", [4, 6, 8])
def test_nodes_that_start_together_make_one_chain(tmp_path: Path, n: int) -> None:
    one_chain(tmp_path / "flash", n)


@pytest.mark.parametrize("time_", range(27))
def test_they_do_so_again_and_again(tmp_path: Path, time_: int) -> None:
    one_chain(tmp_path / "flash", 4 + time_ % 5)
