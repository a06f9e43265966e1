"""The grid of chunks, quotas and the deal."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregation.chunks import ChunkGrid, deal, quotas

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "deal.json").read_text())
RATES = st.lists(
    st.one_of(
        st.integers(0, 10**6), st.floats(0, 1e6), st.sampled_from([0.0, -1.0, math.nan, math.inf, 1e-300, 1e300])
    ),
    min_size=1,
    max_size=12,
)


def test_a_grid_covers_the_vector_once() -> None:
    for n_values, chunk_values in ((1, 1), (10, 3), (9, 3), (2, 5)):
        grid = ChunkGrid(n_values, chunk_values)
        bounds = [grid.bounds(i) for i in range(grid.n_chunks)]
        assert [value for start, stop in bounds for value in range(start, stop)] == list(range(n_values))
        assert all(grid.size(i) == chunk_values for i in range(grid.n_chunks - 1))
        assert 1 <= grid.size(grid.n_chunks - 1) <= chunk_values
        for index in (-1, grid.n_chunks):
            with pytest.raises(IndexError):
                grid.bounds(index)
    for n_values, chunk_values in ((0, 1), (1, 0), (-1, 5)):
        with pytest.raises(ValueError, match="grid"):
            ChunkGrid(n_values, chunk_values)


@settings(max_examples=150, deadline=None)
@given(RATES, st.integers(0, 60))
def test_quotas_deal_all_within_their_limits(kib_s: list[float], n_chunks: int) -> None:
    counts = quotas(kib_s, n_chunks)
    n = len(kib_s)
    assert sum(counts) == n_chunks
    assert max(counts) <= math.ceil(2 * n_chunks / n)
    assert min(counts) >= (1 if n_chunks >= n else 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(100, 150), min_size=1, max_size=9), st.integers(20, 400))
def test_quotas_without_limits_in_reach_are_the_largest_remainders(kib_s: list[int], n_chunks: int) -> None:
    total = sum(kib_s)
    floors = [n_chunks * rate // total for rate in kib_s]
    rest = [n_chunks * rate % total for rate in kib_s]
    for i in sorted(range(len(kib_s)), key=lambda i: (-rest[i], i))[: n_chunks - sum(floors)]:
        floors[i] += 1
    assert quotas(kib_s, n_chunks) == floors


def test_quotas_by_hand() -> None:
    assert quotas([10, 10, 10, 100], 12) == [2, 2, 2, 6]
    assert quotas([1, 1, 1], 4) == [2, 1, 1]
    assert quotas([3, 1], 4) == [3, 1]
    assert quotas([1000, 1, 1, 1], 4) == [1, 1, 1, 1]
    assert quotas([1000, 1, 1, 1], 8) == [4, 2, 1, 1]
    assert quotas([5, 1, 1], 2) == [2, 0, 0]
    assert quotas([0, 10, math.nan, 30], 8) == quotas([20, 10, 20, 30], 8)
    assert quotas([0, 0], 5) == [3, 2]
    assert quotas([7], 3) == [3]


def test_quotas_need_reducers() -> None:
    with pytest.raises(ValueError, match="reducers"):
        quotas([], 3)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=40), st.integers(0, 40), RATES, st.randoms(use_true_random=False))
def test_a_deal_is_complete_fair_and_independent_of_the_order_of_the_list(
    seed: bytes, n_chunks: int, kib_s: list[float], random: object
) -> None:
    peers = [f"peer{i}" for i in range(len(kib_s))]
    lines = deal(seed, n_chunks, peers, kib_s)
    assert len(lines) == n_chunks
    assert all(sorted(line) == sorted(peers) for line in lines)
    counts = Counter(line[0] for line in lines)
    assert max(counts.values(), default=0) <= math.ceil(2 * n_chunks / len(peers))
    if n_chunks >= len(peers):
        assert len(counts) == len(peers)
    pairs = list(zip(peers, kib_s, strict=True))
    random.shuffle(pairs)  # type: ignore[attr-defined]
    assert deal(seed, n_chunks, [peer for peer, _ in pairs], [rate for _, rate in pairs]) == lines


def test_the_line_behind_a_reducer_goes_around_in_one_order() -> None:
    lines = deal(b"seed", 30, ["a", "b", "c", "d"], [1, 2, 3, 4])
    assert len(set(lines)) == 4
    for line in lines:
        doubled = [*line, *line]
        start = doubled.index(lines[0][0])
        assert tuple(doubled[start : start + 4]) == lines[0]


def test_another_seed_deals_otherwise() -> None:
    peers = [f"peer{i}" for i in range(6)]
    assert len({deal(bytes([i]), 12, peers, [1] * 6) for i in range(8)}) == 8


def test_reducers_are_different_and_have_rates() -> None:
    for reducers, kib_s in ((["a", "a"], [1, 1]), (["a"], [1, 2]), ([], [])):
        with pytest.raises(ValueError, match="reducers"):
            deal(b"", 3, reducers, kib_s)


def test_a_deal_keeps_its_outcome() -> None:
    for case in GOLDEN:
        lines = deal(bytes.fromhex(case["seed"]), case["n_chunks"], case["reducers"], case["kib_s"])
        assert [list(line) for line in lines] == case["lines"]
