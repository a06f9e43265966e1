"""Rate limits by a clock of the test's own: no stretch of time carries more than its rate and one burst."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.peers.pacing import PART_LEAST_BYTES, RATE_LEAST_BYTES_S, UNLIMITED, Direction, Rates, TokenBucket
from protos import limits

MIB = 2.0**20


def test_a_burst_goes_at_once_and_the_rest_at_the_rate() -> None:
    bucket = TokenBucket(100.0, 50.0)
    assert bucket.take(50, 10.0) == 0.0
    assert bucket.take(20, 10.0) == 0.2
    assert bucket.take(10, 10.0) == pytest.approx(0.3)  # behind the one before
    assert bucket.take(10, 10.3) == pytest.approx(0.1)
    assert bucket.take(50, 100.0) == 0.0  # a long pause fills it to the burst and no further
    assert bucket.take(1, 100.0) == 0.01


def test_a_clock_that_goes_back_gives_nothing_twice() -> None:
    bucket = TokenBucket(100.0, 100.0)
    assert bucket.take(100, 5.0) == 0.0
    assert bucket.take(100, 4.0) == 1.0
    assert bucket.take(100, 5.0) == 2.0


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 5000)), min_size=1, max_size=40),
    st.floats(10, 1e4),
    st.floats(1, 1e4),
)
def test_nothing_goes_faster_than_the_rate_and_a_burst(
    asked: list[tuple[float, int]], rate_bytes_s: float, burst_bytes: float
) -> None:
    bucket, now = TokenBucket(rate_bytes_s, burst_bytes), 0.0
    went: list[tuple[float, int]] = []  # when, how much
    for pause_s, n_bytes in asked:
        now += pause_s
        went.append((now + bucket.take(n_bytes, now), n_bytes))
    for first in range(len(went)):
        total = 0
        for at, n_bytes in went[first + 1 :]:
            total += n_bytes
            assert total <= burst_bytes + rate_bytes_s * (at - went[first][0]) * (1 + 1e-9) + 1e-3


def test_streams_share_the_total_and_have_a_rate_of_their_own() -> None:
    line = Direction(Rates(total_bytes_s=4 * MIB, stream_bytes_s=3 * MIB))
    one, other = line.stream(), line.stream()
    one.take(int(MIB), 0.0)  # both bursts are gone
    assert one.take(int(3 * MIB), 0.0) == pytest.approx(3.25 / 3, rel=0.01)
    assert other.take(int(MIB), 0.0) == pytest.approx(1.0, rel=0.01)  # 5 MiB in all, 1 MiB of them a burst
    assert line.stream().take(0, 10.0) == 0.0


def test_without_limits_nothing_waits() -> None:
    stream = UNLIMITED.stream()
    assert not stream.limited
    assert stream.take(10**12, 0.0) == 0.0
    assert UNLIMITED.part_bytes == limits.PART_BYTES


@pytest.mark.parametrize(
    ("rates", "part_bytes"),
    [
        (Rates(stream_bytes_s=100 * MIB), limits.PART_BYTES),
        (Rates(total_bytes_s=100_000.0), 200_000),
        (Rates(total_bytes_s=100 * MIB, stream_bytes_s=70_000.0), 140_000),
    ],
)
def test_a_slow_line_sends_smaller_parts(rates: Rates, part_bytes: int) -> None:
    assert Direction(rates).part_bytes == part_bytes >= PART_LEAST_BYTES


@pytest.mark.parametrize("rate", [0.0, -1.0, RATE_LEAST_BYTES_S - 1, float("nan")])
def test_a_rate_at_which_a_peer_looks_dead_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="rate"):
        Rates(total_bytes_s=rate)
    with pytest.raises(ValueError, match="rate"):
        Rates(stream_bytes_s=rate)


def test_a_bucket_needs_a_rate_and_a_burst() -> None:
    for rate, burst in ((0.0, 1.0), (1.0, 0.0)):
        with pytest.raises(ValueError, match="no rate"):
            TokenBucket(rate, burst)


def test_waiting_is_for_as_long_as_it_takes() -> None:
    stream = Direction(Rates(stream_bytes_s=MIB)).stream()
    slept: list[float] = []

    async def sleep(duration_s: float) -> None:
        slept.append(duration_s)

    async def main() -> None:
        for _ in range(3):
            await stream.wait(2**18, clock=lambda: 7.0, sleep=sleep)

    asyncio.run(main())
    assert slept == [0.25, 0.5]
