"""Rules with geometry once more, byte for byte: plain Python floats in the pinned order, numpy for elementwise fp32.

What `geometry_twins` says as the papers do, on rows, is said here as the bytes are made: Gram matrix, coefficients,
their fp32 roundings, mixed rows. `caf` and `geometric_median` are too long to be said twice; for those two the kernels
themselves run, but uncompiled.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from aggregation.rules import geometry
from aggregation.rules.geometry import clipping, eigen, filtering, matrix
from aggregation.rules.geometry import median as geometric
from tests.aggregation import twins

Floats = NDArray[np.float32]
Gram = list[list[float]]
Row = tuple[dict[int, np.float32], np.float32]
"""A mixed row: the numerators that are not zero by the row they belong to, and the divisor."""

ONE = np.float32(1)
PRE = ("arc", "nnm", "norm_clip")


@dataclass
class Given:
    """A chunk's rows as a rule gets them; a centre is the last one."""

    rows: Floats
    gram: Gram
    weights: list[float]
    f: int
    centred: bool
    options: dict[str, float] = field(default_factory=dict)


def gram_of_values(rows: Floats, block: int) -> Gram:
    return _symmetric(len(rows), lambda i, j: _dot(rows[i], rows[j], block))


def gram_of_frames(frames: Sequence[bytes], factors: Sequence[float]) -> Gram:
    blocks = [_blocks(frame) for frame in frames]

    def inner(i: int, j: int) -> float:
        total = 0.0
        for (scale_a, codes_a), (scale_b, codes_b) in zip(blocks[i], blocks[j], strict=True):
            total += (scale_a * scale_b) * float(sum(a * b for a, b in zip(codes_a, codes_b, strict=True)))
        for factor in (factors[max(i, j)], factors[min(i, j)]):
            total *= float(np.float32(factor))
        return total

    return _symmetric(len(frames), inner)


def apply(name: str, given: Given) -> Floats:
    """The fp32 values that a rule, or a chain of rules, makes of a chunk."""
    *before, last = name.split("+")
    if last in PRE:
        before, last = [*before, last], "mean"
    rows, gram = given.rows, given.gram
    n = len(rows) - given.centred
    for pre in before:
        mixed = _before(pre, gram, n, given)
        if given.centred:
            mixed.append(({n: ONE}, ONE))
        rows, gram = _mixed(rows, mixed), _mixed_gram(gram, mixed)
    match last:
        case "mean":
            return twins.mean(rows, given.weights)
        case "median":
            return twins.median(rows)
        case "trimmed_mean":
            return twins.trimmed_mean(rows, given.f)
        case "meamed":
            return twins.meamed(rows, given.f)
        case "bulyan":
            return twins.meamed(rows[_bulyan(_distances(gram), given.f)], 2 * given.f)
    one: Floats = _mixed(rows, [_last(last, gram, n, given)])[0]
    return one


