"""What few contributions change, and who is out before a rule is asked."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregation import rules
from aggregation.errors import RuleError
from aggregation.rules import effective, norm_gate


@pytest.mark.parametrize(
    ("n", "f_max", "f"),
    [
        (1, 9, 0),
        (2, 9, 0),
        (3, 9, 1),
        (4, 9, 1),
        (9, 9, 1),
        (10, 9, 2),
        (15, 9, 3),
        (100, 9, 9),
        (100, 0, 0),
        (3, 0, 0),
    ],
)
def test_f_is_a_fifth_at_least_1_from_3_on_at_most_f_max(n: int, f_max: int, f: int) -> None:
    rule, found, fallback, degraded = effective("median", n, f_max)
    assert (rule, found, fallback) == ("median", f, None)
    assert (degraded is None) == (f > 0)
    assert n >= rules.minimum_contributions(rule, found)


def test_degraded_says_why() -> None:
    assert effective("median", 1, 3)[3] == "no robustness with 1 contribution"
    assert effective("median", 2, 3)[3] == "no robustness with 2 contributions"
    assert effective("median", 7, 0)[3] == "no robustness with f_max 0"


@pytest.mark.parametrize("n", [1, 2, 3, 50])
def test_the_mean_never_falls_back_and_says_what_it_lacks(n: int) -> None:
    assert effective("mean", n, 5) == ("mean", 0, None, "no robustness")


def test_nothing_to_combine_is_an_error() -> None:
    for rule, n, f_max in (("mean", 0, 1), ("median", 0, 1), ("median", 3, -1), ("kurm", 3, 1)):
        with pytest.raises(RuleError):
            effective(rule, n, f_max)


def out(norms: list[float], sum_lrs: list[float] | None = None, **limits: float) -> list[int]:
    reasons = norm_gate(norms, sum_lrs or [1.0] * len(norms), **limits)
    return [i for i, reason in enumerate(reasons) if reason is not None]


def test_far_from_the_median_is_out() -> None:
    assert out([1, 1, 1, 3.01]) == [3]
    assert out([1, 1, 1, 3]) == []
    assert out([1, 1, 1, 0.1]) == []
    assert out([1, 1, 1, 0.0999, 0]) == [3, 4]
    assert out([1, 2, 1000]) == [2]
    assert out([1, 2, 4, 10]) == [3] == out([1, 2, 4, 9.01])  # the mean of the two middle ones is 3
    assert out([1, 2, 4, 9]) == []
    assert norm_gate([1, 1, 8], [1, 1, 1])[2] == "norm is 8 times the median, above 3"
    assert norm_gate([1, 1, 0.01], [1, 1, 1])[2] == "norm is 0.01 times the median, below 0.1"


def test_more_steps_are_no_fault() -> None:
    steps = [30.0, 30.0, 240.0, 240.0, 240.0]
    norms = [step**0.8 for step in steps]
    assert out(norms, steps) == []
    assert out([240**0.8, 30**0.8, 30**0.8], [240, 30, 30]) == []
    assert out([240**0.8, 30**0.8, 30**0.8], [240, 30, 30], power=0.0) == [0]
    assert out([*norms, 240**0.8 * 3.1], [*steps, 240]) == [5]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, -math.inf])
def test_absurd_numbers_are_out_and_in_no_median(bad: float) -> None:
    assert out([bad]) == [0]
    assert out([1, bad]) == [1]
    assert out([1, 1, bad, 1]) == [2]
    assert out([1, 1, 1], [1, bad, 1]) == [1]
    assert out([1, 1, 1, bad, bad, bad, bad, 4]) == [3, 4, 5, 6, 7]


def test_two_cannot_say_which_of_them_is_odd() -> None:
    assert out([1, 1000]) == []
    assert out([0, 1]) == []
    assert out([1, 1000, math.nan]) == [2]


def test_zeros_do_not_throw_out_who_trained() -> None:
    assert out([0, 0, 0, 5]) == []
    assert out([0, 5, 5, 5]) == [0]
    assert out([0, 1, 1, 1], [0, 1, 1, 1]) == [0]
    assert out([1, 1, 1, 1], [0, 1, 1, 1]) == [0]


def test_extremes_do_not_overflow() -> None:
    assert out([1e308, 1e308, 1e308, 1e-308], [1e-300] * 4) == [3]
    assert out([5e-324, 5e-324, 5e-324], [1e300] * 3) == []


def test_a_gate_that_makes_no_sense_is_refused() -> None:
    for limits in ({"low": -0.1}, {"low": 1.1}, {"high": 0.9}, {"high": math.inf}, {"power": math.nan}):
        with pytest.raises(RuleError):
            norm_gate([1], [1], **limits)
    with pytest.raises(RuleError):
        norm_gate([1, 2], [1])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(1e-6, 1e6), st.floats(1e-6, 1e3)), min_size=3, max_size=12))
def test_the_gate_is_the_formula(rows: list[tuple[float, float]]) -> None:
    values = np.array([norm / sum_lr**0.8 for norm, sum_lr in rows])
    ratios = values / np.median(values)
    near = (abs(ratios - 3) < 1e-9) | (abs(ratios - 0.1) < 1e-9)
    expected = [i for i, ratio in enumerate(ratios) if not 0.1 <= ratio <= 3]
    found = out([norm for norm, _ in rows], [sum_lr for _, sum_lr in rows])
    assert near.any() or found == expected
