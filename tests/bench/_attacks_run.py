"""One attacked run: rounds of inner training by honest and lying workers, and of what a run does with the outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tests.bench._attacks_digits import BLOCK, N_WORKERS, Workers, digits
from tests.bench._attacks_liars import ATTACKS, TRAINS_ON_FLIPPED_LABELS, Floats, Known
from tests.reference.rounds import Rounds, Sent, Settings

N_LIARS = 2
FRACTION = N_LIARS / N_WORKERS
"""Of the contributions that may be Byzantine: as many as there are here, so that each rule has the f that it needs."""
H = 20
ROUNDS = 25
OUTER_LR = 0.7
OUTER_MOMENTUM = 0.9
ALPHA = 0.3
CHUNK_VALUES = 1024


@dataclass(frozen=True, slots=True)
class Defence:
    """A rule, and whether the norm gate stands before it."""

    name: str
    rule: str
    gated: bool


DEFENCES: Mapping[str, Defence] = {
    defence.name: defence
    for defence in (
        Defence("mean", "mean", gated=False),
        Defence("gate+mean", "mean", gated=True),
        *(
            Defence(rule, rule, gated=False)
            for rule in (
                "median",
                "trimmed_mean",
                "krum",
                "multi_krum",
                "geometric_median",
                "nnm+trimmed_mean",
                "arc+nnm+trimmed_mean",
                "centered_clip",
            )
        ),
        Defence("default", "default", gated=True),
    )
}


def accuracy(defence: Defence, attack: str, seed: int, *, rounds: int = ROUNDS) -> float:
    """Accuracy on the test images after a run, in percent; the same number for the same arguments."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _accuracy(defence, attack, seed, rounds)
    finally:
        torch.set_num_threads(threads)


def _accuracy(defence: Defence, attack: str, seed: int, rounds: int) -> float:
    liars = range(N_WORKERS - N_LIARS, N_WORKERS)
    flipped = frozenset(liars) if attack in TRAINS_ON_FLIPPED_LABELS else frozenset()
    workers = Workers(digits(seed, alpha=ALPHA), seed, h=H, flipped=flipped)
    settings = Settings(
        rule=defence.rule,
        f_max=N_LIARS,
        block=BLOCK,
        chunk_values=CHUNK_VALUES,
        outer_lr=OUTER_LR,
        outer_momentum=OUTER_MOMENTUM,
        fraction=FRACTION,
        gated=defence.gated,
    )
    run = Rounds(workers.initial(seed), settings)
    past: list[Floats] = []
    first_honest_HD: Floats | None = None
    for _ in range(rounds):
        deltas_WD = workers.train(run.theta_D)
        own_LD, honest_HD = deltas_WD[-N_LIARS:], deltas_WD[:-N_LIARS]
        first_honest_HD = honest_HD if first_honest_HD is None else first_honest_HD
        sent_LD = ATTACKS[attack](Known(own_LD, honest_HD, first_honest_HD, past))
        past.append(own_LD)
        run.apply([Sent(row_D, 1.0, workers.sum_lr) for row_D in (*honest_HD, *sent_LD)])
    return workers.accuracy(run.theta_D)
