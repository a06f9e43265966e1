"""Which rules there are, and how many contributions each must have."""

from __future__ import annotations

from dataclasses import dataclass

from aggregation.errors import RuleError
from aggregation.rules import reduction
from aggregation.rules.reduction import Reduction


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule and its requirement: at least `n_per_f`·f + `n_extra` contributions for f Byzantine ones among them."""

    name: str
    reduce: Reduction
    n_per_f: int
    n_extra: int
    needs_f: bool
    """Whether f means anything to it. A rule that needs none is evaluated with f = 0 whatever f is given."""

    def minimum_contributions(self, f: int) -> int:
        return self.n_per_f * (f if self.needs_f else 0) + self.n_extra


_RULES = (
    Rule("mean", reduction.mean, n_per_f=0, n_extra=1, needs_f=False),
    Rule("median", reduction.median, n_per_f=2, n_extra=1, needs_f=True),
)
_BY_NAME = {rule.name: rule for rule in _RULES}


def names() -> list[str]:
    """The rules that a run may name."""
    return list(_BY_NAME)


def by_name(name: str) -> Rule:
    """The rule of that name; raises RuleError."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise RuleError(f"no rule {name!r}; there are {', '.join(_BY_NAME)}") from None


def minimum_contributions(name: str, f: int) -> int:
    """The N that a rule needs to withstand f Byzantine contributions; raises RuleError for f < 0."""
    if f < 0:
        raise RuleError(f"f is {f}, less than none")
    return by_name(name).minimum_contributions(f)


def needs_f(name: str) -> bool:
    """Whether the rule withstands Byzantine contributions at all and so needs to know how many."""
    return by_name(name).needs_f
