"""Machines whose clocks and calendars disagree by minutes take part as if they agreed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.network import Network, counted

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

FIVE_MINUTES_S = 300


def test_clocks_that_are_minutes_apart_decide_nothing(tmp_path: Path) -> None:
    """The DHT included, whose library refuses peers that are 3 s apart by the clocks it takes by itself."""
    settings = ("work.h=6",)
    with Network(tmp_path, *settings, serve=("--clock-offset", str(-2 * FIVE_MINUTES_S))) as network:
        offsets = {"early": -FIVE_MINUTES_S, "late": FIVE_MINUTES_S}
        for name, offset_s in offsets.items():
            network.join(name, "--clock-offset", str(offset_s))
        full = [row for row in network.wait_for(lambda rows: n_full(rows) >= 3) if len(counted(row)) == 2]
        peers = {network.peer(name) for name in offsets}
        assert counted(full[-1]) == peers
        after = [row for row in network.rows() if row["round"] > full[0]["round"] and row["outcome"] == "committed"]
        assert all(counted(row) == peers for row in after), "nobody is late by a clock"
        assert not any(row["failed_attempts"] for row in after)


def n_full(rows: list[dict[str, object]]) -> int:
    return sum(1 for row in rows if len(counted(row)) == 2)
