"""A rule at work on one chunk: the mixings that its rows' Gram matrix calls for, and the reduction that ends them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregation.errors import RuleError
from aggregation.rules import geometry, reduction
from aggregation.rules.geometry import Mixing
from aggregation.rules.reduction import Reduction
from aggregation.rules.registry import Link, Rule

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Parameters = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Chain:
    """What becomes of K rows: mixed, one mixing after the other, then reduced; without a reduction one row is left."""

    mixings: tuple[Mixing, ...]
    reduce: Reduction | None
    f: int
    """What the reduction takes for f."""


def coordinate_chain(rule: Rule, f: int) -> Chain:
    """The chain of a rule without geometry."""
    return Chain((), _REDUCTIONS[rule.last.name], f)


def geometric_chain(rule: Rule, gram_KK: Doubles, weights_N: Floats, f: int, parameters: Parameters) -> Chain:
    """The chain for rows of this Gram matrix, a centred rule's centre last; raises RuleError as geometry does.

    A pre-aggregator leaves the centre alone. Without a previous result the centre is the median of the contributions
    as they came, not of what pre-aggregators made of them.
    """
    n_fixed = 1 if rule.is_centred else 0
    weights = weights_N.astype(np.float64)
    mixings: list[Mixing] = []
    for link in rule.before:
        mixings.append(_before(link, gram_KK, weights, f, n_fixed, parameters))
        gram_KK = geometry.mixed_gram(gram_KK, mixings[-1])
    if rule.last.name == "bulyan":
        # Of the N - 2f selected rows the N - 4f values nearest the median.
        return Chain((*mixings, geometry.bulyan_selection(gram_KK, f)), reduction.meamed, 2 * f)
    if not rule.last.geometric:
        return Chain(tuple(mixings), _REDUCTIONS[rule.last.name], f)
    return Chain((*mixings, _last(rule.last, gram_KK, weights, f, parameters)), None, f)


_REDUCTIONS: Mapping[str, Reduction] = {
    "mean": reduction.mean,
    "median": reduction.median,
    "trimmed_mean": reduction.trimmed_mean,
    "meamed": reduction.meamed,
}


def _before(link: Link, gram: Doubles, weights: Doubles, f: int, n_fixed: int, parameters: Parameters) -> Mixing:
    match link.name:
        case "arc":
            return geometry.arc(gram, f, n_fixed=n_fixed)
        case "nnm":
            return geometry.nnm(gram, f, n_fixed=n_fixed)
        case "norm_clip":
            return geometry.norm_clip(gram, weights, n_fixed=n_fixed, **_only(parameters, link))
    raise RuleError(f"{link.name} is no pre-aggregator")


def _last(link: Link, gram: Doubles, weights: Doubles, f: int, parameters: Parameters) -> Mixing:
    options = _only(parameters, link)
    match link.name:
        case "krum":
            return geometry.krum(gram, f)
        case "multi_krum":
            return geometry.multi_krum(gram, f, **options)
        case "mda":
            return geometry.mda(gram, f)
        case "caf":
            return geometry.caf(gram, f)
        case "geometric_median":
            return geometry.geometric_median(gram, weights, **options)
        case "centered_clip" | "default":
            return geometry.centered_clip(gram, weights, **options)
    raise RuleError(f"{link.name} is no geometric rule")


def _only(parameters: Parameters, link: Link) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name in link.parameters}
