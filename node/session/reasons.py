"""Why rounds did not count this node, by kind: reasons hold figures and names, of which there is no end."""

from __future__ import annotations

import re
from collections import Counter

KINDS_MOST = 32
OTHERS = "other reasons"

_NAMES = re.compile(r"\b(have not come to|were with) .*", re.DOTALL)
_FIGURE = re.compile(r"\d[\d.]*(?:e[+-]?\d+)?")


def kind_of(reason: str) -> str:
    """A reason without its figures and whom it names: "norm is … times the median, above …"."""
    return _FIGURE.sub("…", _NAMES.sub(r"\1 everybody", reason))


class Reasons:
    """How often each kind of reason was given. A leader's words may be anything, so there are so many kinds at most."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def note(self, reason: str) -> None:
        kind = kind_of(reason)
        known = kind in self._counts or len(self._counts) < KINDS_MOST
        self._counts[kind if known else OTHERS] += 1

    def counts(self) -> dict[str, int]:
        return dict(self._counts)
