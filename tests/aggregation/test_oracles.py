"""Values of independent libraries and of the papers' own formulas, for every rule: a file that none of this code made.

`tests/golden/byz_cases.json` names its generator and versions. Where a library differs from
the paper, the paper counts.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aggregation import rules
from aggregation.errors import RuleError
from aggregation.rules import geometry

ORACLE = json.loads((Path(__file__).parents[1] / "golden" / "byz_cases.json").read_text())
CASES: list[dict[str, Any]] = ORACLE["cases"]
BY_F = [(number, f) for number, case in enumerate(CASES) for f in map(int, case["by_f"])]
TOLERANCE = 1e-5


def splitmix64(states: np.ndarray) -> np.ndarray:
    z = states + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


@cache
def generated(number: int) -> np.ndarray:
    case = CASES[number]
    n, n_values, seed = case["n"], case["d"], case["seed"]
    states = np.array([[seed * 1000003 + i * 100003 + k for k in range(n_values)] for i in range(n)], np.uint64)
    x_ND: np.ndarray = (splitmix64(states) >> np.uint64(40)).astype(np.float64) / 2**24 - 0.25
    x_ND[n - case["outlier_rows"] :] *= -4
    x_ND.setflags(write=False)
    return x_ND


@cache
def gram(number: int) -> np.ndarray:
    x_ND = generated(number)
    return np.array([[sum((a * b).tolist()) for b in x_ND] for a in x_ND])


def mixed(number: int, mixing: geometry.Mixing) -> np.ndarray:
    rows = mixing.numerators_MK.astype(np.float64) @ generated(number)
    out: np.ndarray = (rows / mixing.divisors_M[:, None]).astype(np.float32)
    return out


def assert_matches(result: np.ndarray, expected: dict[str, Any]) -> None:
    """Within 1e-5 of the values' size; of long vectors the oracle keeps five values, the sum and the norm."""
    if "values" in expected:
        values = np.array(expected["values"])
        np.testing.assert_allclose(result, values, rtol=TOLERANCE, atol=TOLERANCE * np.abs(values).max())
    elif "first5" in expected:
        wide = result.astype(np.float64)
        np.testing.assert_allclose(result[:5], expected["first5"], rtol=TOLERANCE, atol=TOLERANCE)
        assert wide.sum() == pytest.approx(expected["sum"], rel=TOLERANCE, abs=TOLERANCE * np.abs(wide).sum())
        assert np.linalg.norm(wide) == pytest.approx(expected["l2"], rel=TOLERANCE)
    else:
        wide = result.astype(np.float64)
        assert list(result.shape) == expected["shape"]
        sizes = TOLERANCE * np.abs(wide).sum(axis=1)
        assert (np.abs(wide.sum(axis=1) - expected["row_sums"]) <= sizes).all()
        first = np.array(expected["first"])
        np.testing.assert_allclose(
            result[: first.shape[0], : first.shape[1]], first, rtol=TOLERANCE, atol=TOLERANCE * np.abs(first).max()
        )


def aggregated(number: int, rule: str, f: int = 0, **more: Any) -> np.ndarray:
    return rules.aggregate(rule, generated(number), f=f, **more)


def selected(mixing: geometry.Mixing) -> list[int]:
    return np.flatnonzero(mixing.numerators_MK[0]).tolist()


@pytest.mark.parametrize("number", range(len(CASES)))
def test_inputs_are_the_oracles(number: int) -> None:
    x_ND = generated(number)
    assert hashlib.sha256(x_ND.astype("<f8").tobytes()).hexdigest() == CASES[number]["input_sha256_f64le"]
    assert np.array_equal(x_ND, x_ND.astype(np.float32))


@pytest.mark.parametrize(("rule", "name"), [("mean", "average"), ("median", "median")])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_rules_without_f(number: int, rule: str, name: str) -> None:
    assert_matches(aggregated(number, rule), CASES[number]["no_f"][name])


