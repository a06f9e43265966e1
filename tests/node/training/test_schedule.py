from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.training.schedule import batch_order, inner_lr, locate, ramp_steps
from protos.runspec import InnerSpec

TINY = InnerSpec(lr=3e-3, warmup_steps=50, beta2=0.99)


def test_a_fresh_run_is_the_plain_warm_up_and_then_constant() -> None:
    rates = [inner_lr(TINY, 30 * (step // 30), step % 30, 30, cold_step=step) for step in range(90)]
    assert rates == [pytest.approx(3e-3 * min(1.0, (step + 1) / 50)) for step in range(90)]


def test_steps_beyond_h_do_not_advance_the_schedule() -> None:
    assert [inner_lr(TINY, 0, k, 10, None) for k in (9, 10, 11, 40)] == pytest.approx(
        [3e-3 * 10 / 50, 3e-3 * 11 / 50, 3e-3 * 11 / 50, 3e-3 * 11 / 50]
    )


def test_cold_moments_late_in_a_run_are_ramped_over_h() -> None:
    assert ramp_steps(TINY, 30) == 30  # 1/(1 - 0.99) = 100 steps, but at most H
    rates = [inner_lr(TINY, 3000, k, 30, cold_step=k) for k in range(40)]
    assert rates[:30] == pytest.approx([3e-3 * (k + 1) / 30 for k in range(30)])
    assert rates[30:] == [3e-3] * 10
    assert inner_lr(TINY, 3000, 0, 30, None) == 3e-3


@pytest.mark.parametrize(("beta2", "h", "steps"), [(0.95, 500, 20), (0.5, 500, 10), (0.999, 500, 500), (0.999, 3, 10)])
def test_the_ramp_is_the_moments_horizon_between_10_and_h(beta2: float, h: int, steps: int) -> None:
    assert ramp_steps(InnerSpec(beta2=beta2), h) == steps


def test_sgd_has_no_moments_to_warm() -> None:
    assert inner_lr(InnerSpec(optimiser="sgd", lr=0.5, warmup_steps=0), 0, 0, 30, cold_step=0) == 0.5


@given(st.integers(1, 3000), st.integers(0, 50), st.integers(0, 2**53))
def test_every_pass_takes_each_batch_once(n_batches: int, pass_index: int, seed: int) -> None:
    order = batch_order(n_batches, pass_index, seed)
    assert sorted(map(order.batch, range(n_batches))) == list(range(n_batches))


def test_the_first_pass_is_the_stored_order_and_later_ones_are_others() -> None:
    first, second, third = ([batch_order(997, p, seed=5).batch(i) for i in range(997)] for p in range(3))
    assert first == list(range(997))
    assert second != first
    assert third not in (first, second)
    assert [batch_order(997, 1, seed=6).batch(i) for i in range(997)] != second


def test_the_order_of_a_pass_never_changes() -> None:
    assert [batch_order(1000, 1, seed=0).batch(i) for i in range(4)] == [309, 630, 951, 272]


def test_batches_count_on_over_the_passes() -> None:
    assert locate(0, 100, 3) == (0, 0)
    assert locate(99, 100, 3) == (0, 99)
    assert locate(100, 100, 3) == (1, batch_order(100, 1, 3).batch(0))
    assert locate(7, 1, 3) == (7, 0)


@given(
    n_batches=st.integers(1, 100),
    seats=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    first=st.integers(0, 10**6),
    seed=st.integers(0, 2**53),
)
def test_seats_of_any_size_side_by_side_read_nothing_twice_and_leave_nothing_out(
    n_batches: int, seats: list[int], first: int, seed: int
) -> None:
    """However many members there are and however much each takes: none has less left than another at a pass's end."""
    read, start = list[tuple[int, int]](), first * n_batches
    for size in seats:
        read += [locate(index, n_batches, seed) for index in range(start, start + size)]
        start += size
    assert len(set(read)) == len(read)
    passes = {pass_index: sorted(stored for p, stored in read if p == pass_index) for pass_index, _ in read}
    *whole, _ = (passes[pass_index] for pass_index in sorted(passes))
    assert all(stored == list(range(n_batches)) for stored in whole)


@pytest.mark.parametrize("index", [-1, 100])
def test_there_is_no_batch_outside_a_pass(index: int) -> None:
    with pytest.raises(IndexError):
        batch_order(100, 0, 0).batch(index)
    with pytest.raises(IndexError):
        locate(-1, 100, 0)
