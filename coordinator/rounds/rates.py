"""Between which sums of learning rates an honest member's steps come, by the chain and the RunSpec alone."""

from __future__ import annotations

from functools import lru_cache

from protos.runspec import InnerSpec

ROUNDING = 1e-6
"""Far above what adding 4 H fp64 numbers one after the other can be off by: 4e6 · 2^-53 of the sum."""
SMALLEST = 1e-300
"""What a step may be off by beside that: below it fp64 numbers have fewer digits."""
LEAST_SHARE = 0.5
"""Who claims less than this of the least that its steps take did not make them by the run's schedule."""
RAMP_STEPS_MIN = 10
_BLOCKS = 16
"""A schedule is looked at in so many places, so that a claim of a million steps takes no longer."""


@lru_cache(maxsize=4096)
def sums(inner: InnerSpec, nominal_step: int, h: int, steps: int, n_made: int) -> tuple[float, float]:
    """The least and the most that the learning rates of a member's steps add up to.

    Its k-th step since the anchor (from 0) has the rate lr · warmed(nominal step + min(k, H)), ramped where its moments
    are cold; `n_made` steps were made, over empty rounds too, and `steps` of them count, for one may be skipped. So the
    j-th that counts was the j-th at the earliest, and at the latest as many further on as were skipped; and moments
    that were emptied have been warmed by the j that counted before it, since whoever empties them counts from 0 again.

    Warm-up and ramp never fall and the decay never rises, so the steps of a block lie between what these are at its two
    ends. Up to 16 steps each is a block by itself; beyond, the bounds are wider by a block's share of a ramp.
    """
    if not 0 < steps <= n_made:
        return 0.0, 0.0
    warm = inner.model_copy(update={"decay_steps": 0})
    falling = inner.model_copy(update={"warmup_steps": 0})
    n_ramp, n_skipped = ramp_steps(inner, h), n_made - steps
    least = most = 0.0
    n_blocks = min(steps, _BLOCKS)
    for block in range(n_blocks):
        first, last = block * steps // n_blocks, (block + 1) * steps // n_blocks - 1
        n = last - first + 1
        early, late = nominal_step + min(first, h), nominal_step + min(last + n_skipped, h)
        lowest = min(warm.warmed(early) * falling.warmed(late), (first + 1) / n_ramp)
        least += n * lowest
        most += n * warm.warmed(late) * falling.warmed(early)
    tiny = steps * SMALLEST
    return max(0.0, LEAST_SHARE * inner.lr * least - tiny), inner.lr * most * (1 + ROUNDING) + tiny


def ramp_steps(inner: InnerSpec, h: int) -> int:
    """Over how many steps a trainer ramps its own rate while moments are cold: as `node.training.schedule` has it."""
    if inner.optimiser == "sgd":
        return 1
    return max(RAMP_STEPS_MIN, min(round(1.0 / (1.0 - inner.beta2)), h))
