"""NumericsSpec takes what fits together and names the field that does not."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from aggregation.errors import SpecError
from aggregation.spec import NUMERICS_VERSION, NumericsSpec, unknown_codec, unknown_rule

GOOD = NumericsSpec(
    n_values=100_000,
    chunk_values=8192,
    leaf_values=1024,
    codec="int8",
    block=1024,
    rule="mean",
    f_max=0,
    outer_lr=0.7,
    outer_momentum=0.6,
)


def test_a_good_one_is_of_this_version_and_frozen() -> None:
    assert GOOD.numerics_version == NUMERICS_VERSION == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        GOOD.block = 16  # type: ignore[misc]


@pytest.mark.parametrize(
    "changes",
    [
        {"outer_lr": 0, "outer_momentum": 0},
        {"rule": "median", "f_max": 3},
        {"codec": "fp32"},
        {"codec": "topk"},
        {"codec": "topk", "block": 64},
        {"rule": "arc+nnm+trimmed_mean", "fraction": 0.5},
        {"rule": "default", "f_max": 1 << 16, "fraction": 0},
        {"n_values": 1},
        {"chunk_values": 1024},
    ],
)
def test_these_are_good_too(changes: dict[str, Any]) -> None:
    dataclasses.replace(GOOD, **changes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_values", 0),
        ("n_values", 1 << 50),
        ("n_values", True),
        ("n_values", "8"),
        ("chunk_values", 0),
        ("chunk_values", 1024 * 7 + 512),
        ("chunk_values", 1 << 40),
        ("leaf_values", 0),
        ("leaf_values", 1000),
        ("leaf_values", 16384),
        ("codec", "int7"),
        ("codec", None),
        ("block", 0),
        ("block", 24),
        ("block", 1.0),
        ("rule", "Mean"),
        ("rule", "krum+nnm"),
        ("fraction", 0.6),
        ("fraction", math.nan),
        ("f_max", (1 << 16) + 1),
        ("f_max", -1),
        ("outer_lr", math.nan),
        ("outer_lr", -0.1),
        ("outer_lr", math.inf),
        ("outer_lr", "0.7"),
        ("outer_momentum", 1.0),
        ("outer_momentum", 1 - 1e-12),
        ("outer_momentum", -0.1),
        ("numerics_version", NUMERICS_VERSION + 1),
    ],
)
def test_the_wrong_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(SpecError, match=field):
        dataclasses.replace(GOOD, **{field: value})


def test_topk_needs_blocks_that_its_indices_reach() -> None:
    for block in (48, 8192):
        with pytest.raises(SpecError, match="block"):
            dataclasses.replace(GOOD, codec="topk", block=block, leaf_values=24576, chunk_values=24576)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("kurm", "krum"),
        ("Median", "median"),
        ("trimmed-mean", "trimmed_mean"),
        ("arc+nmm+trimed_mean", "arc+nnm+trimmed_mean"),
        ("krum+nnm", "nnm+krum"),
    ],
)
def test_a_word_that_is_no_rule_names_the_nearest(name: str, nearest: str) -> None:
    said = unknown_rule(name)
    assert f"did you mean {nearest}?" in said
    assert "rules are mean, " in said


def test_names_that_are_known_and_words_that_are_like_none() -> None:
    assert [unknown_rule(name) for name in ("default", "nnm+arc+median", "nnm")] == [""] * 3
    assert [unknown_codec(name) for name in ("int8", "topk")] == [""] * 2
    assert "did you mean int4?" in unknown_codec("int5") or "did you mean int8?" in unknown_codec("int5")
    for name in ("", "zzzzzz", "+", "a" * 10_000, "krum+krum+krum", "\n"):
        said = unknown_rule(name)
        assert "rules are " in said
        assert len(said) < 600
