"""What churn, mixed speeds and slow links cost a run, in the virtual world of `tests.sim`: the real machines, no clock.

Members train about a minute a round. Rows of 1 MiB go to two reducers each; where a row of the table names no link they
take no time, and what is looked at are membership, deadlines, leases and votes. `utilised` is the share of the members'
time in which they trained what counted, `lost` the share of trained batches that did not count. Leader's bytes are
reckoned as protobuf encodes them, without TLS; its share of a round is at 100 Mbit/s.

A fixed deadline is the best of its mix on some seeds, and the adaptive one is compared with it on others, in pairs of
worlds of the same seed: the best of many on the seeds that chose it would be lucky too. A pair of worlds differs by a
few percent from the next, since whoever dies dies at another moment of a round; so there are pairs until the standard
error of the mean ratio is small, and it is printed. That takes about a minute of one core for each mix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from statistics import fmean, stdev
from typing import Annotated

import typer

from tests.bench import report
from tests.bench._churn_world import MBIT, Mix, Outcomes, Stuck, measured
from tests.bench.report import Figure

LEADER_MBIT = 100.0
LEADER_SHARE = 0.1
ROUND_S = 60.0
FIXED = (1.05, 1.15, 1.3, 1.6, 2.5, 5.0)
"""Fixed deadlines, as multiples of the length that work is sized for; below the first nobody's work would fit."""
ERROR_WANTED = 0.005
"""Of the ratio of the adaptive deadline to the best fixed one."""

EXCHANGES = {
    "n8.100mbit": Mix(8, link_mbit=100, link_spread=0.5, n_chunks=16),
    "n8.20mbit": Mix(8, link_mbit=20, link_spread=0.5, n_chunks=16),
    "n64.100mbit": Mix(64, link_mbit=100, link_spread=0.5, n_chunks=16),
    "n64.100mbit.churn": Mix(64, link_mbit=100, link_spread=0.5, n_chunks=16, speeds="mixed", life_s=1200),
    "n256.100mbit.churn": Mix(256, link_mbit=100, link_spread=0.5, n_chunks=16, speeds="mixed", life_s=1200),
}
CHURNS = {
    "calm": Mix(32, speeds="mixed", round_s=ROUND_S),
    "life20min": Mix(32, speeds="mixed", round_s=ROUND_S, life_s=1200),
    "life5min": Mix(32, speeds="mixed", round_s=ROUND_S, life_s=300),
    "heavy.life20min": Mix(32, speeds="heavy", round_s=ROUND_S, life_s=1200),
}
CONTROLS = (32, 128, 512, 5000)
DEADLINES = {
    "alike": Mix(16, round_s=ROUND_S),
    "mixed": Mix(16, speeds="mixed", round_s=ROUND_S),
    "heavy": Mix(16, speeds="heavy", round_s=ROUND_S),
    "mixed.life10min": Mix(16, speeds="mixed", round_s=ROUND_S, life_s=600),
    "mixed.spells": Mix(16, speeds="mixed", round_s=ROUND_S, spell_s=400),
}


@dataclass(frozen=True, slots=True)
class Trials:
    """How much is tried for one mix."""

    fixed: tuple[float, ...] = FIXED
    n_rounds: int = 10
    """Of each world."""
    n_choosing: int = 3
    """Seeds on which the best fixed deadline is chosen."""
    pairs_least: int = 6
    pairs_most: int = 24


def main(
    json: Annotated[bool, typer.Option("--json", help="One JSON document in place of the table.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A few small worlds, in seconds.")] = False,
) -> None:
    """Utilisation, time a round, lost work and the leader's bytes against N, churn and links; and the deadlines."""
    report.show("churn", list(small() if quick else whole()), as_json=json)


def small() -> Iterator[Figure]:
    """Each kind of figure once."""
    yield from costs(Mix(4, h=20, step_s=0.5), 2)
    yield from rows("churn.n8.life5min", measured(Mix(8, speeds="mixed", round_s=ROUND_S, life_s=300), 2))
    yield from rows("exchange.n4.100mbit", measured(Mix(4, link_mbit=100, n_chunks=4), 1))
    yield from controls((8, 32), 1)
    yield from deadlines("mixed", Mix(6, speeds="mixed", round_s=ROUND_S), Trials(FIXED[:2], 1, 1, 2, 2))


def whole() -> Iterator[Figure]:
    yield from costs(Mix(8, h=20, step_s=0.5), 6)
    for name, mix in CHURNS.items():
        report.say(f"churn: {name}")
        yield from lived(f"churn.n{mix.n}.{name}", mix, 5)
    for name, mix in EXCHANGES.items():
        report.say(f"exchange: {name}")
        yield from lived(f"exchange.{name}", mix, 3)
    report.say(f"leader: {CONTROLS[-1]} members")
    yield from controls(CONTROLS, 1)
    for name, mix in DEADLINES.items():
        report.say(f"deadlines: {name}")
        yield from deadlines(name, mix, Trials())


