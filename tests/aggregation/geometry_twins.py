"""Geometry once more, as the papers define it: on the rows themselves, in plain Python, without a Gram matrix.

Slow on purpose. Exact on rows of small integers, where sums and squared distances have no rounding; so ties are ties.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from aggregation.rules.geometry import Mixing

Rows = Sequence[Sequence[float]]


def gram(rows: np.ndarray) -> np.ndarray:
    """Inner products, summed in order, so that rows that are alike have entries that are alike."""
    listed = np.asarray(rows, np.float64).tolist()
    return np.array([[_inner(a, b) for b in listed] for a in listed])


def applied(mixing: Mixing, rows: np.ndarray) -> np.ndarray:
    """The mixed rows in fp64."""
    mixed: np.ndarray = mixing.numerators_MK.astype(np.float64) @ np.asarray(rows, np.float64)
    return mixed / mixing.divisors_M[:, None]


def chosen(mixing: Mixing, row: int = 0) -> list[int]:
    """The rows that have a part in a mixed row."""
    return np.flatnonzero(mixing.numerators_MK[row]).tolist()


def squared(a: Sequence[float], b: Sequence[float]) -> float:
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))


def krum_scores(rows: Rows, f: int, n_nearest: int | None = None) -> list[float]:
    n_nearest = len(rows) - f - 2 if n_nearest is None else n_nearest
    scores = []
    for i, row in enumerate(rows):
        others = sorted(squared(row, other) for j, other in enumerate(rows) if j != i)
        scores.append(sum(others[:n_nearest]))
    return scores


def multi_krum(rows: Rows, f: int, m: int) -> list[int]:
    scores = krum_scores(rows, f)
    return sorted(sorted(range(len(rows)), key=lambda i: (scores[i], i))[:m])


def bulyan(rows: Rows, f: int) -> list[int]:
    left = list(range(len(rows)))
    order = []
    for _ in range(len(rows) - 2 * f):
        scores = krum_scores([rows[i] for i in left], f, max(len(left) - f - 2, 1))
        best = min(range(len(left)), key=lambda at: (scores[at], at))
        order.append(left.pop(best))
    return order


def diameter(rows: Rows, subset: Sequence[int]) -> float:
    return max((squared(rows[i], rows[j]) for i, j in itertools.combinations(subset, 2)), default=0)


def mda(rows: Rows, f: int) -> list[int]:
    n = len(rows)
    subsets: list[tuple[int, ...]] = list(itertools.combinations(range(n), n - f))
    return list(min((diameter(rows, subset), subset) for subset in subsets)[1])


def nnm(rows: Rows, f: int) -> list[list[int]]:
    n = len(rows)
    nearest = []
    for i, row in enumerate(rows):
        order = sorted(range(n), key=lambda j: (j != i, squared(row, rows[j]), j))
        nearest.append(sorted(order[: n - f]))
    return nearest


def norm(row: Sequence[float]) -> float:
    return math.sqrt(_inner(row, row))


def clipped(row: Sequence[float], radius: float) -> list[float]:
    length = norm(row)
    return [value * min(1.0, radius / length) if length > 0 else value for value in row]


def arc(rows: Rows, f: int) -> list[list[float]]:
    n = len(rows)
    k = math.floor(2 * f * (n - f) / n)
    radius = sorted(map(norm, rows), reverse=True)[k]
    longest = sorted(range(n), key=lambda i: -norm(rows[i]))[:k]
    return [clipped(row, radius) if i in longest else list(row) for i, row in enumerate(rows)]


def lower_median(values: Sequence[float], weights: Sequence[float]) -> float:
    for value in sorted(values):
        if sum(w for v, w in zip(values, weights, strict=True) if v <= value) >= sum(weights) / 2:
            return value
    raise AssertionError


def centered_clip(
    rows: Rows, centre: Sequence[float], weights: Sequence[float], tau: float | None, iterations: int
) -> list[float]:
    v = list(centre)
    if tau is None:
        tau = lower_median([math.sqrt(squared(row, v)) for row in rows], weights)
    for _ in range(iterations):
        pulls = [clipped([x - y for x, y in zip(row, v, strict=True)], tau) for row in rows]
        v = [
            y + sum(w * pull[k] for w, pull in zip(weights, pulls, strict=True)) / sum(weights) for k, y in enumerate(v)
        ]
    return v


def spread(rows: Rows, point: Sequence[float], weights: Sequence[float]) -> float:
    """What the geometric median makes smallest."""
    return sum(w * math.sqrt(squared(row, point)) for w, row in zip(weights, rows, strict=True))


def caf(rows: np.ndarray, f: int) -> np.ndarray:
    """With LAPACK's eigenvectors of the covariance itself, D by D."""
    n = len(rows)
    c = np.ones(n)
    best, least = c.copy(), math.inf
    while c.sum() > n - 2 * f:
        deviations = rows - (c @ rows) / c.sum()
        values, vectors = np.linalg.eigh((deviations * c[:, None]).T @ deviations / c.sum())
        if values[-1] < least:
            least, best = values[-1], c.copy()
        tau = (deviations @ vectors[:, -1]) ** 2
        c = c * (1 - tau / tau[c > 0].max())
        c[c < 1e-14] = 0
    shares: np.ndarray = best / best.sum()
    return shares


def _inner(a: Sequence[float], b: Sequence[float]) -> float:
    total = 0.0
    for x, y in zip(a, b, strict=True):
        total += x * y
    return total
