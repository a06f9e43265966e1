"""Sums of learning rates: every honest trainer's lies between the bounds, and what a liar gains is little."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.rounds import leases, policy, rates
from node.training.schedule import inner_lr, ramp_steps
from protos.messages import Range
from protos.runspec import InnerSpec, WorkSpec
from tests.coordinator.rounds.cases import NO_HASH, PEERS, commitment, seated
from tests.fakes.tiny import tiny_run
from tests.node.training.bench import Bench
from tests.sim.options import sim_spec

STEPS = st.integers(0, 3000)
INNERS = st.builds(
    InnerSpec,
    optimiser=st.sampled_from(["adamw", "sgd"]),
    lr=st.sampled_from([0.0, 5e-324, 3e-320, 1e-300]) | st.floats(0, 10),
    warmup_steps=STEPS,
    beta2=st.sampled_from([0.0, 0.9, 0.95, 0.99, 0.999]),
    decay_start=STEPS,
    decay_steps=STEPS,
)
MADE, SKIPPED, RESTORED = range(3)


def trained(
    inner: InnerSpec, nominal_step: int, h: int, steps: Sequence[int], cold_step: int | None
) -> tuple[int, float]:
    """(steps, sum of rates) of a trainer: what it counts, step by step, as `node.training.inner` does.

    RESTORED: a batch after which the parameters are the anchor's again, and the moments empty.
    """
    n_steps, sum_lr = 0, 0.0
    for k, outcome in enumerate(steps):
        lr = inner_lr(inner, nominal_step, k, h, cold_step)
        if outcome == MADE:
            n_steps, sum_lr = n_steps + 1, sum_lr + lr
            cold_step = None if cold_step is None else cold_step + 1
        elif outcome == RESTORED:
            n_steps, sum_lr, cold_step = 0, 0.0, 0
    return n_steps, sum_lr


@given(
    INNERS,
    STEPS,
    st.integers(1, 200),
    st.floats(0, 4),
    st.lists(st.tuples(st.integers(0, 800), st.sampled_from([SKIPPED, RESTORED])), max_size=12),
    st.none() | st.integers(0, 100),
)
@example(InnerSpec(lr=0.01, warmup_steps=50), 0, 30, 1.0, [], 0)
@example(InnerSpec(lr=0.01, warmup_steps=50), 0, 30, 4.0, [], None)
@example(InnerSpec(lr=0.01, warmup_steps=10, decay_start=100, decay_steps=10), 95, 30, 1.0, [], None)
@example(InnerSpec(lr=0.01, warmup_steps=10, decay_start=100, decay_steps=10), 200, 30, 1.0, [], 0)
@example(InnerSpec(lr=0.01, warmup_steps=100, decay_start=50, decay_steps=100), 20, 90, 1.0, [(3, SKIPPED)], 0)
@example(InnerSpec(lr=0.01, warmup_steps=50), 0, 30, 1.0, [(28, RESTORED)], None)
def test_no_honest_sum_is_outside(
    inner: InnerSpec,
    nominal_step: int,
    h: int,
    share: float,
    odd: list[tuple[int, int]],
    cold_step: int | None,
) -> None:
    """Over empty rounds up to 4 H steps, some skipped, from cold or warm moments, at any place of any schedule."""
    outcomes = [MADE] * max(1, int(share * h))
    for k, outcome in odd:
        outcomes[k % len(outcomes)] = outcome
    steps, sum_lr = trained(inner, nominal_step, h, outcomes, cold_step)
    least, most = rates.sums(inner, nominal_step, h, steps, len(outcomes))
    assert least <= sum_lr <= most
    assert math.isfinite(most)


@given(st.integers(0, 60), st.integers(1, 60), st.booleans())
def test_the_bounds_are_those_of_the_schedule(nominal_step: int, steps: int, cold: bool) -> None:
    """Where nothing is skipped: the most is what warm moments make of it, the least half of what cold ones do."""
    inner = InnerSpec(lr=0.01, warmup_steps=80, decay_start=100, decay_steps=40)
    _, sum_lr = trained(inner, nominal_step, 60, [MADE] * steps, 0 if cold else None)
    least, most = rates.sums(inner, nominal_step, 60, steps, steps)
    assert least == pytest.approx(sum_lr / 2, rel=0.2) if cold else most == pytest.approx(sum_lr, rel=0.2)


def test_bounds_of_a_million_steps_take_no_longer() -> None:
    inner = InnerSpec(lr=0.01, warmup_steps=10**6)
    least, most = rates.sums(inner, 0, 10**6, 4 * 10**6, 4 * 10**6)
    exact = 0.01 * (10**6 / 2 + 3 * 10**6)
    assert exact <= most <= 1.05 * exact
    assert 0.45 * exact <= least <= exact / 2


@given(INNERS, st.integers(1, 10**6))
def test_the_ramp_is_the_trainers(inner: InnerSpec, h: int) -> None:
    assert rates.ramp_steps(inner, h) == ramp_steps(inner, h)


def test_a_trainers_own_sums_are_inside(tmp_path: Path) -> None:
    bench = Bench(tiny_run(tmp_path, width=13, inner={"lr": 0.01, "warmup_steps": 20}))
    inner = bench.run.spec.inner
    for nominal_step, n in ((0, 7), (7, 10), (15, 23)):
        bench.load(nominal_step=nominal_step, fresh=nominal_step == 7)
        bench.train(Range(0, n), h=10)
        encoded = bench.encode()
        least, most = rates.sums(inner, nominal_step, 10, encoded.steps, n)
        assert encoded.steps == n
        assert least <= encoded.sum_lr <= most


# -- what it is for ---------------------------------------------------------------------------------------------------


WARMING = sim_spec(n_chunks=3, work=WorkSpec(batch_tokens=8, h=8)).model_copy(
    update={"inner": InnerSpec(lr=0.01, warmup_steps=400)}
)


def test_a_peak_rate_that_is_claimed_in_the_warm_up_is_out() -> None:
    """It made the norm gate's allowance 36 times as large."""
    ledger = seated(5, WARMING)
    honest = 0.01 * sum((k + 1) / 400 for k in range(8))
    made = {peer: commitment(ledger, peer, NO_HASH, WARMING, sum_lr=honest) for peer in PEERS[:5]}
    assert policy.excluded(made, ledger, WARMING) == {}
    made[PEERS[0]] = replace(made[PEERS[0]], sum_lr=8 * 0.01, norms=(50.0**2,) * 3)
    assert policy.excluded(made, ledger, WARMING) == {PEERS[0]: "more learning rate than its steps allow"}


