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
from aggregation.rules.gate import clip_factor, median, normalised
from aggregation.rules.policy import Choice, planned_f

ALL = 1 << 16
"""An f_max that lets the fraction decide."""


def chosen(rule: str, n: int, *, f_max: int = ALL, fraction: float = 0.2, rejected: int = 0) -> Choice:
    return effective(rule, [1.0] * n, f_max=f_max, fraction=fraction, rejected=rejected)


# -- f -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "f_max", "f"),
    [
        (1, 9, 0),
        (2, 9, 0),
        (3, 9, 1),
        (4, 9, 1),
        (5, 9, 1),
        (6, 9, 1),
        (7, 9, 1),
        (9, 9, 1),
        (10, 9, 2),
        (14, 9, 2),
        (15, 9, 3),
        (16, 9, 3),
        (100, 9, 9),
        (100, ALL, 20),
        (100, 0, 0),
        (3, 0, 0),
    ],
)
def test_f_is_a_fifth_at_least_1_from_3_on_at_most_f_max(n: int, f_max: int, f: int) -> None:
    choice = chosen("median", n, f_max=f_max)
    assert choice.f == f
    assert (choice.degraded is None) == (f > 0)
    assert n >= rules.minimum_contributions(choice.rule, choice.f)
    if n >= 3:
        assert (choice.rule, choice.fallback) == ("median", None)