@pytest.mark.parametrize("number", range(len(CASES)))
def test_geometric_median_and_its_weights(number: int) -> None:
    expected = CASES[number]["no_f"]["geomedian_converged"]
    mixing = geometry.geometric_median(gram(number), np.ones(CASES[number]["n"]))
    weights = mixing.numerators_MK[0] / mixing.divisors_M[0]
    np.testing.assert_allclose(weights, expected["weights"], rtol=TOLERANCE, atol=1e-7)
    assert_matches(mixed(number, mixing)[0], expected)
    assert_matches(aggregated(number, "geometric_median"), expected)


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("tau", [0.5, 1.0])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_centred_clipping_from_zero(number: int, tau: float, iterations: int) -> None:
    case = CASES[number]
    expected = case["no_f"][f"centered_clipping(m=0,tau={tau},L={iterations})"]
    padded = np.pad(gram(number), ((0, 1), (0, 1)))
    mixing = geometry.centered_clip(padded, np.ones(case["n"]), tau, iterations)
    coefficients = mixing.numerators_MK[0, :-1] / mixing.divisors_M[0]
    assert_matches((coefficients @ generated(number)).astype(np.float32), expected)
    zeros = np.zeros(case["d"])
    assert_matches(aggregated(number, "centered_clip", tau=tau, iterations=iterations, previous_D=zeros), expected)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_centred_clipping_from_the_median(number: int) -> None:
    expected = CASES[number]["no_f"]["centered_clipping_btard(init=median,tau=1.0,L=20)"]
    assert_matches(aggregated(number, "centered_clip", tau=1.0, iterations=20), expected)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_norm_clipping(number: int) -> None:
    mixing = geometry.norm_clip(gram(number), np.ones(CASES[number]["n"]), 1.0)
    assert_matches(mixed(number, mixing), CASES[number]["no_f"]["norm_clipping(c=1.0)"])


@pytest.mark.parametrize(("number", "f"), BY_F)
def test_nearest_neighbour_mixing(number: int, f: int) -> None:
    expected = CASES[number]["by_f"][str(f)]
    mixing = geometry.nnm(gram(number), f)
    assert_matches(mixed(number, mixing), expected["nnm"])
    for rule, name in (
        ("nnm+trimmed_mean", "nnm+trmean"),
        ("nnm+median", "nnm+median"),
        ("nnm+geometric_median", "nnm+geomedian_converged"),
    ):
        assert_matches(aggregated(number, rule, f), expected[name])


@pytest.mark.parametrize(("number", "f"), BY_F)
def test_adaptive_clipping(number: int, f: int) -> None:
    expected = CASES[number]["by_f"][str(f)]
    assert_matches(mixed(number, geometry.arc(gram(number), f)), expected["arc"])
    assert_matches(aggregated(number, "arc+nnm+trimmed_mean", f), expected["arc+nnm+trmean"])


@pytest.mark.parametrize(("rule", "name"), [("trimmed_mean", "trmean"), ("meamed", "meamed"), ("mda", "mda")])
@pytest.mark.parametrize(("number", "f"), BY_F)
def test_rules_with_f(number: int, f: int, rule: str, name: str) -> None:
    assert_matches(aggregated(number, rule, f), CASES[number]["by_f"][str(f)][name])


@pytest.mark.parametrize(("number", "f"), BY_F)
def test_covariance_filtering(number: int, f: int) -> None:
    expected = CASES[number]["by_f"][str(f)]["caf_exact_eig"]
    assert_matches(mixed(number, geometry.caf(gram(number), f))[0], expected)
    assert_matches(aggregated(number, "caf", f), expected)


@pytest.mark.parametrize(("number", "f"), BY_F)
def test_krum_and_multi_krum_are_the_papers(number: int, f: int) -> None:
    n, expected = CASES[number]["n"], CASES[number]["by_f"][str(f)]
    if n < 2 * f + 3:
        for rule in ("krum", "multi_krum"):
            with pytest.raises(RuleError, match="needs"):
                aggregated(number, rule, f)
        return
    krum = expected["krum_paper(n-f-2 neighbours)"]
    assert selected(geometry.krum(gram(number), f)) == [krum["index"]]
    assert_matches(aggregated(number, "krum", f), krum)
    for m, default in ((n - f - 2, False), (n - f, True)):
        multi = expected[f"multikrum_paper(m={'n-f' if default else 'n-f-2'})"]
        mixing = geometry.multi_krum(gram(number), f, m)
        assert selected(mixing) == multi["selected"]
        assert_matches(aggregated(number, "multi_krum", f, m=m), multi)
        if default:
            assert_matches(aggregated(number, "multi_krum", f), multi)


def test_a_library_picks_other_winners_than_the_paper() -> None:
    """byzfl sums n - f - 1 neighbours: the oracle has cases that tell them apart, else the test above shows nothing."""
    others = [(number, f) for number, f in BY_F if CASES[number]["by_f"][str(f)].get("krum_same_as_paper") is False]
    assert len(others) == 8
    for number, f in others:
        theirs = CASES[number]["by_f"][str(f)]["krum_byzfl_index"]
        assert selected(geometry.krum(gram(number), f)) != [theirs]