def test_a_sum_of_nearly_nothing_lifts_no_tiny_norm_over_the_gate() -> None:
    ledger = seated(5, WARMING)
    honest = 0.01 * sum((k + 1) / 400 for k in range(8))
    made = {peer: commitment(ledger, peer, NO_HASH, WARMING, sum_lr=honest) for peer in PEERS[:5]}
    made[PEERS[0]] = replace(made[PEERS[0]], sum_lr=honest * 1e-6 ** (1 / 0.8), norms=(1e-12,) * 3)
    assert policy.excluded(made, ledger, WARMING) == {PEERS[0]: "less learning rate than its steps take"}
    made[PEERS[0]] = replace(made[PEERS[0]], sum_lr=honest)
    assert "below" in policy.excluded(made, ledger, WARMING)[PEERS[0]]


def test_the_clock_of_the_schedule_is_the_ledgers() -> None:
    ledger = seated(1, WARMING)
    seat = ledger.seats[0]
    late = commitment(ledger, PEERS[0], NO_HASH, WARMING, sum_lr=8 * 0.01)
    assert policy.fault_of(late, seat, 400, WARMING) == ""
    assert "more learning rate" in policy.fault_of(late, seat, 100, WARMING)
    assert "less learning rate" in policy.fault_of(replace(late, sum_lr=0.004), seat, 10_000, WARMING)


def test_who_has_skipped_all_but_a_step_may_have_made_any_of_them() -> None:
    ledger = seated(1, WARMING)
    for k in range(8):
        one = commitment(ledger, PEERS[0], NO_HASH, WARMING, steps=1, sum_lr=0.01 * (k + 1) / 400)
        one = replace(one, used=leases.prefix(ledger.seats[0].ranges, 8), tokens=64)
        assert policy.fault_of(one, ledger.seats[0], 0, WARMING) == ""


def test_a_schedule_at_nothing_takes_nothing() -> None:
    ended = WARMING.model_copy(update={"inner": InnerSpec(lr=0.01, warmup_steps=0, decay_start=10, decay_steps=10)})
    ledger = seated(3, ended)
    still = commitment(ledger, PEERS[0], NO_HASH, ended, sum_lr=0.0, norms=(0.0,) * 3)
    assert policy.fault_of(still, ledger.seats[0], 50, ended) == ""
    assert "more learning rate" in policy.fault_of(replace(still, sum_lr=1e-9), ledger.seats[0], 50, ended)
