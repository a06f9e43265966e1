"""Rules: contributions of one chunk in, one result out, the same bytes on every machine.

A rule is geometry (the rows' Gram matrix gives a mixing of them), then a reduction per coordinate, or one of the two.
`registry` knows the rules and what they require, `policy` what happens with few contributions, `gate` who is out
before a rule is asked, `chain` puts a rule together, `combining` applies it: to `inputs` and `rows`, with `gram`,
`geometry`, `mixing`, `reduction` and `sorting`.
"""

from __future__ import annotations

from aggregation.rules.combining import aggregate, combine
from aggregation.rules.gate import norm_gate
from aggregation.rules.policy import Choice, effective, planned_f
from aggregation.rules.registry import (
    by_name,
    clips_aggregate,
    fits,
    is_centred,
    minimum_contributions,
    names,
    needs_f,
    norm_growth,
    uses_weights,
)

__all__ = [
    "Choice",
    "aggregate",
    "by_name",
    "clips_aggregate",
    "combine",
    "effective",
    "fits",
    "is_centred",
    "minimum_contributions",
    "names",
    "needs_f",
    "norm_gate",
    "norm_growth",
    "planned_f",
    "uses_weights",
]
