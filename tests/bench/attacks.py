"""Accuracy under attack, in percent: two liars among eight workers with unequal shards of scikit-learn's digits.

A run is `ROUNDS` rounds of `H` AdamW steps of a 64-48-10 network, Dirichlet α = 0.3, outer Nesterov 0.7/0.9, int8 with
blocks of 64, rules chunk by chunk. `mean` and the robust rules stand alone; `default` is the norm gate, centred
clipping around the last result and the clip of the aggregate, as in a run. Differences of 2 or 3 points are noise.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tests.bench import report
from tests.bench._attacks_liars import ATTACKS
from tests.bench._attacks_run import DEFENCES, accuracy

QUICK = ("mean", "gate+mean", "median", "default")
REFERENCE = "mean.none"

Accuracies = Mapping[str, Mapping[str, float]]


def main(
    json: Annotated[bool, typer.Option("--json", help="One JSON document in place of the table.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Runs that each figure is the mean of.")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, and four of the rules.")] = False,
) -> None:
    """Accuracy of the rules under the attacks; the worst of each rule is the lowest of its mean accuracies."""
    names = QUICK if quick else tuple(DEFENCES)
    found = measured(names, 1 if quick else seeds)
    if json:
        report.show("attacks", figures(found), as_json=True)
    else:
        Console(file=sys.stdout, width=None if sys.stdout.isatty() else 140).print(table(found))


def measured(names: tuple[str, ...], n_seeds: int) -> Accuracies:
    """Mean accuracy over the seeds, by defence and attack."""
    found: dict[str, dict[str, float]] = {}
    for name in names:
        report.say(f"{name}: {len(ATTACKS) * n_seeds} runs")
        found[name] = {
            attack: statistics.fmean(accuracy(DEFENCES[name], attack, seed) for seed in range(n_seeds))
            for attack in ATTACKS
        }
    return found


def figures(found: Accuracies) -> list[report.Figure]:
    """`default.flip10`, …, `default.worst`, …, each as a ratio to the mean's accuracy without an attack."""
    rule, attack = REFERENCE.split(".")
    reference = found[rule][attack]
    values = {f"{name}.{attack}": value for name, row in found.items() for attack, value in row.items()}
    values |= {f"{name}.worst": min(row.values()) for name, row in found.items()}
    return [report.Figure(name, value, "%", {REFERENCE: value / reference}) for name, value in values.items()]


def table(found: Accuracies) -> Table:
    """Rules down, attacks across."""
    made = Table("rule", *(attack.replace("_", " ") for attack in ATTACKS), "worst", title="accuracy under attack, %")
    for name, row in found.items():
        made.add_row(name, *(f"{value:.1f}" for value in row.values()), f"{min(row.values()):.1f}")
    return made
