"""The end of a round in one process: contributions encoded, gated, combined and applied by the code that a run uses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aggregation import codec, outer
from aggregation.chunks import ChunkGrid
from aggregation.errors import RuleError
from aggregation.rules import clips_aggregate, combine, effective, norm_gate
from aggregation.rules.gate import clip_factor, normalised

Floats = NDArray[np.float32]

NORMS_KEPT = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """What a RunSpec would say of it."""

    rule: str
    f_max: int
    block: int
    chunk_values: int
    outer_lr: float
    outer_momentum: float
    fraction: float = 0.2
    gated: bool = True


@dataclass(frozen=True, slots=True)
class Sent:
    """One contribution before it is encoded."""

    delta_D: Floats
    weight: float
    sum_lr: float


class Rounds:
    """θ and the outer momentum, and what the chain remembers: the last results, their clip factor, past norms."""

    def __init__(self, theta_D: Floats, settings: Settings) -> None:
        self.theta_D = theta_D
        self._momentum_D = np.zeros_like(theta_D)
        self._settings = settings
        self._chunks = [slice(*bounds) for bounds in _bounds(ChunkGrid(theta_D.size, settings.chunk_values))]
        self._results: list[bytes] | None = None
        self._scale = 1.0
        self._norms: list[float] = []

    def apply(self, sent: Sequence[Sent]) -> list[str | None]:
        """End one round with these contributions: for each the reason that it was gated, or None.

        Where no rule can combine what is left the round is empty: θ stays, and the next one has no last result.
        """
        settings = self._settings
        rows = [[codec.encode("int8", one.delta_D[c], block=settings.block) for c in self._chunks] for one in sent]
        norms = [_norm([codec.squared_norm(frame) for frame in frames]) for frames in rows]
        reasons: list[str | None] = [None] * len(sent)
        if settings.gated:
            reasons = norm_gate(norms, [one.sum_lr for one in sent])
        counted = [i for i, reason in enumerate(reasons) if reason is None]
        weights_N = [sent[i].weight for i in counted]
        try:
            choice = effective(
                settings.rule,
                weights_N,
                f_max=settings.f_max,
                fraction=settings.fraction,
                rejected=len(sent) - len(counted),
            )
            combined = [
                combine(
                    choice.rule,
                    [rows[i][chunk] for i in counted],
                    weights_N=weights_N,
                    f=choice.f,
                    codec="int8",
                    block=settings.block,
                    previous=None if self._results is None else self._results[chunk],
                    previous_scale=self._scale,
                )
                for chunk in range(len(self._chunks))
            ]
        except RuleError:
            self._results = None
            return reasons
        norm = _norm([squared for _, squared in combined])
        sum_lr = _weighted_lower_median([sent[i].sum_lr for i in counted], weights_N)
        clips = clips_aggregate(choice.rule)
        self._scale = clip_factor(norm, sum_lr, self._norms[-NORMS_KEPT:]) if clips else 1.0
        self._norms.append(normalised(self._scale * norm, sum_lr))
        self._results = [frame for frame, _ in combined]
        for chunk, frame in zip(self._chunks, self._results, strict=True):
            outer.nesterov_from_frame(
                self.theta_D[chunk],
                self._momentum_D[chunk],
                frame,
                lr=settings.outer_lr,
                momentum=settings.outer_momentum,
                scale=self._scale,
            )
        return reasons


def _bounds(grid: ChunkGrid) -> list[tuple[int, int]]:
    return [grid.bounds(chunk) for chunk in range(grid.n_chunks)]


def _norm(squared: Sequence[float]) -> float:
    return math.sqrt(sum(squared))


def _weighted_lower_median(values: Sequence[float], weights: Sequence[float]) -> float:
    cumulated = 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        cumulated += weight
        if 2 * cumulated >= sum(weights):
            return value
    raise ValueError("no values")
