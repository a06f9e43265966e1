"""Norms against norms: who is out before a byte travels, and by how much an aggregate is shortened afterwards.

A gate bounds what one row can do to a rule; it is no defence by itself. Lengths are compared after division by the sum
of inner learning rates to the power 0.8, which is how far AdamW gets (measured): a raw norm would throw out who did
more steps.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from decimal import Context, Decimal

from aggregation.errors import RuleError

POWER = 0.8
PAST_LEAST = 3
"""An aggregate is compared with the ones before it once there are so many."""
JUMP_MOST = 2.0
"""An aggregate may be so many times as long as the median of the ones before it."""

_CONTEXT = Context(prec=40)
"""Decimal's ln and exp are correctly rounded, so a power is the same on every machine. A libm's `pow` is not, and a
norm chosen to lie on the limit could make honest voters disagree."""


def norm_gate(
    norms_N: Sequence[float],
    sum_lrs_N: Sequence[float],
    *,
    low: float = 0.1,
    high: float = 3.0,
    power: float = POWER,
) -> list[str | None]:
    """For each row the reason it is out, or None.

    Compared is ‖Δ_i‖ / (Σ of its steps' inner learning rates)^power: out is more than `high` times or less than `low`
    times the median (for even N the mean of the two middle ones). Rows whose numbers are absurd by themselves are out
    first and are in no median. Where at most two rows are left nobody is compared: two rows cannot say which of them is
    the odd one, and half the sum of both lies so near the larger that a huge row would throw out the honest small one.
    Where the median is 0 nobody is compared either, lest a majority of zeros throw out whoever trained. Raises
    RuleError for limits that make no sense.
    """
    if len(norms_N) != len(sum_lrs_N):
        raise RuleError(f"{len(norms_N)} norms but {len(sum_lrs_N)} sums of learning rates")
    if not (0 <= low <= 1 <= high and math.isfinite(high) and math.isfinite(power)):
        raise RuleError(f"a gate from {low} to {high} times the median at power {power} makes no sense")
    reasons = [_absurd(norm, sum_lr) for norm, sum_lr in zip(norms_N, sum_lrs_N, strict=True)]
    compared = {i: normalised(norms_N[i], sum_lrs_N[i], power) for i, reason in enumerate(reasons) if reason is None}
    if len(compared) <= 2:
        return reasons
    middle = median(list(compared.values()))
    if middle == 0.0:
        return reasons
    for i, value in compared.items():
        if value > high * middle:
            reasons[i] = f"norm is {value / middle:.3g} times the median, above {high:g}"
        elif value < low * middle:
            reasons[i] = f"norm is {value / middle:.3g} times the median, below {low:g}"
    return reasons


def clip_factor(norm: float, sum_lr: float, past: Sequence[float]) -> float:
    """What an aggregate of this norm is multiplied by: s = min(1, 2·median(past)·(Σ lr)^0.8 / norm), an fp32 value.

    `past` are the normalised norms of the aggregates before it, each after its own clipping, so a run of long ones
    can't lift the median by more than the factor. 1 where there is nothing to compare: fewer than 3 past ones, a norm
    or a sum of learning rates of 0, and a median of 0, which would hold every later aggregate at 0 as well. Raises
    RuleError for numbers that are none.
    """
    if (fault := _absurd(norm, sum_lr)) and sum_lr != 0.0:
        raise RuleError(f"no aggregate: {fault}")
    middle = median(past) if len(past) >= PAST_LEAST else 0.0
    if middle == 0.0 or norm == 0.0 or sum_lr == 0.0:
        return 1.0
    ratio = JUMP_MOST * (middle / normalised(norm, sum_lr))
    return 1.0 if ratio >= 1.0 else float(struct.unpack("<f", struct.pack("<f", ratio))[0])


def normalised(norm: float, sum_lr: float, power: float = POWER) -> float:
    """norm / sum_lr^power, correctly rounded; finite, and 0 only for a norm of 0. `sum_lr` must be above 0 then."""
    if norm == 0.0:
        return 0.0
    exponent = _CONTEXT.multiply(Decimal(power), _CONTEXT.ln(Decimal(sum_lr)))
    value = _CONTEXT.divide(Decimal(norm), _CONTEXT.exp(exponent))
    # At least the smallest and at most the largest number, so that ratios to it stay defined.
    return min(max(float(value), 5e-324), 1.7976931348623157e308)


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones."""
    ordered = sorted(values)
    n = len(ordered)
    low, high = ordered[(n - 1) // 2], ordered[n // 2]
    return low if low == high else low / 2 + high / 2


def _absurd(norm: float, sum_lr: float) -> str | None:
    if not math.isfinite(norm) or norm < 0.0:
        return f"norm is {norm}"
    if not math.isfinite(sum_lr) or sum_lr < 0.0:
        return f"sum of learning rates is {sum_lr}"
    if sum_lr == 0.0 and norm > 0.0:
        return "it moved with a learning rate of 0"
    return None
