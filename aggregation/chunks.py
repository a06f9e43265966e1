"""The chunks of a flat vector, and which reducers combine each of them.

Chunks are fixed by the run, so a result depends neither on how many contribute nor on who reduces. Who reduces is
drawn by hashes from a seed that nobody knows before all have committed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from aggregation.digest import tagged_hash

_CHUNK_TAG = "barnraise.deal.chunk"
_PEER_TAG = "barnraise.deal.peer"


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """A vector of `n_values` cut every `chunk_values`; the last chunk may be shorter."""

    n_values: int
    chunk_values: int

    def __post_init__(self) -> None:
        if self.n_values < 1 or self.chunk_values < 1:
            raise ValueError(f"no grid of {self.n_values} values in chunks of {self.chunk_values}")

    @property
    def n_chunks(self) -> int:
        return -(-self.n_values // self.chunk_values)

    def bounds(self, index: int) -> tuple[int, int]:
        """First value and the one after the last of a chunk; raises IndexError."""
        if not 0 <= index < self.n_chunks:
            raise IndexError(f"no chunk {index} among {self.n_chunks}")
        start = index * self.chunk_values
        return start, min(start + self.chunk_values, self.n_values)

    def size(self, index: int) -> int:
        """Values of a chunk; raises IndexError."""
        start, stop = self.bounds(index)
        return stop - start


def quotas(kib_s: Sequence[float], n_chunks: int) -> list[int]:
    """How many chunks each reducer takes: the largest remainder of the measured KiB/s.

    A reducer takes at most twice an equal share, rounded up, and at least one chunk where there are as many chunks as
    reducers. A rate that is unknown (zero, negative, not finite) counts as the mean of the known ones. Remainders are
    compared exactly and ties go by position, so every member computes the same. Raises ValueError without reducers.
    """
    n = len(kib_s)
    if n == 0 or n_chunks < 0:
        raise ValueError(f"{n_chunks} chunks cannot be dealt to {n} reducers")
    ideal = _clamped_shares(_known_rates(kib_s), n_chunks, low=1 if n_chunks >= n else 0, high=-(-2 * n_chunks // n))
    counts = [math.floor(share) for share in ideal]
    by_remainder = sorted(range(n), key=lambda i: (counts[i] - ideal[i], i))
    for i in by_remainder[: n_chunks - sum(counts)]:
        counts[i] += 1
    return counts


def deal(seed: bytes, n_chunks: int, reducers: Sequence[str], kib_s: Sequence[float]) -> tuple[tuple[str, ...], ...]:
    """For each chunk the reducers in line: first its reducer, then the replicas and whoever is next.

    Reducers stand in the order of H(seed, peer), which also settles ties of their quotas; chunks in the order of
    H(seed, chunk) fill one quota after the other; the line behind a reducer follows the reducers' order, around. The
    order of the arguments does not matter. Raises ValueError for no, doubled or unmatched reducers.
    """
    if len(reducers) != len(kib_s) or len(set(reducers)) != len(reducers):
        raise ValueError(f"{len(set(reducers))} different reducers of {len(reducers)} with {len(kib_s)} rates")
    rates = dict(zip(reducers, kib_s, strict=True))
    line = sorted(reducers, key=lambda peer: tagged_hash(_PEER_TAG, seed, peer.encode()))
    order = sorted(range(n_chunks), key=lambda chunk: tagged_hash(_CHUNK_TAG, seed, struct.pack("<Q", chunk)))
    lines: list[tuple[str, ...]] = [()] * n_chunks
    dealt = iter(order)
    for first, count in enumerate(quotas([rates[peer] for peer in line], n_chunks)):
        rotated = (*line[first:], *line[:first])
        for _ in range(count):
            lines[next(dealt)] = rotated
    return tuple(lines)


def _known_rates(kib_s: Sequence[float]) -> list[Fraction]:
    known = [Fraction(rate) for rate in kib_s if math.isfinite(rate) and rate > 0]
    mean = sum(known, Fraction(0)) / len(known) if known else Fraction(1)
    return [Fraction(rate) if math.isfinite(rate) and rate > 0 else mean for rate in kib_s]


def _clamped_shares(rates: list[Fraction], total: int, *, low: int, high: int) -> list[Fraction]:
    """Shares of `total` in proportion to the rates, except for those held at `low` or `high`; their sum is `total`.

    In each pass the free shares are laid out in proportion; the side on which the limits are broken by more in sum
    is held for good, as any final solution holds it too.
    """
    shares = [Fraction(0)] * len(rates)
    free = list(range(len(rates)))
    rest = Fraction(total)
    while free:
        weight = sum((rates[i] for i in free), Fraction(0))
        wanted = {i: rest * rates[i] / weight for i in free}
        below = sum((low - wanted[i] for i in free if wanted[i] < low), Fraction(0))
        above = sum((wanted[i] - high for i in free if wanted[i] > high), Fraction(0))
        if below == above == 0:
            for i in free:
                shares[i] = wanted[i]
            break
        limit = low if below >= above else high
        held = {i for i in free if (wanted[i] < low if limit == low else wanted[i] > high)}
        for i in held:
            shares[i] = Fraction(limit)
        rest -= limit * len(held)
        free = [i for i in free if i not in held]
    return shares
