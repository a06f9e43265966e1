"""What a round does with N contributions: the f it plans for, and the rule it falls back to when N is too small.

A function of (rule, N, f_max) alone, so the plan's author and every voter come to the same.
"""

from __future__ import annotations

from aggregation.errors import RuleError
from aggregation.rules import registry

FALLBACKS = ("median",)
"""Tried in this order where the run's own rule needs more contributions than there are; each needs no more than the
one before it."""


def planned_f(n: int, f_max: int) -> int:
    """f for N contributions: a fifth of them, at least 1 from N = 3 on, and never above f_max."""
    return min(f_max, max(n // 5, 1 if n >= 3 else 0))


def effective(rule: str, n: int, f_max: int) -> tuple[str, int, str | None, str | None]:
    """(rule, f, fallback, degraded) for N contributions that count.

    `fallback` names the rule taken instead of the run's own, if one was. `degraded` says why a commit's result is
    less protected than the run asked for. Raises RuleError where nothing can be combined: no contribution, or no rule
    of the line that so few suffice for. Never silently the mean.
    """
    if n < 1:
        raise RuleError("no contribution to combine")
    if f_max < 0:
        raise RuleError(f"f_max is {f_max}, less than none")
    if not registry.needs_f(rule):
        return rule, 0, None, "no robustness"
    f = planned_f(n, f_max)
    for candidate in (rule, *FALLBACKS):
        needed = registry.minimum_contributions(candidate, f)
        if n >= needed:
            return candidate, f, None if candidate == rule else candidate, _degraded(n, f)
    raise RuleError(f"{rule} and its fallbacks need more than {n} contributions for f = {f}")


def _degraded(n: int, f: int) -> str | None:
    if f > 0:
        return None
    if n <= 2:
        return f"no robustness with {n} contribution{'s' if n > 1 else ''}"
    return "no robustness with f_max 0"
