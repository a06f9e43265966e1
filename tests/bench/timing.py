"""Timing of things side by side: interleaved, so that a noisy moment hits all of them alike; the median is taken."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

ROUNDS = 7


def seconds(cases: Mapping[str, Callable[[], object]], *, rounds: int = ROUNDS, warm: int = 1) -> dict[str, float]:
    """Median seconds of each case, run in turn `rounds` times after `warm` turns that don't count."""
    took: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(warm + rounds):
        for name, case in cases.items():
            began = time.perf_counter()
            case()
            ended = time.perf_counter()
            if turn >= warm:
                took[name].append(ended - began)
    return {name: statistics.median(times) for name, times in took.items()}
