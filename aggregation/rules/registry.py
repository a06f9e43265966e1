"""Which rules there are, how they compose, and what each requires and promises.

A rule is a chain `a+b+c`: any of the pre-aggregators `arc`, `nnm`, `norm_clip`, each at most once and in any order,
before one final rule. A chain of pre-aggregators alone ends in the mean. A fact about a chain follows from its links.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from aggregation.errors import RuleError
from aggregation.rules.geometry import ROWS_MAX, mda_fits


@dataclass(frozen=True, slots=True)
class Link:
    """One rule by itself; at least `n_per_f`·f + `n_extra` contributions for f Byzantine ones among them."""

    name: str
    n_per_f: int
    n_extra: int
    geometric: bool = True
    """Whether it looks at distances between the rows of a chunk, and not at each coordinate alone."""
    needs_f: bool = True
    pre: bool = False
    weighted: bool = False
    centred: bool = False
    clips_aggregate: bool = False
    parameters: tuple[str, ...] = ()


_CENTRED = ("iterations", "tau")
_LINKS = (
    Link("mean", 0, 1, geometric=False, needs_f=False, weighted=True),
    Link("median", 2, 1, geometric=False),
    Link("trimmed_mean", 2, 1, geometric=False),
    Link("meamed", 2, 1, geometric=False),
    Link("krum", 2, 3),
    Link("multi_krum", 2, 3, parameters=("m",)),
    Link("geometric_median", 2, 1, weighted=True, parameters=("nu", "tolerance")),
    Link("centered_clip", 2, 1, weighted=True, centred=True, parameters=_CENTRED),
    Link("default", 2, 1, weighted=True, centred=True, clips_aggregate=True, parameters=_CENTRED),
    Link("norm_clip", 0, 1, needs_f=False, pre=True, weighted=True, parameters=("radius",)),
    Link("arc", 2, 1, pre=True, weighted=True),
    Link("nnm", 2, 1, pre=True),
    Link("mda", 2, 1),
    Link("caf", 2, 1),
    Link("bulyan", 4, 3),
)
_BY_NAME = {link.name: link for link in _LINKS}
_COMPOSITIONS = ("nnm+trimmed_mean", "nnm+median", "nnm+krum", "nnm+geometric_median", "arc+nnm+trimmed_mean")


@dataclass(frozen=True, slots=True)
class Rule:
    """A chain: the pre-aggregators in the order in which they work, then what makes one row of the rows."""

    name: str
    before: tuple[Link, ...]
    last: Link

    @property
    def links(self) -> tuple[Link, ...]:
        return (*self.before, self.last)

    @property
    def is_robust(self) -> bool:
        """Whether more stands against f rows than that they are shortened or averaged with their neighbours: what ends
        in the mean still gives each of them its share.
        """
        return self.last.name != "mean"

    @property
    def is_geometric(self) -> bool:
        """Whether it needs the whole chunk's Gram matrix before its first value."""
        return any(link.geometric for link in self.links)

    @property
    def needs_f(self) -> bool:
        """Whether f means anything to it. A rule that needs none is evaluated with f = 0 whatever f is given."""
        return any(link.needs_f for link in self.links)

    @property
    def uses_weights(self) -> bool:
        """Whether weights change the result: each link allows them, and rows are not mixed with each other first."""
        return all(link.weighted for link in self.links)

    @property
    def is_centred(self) -> bool:
        """Whether it starts from the previous result."""
        return self.last.centred

    @property
    def clips_aggregate(self) -> bool:
        """Whether the commit that takes its result scales it by a clip factor."""
        return self.last.clips_aggregate

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that `aggregate` takes for it."""
        return tuple(sorted({name for link in self.links for name in link.parameters}))

    def minimum_contributions(self, f: int) -> int:
        return max((link.n_per_f * f if link.needs_f else 0) + link.n_extra for link in self.links)

    def limits(self, n: int, f: int) -> str | None:
        """Why n contributions are too few or too many for it, or None."""
        needed = self.minimum_contributions(f)
        if n < needed:
            return f"{self.name} needs {needed} contributions for f = {f}, {n} count"
        if self.is_geometric and n > ROWS_MAX:
            return f"{self.name} takes at most {ROWS_MAX} contributions, {n} count"
        if self.last.name == "mda" and not mda_fits(n, f):
            return f"{self.name} would search too long among {n} contributions with f = {f}"
        return None

    def norm_growth(self, n: int, f: int) -> float:
        """‖result‖ is at most this times the longest row's (or the centre's) norm, rounding and encoding apart.

        Rows that are clipped or mixed by weights of sum 1 grow no longer. Per coordinate, the squares of the k values
        of a mean sum up to at least k times its own (Jensen). A trimmed mean leaves out f more values that are as large
        as its largest one, so its square counts n - f times at least; a median is one with f = (n - 1)//2.
        """
        f = f if self.needs_f else 0
        match self.last.name:
            case "median" | "centered_clip" | "default":  # centred rules start from the median where there is no centre
                at_least = n // 2 + 1
            case "trimmed_mean" | "meamed":
                at_least = n - f
            case "bulyan":
                n, at_least = n - 2 * f, n - 4 * f
            case _:
                return 1.0
        return math.sqrt(n / at_least)


def names() -> list[str]:
    """The rules by themselves, then the compositions that are known to be of use; `by_name` takes any other too."""
    return [*_BY_NAME, *_COMPOSITIONS]


@lru_cache(maxsize=256)
def by_name(name: str) -> Rule:
    """The rule of that name, compositions `a+b+c` included; raises RuleError."""
    links = [_link(part, name) for part in name.split("+")]
    last = _BY_NAME["mean"] if links[-1].pre else links.pop()
    for link in links:
        if not link.pre:
            raise RuleError(f"rule {name!r}: {link.name} gives one row, nothing can follow it")
    if len({link.name for link in links}) < len(links):
        raise RuleError(f"rule {name!r} names a pre-aggregator twice")
    return Rule(name, tuple(links), last)


def minimum_contributions(name: str, f: int) -> int:
    """The N that a rule needs to withstand f Byzantine contributions; raises RuleError for f < 0."""
    return by_name(name).minimum_contributions(_at_least_0(f))


def fits(name: str, n: int, f: int) -> bool:
    """Whether the rule can be evaluated for n contributions and f: enough of them, and no search without an end."""
    return by_name(name).limits(n, _at_least_0(f)) is None


def needs_f(name: str) -> bool:
    """Whether f means anything to the rule; where it means nothing, no Byzantine contribution is withstood."""
    return by_name(name).needs_f


def uses_weights(name: str) -> bool:
    """Whether the contributions' weights change the rule's result (weight 0 always does: such a row is not there)."""
    return by_name(name).uses_weights


def is_centred(name: str) -> bool:
    """Whether the rule starts from the previous result."""
    return by_name(name).is_centred


def clips_aggregate(name: str) -> bool:
    """Whether a commit scales the rule's result by a clip factor s."""
    return by_name(name).clips_aggregate


def norm_growth(name: str, n: int, f: int) -> float:
    """A bound: the result's norm over the longest row's or, where there is one, the centre's, rounding apart."""
    rule = by_name(name)
    limit = rule.limits(n, _at_least_0(f))
    if limit is not None:
        raise RuleError(limit)
    return rule.norm_growth(n, f)


def _link(part: str, name: str) -> Link:
    try:
        return _BY_NAME[part]
    except KeyError:
        raise RuleError(f"no rule {name!r}; there are {', '.join(_BY_NAME)}, and arc, nnm, norm_clip before") from None


def _at_least_0(f: int) -> int:
    if f < 0:
        raise RuleError(f"f is {f}, less than none")
    return f
