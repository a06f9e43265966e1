"""Whole runs in real processes: alone, exact, two at once."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from protos.runspec import RunSpec
from tests.e2e.runs import COORDINATOR, environment, left_over, simulate
from tests.reference import diloco

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def replayed(folder: Path) -> diloco.ReplayResult:
    from node.training.model import build_task

    spec = RunSpec.from_bytes((folder / "spec.json").read_bytes())
    return diloco.replay(folder, spec, build_task(spec))


def committed(result: Any) -> list[dict[str, Any]]:
    return [row for row in result["rounds"] if row["outcome"] == "committed"]


@pytest.mark.long  # test_village has it in one process, and test_default_run compares real ones with plain DiLoCo
def test_with_fp32_and_the_mean_a_run_ends_at_plain_dilocos_parameters(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "run"
    result = simulate(
        folder, "--nodes", "2", "--rounds", "3", "--steps", "12", "--codec", "fp32", "--rule", "mean", "--seed", "7"
    )
    assert len(committed(result)) == 3
    reference = replayed(folder)
    model = AutoModelForCausalLM.from_pretrained(result["export"], local_files_only=True)
    difference = total = 0.0
    for name, parameter in model.named_parameters():
        wanted = reference.parameters[name]
        difference += float(torch.sum((parameter.detach() - wanted) ** 2))
        total += float(torch.sum(wanted**2))
    assert difference**0.5 <= 1e-5 * total**0.5


def test_one_node_goes_on_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = simulate(folder, "--nodes", "1", "--rounds", "2", "--steps", "8")
    rows = committed(result)
    assert len(rows) == 2
    assert result["digests_equal"] is True
    assert result["val_loss"] < result["initial_val_loss"]
    assert all(row["degraded"] for row in rows)
    assert left_over(folder) == []


@pytest.mark.long
def test_two_runs_on_one_machine_at_once(tmp_path: Path) -> None:
    def start(name: str) -> subprocess.Popen[str]:
        words = [*COORDINATOR, "simulate", "--json", "--data", str(tmp_path / name)]
        words += ["--nodes", "2", "--rounds", "2", "--steps", "6"]
        return subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True
        )

    both = [start("a"), start("b")]
    try:
        ended = [process.communicate(timeout=250) for process in both]
    finally:
        for process in both:
            process.kill()
    for process, (_, err) in zip(both, ended, strict=True):
        assert process.returncode == 0, err[-3000:]
    results = [json.loads(out) for out, _ in ended]
    assert results[0]["run_id"] != results[1]["run_id"]
    assert all(result["digests_equal"] for result in results)
    assert left_over(tmp_path) == []
