"""The norm gate: throws out absurd contributions by their committed norms, before a byte of them travels.

A gate bounds what one row can do to a rule; it is no defence by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Context, Decimal

from aggregation.errors import RuleError

_CONTEXT = Context(prec=40)
"""Decimal's ln and exp are correctly rounded, so a power is the same on every machine. A libm's `pow` is not, and a
norm chosen to lie on the limit could make honest voters disagree."""


def norm_gate(
    norms_N: Sequence[float],
    sum_lrs_N: Sequence[float],
    *,
    low: float = 0.1,
    high: float = 3.0,
    power: float = 0.8,
) -> list[str | None]:
    """For each row the reason it is out, or None.

    Compared is ‖Δ_i‖ / (Σ of its steps' inner learning rates)^power, because a raw norm would throw out who did more
    steps: out is more than `high` times or less than `low` times the median (for even N the mean of the two middle
    ones). Rows whose numbers are absurd by themselves are out first and are in no median. Where at most two rows are
    left nobody is compared: two rows cannot say which of them is the odd one, and half the sum of both lies so near
    the larger that a huge row would throw out the honest small one. Where the median is 0 nobody is compared either,
    lest a majority of zeros throw out whoever trained. Raises RuleError for limits that make no sense.
    """
    if len(norms_N) != len(sum_lrs_N):
        raise RuleError(f"{len(norms_N)} norms but {len(sum_lrs_N)} sums of learning rates")
    if not (0 <= low <= 1 <= high and math.isfinite(high) and math.isfinite(power)):
        raise RuleError(f"a gate from {low} to {high} times the median at power {power} makes no sense")
    reasons = [_absurd(norm, sum_lr) for norm, sum_lr in zip(norms_N, sum_lrs_N, strict=True)]
    compared = {i: _normalised(norms_N[i], sum_lrs_N[i], power) for i, reason in enumerate(reasons) if reason is None}
    if len(compared) <= 2:
        return reasons
    middle = _median(list(compared.values()))
    if middle == 0.0:
        return reasons
    for i, value in compared.items():
        if value > high * middle:
            reasons[i] = f"norm is {value / middle:.3g} times the median, above {high:g}"
        elif value < low * middle:
            reasons[i] = f"norm is {value / middle:.3g} times the median, below {low:g}"
    return reasons


def _absurd(norm: float, sum_lr: float) -> str | None:
    if not math.isfinite(norm) or norm < 0.0:
        return f"norm is {norm}"
    if not math.isfinite(sum_lr) or sum_lr < 0.0:
        return f"sum of learning rates is {sum_lr}"
    if sum_lr == 0.0 and norm > 0.0:
        return "it moved with a learning rate of 0"
    return None


def _normalised(norm: float, sum_lr: float, power: float) -> float:
    if norm == 0.0:
        return 0.0
    exponent = _CONTEXT.multiply(Decimal(power), _CONTEXT.ln(Decimal(sum_lr)))
    value = _CONTEXT.divide(Decimal(norm), _CONTEXT.exp(exponent))
    # At least the smallest and at most the largest number, so that ratios to it stay defined.
    return min(max(float(value), 5e-324), 1.7976931348623157e308)


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    n = len(ordered)
    low, high = ordered[(n - 1) // 2], ordered[n // 2]
    return low if low == high else low / 2 + high / 2
