"""A longer run in which nodes are killed all the time: nothing leaks, nothing differs, everything is counted once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import left_over, simulate

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(1800)]


def test_a_run_of_many_rounds_and_many_deaths(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["--nodes", "5", "--rounds", "40", "--steps", "25", "--kill-every", "4", "--seed", "3"]
    result = simulate(folder, *words, limit_s=1700.0)
    rows = [row for row in result["rounds"] if row["outcome"] == "committed"]
    assert len(rows) == 40
    assert result["digests_equal"] is True
    assert result["val_loss"] < 2.2
    counted = [{member["peer"] for member in row["members"] if member["accepted"]} for row in rows]
    assert min(map(len, counted)) >= 3
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
