"""What a round does with N contributions: the f it withstands, and the rule it falls back to when N is too small.

A function of (rule, weights, f_max, fraction, rejected) alone, so the plan's author, every reducer and every voter
come to the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from aggregation.errors import RuleError
from aggregation.rules import registry

FALLBACKS = ("nnm+trimmed_mean", "trimmed_mean", "median")
"""Tried in this order where the run's own rule can't take these N and f."""
ALONE = "mean"
PAIR = "norm_clip"
"""What one and what two contributions are combined with: nothing says which of two is the honest one."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a set of contributions is combined with, and why it is not all that the run asked for."""

    rule: str
    f: int
    fallback: str | None
    """The rule in force where it is not the run's own."""
    degraded: str | None
    """Why the result is less protected than the run asked for."""


def planned_f(n: int, f_max: int, fraction: float = 0.2, rejected: int = 0) -> int:
    """The Byzantine rows to withstand among n, after `rejected` others have been thrown out already.

    min(f_max, ⌊fraction·(n + rejected)⌋) − rejected, but at least 1 from n = 3 on, unless f_max is 0. The budget is of
    all rows that came: counted of the n that are left, a liar that is thrown out would take more than itself from it,
    and with a tenth of 100 rows thrown out 8 were withstood where 10 of the 20 allowed for may still be there. The
    product is that of the decimal number that the RunSpec shows: 0.29·100 is 29, in binary it is less.
    Raises RuleError for numbers that make no sense.
    """
    if n < 0 or rejected < 0:
        raise RuleError(f"{n} contributions and {rejected} rejected ones make no sense")
    if f_max < 0:
        raise RuleError(f"f_max is {f_max}, less than none")
    if not 0 <= fraction <= 1:
        raise RuleError(f"a fraction of {fraction} Byzantine contributions makes no sense")
    budget = min(f_max, math.floor(Fraction(str(fraction)) * (n + rejected)))
    return max(budget - rejected, 1 if n >= 3 and f_max > 0 else 0)


def effective(rule: str, weights_N: Sequence[float], *, f_max: int, fraction: float = 0.2, rejected: int = 0) -> Choice:
    """What contributions of these weights are combined with.

    N are those of positive weight, after sanitising; `rejected` were thrown out before. One contribution is taken as
    it is, two as their norm-clipped mean, whatever robust rule the run names. From three on the run's rule and then the
    FALLBACKS are asked whether they can take N and f; f is never lowered for their sake. Never silently the mean.
    Raises RuleError where nothing can be combined: no contribution, or too few for every rule of the line.
    """
    n = sum(1 for weight in weights_N if weight > 0)
    if n < 1:
        raise RuleError("no contribution to combine")
    f = planned_f(n, f_max, fraction, rejected)
    if not registry.needs_f(rule):
        return Choice(rule, 0, None, "no robustness")
    if n <= 2:
        why = f"no robustness with {n} contribution{'s' if n > 1 else ''}"
        return Choice(ALONE if n == 1 else PAIR, 0, ALONE if n == 1 else PAIR, why)
    for candidate in (rule, *FALLBACKS):
        if registry.fits(candidate, n, f):
            return Choice(candidate, f, None if candidate == rule else candidate, _degraded(candidate, weights_N, n, f))
    raise RuleError(f"neither {rule} nor its fallbacks can combine {n} contributions for f = {f}")


def _degraded(rule: str, weights_N: Sequence[float], n: int, f: int) -> str | None:
    if not registry.by_name(rule).is_robust:
        return "no robustness"
    if f == 0:
        return "no robustness with f_max 0"
    if registry.uses_weights(rule):
        heaviest_first = sorted((weight for weight in weights_N if weight > 0), reverse=True)
        # Sums that are rounded once, so that the order of the rows does not matter.
        if 2 * math.fsum(heaviest_first[:f]) >= math.fsum(heaviest_first):
            return f"the {f} heaviest of {n} contributions hold half of the weight or more"
    return None