@pytest.mark.parametrize(
    ("fraction", "n", "f"), [(0.29, 100, 29), (0.07, 100, 7), (0.1, 30, 3), (0.57, 100, 57), (1e-5, 100_000, 1)]
)
def test_the_fraction_is_the_decimal_number_that_a_runspec_shows(fraction: float, n: int, f: int) -> None:
    """In binary 0.29·100 is 28.999…, and 0.57·100 is 56.999…"""
    assert planned_f(n, ALL, fraction) == f


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 100), st.integers(0, 60))
def test_f_is_what_is_left_of_the_budget_and_never_below_1_from_3_on(
    n: int, hundredths: int, f_max: int, rejected: int
) -> None:
    fraction = hundredths % 101 / 100
    f = planned_f(n, f_max, fraction, rejected)
    floor = 1 if n >= 3 and f_max else 0
    assert f == max(min(f_max, hundredths % 101 * (n + rejected) // 100) - rejected, floor)
    assert f <= max(f_max, floor)


@given(st.integers(3, 300), st.data())
def test_liars_within_the_fraction_are_withstood_whoever_of_them_is_thrown_out(n_all: int, data: st.DataObject) -> None:
    n_liars = data.draw(st.integers(0, n_all // 5))
    rejected = data.draw(st.integers(0, n_liars))
    n = n_all - rejected
    assert planned_f(n, ALL, 0.2, rejected) >= n_liars - rejected


def test_rejected_rows_use_up_f() -> None:
    assert [chosen("median", 18, rejected=rejected).f for rejected in range(5)] == [3, 2, 2, 1, 1]
    assert chosen("median", 3, rejected=7).f == 1
    assert chosen("median", 2, rejected=7).f == 0
    assert chosen("median", 10, f_max=0, rejected=3).f == 0


def test_n_are_the_rows_that_weigh_something() -> None:
    assert effective("median", [1, 0, 1, 0.0, 1], f_max=9) == Choice("median", 1, None, None)
    assert effective("default", [1, 0, 0], f_max=9).rule == "mean"
    assert effective("default", [5, 0, 2], f_max=9).rule == "norm_clip"


# -- the rule ------------------------------------------------------------------------------------------------------

ROBUST = [name for name in rules.names() if rules.needs_f(name)]


@pytest.mark.parametrize("rule", ROBUST)
def test_one_is_taken_as_it_is_and_two_are_clipped_and_both_are_said(rule: str) -> None:
    assert chosen(rule, 1) == Choice("mean", 0, "mean", "no robustness with 1 contribution")
    assert chosen(rule, 2) == Choice("norm_clip", 0, "norm_clip", "no robustness with 2 contributions")


@pytest.mark.parametrize("rule", ["mean", "norm_clip", "norm_clip+mean"])
@pytest.mark.parametrize("n", [1, 2, 3, 50])
def test_rules_that_need_no_f_never_fall_back_and_say_what_they_lack(rule: str, n: int) -> None:
    assert chosen(rule, n, rejected=2) == Choice(rule, 0, None, "no robustness")


@pytest.mark.parametrize("rule", ["nnm", "arc", "arc+nnm", "nnm+mean", "norm_clip+arc"])
@pytest.mark.parametrize("n", [3, 7, 50])
def test_what_ends_in_the_mean_says_that_it_is_no_defence(rule: str, n: int) -> None:
    """f counts for it, but one row at 1e6 goes through nnm, and what arc leaves of f rows pulls as one."""
    choice = chosen(rule, n)
    assert (choice.rule, choice.f, choice.fallback, choice.degraded) == (rule, max(n // 5, 1), None, "no robustness")


def test_all_others_are_a_defence() -> None:
    means = {"mean", "norm_clip", "arc", "nnm"}
    assert {rule for rule in rules.names() if chosen(rule, 20).degraded} == means


LIMITS = {
    "f ≤ (n - 1)/2": (["median", "trimmed_mean", "default", "centered_clip", "geometric_median", "mda"], 1),
    "f ≤ (n - 3)/2": (["krum", "multi_krum"], 3),
    "f ≤ (n - 3)/4": (["bulyan"], 3),
}


@pytest.mark.parametrize("n", [3, 4, 5, 6, 7, 9, 10, 14, 15, 16])
@pytest.mark.parametrize("kind", LIMITS)
def test_a_rule_is_in_force_where_its_limit_allows_f_and_else_the_first_fallback(kind: str, n: int) -> None:
    names, extra = LIMITS[kind]
    most = (n - extra) // (4 if "4" in kind else 2)
    f = max(n // 5, 1)
    for rule in names:
        choice = chosen(rule, n)
        assert choice.f == f  # never lowered for a rule's sake
        if f <= most:
            assert (choice.rule, choice.fallback, choice.degraded) == (rule, None, None)
        else:
            assert (choice.rule, choice.fallback, choice.degraded) == ("nnm+trimmed_mean", "nnm+trimmed_mean", None)


def test_where_the_default_run_stands() -> None:
    """The table of small N for a fifth of liars: what is done, and for how many."""
    found = {n: (chosen("default", n).rule, chosen("default", n).f) for n in (1, 2, 3, 4, 5, 6, 7, 9, 10, 14, 15, 16)}
    assert found == {
        1: ("mean", 0), 2: ("norm_clip", 0), 3: ("default", 1), 4: ("default", 1), 5: ("default", 1),
        6: ("default", 1), 7: ("default", 1), 9: ("default", 1), 10: ("default", 2), 14: ("default", 2),
        15: ("default", 3), 16: ("default", 3),
    }  # fmt: skip


def test_too_many_rows_for_geometry_fall_back_to_a_coordinate_rule() -> None:
    assert chosen("default", 2000) == Choice("trimmed_mean", 400, "trimmed_mean", None)


def test_where_no_rule_withstands_f_nothing_is_combined() -> None:
    for rule in ROBUST:
        with pytest.raises(RuleError, match="nor its fallbacks"):
            chosen(rule, 4, fraction=0.5)


def test_nothing_to_combine_is_an_error() -> None:
    for rule, weights, f_max in (
        ("mean", [], 1),
        ("median", [], 1),
        ("median", [0.0, 0.0], 1),
        ("median", [1.0] * 3, -1),
        ("kurm", [1.0] * 3, 1),
        ("mean", [1.0], -1),
    ):
        with pytest.raises(RuleError):
            effective(rule, weights, f_max=f_max)
    for fraction in (-0.1, 1.1, math.nan):
        with pytest.raises(RuleError):
            chosen("median", 5, fraction=fraction)
    with pytest.raises(RuleError):
        planned_f(5, 1, 0.2, -1)


# -- degraded ------------------------------------------------------------------------------------------------------


def test_degraded_says_why() -> None:
    assert chosen("median", 7, f_max=0).degraded == "no robustness with f_max 0"
    assert chosen("default", 7, f_max=0).degraded == "no robustness with f_max 0"
    assert effective("default", [1, 1, 2], f_max=9).degraded == (
        "the 1 heaviest of 3 contributions hold half of the weight or more"
    )
    assert effective("default", [1, 1, 1.999], f_max=9).degraded is None
    assert effective("default", [3, 0, 1, 1, 2], f_max=9).degraded is None
    assert effective("default", [6, *[1] * 12, 6], f_max=9).degraded is not None  # f = 2
    assert effective("median", [1, 1, 100], f_max=9).degraded is None  # it takes no weights


@given(st.permutations([0.1, 0.2, 0.3, 0.6]))
def test_the_order_of_the_rows_does_not_matter(weights: list[float]) -> None:
    assert effective("default", weights, f_max=9).degraded is not None  # 0.6 of 1.2


# -- the gate ------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("n_steps", [(32, 32, 4, 4), (32, 32, 4, 4, 4), (32, 4), (320, 40, 40)])
def test_machines_of_mixed_speeds_are_all_let_in(n_steps: tuple[int, ...]) -> None:
    """Two members at H and two, or three, at H/8: a raw norm would throw one half of them out."""
    norms = [0.01 * steps**0.8 for steps in n_steps]
    assert out(norms, [3e-3 * steps for steps in n_steps]) == []
    grown_by_the_root = [0.01 * steps**0.5 for steps in n_steps]  # noise that doesn't add up
    assert out(grown_by_the_root, [3e-3 * steps for steps in n_steps]) == []


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


# -- the aggregate's clip factor -------------------------------------------------------------------------------------


def test_an_aggregate_may_be_twice_as_long_as_the_median_of_those_before_it() -> None:
    assert clip_factor(100.0, 1.0, [1.0, 1.0]) == 1.0  # too few to say
    assert clip_factor(2.0, 1.0, [1.0, 1.0, 1.0]) == 1.0
    assert clip_factor(4.0, 1.0, [1.0, 1.0, 1.0]) == 0.5
    assert clip_factor(4.0, 1.0, [1.0, 3.0, 0.1, 1.0]) == 0.5
    assert clip_factor(32.0, 32.0, [1.0] * 3) == 1.0  # 32^0.8 is 16
    assert clip_factor(64.0, 32.0, [1.0] * 3) == 0.5
    assert clip_factor(1e-3, 1.0, [1.0] * 3) == 1.0


def test_nothing_to_compare_with_clips_nothing() -> None:
    assert clip_factor(5.0, 1.0, [0.0] * 16) == 1.0  # else a run that stood still would do so for ever
    assert clip_factor(0.0, 1.0, [1.0] * 3) == 1.0
    assert clip_factor(5.0, 0.0, [1.0] * 3) == 1.0
    assert clip_factor(0.0, 0.0, [1.0] * 3) == 1.0


def test_an_aggregate_that_is_none_is_an_error() -> None:
    for norm, sum_lr in ((math.nan, 1.0), (math.inf, 1.0), (-1.0, 1.0), (1.0, math.nan), (1.0, math.inf), (1.0, -1.0)):
        with pytest.raises(RuleError):
            clip_factor(norm, sum_lr, [1.0] * 3)


NORMS = st.floats(1e-12, 1e12)


@settings(max_examples=60, deadline=None)
@given(NORMS, st.floats(1e-6, 1e3), st.lists(NORMS, min_size=3, max_size=16))
def test_the_clip_factor_is_the_formula_in_fp32(norm: float, sum_lr: float, past: list[float]) -> None:
    s = clip_factor(norm, sum_lr, past)
    assert np.float32(s) == s
    assert s == pytest.approx(min(1.0, 2 * float(np.median(past)) * sum_lr**0.8 / norm), rel=1e-6)
    assert normalised(s * norm, sum_lr) <= 2 * median(past) * (1 + 1e-6) or s == 1.0


def test_a_run_of_long_aggregates_lifts_the_median_slowly() -> None:
    kept = [1.0] * 16
    for _ in range(8):
        s = clip_factor(1e6, 1.0, kept[-16:])
        kept.append(normalised(s * 1e6, 1.0))
        assert kept[-1] <= 2.0 + 1e-6  # half of what is kept is as it was
    assert max(kept) == pytest.approx(2.0)
