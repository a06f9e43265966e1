"""Leases against plain sets of batches."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds import leases
from protos.messages import Range


def batches(ranges: tuple[Range, ...] | list[Range]) -> list[int]:
    """In the order of the ranges."""
    return [batch for r in ranges for batch in range(r.start, r.start + r.count)]


def ranges_of(numbers: set[int]) -> list[Range]:
    """One range a batch, so that joining is put to the test."""
    return [Range(number, 1) for number in sorted(numbers)]


NUMBERS = st.sets(st.integers(0, 60), max_size=40)
RANGES = st.lists(st.builds(Range, st.integers(0, 40), st.integers(0, 6)), max_size=8)


@given(RANGES)
def test_normalise_keeps_the_batches_sorted_and_joined_or_finds_the_double_one(ranges: list[Range]) -> None:
    listed = batches(ranges)
    if len(set(listed)) < len(listed):
        with pytest.raises(ValueError, match="leased twice"):
            leases.normalise(ranges)
        return
    normal = leases.normalise(ranges)
    assert batches(normal) == sorted(listed)
    assert all(a.start + a.count < b.start for a, b in pairwise(normal))
    assert all(r.count > 0 for r in normal)
    assert leases.count(normal) == len(listed)


@given(NUMBERS, st.integers(-3, 50))
def test_prefix_and_rest_cut_a_lease_in_two(numbers: set[int], n: int) -> None:
    lease = leases.normalise(ranges_of(numbers))
    head, tail = leases.prefix(lease, n), leases.rest(lease, n)
    assert batches(head) + batches(tail) == batches(lease)
    assert leases.count(head) == min(max(n, 0), len(numbers))
    assert all(r.count > 0 for r in (*head, *tail))


@given(NUMBERS, st.integers(0, 20), st.integers(0, 70))
def test_take_gives_returned_batches_first_and_new_ones_after(numbers: set[int], n: int, cursor: int) -> None:
    pool = leases.normalise(ranges_of({number for number in numbers if number < cursor}))
    lease, left, after = leases.take(pool, cursor, n)
    taken = batches(lease)
    assert len(taken) == n
    n_new = max(0, n - leases.count(pool))
    assert after == cursor + n_new
    assert sorted(taken) == sorted([*batches(pool)[: n - n_new], *range(cursor, after)])
    assert sorted([*taken, *batches(left)]) == sorted([*batches(pool), *range(cursor, after)])


@given(NUMBERS, NUMBERS)
def test_subtract_is_the_difference_or_says_what_is_not_free(free: set[int], leased: set[int]) -> None:
    ours, theirs = leases.normalise(ranges_of(free)), leases.normalise(ranges_of(leased))
    if leased <= free:
        assert set(batches(leases.subtract(ours, theirs))) == free - leased
        return
    with pytest.raises(ValueError, match="not free"):
        leases.subtract(ours, theirs)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), max_size=20))
def test_no_batch_is_leased_while_another_holds_it(turns: list[tuple[int, int]]) -> None:
    """Lease n, use some, return the rest: every batch below the cursor is used once or waits."""
    pool: tuple[Range, ...] = ()
    cursor, used = 0, set[int]()
    for n, n_used in turns:
        lease, pool, cursor = leases.take(pool, cursor, n)
        now_used = set(batches(leases.prefix(lease, n_used)))
        assert not used & now_used
        used |= now_used
        pool = leases.normalise((*pool, *leases.rest(lease, n_used)))
        assert used | set(batches(pool)) == set(range(cursor))


@given(NUMBERS, NUMBERS, st.integers(0, 20), st.integers(1, 8))
def test_no_lease_has_more_ranges_than_it_may(numbers: set[int], held: set[int], n: int, most: int) -> None:
    pool = leases.normalise(ranges_of(numbers - held))
    before = leases.normalise(ranges_of(held))[:most]
    lease, left, after = leases.extended(before, pool, 100, n, most)
    assert len(lease) <= most
    assert leases.begins_with(lease, before)
    n_more = leases.count(lease) - leases.count(before)
    assert n_more == n or (n_more == 0 and len(before) == most)
    assert sorted([*batches(lease), *batches(left)]) == sorted([*batches(before), *batches(pool), *range(100, after)])
    whole, *rest = leases.take(pool, 100, n)
    if len(leases.joined((*before, *whole))) <= most:  # as where there is no such limit
        assert (lease, [left, after]) == (leases.joined((*before, *whole)), rest)


def test_a_lease_that_has_no_room_stays_as_it_is() -> None:
    held = (Range(0, 1), Range(2, 1))
    pool = (Range(4, 1), Range(6, 3))
    assert leases.extended(held, pool, 20, 3, 2) == (held, pool, 20)
    assert leases.extended(held, pool, 20, 3, 3) == ((*held, Range(20, 3)), pool, 23)
    assert leases.extended(held, pool, 20, 5, 4) == ((*held, Range(4, 1), Range(20, 4)), (Range(6, 3),), 24)
    assert leases.extended(held, (Range(3, 2),), 20, 2, 2) == ((Range(0, 1), Range(2, 3)), (), 20)  # it touches
