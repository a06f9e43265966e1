"""The arithmetic part of a RunSpec: what the bytes of a result depend on, validated."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields

import numpy as np

from aggregation import codec, rules
from aggregation.codec.frame import BLOCK_MAX, BLOCK_STEP, N_VALUES_MAX
from aggregation.codec.topk import BLOCK_MAX as TOPK_BLOCK_MAX
from aggregation.codec.topk import BLOCK_STEP as TOPK_BLOCK_STEP
from aggregation.errors import RuleError, SpecError

NUMERICS_VERSION = 2
"""Raised when any result's bytes or norm change: arithmetic, order of sums, canonical form, hashes. See README."""

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
    """A rule's name, or a composition `a+b+c`."""
    f_max: int
    """The most Byzantine contributions that a round is planned for; 0 gives up robustness."""
    fraction: float = 0.2
    """The share of a round's contributions that is planned for; above a half no rule withstands it."""
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
        _check_range("fraction", self.fraction, 0.0, 0.5)
        _check_range("outer_lr", self.outer_lr, 0.0, MAX_OUTER_LR)
        _check_range("outer_momentum", self.outer_momentum, 0.0, 1.0)
        if np.float32(self.outer_momentum) == 1.0:
            raise SpecError(f"outer_momentum is {self.outer_momentum}, not below 1 in fp32")
        _check_multiple("block", self.block, "16", BLOCK_STEP)
        _check_multiple("leaf_values", self.leaf_values, "block", self.block)
        _check_multiple("chunk_values", self.chunk_values, "leaf_values", self.leaf_values)
        if self.codec not in codec.names():
            raise SpecError(f"codec is {unknown_codec(self.codec)}")
        if self.codec == "topk" and (self.block > TOPK_BLOCK_MAX or self.block % TOPK_BLOCK_STEP):
            raise SpecError(
                f"block is {self.block}; codec topk needs at most {TOPK_BLOCK_MAX} and a multiple of {TOPK_BLOCK_STEP}"
            )
        if why := unknown_rule(self.rule):
            raise SpecError(f"rule is {why}")
        if self.numerics_version != NUMERICS_VERSION:
            raise SpecError(f"numerics_version {self.numerics_version} is not ours, which is {NUMERICS_VERSION}")


def unknown_rule(name: str) -> str:
    """Why this is no rule, the nearest one, and what rules there are; empty where it is one."""
    try:
        rules.by_name(name)
    except RuleError:
        return _unknown(name, "rule", _nearest_rule(name), rules.names())
    return ""


def unknown_codec(name: str) -> str:
    """Why this is no codec, the nearest one, and what codecs there are; empty where it is one."""
    known = codec.names()
    return "" if name in known else _unknown(name, "codec", _nearest(name, known), known)


def _unknown(name: str, kind: str, nearest: str, known: list[str]) -> str:
    meant = f"did you mean {nearest}? " if nearest else ""
    return f"{name[:100]!r}, which is no {kind}: {meant}{kind}s are {', '.join(known)}"


def _nearest_rule(name: str) -> str:
    """The rule whose links are nearest, if they go together; else the nearest of those that have a name."""
    known = rules.names()
    links = [_nearest(link, [each for each in known if "+" not in each]) for link in name[:100].split("+")]
    for guess in ("+".join(links), "+".join(reversed(links)), _nearest(name, known)):
        try:
            return rules.by_name(guess).name
        except RuleError:
            continue
    return ""


def _nearest(name: str, known: list[str]) -> str:
    return next(iter(difflib.get_close_matches(name[:100].strip().lower(), known, n=1)), "")


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
