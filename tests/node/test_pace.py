"""Whether a line keeps up, and what catching up takes."""

from __future__ import annotations

import pytest

from node.pace import Pace, seconds_to_catch_up

MBIT = 1e6 / 8


def outlook(pace: Pace, rate: float, n_behind: int = 8) -> str:
    return pace.outlook(rate * MBIT, round_bytes=2.008e6, n_behind=n_behind)


def test_a_line_that_is_too_slow_is_told_the_figure_and_the_need() -> None:
    pace = Pace()
    for number in range(6):
        pace.heard(6.0 * number)
        pace.fetched(2_008_000, 10.7)
    verdict = pace.verdict()
    assert "2.01 MB" in verdict
    assert "every 6 s" in verdict
    assert "needs 2.68 Mbit/s" in verdict
    assert "come at 1.5 Mbit/s" in verdict
    assert pace.verdict() == ""  # not at every round


def test_a_line_that_keeps_up_is_told_nothing() -> None:
    pace = Pace()
    for number in range(6):
        pace.heard(6.0 * number)
        pace.fetched(2_008_000, 5.35)
    assert pace.verdict() == ""


def test_nothing_is_said_before_it_is_known_how_often_rounds_come() -> None:
    pace = Pace()
    for _ in range(9):
        pace.fetched(10**9, 1e6)
    pace.heard(0.0)
    pace.heard(1.0)
    assert pace.interval_s is None
    assert pace.verdict() == ""


def test_one_long_round_does_not_change_how_often_they_come() -> None:
    pace = Pace()
    for at in (0, 6, 12, 300, 306, 312):
        pace.heard(float(at))
    assert pace.interval_s == 6.0


@pytest.mark.parametrize(("n_parameters", "behind"), [(120_000, 16), (820_000, 8), (1_500_000, 4)])
def test_a_newcomer_at_3_mbit_s_is_there_within_3_minutes(n_parameters: int, behind: int) -> None:
    """Rounds of 6 s; the snapshot is some rounds old. It contributes in the round after it holds the state."""
    seconds = seconds_to_catch_up(
        state_bytes=8 * n_parameters, round_bytes=1.004 * n_parameters, rate_bytes_s=3 * MBIT, interval_s=6.0,
        behind=behind,
    )  # fmt: skip
    assert seconds + 2 * 6.0 < 180


def test_2_million_parameters_are_near_what_such_a_line_carries() -> None:
    """2.008 MB every 6 s are 2.68 of its 3 Mbit/s: it gains 0.32 Mbit/s, and needs minutes more than a wider line."""
    slow, wide = (
        seconds_to_catch_up(state_bytes=16e6, round_bytes=2.008e6, rate_bytes_s=rate * MBIT, interval_s=6.0)
        for rate in (3, 4)
    )
    assert 380 < slow < 420
    assert wide < 100
    never = seconds_to_catch_up(state_bytes=16e6, round_bytes=2.5e6, rate_bytes_s=3 * MBIT, interval_s=6.0)
    assert never == float("inf")


def test_what_a_newcomer_is_told_of_its_way_to_the_newest_state() -> None:
    pace = Pace()
    assert outlook(pace, 3) == ""
    for number in range(4):
        pace.heard(6.0 * number)
    assert "8 rounds behind: up to date in about 398 s" in outlook(pace, 3)
    assert "can't keep up" in outlook(pace, 2)
    assert "needs 2.68 Mbit/s; here they come at 2 Mbit/s" in outlook(pace, 2)
    assert outlook(pace, 3, n_behind=1) == ""
