"""How fast one core combines contributions: fp32 rows beside torch, and int8 frames as a reducer has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import numpy as np
import torch
import typer

from aggregation import codec, rules
from aggregation.rules import reduction
from tests.bench import report, timing
from tests.bench.report import Figure

BLOCK = 1024
PER_COORDINATE = {
    "mean": reduction.mean,
    "median": reduction.median,
    "trimmed_mean": reduction.trimmed_mean,
    "meamed": reduction.meamed,
}
"""Timed by themselves on fp32 rows, as torch's are; the others through `aggregate`, whose checks of the input count."""


def main(
    json: Annotated[bool, typer.Option(help="One JSON document instead of a table.")] = False,
    values: Annotated[int, typer.Option(help="Values of a chunk.", min=1)] = 1 << 20,
    contributions: Annotated[int, typer.Option(help="Rows, N.", min=3, max=256)] = 8,
    rounds: Annotated[int, typer.Option(help="Measurements of each, of which the median counts.", min=1)] = 15,
) -> None:
    """Every rule on one chunk of N rows, f a fifth of N, with an int8 chunk as the previous result."""
    torch.set_num_threads(1)
    n, f = contributions, max(1, contributions // 5)
    random = np.random.default_rng(0)
    common_P = random.standard_normal(values, dtype=np.float32)
    updates_NP = (random.standard_normal((n, values), dtype=np.float32) + common_P) * np.float32(1e-3)
    cases = {**_fp32_cases(updates_NP, f), **_int8_cases(updates_NP, common_P * np.float32(1e-3), f)}
    report.say(f"{len(cases)} cases of {n} rows of {values} values, {rounds} times each")
    took_s = timing.seconds(cases, rounds=rounds)
    report.show("rules", [_figure(name, values, n, took_s) for name in cases], as_json=json)


def _fp32_cases(updates_NP: np.ndarray, f: int) -> dict[str, Callable[[], object]]:
    n, n_values = updates_NP.shape
    weights_N, out_P = np.linspace(1, 2, n, dtype=np.float32), np.zeros(n_values, np.float32)
    tensor_NP = torch.from_numpy(updates_NP)
    cases: dict[str, Callable[[], object]] = {
        "torch.mean": lambda: torch.mean(tensor_NP, dim=0),
        "torch.median": lambda: torch.median(tensor_NP, dim=0),
    }
    for name, reduce in PER_COORDINATE.items():
        cases[f"{name}.{n}"] = lambda reduce=reduce: reduce(updates_NP, weights_N, f, out_P)  # type: ignore[misc]
    previous_P = updates_NP.mean(axis=0)
    for name in rules.names():
        if name not in PER_COORDINATE and rules.fits(name, n, f):
            cases[f"{name}.{n}"] = lambda name=name: rules.aggregate(  # type: ignore[misc]
                name, updates_NP, f=f, previous_D=previous_P
            )
    return cases


def _int8_cases(updates_NP: np.ndarray, previous_P: np.ndarray, f: int) -> dict[str, Callable[[], object]]:
    n = len(updates_NP)
    frames = [codec.encode("int8", row_P, block=BLOCK) for row_P in updates_NP]
    previous = codec.encode("int8", previous_P, block=BLOCK)
    weights_N = [1000 + i for i in range(n)]

    def case(name: str) -> Callable[[], object]:
        return lambda: rules.combine(
            name, frames, weights_N=weights_N, f=f, codec="int8", block=BLOCK, previous=previous, checked=True
        )

    return {f"int8.{name}.{n}": case(name) for name in rules.names() if rules.fits(name, n, f)}


def _figure(name: str, values: int, n: int, took_s: Mapping[str, float]) -> Figure:
    ratios = {}
    if name.startswith("int8."):
        mean = f"int8.mean.{n}"
        ratios = {mean: took_s[mean] / took_s[name], f"time of {mean}": took_s[name] / took_s[mean]}
    elif not name.startswith("torch."):
        ratios = {other: took_s[other] / took_s[name] for other in ("torch.median", "torch.mean", f"mean.{n}")}
        ratios[f"time of mean.{n}"] = took_s[name] / took_s[f"mean.{n}"]
    return Figure(name, values / took_s[name] / 1e6, "M coordinates/s", ratios)