@pytest.mark.parametrize(
    ("number", "f"), [(number, f) for number, f in BY_F if "bulyan_paper" in CASES[number]["by_f"][str(f)]]
)
def test_bulyan_is_the_papers(number: int, f: int) -> None:
    expected = CASES[number]["by_f"][str(f)]["bulyan_paper"]
    mixing = geometry.bulyan_selection(gram(number), f)
    assert np.argmax(mixing.numerators_MK, axis=1).tolist() == expected["selection_order"]
    assert_matches(aggregated(number, "bulyan", f), expected)


TINY = np.array(ORACLE["tiny"]["x"], np.float32)


def test_three_rows_on_a_line() -> None:
    tiny = ORACLE["tiny"]
    for rule, f, name in (
        ("mean", 0, "average"),
        ("median", 0, "median"),
        ("trimmed_mean", 1, "trmean_f1"),
        ("geometric_median", 0, "true_geomedian"),
    ):
        np.testing.assert_allclose(rules.aggregate(rule, TINY, f=f), tiny[name], rtol=TOLERANCE)
    for rule in ("krum", "multi_krum"):  # not defined by the paper; a library returns the first row or two
        with pytest.raises(RuleError, match="needs 5"):
            rules.aggregate(rule, TINY, f=1)


MEANS = {"mean", "arc", "nnm", "norm_clip"}  # a pre-aggregator by itself ends in the mean
ROBUST = [name for name in rules.names() if name not in MEANS]


def honest(n: int, seed: int = 5) -> np.ndarray:
    states = np.array([[seed * 1000003 + i * 100003 + k for k in range(40)] for i in range(n)], np.uint64)
    x_ND: np.ndarray = ((splitmix64(states) >> np.uint64(40)).astype(np.float64) / 2**24).astype(np.float32)
    return x_ND


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rule", rules.names())
def test_a_row_that_is_not_finite_is_out_and_uses_up_f(rule: str, bad: float) -> None:
    rows = honest(12)
    poisoned = rows.copy()
    poisoned[4, 7] = bad
    kept = np.delete(rows, 4, axis=0)
    assert np.array_equal(rules.aggregate(rule, poisoned, f=2), rules.aggregate(rule, kept, f=1))
    assert np.array_equal(rules.aggregate(rule, poisoned, f=1), rules.aggregate(rule, kept, f=1))


@pytest.mark.parametrize("rule", ROBUST)
def test_a_huge_row_moves_nothing_far_and_nothing_loops(rule: str) -> None:
    rows = honest(11)
    rows[3] = 1e30
    result = rules.aggregate(rule, rows, f=2)
    good = np.delete(rows, 3, axis=0)
    assert np.isfinite(result).all()
    assert np.linalg.norm(result - good.mean(axis=0)) <= 3 * np.linalg.norm(good - good.mean(axis=0), axis=1).max()


@pytest.mark.parametrize("rule", rules.names())
def test_equal_rows_come_back_from_every_rule(rule: str) -> None:
    row = honest(1)[0]
    for n, f in ((7, 0), (7, 1), (11, 2)):
        np.testing.assert_allclose(rules.aggregate(rule, np.tile(row, (n, 1)), f=f), row, rtol=1e-6)
        assert not rules.aggregate(rule, np.zeros((n, 40)), f=f).any()


@pytest.mark.parametrize("rule", ROBUST)
def test_colluders_that_send_the_same_row_divide_nothing_by_zero(rule: str) -> None:
    rows = honest(11)
    rows[:2] = 5.0
    assert np.isfinite(rules.aggregate(rule, rows, f=2)).all()
    rows[:] = rows[-1]
    rows[0] = 5.0
    np.testing.assert_allclose(rules.aggregate(rule, rows, f=2), rows[-1], rtol=1e-5)


@pytest.mark.parametrize("rule", ["arc", "norm_clip"])
def test_clipping_lets_no_row_be_longer_than_an_honest_one(rule: str) -> None:
    rows = honest(11)
    rows[3] = 1e30
    longest = np.linalg.norm(np.delete(rows, 3, axis=0), axis=1).max()
    assert np.linalg.norm(rules.aggregate(rule, rows, f=2)) <= longest


def test_krum_falls_for_as_many_equal_rows_as_it_has_neighbours() -> None:
    """n - f - 1 equal rows score 0: a limit of the rule, which it is not to be used past."""
    rows = honest(7)
    rows[:4] = 9.0
    assert (rules.aggregate("krum", rows, f=2) == 9.0).all()


@pytest.mark.parametrize("rule", ["trimmed_mean", "multi_krum", "nnm", "caf", "mda", "arc", "meamed", "bulyan"])
def test_without_liars_it_is_the_mean(rule: str) -> None:
    rows = honest(7)
    np.testing.assert_allclose(rules.aggregate(rule, rows, f=0), rules.aggregate("mean", rows), rtol=1e-6)
