"""When training ends without waiting for the slowest: from the finish times that members announce, and which count.

    m + min(max(k·MAD, 0.05 m, 0.5 s), max(0.15 m, 0.5 s))

m is the lower median of the finish times, in seconds since the round began, MAD the lower median of their distances
from it. So the slow cost the others at most 15 % of the round, or half a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from protos.messages import Heartbeat

SLACK_LEAST = 0.05
SLACK_MOST = 0.15
SLACK_LEAST_S = 0.5
"""What is granted beyond the median: at least this share of it or so long, and no more than that share or so long."""
PLAUSIBLE = 4.0
"""An announcement that goes beyond so many times the pace at which its member was seen to work is not believed."""
PACE_STEPS = 4
"""A pace is told by so many steps; fewer say more about when heartbeats come."""


def ends_after_s(finishes_s: Sequence[float], k: float) -> float:
    """Seconds from the beginning of a round to the end of its training, for finish times of all who are waited for.

    A finish time that nobody knows is infinite. While half of them are, and for k = 0, which asks for the fixed limit
    alone, the answer is infinite too.
    """
    if not finishes_s or k <= 0:
        return math.inf
    median_s = _lower_median(finishes_s)
    if not math.isfinite(median_s):
        return math.inf
    spread_s = k * _lower_median([abs(finish_s - median_s) for finish_s in finishes_s])
    granted_s = max(spread_s, SLACK_LEAST * median_s, SLACK_LEAST_S)
    return median_s + min(granted_s, max(SLACK_MOST * median_s, SLACK_LEAST_S))


def time_left_s(heartbeat: Heartbeat, steps: int, step_tokens: int, pace: float) -> float | None:
    """The time left as a heartbeat announces it, or None where it can't be so.

    Args:
        steps: that its member's lease holds.
        step_tokens: tokens of one of them.
        pace: tokens a second at which the member was seen to work before, 0 where it was not.
    """
    left = steps - heartbeat.step
    if left < 0:
        return None  # more than its lease holds
    if left == 0:
        return 0.0
    if not (math.isfinite(heartbeat.time_left_s) and heartbeat.time_left_s > 0):
        return None  # it doesn't know yet
    claimed = left * step_tokens / heartbeat.time_left_s
    if pace > 0 and claimed > PLAUSIBLE * pace:
        return None
    return heartbeat.time_left_s


def _lower_median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]
