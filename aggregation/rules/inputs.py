"""What a caller hands to a rule, as the numbers that it takes; whatever else it may be is a RuleError."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aggregation.errors import RuleError
from aggregation.finite import is_finite

if TYPE_CHECKING:
    from aggregation.rules.registry import Rule

Floats = NDArray[np.float32]

WEIGHT_MIN = 2.0**-32
WEIGHT_END = 2.0**63
"""Between these no sum of what codecs send overflows.

A product loses places where it falls among the denormals, a product with a weight w at most 2^-150 / w of its value; so
a mean is off by at most 2^-118 for it, which is far below what int8, int4 and topk tell from zero. From w = 1 on, as
tokens are counted, it is half the smallest fp32 number, and no more than the mean's own rounding.
"""
_WHOLE_NUMBERS = ("iterations", "m")


def as_updates(updates_ND: ArrayLike) -> Floats:
    """(N, D) as fp32, row by row in memory; a value beyond fp32 becomes infinite."""
    updates = _as_floats("updates", updates_ND)
    if updates.ndim != 2 or 0 in updates.shape:
        raise RuleError(f"updates are (N, D), not of shape {updates.shape}")
    return updates


def as_previous(previous_D: ArrayLike, n_values: int) -> Floats:
    """(D,) as fp32, finite."""
    previous = _as_floats("the previous aggregate", previous_D)
    if previous.shape != (n_values,):
        raise RuleError(f"previous aggregate of shape {previous.shape} for {n_values} values")
    if not is_finite(previous):
        raise RuleError("the previous aggregate is not finite")
    return previous


def as_weights(weights_N: ArrayLike | Sequence[float], n: int) -> tuple[Floats, list[int]]:
    """All weights, each rounded to fp32 by itself, and which rows have one."""
    # A list is not made an array first, which would round large integers beside a float once more.
    listed = weights_N if isinstance(weights_N, (list, tuple)) else _as_array("weights", weights_N).tolist()
    if not isinstance(listed, (list, tuple)) or len(listed) != n:
        raise RuleError(f"{_short(listed)} are no weights of {n} contributions")
    for weight in listed:
        known = isinstance(weight, (int, float, np.integer, np.floating))
        if not known or not (weight == 0 or WEIGHT_MIN <= weight < WEIGHT_END):  # a NaN is in no range
            raise RuleError(f"a weight is {_short(weight)}")
    weights = np.array([np.float32(weight) for weight in listed], np.float32)
    there: list[int] = np.flatnonzero(weights).tolist()
    if not there:
        raise RuleError("no contribution has weight")
    return weights, there


def as_scale(scale: float) -> float:
    """A factor of the last result, within 0 and 1, rounded to fp32."""
    if not is_number(scale) or not 0 <= scale <= 1:
        raise RuleError(f"the last result is scaled by {_short(scale)}")
    return float(np.float32(scale))


def checked_f(f: int) -> int:
    """f, where it is a number of contributions."""
    if not is_whole(f):
        raise RuleError(f"f is {_short(f)}, no number of contributions")
    if f < 0:
        raise RuleError(f"f is {_short(f)}, less than none")
    return int(f)


def checked_parameters(rule: Rule, parameters: Mapping[str, object]) -> Mapping[str, Any]:
    """The parameters, if the rule has them all and they are finite numbers."""
    unknown = sorted(set(parameters) - set(rule.parameters))
    if unknown:
        raise RuleError(f"{rule.name} has no parameter {', '.join(unknown)}")
    for name, value in parameters.items():
        fits = is_whole(value) if name in _WHOLE_NUMBERS else is_number(value)
        if not fits or not _is_finite(value):
            raise RuleError(f"{name} is {_short(value)}")
    return parameters


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, numpy's too; True and False are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a real number, numpy's too; True and False are none."""
    return is_whole(value) or isinstance(value, (float, np.floating))


def _as_floats(what: str, values: ArrayLike) -> Floats:
    array = _as_array(what, values)
    # Extension types, such as the bf16 of ml_dtypes, say themselves that they fit into fp32.
    if array.dtype.kind not in "fiub" and not np.can_cast(array.dtype, np.float32):
        raise RuleError(f"{what}: real numbers are wanted, not {array.dtype}")
    with np.errstate(over="ignore"):
        return np.asarray(np.require(array, np.float32, ["C", "A"]))


def _as_array(what: str, values: ArrayLike) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists; tensors that numpy has no type or memory for
        raise RuleError(f"{what}: no numbers that numpy knows: {error}") from None


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _short(value: object) -> str:
    try:
        return repr(value)[:50]
    except ValueError:  # an integer of more digits than Python cares to write
        return "an integer of thousands of digits"
