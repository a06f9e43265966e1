"""What a simulation decides before and after its processes run: options, folders, digests. And how it looks."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator import config, simulate, tools
from coordinator.display import PlainDisplay, loss_curve, print_summary, round_line, status_line
from coordinator.errors import CoordinatorError, StateError
from coordinator.folder import RunFolder, read_founded
from coordinator.simulate import EMPTY_MOST, MARKER, SimulateOptions, check_empty, digests_equal
from tests.coordinator.made import make_data, make_run
from tests.coordinator.test_web import STATUS

OPTIONS = SimulateOptions(nodes=3, rounds=5, sets=("data.sequence_length=16", "work.batch_tokens=16"))


class Silent:
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def update(self, status: Any, rows: Any) -> None:
        pass

    def close(self) -> None:
        pass


def test_options_become_settings_and_the_users_own_stand_over_them() -> None:
    options = SimulateOptions(
        nodes=3, rounds=5, steps=7, rule="median", f=1, codec="fp32", data_path="text", seed=9,
        sets=("work.h=8", "membership.min_contributors=2"),
    )  # fmt: skip
    made = config.load(options.model, None, options.settings())
    assert (made.membership.start_contributors, made.work.end_rounds, made.seed) == (3, 5, 9)
    assert (made.rule.name, made.rule.f_max, made.codec.name) == ("median", 1, "fp32")
    assert (made.work.h, made.membership.min_contributors) == (8, 2)
    assert Path(made.data.path) == Path("text").absolute()


@pytest.mark.parametrize(("sets", "k"), [((), 0.0), (("deadlines.deadline_k=3",), 3.0)])
def test_a_busy_machine_cuts_nobodys_training_unless_that_is_asked_for(sets: tuple[str, ...], k: float) -> None:
    """Half a second beyond the median cut members of a default run, or left them out, on a machine in use."""
    options = replace(OPTIONS, sets=sets)
    assert config.load(options.model, None, options.settings()).deadlines.deadline_k == k


@pytest.mark.parametrize(
    ("rule", "codec"), [("arc+nnm+trimmed_mean", "topk"), ("bulyan", "int4"), ("multi_krum", "fp16"), (None, None)]
)
def test_every_rule_and_codec_can_be_simulated(rule: str | None, codec: str | None) -> None:
    options = replace(OPTIONS, rule=rule, codec=codec)
    made = config.load(options.model, None, options.settings())
    assert (made.rule.name, made.codec.name) == (rule or "default", codec or "int8")


def prepared(folder: RunFolder, options: SimulateOptions, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    async def init(wish: Path, to: Path, say: object) -> Any:
        return await make_data(wish, to)

    monkeypatch.setattr(tools, "init", init)
    shown = Silent()
    asyncio.run(simulate._prepare(folder, options, shown))
    return shown.said


def test_a_repeated_call_goes_on_or_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "run")
    prepared(folder, OPTIONS, monkeypatch)
    first = read_founded(folder).run
    assert any("going on" in text for text in prepared(folder, OPTIONS, monkeypatch))
    assert read_founded(folder).run == first
    assert any("other options" in text for text in prepared(folder, replace(OPTIONS, seed=1), monkeypatch))
    second = read_founded(folder).run
    assert second != first
    marker = json.loads((folder.path / MARKER).read_text())
    (folder.path / MARKER).write_text(json.dumps({**marker, "finished": True}))
    assert any("finished" in text for text in prepared(folder, replace(OPTIONS, seed=1), monkeypatch))
    assert read_founded(folder).run != second


def test_another_run_is_never_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run")
    before = folder.spec.read_bytes()
    with pytest.raises(StateError, match="no simulation made"):
        prepared(folder, OPTIONS, monkeypatch)
    assert folder.spec.read_bytes() == before


def row(number: int, outcome: str = "committed", loss: float | None = 2.0) -> dict[str, Any]:
    member = {"peer": "p", "accepted": True, "bytes_sent": 1000, "tokens": 10}
    return {
        "round": number, "epoch": 0, "outcome": outcome, "commit_hash": f"c{number}", "state_digest": f"d{number}",
        "members": [member], "val_loss": loss, "inner_loss": 3.0, "reason": "nobody",
        "failed_attempts": [], "delta_norm": 1.0, "tokens": 10, "fallback": "", "degraded": "",
        "seconds": {"train": 1.0, "exchange": None, "apply": None},
    }  # fmt: skip


def test_digests_are_equal_only_if_all_are_and_each_round_has_one() -> None:
    rows = [row(0, "empty"), row(1), row(2)]
    said = {"c1": {"a": "d1", "b": "d1"}, "c2": {"a": "d2"}}
    assert digests_equal(rows, said)
    assert not digests_equal(rows, {**said, "c2": {"a": "d2", "b": "dx"}})
    assert not digests_equal(rows, {"c1": said["c1"]})
    assert not digests_equal([], {})


def test_a_run_of_empty_rounds_only_is_no_progress() -> None:
    check_empty({**STATUS, "empty_rounds": EMPTY_MOST - 1, "empty_reason": "2 are too few"})
    with pytest.raises(CoordinatorError, match="10 rounds in a row were empty, the last one for: 2 are too few"):
        check_empty({**STATUS, "empty_rounds": EMPTY_MOST, "empty_reason": "2 are too few"})


def test_plain_lines_show_each_round_once_and_what_is_awaited(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("coordinator.display.time.monotonic", lambda: now)
    shown = PlainDisplay()
    shown.update(STATUS, [row(0, "empty"), row(1, "empty"), row(2, loss=None)])
    shown.update(STATUS, [row(1, "empty"), row(2)])
    shown.update(STATUS, [row(2)])
    now += 25
    shown.update(STATUS, [row(2)])
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["round 1", "round 2"]
    assert lines[2:] == [status_line(STATUS)]


def test_words_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert "1 members" in status_line(STATUS)
    assert "1.0 kB exchanged" in round_line(row(2))
    assert "empty (nobody)" in round_line(row(2, "empty"))
    assert "rule" not in round_line(row(2))
    other = {**row(2), "fallback": "trimmed_mean", "degraded": "no robustness with 2 contributions"}
    assert "by trimmed_mean instead of the run's rule, no robustness with 2" in round_line(other)
    assert "empty" not in status_line({**STATUS, "empty_rounds": 1, "empty_reason": "seats"})
    barren = status_line({**STATUS, "empty_rounds": 3, "empty_reason": "2 contributions, too few"})
    assert "3 rounds in a row were empty: 2 contributions, too few" in barren
    assert loss_curve([(1, 5.0)]) == ""
    assert "validation loss by round" in loss_curve([(1, 5.0), (2, 3.0)])
    result = {
        "run_id": "R", "nodes": 2, "rounds": [row(1, "empty", 5.0), row(2)], "val_loss": 2.0, "initial_val_loss": 5.0,
        "digests_equal": False, "seconds": 12.0, "export": "/x/export",
    }  # fmt: skip
    print_summary(result, Path("/x"), kept=True)
    out = capsys.readouterr().out
    for part in ("5.000 → 2.000", "NOT EQUAL", "/x/export", "1 committed with 2 nodes"):
        assert part in out
