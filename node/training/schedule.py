"""Which learning rate a node's k-th step has, and which batch of the data a leased index means: pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from blake3 import blake3

from protos.runspec import InnerSpec

RAMP_STEPS_MIN = 10


def inner_lr(inner: InnerSpec, nominal_step: int, k: int, h: int, cold_step: int | None) -> float:
    """Learning rate of the k-th step (from 0) since the anchor: lr(nominal + min(k, H)), warm-up and then constant.

    Args:
        inner: the run's inner optimiser.
        nominal_step: sum of the nominal H of all commits with contributions so far, the same on every node.
        k: steps of this node since it loaded the anchor; beyond H (after empty rounds) the rate stands still.
        h: the nominal H of the round.
        cold_step: steps since the optimiser's moments were empty, or None when they never were or it is long ago.

    Cold Adam moments at the full rate move several times too far at the first step, so a cold node's own rate is
    ramped as well. The smaller of the two factors counts: a fresh run with a warm-up is the plain warm-up.
    """
    step = nominal_step + min(k, h)
    factor = inner.warmed(step)
    if cold_step is not None:
        factor = min(factor, (cold_step + 1) / ramp_steps(inner, h))
    return inner.lr * factor


def ramp_steps(inner: InnerSpec, h: int) -> int:
    """Steps over which cold moments become warm: 1/(1 - beta2), at most H and never below 10. SGD has none to warm."""
    if inner.optimiser == "sgd":
        return 1
    return max(RAMP_STEPS_MIN, min(round(1.0 / (1.0 - inner.beta2)), h))


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """The affine permutation i -> (factor * i + offset) mod n of one pass over n batches."""

    n_batches: int
    factor: int
    offset: int

    def batch(self, index: int) -> int:
        """The stored batch that comes at `index` of this pass."""
        if not 0 <= index < self.n_batches:
            raise IndexError(f"batch {index} of a pass of {self.n_batches}")
        return (self.factor * index + self.offset) % self.n_batches


def batch_order(n_batches: int, pass_index: int, seed: int) -> BatchOrder:
    """The order of one pass: stored order in the first (sequences are permuted when packed), another in each later one.

    Factor and offset are BLAKE3 of seed and pass, so everybody has the same order without being told.
    """
    if n_batches < 1 or pass_index < 0:
        raise ValueError(f"no pass {pass_index} over {n_batches} batches")
    if pass_index == 0:
        return BatchOrder(n_batches, 1, 0)
    digest = blake3(b"barnraise batch order" + seed.to_bytes(8, "little") + pass_index.to_bytes(8, "little")).digest()
    factor = 1 + int.from_bytes(digest[:16], "little") % n_batches
    while gcd(factor, n_batches) != 1:
        factor += 1
    return BatchOrder(n_batches, factor % n_batches, int.from_bytes(digest[16:], "little") % n_batches)


def locate(batch_index: int, n_batches: int, seed: int) -> tuple[int, int]:
    """(pass, stored batch) of a batch of the run, which counts on over all passes."""
    if batch_index < 0:
        raise IndexError(f"batch {batch_index} is before the first")
    pass_index, index = divmod(batch_index, n_batches)
    return pass_index, batch_order(n_batches, pass_index, seed).batch(index)
