"""The arithmetic part of a RunSpec: what the bytes of a result depend on, validated."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from aggregation import codec, rules
from aggregation.codec.frame import BLOCK_MAX, BLOCK_STEP, N_VALUES_MAX
from aggregation.errors import SpecError

NUMERICS_VERSION = 1
"""Raised when any result's bytes change: arithmetic, order of sums, canonical form, hashes. See README."""

MAX_VALUES = 1 << 42
MAX_CHUNK_VALUES = 1 << 28
MAX_F = 1 << 16
MAX_OUTER_LR = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsSpec:
    """Everything that the bytes of results and of the state depend on, beside the contributions.

    Construction raises SpecError, which names the field.
    """

    n_values: int
    """D: length of the flat vector."""
    chunk_values: int
    """P: values of a chunk, a multiple of the leaf."""
    leaf_values: int
    """Values of a leaf, a multiple of the block."""
    codec: str
    block: int
    """B: values that share a scale, a multiple of 16."""
    rule: str
    f_max: int
    """The most Byzantine contributions that a round is planned for; 0 gives up robustness."""
    outer_lr: float
    outer_momentum: float
    """In [0, 1); at 1 the momentum would never fade."""
    numerics_version: int = NUMERICS_VERSION

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_type(field.name, str(field.type), getattr(self, field.name))
        _check_range("n_values", self.n_values, 1, MAX_VALUES)
        _check_range("block", self.block, BLOCK_STEP, BLOCK_MAX)
        _check_range("chunk_values", self.chunk_values, 1, min(MAX_CHUNK_VALUES, N_VALUES_MAX))
        _check_range("leaf_values", self.leaf_values, 1, self.chunk_values)
        _check_range("f_max", self.f_max, 0, MAX_F)
        _check_range("outer_lr", self.outer_lr, 0.0, MAX_OUTER_LR)
        _check_range("outer_momentum", self.outer_momentum, 0.0, 1.0)
        if np.float32(self.outer_momentum) == 1.0:
            raise SpecError(f"outer_momentum is {self.outer_momentum}, not below 1 in fp32")
        _check_multiple("block", self.block, "16", BLOCK_STEP)
        _check_multiple("leaf_values", self.leaf_values, "block", self.block)
        _check_multiple("chunk_values", self.chunk_values, "leaf_values", self.leaf_values)
        _check_known("codec", self.codec, codec.names())
        _check_known("rule", self.rule, rules.names())
        if self.numerics_version != NUMERICS_VERSION:
            raise SpecError(f"numerics_version {self.numerics_version} is not ours, which is {NUMERICS_VERSION}")


def _check_type(name: str, wanted: str, value: object) -> None:
    # A bool is an int and an int will do for a float, but no string and no None may come as far as the arithmetic.
    ok = {"int": type(value) is int, "str": type(value) is str, "float": type(value) in (int, float)}[wanted]
    if not ok:
        raise SpecError(f"{name} is {value!r}, not of type {wanted}")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise SpecError(f"{name} is {value}, not within [{low}, {high}]")


def _check_multiple(name: str, value: int, of_name: str, of: int) -> None:
    if value % of:
        raise SpecError(f"{name} is {value}, not a multiple of {of_name} ({of})")


def _check_known(name: str, value: str, known: list[str]) -> None:
    if value not in known:
        raise SpecError(f"{name} is {value!r}, not one of {', '.join(known)}")