def lived(name: str, mix: Mix, n_rounds: int) -> Iterator[Figure]:
    """The figures of a world, or that it came to nothing."""
    try:
        yield from rows(name, measured(mix, n_rounds))
    except Stuck as stuck:
        report.say(f"{name}: {stuck}")
        yield Figure(f"{name}.committed", 0, f"of {n_rounds} rounds")


def rows(name: str, found: Outcomes) -> Iterator[Figure]:
    """The figures of one world."""
    yield Figure(f"{name}.round", found.round_s, "s")
    yield Figure(f"{name}.utilised", 100 * found.utilised, "%")
    yield Figure(f"{name}.lost", 100 * found.lost, "%")
    yield Figure(f"{name}.leader_sent", found.leader_sent_bytes / 1e6, "MB/round")


def costs(alike: Mix, n_rounds: int) -> Iterator[Figure]:
    """What one member that is 10 times slower and one that joins cost the others: rounds of 10 s of training."""
    reference = measured(alike, n_rounds)
    slowed = measured(replace(alike, slow=(10.0,)), n_rounds)
    joined = measured(replace(alike, n=alike.n + 1, newcomers=1), n_rounds)
    yield Figure("cost.alike.round", reference.round_s, "s")
    yield Figure("cost.one_10x_slower.round", slowed.round_s, "s", {"alike": slowed.round_s / reference.round_s})
    yield Figure("cost.one_10x_slower.counted", 100 * slowed.slow_counted, "% of rounds")
    yield Figure("cost.joiner.round", joined.round_s, "s", {"alike": joined.round_s / reference.round_s})


def controls(sizes: tuple[int, ...], n_rounds: int) -> Iterator[Figure]:
    """Membership, deadlines, leases and votes of so many members, of which about a hundred can be reached.

    At most `max_members` have a seat, 1,024 by default; the others hold the state and wait, and are in `utilised`.
    """
    shares: list[tuple[int, float]] = []
    for n in sizes:
        found = measured(Mix(n, speeds="mixed", round_s=ROUND_S, n_chunks=2, reachable=min(1.0, 100 / n)), n_rounds)
        sent_s = found.leader_sent_bytes / (LEADER_MBIT * MBIT)
        shares.append((n, sent_s / found.round_s))
        yield from rows(f"control.n{n}", found)
        yield Figure(f"control.n{n}.leader_share", 100 * shares[-1][1], "% of a round")
    yield Figure("control.leader_passes_10_percent", crossing(shares, LEADER_SHARE), "members")


def crossing(shares: list[tuple[int, float]], share: float) -> float:
    """The N at which a share is passed: between measured ones straight in logarithms, beyond the last in its slope."""
    points = [(math.log(n), math.log(value)) for n, value in shares]
    wanted = math.log(share)
    pairs = list(pairwise(points))
    (n_0, y_0), (n_1, y_1) = next((pair for pair in pairs if pair[1][1] >= wanted), pairs[-1])
    return math.exp(n_0 + (wanted - y_0) * (n_1 - n_0) / (y_1 - y_0))


def deadlines(name: str, mix: Mix, trials: Trials) -> Iterator[Figure]:
    """Counted batches a second under the adaptive deadline, beside those under the best fixed one of a grid."""
    seeds = count(1)
    choosing = [next(seeds) for _ in range(trials.n_choosing)]
    by_limit = {
        times: fmean(rate(at_most(mix, times), trials.n_rounds, seed) for seed in choosing) for times in trials.fixed
    }
    best = max(by_limit, key=lambda times: by_limit[times])
    pairs: list[tuple[float, float]] = []
    while len(pairs) < trials.pairs_least or (len(pairs) < trials.pairs_most and error(pairs) > ERROR_WANTED):
        seed = next(seeds)
        pairs.append((rate(mix, trials.n_rounds, seed), rate(at_most(mix, best), trials.n_rounds, seed)))
    ratio = fmean(adaptive / fixed for adaptive, fixed in pairs)
    yield Figure(f"deadline.{name}.adaptive", fmean(one for one, _ in pairs), "batches/s", {"best fixed": ratio})
    yield Figure(f"deadline.{name}.adaptive.error", 100 * error(pairs), f"% of the ratio, {len(pairs)} pairs")
    yield Figure(f"deadline.{name}.best_fixed_at", best * mix.round_s, "s")
    for times, value in by_limit.items():
        yield Figure(
            f"deadline.{name}.fixed_{times * mix.round_s:g}s", value, "batches/s", {"best": value / by_limit[best]}
        )


def at_most(mix: Mix, times: float) -> Mix:
    """The same world with a fixed deadline."""
    return replace(mix, deadline_k=0.0, train_limit_s=times * mix.round_s)


def rate(mix: Mix, n_rounds: int, seed: int) -> float:
    """Counted batches a second."""
    return measured(replace(mix, seed=seed), n_rounds).batches_per_s


def error(pairs: Sequence[tuple[float, float]]) -> float:
    """The standard error of the mean ratio."""
    return stdev(one / other for one, other in pairs) / math.sqrt(len(pairs))
