"""What Byzantine workers send: each attack is a function of what they know, which is everything.

Formulas as in byzfl (LPD-EPFL), Baruch et al. 2019 (alie), Xie et al. 2020 (ipm), Karimireddy et al. 2022 (mimic).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

REPLAYED_ROUNDS = 5
"""How old the pseudo-gradients are that replaying workers send again."""


@dataclass(frozen=True)
class Known:
    """What the liars know when they choose what to send."""

    own_LD: Floats
    """The pseudo-gradients of the liars' own training in this round."""
    honest_HD: Floats
    first_honest_HD: Floats
    """The honest rows of the first round."""
    past: Sequence[Floats]
    """own_LD of the rounds before, oldest first."""


Attack = Callable[[Known], Floats]


def _none(known: Known) -> Floats:
    return known.own_LD


def _scaled(factor: float) -> Attack:
    return lambda known: np.float32(factor) * known.own_LD


def _same(row_D: Floats, known: Known) -> Floats:
    return np.tile(row_D.astype(np.float32), (len(known.own_LD), 1))


def _ipm(known: Known) -> Floats:
    return _same(-0.5 * known.honest_HD.mean(axis=0), known)


def _alie(known: Known) -> Floats:
    """μ - 1.5 σ of each coordinate: inside what honest workers send, where z by the paper's formula is 0 for N = 8."""
    return _same(known.honest_HD.mean(axis=0) - 1.5 * known.honest_HD.std(axis=0), known)


def _mimic(known: Known) -> Floats:
    """A copy of one honest worker, in all rounds the one that was farthest from the honest mean in the first.

    Always the same one: copies of whoever is farthest in each round give nobody more than its turn.
    """
    away_HD = known.first_honest_HD - known.first_honest_HD.mean(axis=0)
    return _same(known.honest_HD[np.argmax(np.linalg.norm(away_HD, axis=1))], known)


def _zero(known: Known) -> Floats:
    return np.zeros_like(known.own_LD)


def _replay(known: Known) -> Floats:
    past = [*known.past, known.own_LD]
    return past[max(0, len(past) - 1 - REPLAYED_ROUNDS)]


def _adaptive_flip(known: Known) -> Floats:
    """Against the honest mean, at 2.9 times the honest rows' median norm: as long as a gate at 3 lets through."""
    mean_D = known.honest_HD.mean(axis=0)
    length = 2.9 * float(np.median(np.linalg.norm(known.honest_HD, axis=1)))
    return _same(-length * mean_D / np.linalg.norm(mean_D), known)


ATTACKS: Mapping[str, Attack] = {
    "none": _none,
    "flip1": _scaled(-1),
    "flip10": _scaled(-10),
    "ipm": _ipm,
    "alie": _alie,
    "mimic": _mimic,
    "label_flip": _none,  # those workers train on 9 - label and send what comes of it
    "zero": _zero,
    "replay": _replay,
    "scale50": _scaled(50),
    "adaptive_flip": _adaptive_flip,
}
TRAINS_ON_FLIPPED_LABELS = frozenset({"label_flip"})
