"""One all-reduce among processes on loopback, over mutual TLS, beside gloo in fp32 and hivemind's averager in fp16.

From an fp32 vector in memory to the mean of all in an fp32 vector, on every peer: encoded, committed to, dealt, sent,
checked, combined, reported, fetched, verified and decoded, timed from a common start to the end of the slowest.

That the exchange and the outer step of 10^9 values fit two peers with 2 GiB each, their vectors in mapped files and
their state in a node's own store (root, 70 GB of disk, some minutes):

    python -m tests.bench allreduce --values 1000000000 --peers 2 --memory 2048 --outer --only int8.mean --turns 1
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Annotated

import typer

from aggregation.rules import names
from protos.runspec import RunSpec
from tests.bench import report
from tests.bench._allreduce_leader import AllReduceFailed, Turn, Village
from tests.bench._allreduce_words import Case
from tests.bench._baselines import BaselineFailed, gloo_fp32, hivemind_fp16
from tests.bench._cgroup import NoCgroup
from tests.bench.report import Figure
from tests.coordinator.made import spec

GLOO, HIVEMIND = "gloo.fp32", "hivemind.fp16"
MEAN, MESH, DEFAULT = "int8.mean", "int8.mean.mesh", "int8.default"
ERROR_LIMIT = 0.012
"""Relative, for Gaussian values: int8 rows and an int8 result."""
ROOM_BYTES = 64 * 2**20
BYTES_A_VALUE = 1.01


def main(
    values: Annotated[int, typer.Option(help="values of each peer's vector")] = 25_000_000,
    peers: Annotated[int, typer.Option(help="processes")] = 4,
    turns: Annotated[int, typer.Option(help="timed turns of each case, after one that does not count")] = 7,
    only: Annotated[str, typer.Option(help="of the cases and references only these, with commas between")] = "",
    json: Annotated[bool, typer.Option("--json", help="one JSON document instead of a table")] = False,
    loop: Annotated[str, typer.Option(help="the members' event loop: uvloop or asyncio")] = "uvloop",
    seed: Annotated[int, typer.Option(help="of the values")] = 0,
    memory: Annotated[int, typer.Option(help="MiB that each process may use (a control group; needs root)")] = 0,
    outer: Annotated[bool, typer.Option(help="end each turn with the outer step on a state in files")] = False,
    profile: Annotated[str, typer.Option(help="write the first member's last turn as a cProfile file")] = "",
) -> None:
    """Compare all-reduces; exits with 1 if members end with different values or too far from the true mean."""
    wanted = [name for name in only.split(",") if name]
    cases = _cases(values, peers)
    known = [*(case.name for case in cases), GLOO, HIVEMIND]
    if unknown := next((name for name in wanted if name not in known), ""):
        raise typer.BadParameter(f"{unknown!r} is none of {', '.join(known)}", param_hint="--only")
    cases = [case for case in cases if not wanted or case.name in wanted]
    took: dict[str, list[float]] = {}
    warm: dict[str, Turn] = {}
    last: dict[str, Turn] = {}
    with ExitStack() as stack:
        takes: dict[str, Callable[[], float]] = {}
        try:
            village = None
            if cases:
                village = stack.enter_context(
                    Village(
                        cases, peers, seed=seed, loop=loop, profile=profile, memory_bytes=memory * 2**20, outer=outer
                    )
                )
                for index, case in enumerate(cases):
                    takes[case.name] = partial(_take, village, index, case.name, warm, last, cold=bool(memory))
            for name, make in ((GLOO, gloo_fp32), (HIVEMIND, hivemind_fp16)):
                if not wanted or name in wanted:
                    takes[name] = stack.enter_context(make(peers, values, seed=seed)).average
            for turn in range(turns + 1):
                for name, one in takes.items():
                    seconds = one()
                    if turn:
                        took.setdefault(name, []).append(seconds)
                    report.say(f"turn {turn}: {name} {seconds:.3f} s")
            peak_bytes = village.peak_bytes() if village else 0
        except (AllReduceFailed, BaselineFailed, NoCgroup) as error:
            report.say(str(error))
            raise typer.Exit(1) from None
    medians = {name: statistics.median(all_s) for name, all_s in took.items()}
    figures = [figure for name in medians for figure in _figures(name, medians, last, warm, values, cases)]
    if memory:
        figures.append(
            Figure("memory.peak", peak_bytes / 2**20, "MiB a peer", {"allowed": peak_bytes / (memory * 2**20)})
        )
    report.show("allreduce", figures, as_json=json)
    errors = {name: max(done.relative_error for done in turn.members) for name, turn in last.items()}
    if any(not error <= ERROR_LIMIT for name, error in errors.items() if name != DEFAULT):
        report.say(f"too far from the true mean: {errors}")
        raise typer.Exit(1)


def _take(
    village: Village, index: int, name: str, warm: dict[str, Turn], last: dict[str, Turn], *, cold: bool
) -> float:
    """One turn of a case in seconds; the first one is watched, which takes time, after one that warms up."""
    if name in warm:
        last[name] = village.turn(index)
        return last[name].seconds
    if not cold:  # there, what the first turn takes is of interest too
        village.turn(index)
    warm[name] = village.turn(index, watched=True)
    return warm[name].seconds


def _cases(n_values: int, n_peers: int) -> list[Case]:
    mean, default = _spec(n_values, "mean"), "default" in names()
    cases = [Case(MEAN, mean, 1), Case(MESH, mean, n_peers)]
    return [*cases, Case(DEFAULT, _spec(n_values, "default"), 1, centred=True)] if default else cases


def _spec(n_values: int, rule: str) -> RunSpec:
    """A run whose chunks and leaves are of the usual size."""
    base = spec(f"rule.name={rule}", "codec.chunk_values=1048576", "codec.leaf_values=65536").model_dump(mode="json")
    return RunSpec.model_validate({**base, "model": {**base["model"], "n_values": n_values}})


def _figures(
    name: str,
    medians: dict[str, float],
    last: dict[str, Turn],
    warm: dict[str, Turn],
    n_values: int,
    cases: Sequence[Case],
) -> list[Figure]:
    others = [GLOO, HIVEMIND] if name in (MEAN, MESH, DEFAULT) else []
    others += [MEAN] if name in (MESH, DEFAULT) else []
    figures = [Figure(name, medians[name], "s", {o: medians[name] / medians[o] for o in others if o in medians})]
    if name not in last:
        return figures
    turn = last[name]
    replicas = next(case.replicas for case in cases if case.name == name)
    most_bytes = int((replicas + 2) * BYTES_A_VALUE * n_values) + ROOM_BYTES
    held_bytes = max(done.held_bytes + done.private_bytes for done in warm[name].members)
    figures += [
        Figure(f"{name}.error", max(done.relative_error for done in turn.members), "relative"),
        Figure(f"{name}.held", held_bytes / 2**20, "MiB", {"allowed": held_bytes / most_bytes}),
        Figure(f"{name}.private", max(done.private_bytes for done in warm[name].members) / 2**20, "MiB"),
        Figure(f"{name}.cpu", statistics.mean(done.cpu_s for done in turn.members), "core-s a peer"),
    ]
    for mark in turn.members[0].marks:
        figures.append(Figure(f"{name}.until.{mark}", max(done.marks[mark] for done in turn.members), "s"))
    for stage in turn.members[0].stages:
        sums = [done.stages[stage] for done in turn.members]
        n_bytes = sum(each.n_bytes for each in sums)
        if n_bytes:
            seconds = statistics.mean(each.seconds for each in sums)
            copies = sum(each.copied_bytes for each in sums) / n_bytes
            figures.append(Figure(f"{name}.{stage}", seconds, "s a peer"))
            figures.append(Figure(f"{name}.{stage}.bytes", n_bytes / len(sums) / 2**20, "MiB a peer"))
            figures.append(Figure(f"{name}.{stage}.copies", copies, "× its bytes"))
    return figures
