"""What a benchmark found: figures with their ratios to references of the same run, as a table or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

FILE_COLUMNS = 120
"""Where no terminal says how wide it is."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure. `ratios` are value / reference by the reference's name, of this very run."""

    name: str
    value: float
    unit: str
    ratios: Mapping[str, float] = field(default_factory=dict)


def show(benchmark: str, figures: Sequence[Figure], *, as_json: bool) -> None:
    """Print the figures on standard output: one JSON document, or a table."""
    if as_json:
        results = [
            {"name": one.name, "value": one.value, "unit": one.unit, "ratios": dict(one.ratios)} for one in figures
        ]
        print(json.dumps({"benchmark": benchmark, "results": results}))
        return
    table = Table(title=benchmark)
    for header in ("what", "figure", "unit", "ratios"):
        table.add_column(header, overflow="fold")  # a name that is cut is none
    for one in figures:
        ratios = ", ".join(f"{ratio:.3g} × {reference}" for reference, ratio in one.ratios.items())
        table.add_row(one.name, f"{one.value:.4g}", one.unit, ratios)
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else FILE_COLUMNS).print(table)


def say(text: str) -> None:
    """Progress, on standard error: standard output is the result's."""
    print(text, file=sys.stderr, flush=True)
