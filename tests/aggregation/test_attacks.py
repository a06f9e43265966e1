"""The default rule against every attack of the benchmark, and the defences that are none; one seed."""

from __future__ import annotations

import pytest

from tests.bench._attacks_liars import ATTACKS
from tests.bench._attacks_run import DEFENCES, accuracy


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_the_default_rule_learns_under_every_attack(attack: str) -> None:
    assert accuracy(DEFENCES["default"], attack, 0) >= 75


@pytest.mark.slow
def test_the_mean_collapses_under_a_tenfold_sign_flip() -> None:
    assert accuracy(DEFENCES["mean"], "flip10", 0) < 30


@pytest.mark.slow
def test_the_gate_alone_is_no_defence() -> None:
    assert accuracy(DEFENCES["gate+mean"], "flip10", 0) > 75
    assert accuracy(DEFENCES["gate+mean"], "adaptive_flip", 0) < 30


@pytest.mark.slow
def test_the_same_run_gives_the_same_accuracy() -> None:
    first, second = (accuracy(DEFENCES["default"], "alie", 1, rounds=4) for _ in range(2))
    assert first == second
