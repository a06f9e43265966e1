"""Rules: contributions of one chunk in, one result out, the same bytes on every machine.

A rule ends in a reduction per coordinate (`reduction`). `registry` knows the rules and what they require, `policy`
what happens with few contributions, `gate` who is out before a rule is asked, `combining` applies a rule.
"""

from __future__ import annotations

from aggregation.rules.combining import aggregate, combine
from aggregation.rules.gate import norm_gate
from aggregation.rules.policy import effective, planned_f
from aggregation.rules.registry import minimum_contributions, names, needs_f

__all__ = [
    "aggregate",
    "combine",
    "effective",
    "minimum_contributions",
    "names",
    "needs_f",
    "norm_gate",
    "planned_f",
]