def _before(pre: str, gram: Gram, n: int, given: Given) -> list[Row]:
    f = given.f
    if pre == "nnm":
        near = _distances(gram)
        mixed: list[Row] = []
        for i in range(n):
            chosen = sorted(range(n), key=lambda j, i=i: (j != i, near[i][j], j))[: n - f]  # type: ignore[misc]
            alike = near[i][chosen[-1]] == 0 or len(chosen) == 1
            mixed.append(({i: ONE}, ONE) if alike else (dict.fromkeys(sorted(chosen), ONE), np.float32(n - f)))
        return mixed
    norms = [math.sqrt(max(gram[i][i], 0.0)) for i in range(n)]
    if pre == "arc":
        radius = sorted(norms)[n - 1 - 2 * f * (n - f) // n]
    else:
        radius = given.options.get("radius", _lower_median(norms, given.weights))
    scales = [np.float32(radius / norm) if norm > radius else ONE for norm in norms]
    return [({i: scale} if scale else {}, ONE) for i, scale in enumerate(scales)]


def _last(name: str, gram: Gram, n: int, given: Given) -> Row:
    distances = _distances(gram)
    match name:
        case "krum":
            return {_by_score(distances, given.f)[0]: ONE}, ONE
        case "multi_krum":
            return _weighted(dict.fromkeys(_by_score(distances, given.f)[: n - given.f], 1.0), distances)
        case "mda":
            subsets = itertools.combinations(range(n), n - given.f)
            chosen = min(subsets, key=lambda s: (max((distances[i][j] for i in s for j in s if i < j), default=0.0), s))
            return _weighted(dict.fromkeys(chosen, 1.0), distances)
        case "centered_clip" | "default":
            return _weighted(_clipped_around(gram, n, given), distances)
        case "geometric_median" | "caf":
            with uncompiled():
                taken = (
                    geometry.caf(np.array(gram), given.f)
                    if name == "caf"
                    else geometry.geometric_median(np.array(gram), given.weights)
                )
            row = taken.numerators_MK[0]
            return {j: row[j] for j in range(n) if row[j]}, taken.divisors_M[0]
    raise AssertionError(name)


def _clipped_around(gram: Gram, n: int, given: Given) -> dict[int, float]:
    distances = [math.sqrt(_distances(gram)[n][i]) for i in range(n)]
    tau = given.options.get("tau", _lower_median(distances, given.weights))
    weight = _sum(given.weights)
    a = [0.0] * n + [1.0]
    for _ in range(int(given.options.get("iterations", 3))):
        products = [_sum([a[j] * gram[j][i] for j in range(n + 1) if a[j]]) for i in range(n + 1)]
        square = _sum([a[j] * products[j] for j in range(n + 1)])
        clips = []
        for i in range(n):
            distance = math.sqrt(max((gram[i][i] + square) - 2.0 * products[i], 0.0))
            clips.append(given.weights[i] * (tau / distance if distance > tau else 1.0))
        kept = 1.0 - _sum(clips) / weight
        a = [value * kept for value in a]
        for i in range(n):
            a[i] += clips[i] / weight
    return dict(enumerate(a))


def _by_score(distances: Gram, f: int) -> list[int]:
    n = len(distances)
    scores = [_sum(sorted(distances[i][j] for j in range(n) if j != i)[: n - f - 2]) for i in range(n)]
    return sorted(range(n), key=lambda i: (scores[i], i))


def _bulyan(distances: Gram, f: int) -> list[int]:
    left = list(range(len(distances)))
    order = []
    for _ in range(len(distances) - 2 * f):
        n_nearest = max(len(left) - f - 2, 1)
        scores = {i: _sum(sorted(distances[i][j] for j in left if j != i)[:n_nearest]) for i in left}
        order.append(min(left, key=lambda i: (scores[i], i)))
        left.remove(order[-1])
    return order


def _weighted(coefficients: dict[int, float], distances: Gram) -> Row:
    numerators = {j: np.float32(value) for j, value in sorted(coefficients.items()) if np.float32(value)}
    first = next(iter(numerators))
    if all(distances[first][j] == 0 for j in numerators):
        return {first: ONE}, ONE
    total = np.float32(0)
    for value in numerators.values():
        total = np.float32(total + value)
    return numerators, total


def _mixed(rows: Floats, mixed: Sequence[Row]) -> Floats:
    out = np.zeros((len(mixed), rows.shape[1]), np.float32)
    for m, (numerators, divisor) in enumerate(mixed):
        for k, (j, numerator) in enumerate(numerators.items()):
            out[m] = numerator * rows[j] if k == 0 else out[m] + numerator * rows[j]
        out[m] = out[m] / divisor
    return out


def _mixed_gram(gram: Gram, mixed: Sequence[Row]) -> Gram:
    def entry(a: int, b: int) -> float:
        (of_a, divisor_a), (of_b, divisor_b) = mixed[min(a, b)], mixed[max(a, b)]
        products = [_sum([float(x) * gram[i][j] for i, x in of_a.items()]) for j in range(len(gram))]
        return _sum([products[j] * float(x) for j, x in of_b.items()]) / float(divisor_a) / float(divisor_b)

    return _symmetric(len(mixed), entry)


def _distances(gram: Gram) -> Gram:
    ks = range(len(gram))
    return [[max((gram[i][i] + gram[j][j]) - 2.0 * gram[i][j], 0.0) for j in ks] for i in ks]


def _lower_median(values: Sequence[float], weights: Sequence[float]) -> float:
    ordered = sorted(zip(values, weights, strict=True))
    half = _sum([weight for _, weight in ordered]) / 2
    cumulated = itertools.accumulate(weight for _, weight in ordered)
    return next(value for (value, _), total in zip(ordered, cumulated, strict=True) if total >= half)


def _dot(a: Floats, b: Floats, block: int) -> float:
    total = 0.0
    for start in range(0, len(a), block):
        products = a[start : start + block].astype(np.float64) * b[start : start + block].astype(np.float64)
        lanes = np.zeros(16)
        for at in range(0, len(products), 16):
            part = products[at : at + 16]
            lanes[: len(part)] += part
        total += _sum(lanes.tolist())
    return total


def _blocks(frame: bytes) -> list[tuple[float, list[int]]]:
    block, n_values = struct.unpack_from("<II", frame, 8)
    out, at = [], 16
    for start in range(0, n_values, block):
        n = min(block, n_values - start)
        out.append((struct.unpack_from("<f", frame, at)[0], list(struct.unpack_from(f"<{n}b", frame, at + 4))))
        at += 4 + n
    return out


def _symmetric(n: int, entry: Callable[[int, int], float]) -> Gram:
    below = {(i, j): entry(i, j) for i in range(n) for j in range(i + 1)}
    return [[below[max(i, j), min(i, j)] for j in range(n)] for i in range(n)]


def _sum(values: Sequence[float]) -> float:
    """In order; `sum` compensates from Python 3.12 on."""
    total = 0.0
    for value in values:
        total = total + value
    return total


@contextmanager
def uncompiled() -> Iterator[None]:
    """Geometry's kernels as the plain Python functions that they are written as."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (clipping, eigen, filtering, matrix, geometric):
            for name, value in vars(module).items():
                if hasattr(value, "py_func"):
                    patch.setattr(module, name, value.py_func)
        yield
