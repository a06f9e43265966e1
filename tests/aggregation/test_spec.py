"""NumericsSpec takes what fits together and names the field that does not."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from aggregation.errors import SpecError
from aggregation.spec import NUMERICS_VERSION, NumericsSpec

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
    assert GOOD.numerics_version == NUMERICS_VERSION == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        GOOD.block = 16  # type: ignore[misc]


@pytest.mark.parametrize(
    "changes",
    [
        {"outer_lr": 0, "outer_momentum": 0},
        {"rule": "median", "f_max": 3},
        {"codec": "fp32"},
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
        ("f_max", -1),
        ("outer_lr", math.nan),
        ("outer_lr", -0.1),
        ("outer_lr", math.inf),
        ("outer_lr", "0.7"),
        ("outer_momentum", 1.0),
        ("outer_momentum", 1 - 1e-12),
        ("outer_momentum", -0.1),
        ("numerics_version", 2),
    ],
)
def test_the_wrong_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(SpecError, match=field):
        dataclasses.replace(GOOD, **{field: value})
