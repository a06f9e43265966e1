"""The registry: which rules there are, what they need, and that their bound on the result's norm holds."""

from __future__ import annotations

import numpy as np
import pytest

from aggregation import rules
from aggregation.errors import RuleError

CONTRACT = """mean median trimmed_mean krum multi_krum geometric_median centered_clip
nnm+trimmed_mean arc+nnm+trimmed_mean bulyan"""


def norms(rows: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.norm(rows.astype(np.float64), axis=-1))


def test_the_rules_that_outsiders_rely_on_are_there() -> None:
    known = rules.names()
    assert set(CONTRACT.split()) <= set(known)
    assert {"meamed", "norm_clip", "arc", "nnm", "mda", "caf", "default", "nnm+krum"} <= set(known)
    assert len(set(known)) == len(known)
    assert [rules.by_name(name).name for name in known] == known


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("mean", [1, 1, 1]),
        ("norm_clip", [1, 1, 1]),
        ("median", [1, 3, 5]),
        ("trimmed_mean", [1, 3, 5]),
        ("meamed", [1, 3, 5]),
        ("geometric_median", [1, 3, 5]),
        ("default", [1, 3, 5]),
        ("nnm", [1, 3, 5]),
        ("arc", [1, 3, 5]),
        ("mda", [1, 3, 5]),
        ("caf", [1, 3, 5]),
        ("krum", [3, 5, 7]),
        ("multi_krum", [3, 5, 7]),
        ("arc+nnm+krum", [3, 5, 7]),
        ("bulyan", [3, 7, 11]),
        ("nnm+bulyan", [3, 7, 11]),
    ],
)
def test_each_rule_states_how_many_it_needs_and_works_with_so_many(name: str, needed: list[int]) -> None:
    assert [rules.minimum_contributions(name, f) for f in range(3)] == needed
    for f, n in enumerate(needed):
        updates = np.random.default_rng(n).standard_normal((n, 30))
        assert rules.fits(name, n, f)
        assert rules.aggregate(name, updates, f=f).shape == (30,)
        if rules.needs_f(name) and n > 1:
            assert not rules.fits(name, n - 1, f)
            with pytest.raises(RuleError, match=f"needs {n} contributions for f = {f}"):
                rules.aggregate(name, updates[:-1], f=f)


def test_what_f_weights_and_centres_mean_to_whom() -> None:
    assert [name for name in rules.names() if not rules.needs_f(name)] == ["mean", "norm_clip"]
    assert [name for name in rules.names() if rules.is_centred(name)] == ["centered_clip", "default"]
    assert [name for name in rules.names() if rules.clips_aggregate(name)] == ["default"]
    weighted = ["mean", "geometric_median", "centered_clip", "default", "norm_clip", "arc"]
    assert [name for name in rules.names() if rules.uses_weights(name)] == weighted
    for name, uses, centred in (
        ("arc+default", True, True),
        ("nnm+mean", False, False),
        ("norm_clip+krum", False, False),
    ):
        assert (rules.uses_weights(name), rules.is_centred(name)) == (uses, centred)


@pytest.mark.parametrize("name", rules.names())
def test_weights_change_the_result_of_those_that_use_them_alone(name: str) -> None:
    updates = np.random.default_rng(3).standard_normal((9, 40)) * np.arange(1, 10)[:, None]
    even, uneven = (rules.aggregate(name, updates, f=1, weights_N=w) for w in ([1] * 9, [5, 4, 3, 4, 5, 1, 2, 3, 4]))
    assert (even.tobytes() != uneven.tobytes()) == rules.uses_weights(name)


def test_only_searches_that_end_are_taken_on() -> None:
    assert rules.fits("mda", 20, 9)
    assert not rules.fits("mda", 256, 127)
    assert rules.fits("median", 257, 1)
    assert not rules.fits("krum", 257, 1)
    with pytest.raises(RuleError, match="search too long"):
        rules.aggregate("mda", np.ones((256, 2)), f=127)


@pytest.mark.parametrize(
    "name",
    ["kurm", "", "+", "mean+median", "krum+nnm", "nnm+nnm", "arc+nnm+arc+mean", "nnm+", "+nnm", "nnm median", "NNM"],
)
def test_what_is_no_rule_is_said_so(name: str) -> None:
    for call in (rules.by_name, rules.needs_f, rules.is_centred, lambda name: rules.fits(name, 5, 1)):
        with pytest.raises(RuleError, match="rule"):
            call(name)
    for f in (-1, -100):
        with pytest.raises(RuleError, match="less than none"):
            rules.minimum_contributions("median", f)


def test_pre_aggregators_come_in_any_order_and_end_in_the_mean_by_themselves() -> None:
    updates = np.random.default_rng(0).standard_normal((9, 64))
    for short, long in (("nnm", "nnm+mean"), ("arc", "arc+mean"), ("arc+nnm", "arc+nnm+mean")):
        assert rules.aggregate(short, updates, f=2).tobytes() == rules.aggregate(long, updates, f=2).tobytes()
    assert not np.array_equal(
        rules.aggregate("arc+nnm+median", updates, f=2), rules.aggregate("nnm+arc+median", updates, f=2)
    )


@pytest.mark.parametrize("name", rules.names())
@pytest.mark.parametrize(("n", "f"), [(8, 1), (11, 2), (12, 0), (7, 1)])
def test_no_result_is_longer_than_the_bound(name: str, n: int, f: int) -> None:
    random = np.random.default_rng(n)
    growth = rules.norm_growth(name, n, f)
    for kind in range(4):
        # Rows that are long in few coordinates each are what a median makes longer.
        updates = random.standard_normal((n, 60)) * (random.random((n, 60)) < (1.0, 0.6, 0.55, 0.5)[kind])
        updates = updates / norms(updates)[:, None]
        assert norms(rules.aggregate(name, updates, f=f)) <= growth * norms(updates).max() * (1 + 1e-5)
        if rules.is_centred(name):
            previous = random.standard_normal(60)
            result = rules.aggregate(name, updates, f=f, previous_D=previous / norms(previous))
            assert norms(result) <= 1 + 1e-5


def test_the_bound_is_one_for_means_and_root_two_at_most_for_medians() -> None:
    for name in ("mean", "krum", "nnm", "geometric_median", "norm_clip", "caf"):
        assert rules.norm_growth(name, 8, 1) == 1.0
    for name in ("median", "default", "centered_clip"):
        growths = [rules.norm_growth(name, n, 0) for n in range(1, 40)]
        assert growths[0] == growths[1] == 1.0
        assert max(growths) < np.sqrt(2)
    assert rules.norm_growth("trimmed_mean", 3, 1) == rules.norm_growth("median", 3, 1)
    assert rules.norm_growth("bulyan", 11, 2) == pytest.approx(np.sqrt(7 / 3))
    with pytest.raises(RuleError, match="needs"):
        rules.norm_growth("krum", 4, 1)


@pytest.mark.parametrize(("n", "f"), [(3, 1), (7, 2), (8, 1), (9, 4), (10, 4), (12, 0)])
@pytest.mark.parametrize("name", ["median", "trimmed_mean", "meamed"])
def test_rules_per_coordinate_can_reach_their_bound(name: str, n: int, f: int) -> None:
    """So many rows as decide agree on each coordinate, and none of them on all."""
    n_agree = n // 2 + 1 if name == "median" else n - f
    updates = ((np.arange(n)[:, None] - np.arange(10 * n)) % n < n_agree).astype(np.float32)
    growth = norms(rules.aggregate(name, updates, f=f)) / norms(updates).max()
    assert growth == pytest.approx(rules.norm_growth(name, n, f))
