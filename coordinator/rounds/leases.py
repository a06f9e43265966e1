"""Leases of training batches: ranges handed out once, returned when unused, never given twice.

A batch index counts batches over all passes. What was handed out is everything below the cursor that is not in the
returned pool; so no batch is used twice, and a pass ends with every batch of it used or waiting in the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protos.limits import RANGES
from protos.messages import Range


def normalise(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sorted, without empty ones, touching ones joined. Raises ValueError if two overlap."""
    joined: list[Range] = []
    for item in sorted((r for r in ranges if r.count), key=lambda r: r.start):
        if joined and item.start < joined[-1].start + joined[-1].count:
            raise ValueError(f"batches from {item.start} are leased twice")
        if joined and item.start == joined[-1].start + joined[-1].count:
            joined[-1] = Range(joined[-1].start, joined[-1].count + item.count)
        else:
            joined.append(item)
    return tuple(joined)


def joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same batches in the same order, in as few ranges as they take."""
    found: list[Range] = []
    for item in ranges:
        if found and item.start == found[-1].start + found[-1].count:
            found[-1] = Range(found[-1].start, found[-1].count + item.count)
        elif item.count:
            found.append(item)
    return tuple(found)


def begins_with(lease: Sequence[Range], first: Sequence[Range]) -> bool:
    """Whether a lease goes on from another one: its first batches are the other's, in their order."""
    return joined(prefix(lease, count(first))) == joined(first)


def count(ranges: Iterable[Range]) -> int:
    return sum(r.count for r in ranges)


def prefix(ranges: Sequence[Range], n: int) -> tuple[Range, ...]:
    """The first n batches of a lease, in the order of its ranges."""
    return _split(ranges, n)[0]


def rest(ranges: Sequence[Range], n: int) -> tuple[Range, ...]:
    """A lease without its first n batches."""
    return _split(ranges, n)[1]


def take(
    pool: Sequence[Range], cursor: int, n: int, most: int = RANGES
) -> tuple[tuple[Range, ...], tuple[Range, ...], int]:
    """Lease n batches: returned ones first, then new ones. Gives (lease, pool, cursor) afterwards.

    It has at most `most` ranges, 1 or more: where the pool is in too many pieces, the last range is of new ones.
    """
    returned, left = _split(pool, n)
    lease = normalise((*returned, Range(cursor, n - count(returned))))
    if len(lease) > most:
        returned = returned[: most - 1]
        left = rest(pool, count(returned))
        lease = normalise((*returned, Range(cursor, n - count(returned))))
    return lease, left, cursor + n - count(returned)


def extended(
    held: Sequence[Range], pool: Sequence[Range], cursor: int, n: int, most: int = RANGES
) -> tuple[tuple[Range, ...], tuple[Range, ...], int]:
    """A lease that goes on with n batches more, in at most `most` ranges; (lease, pool, cursor) afterwards.

    One that is in so many pieces already that nothing fits stays as it is: its member has no more to do.
    """
    more, left, after = take(pool, cursor, n, most)
    whole = joined((*held, *more))
    if len(whole) <= most:
        return whole, left, after
    room = most - len(joined(held))
    if room < 1:
        return joined(held), tuple(pool), cursor
    more, left, after = take(pool, cursor, n, room)
    return joined((*held, *more)), left, after


def _split(ranges: Sequence[Range], n: int) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    head: list[Range] = []
    tail: list[Range] = []
    for item in ranges:
        used = max(0, min(item.count, n))
        n -= used
        if used:
            head.append(Range(item.start, used))
        if item.count > used:
            tail.append(Range(item.start + used, item.count - used))
    return tuple(head), tuple(tail)


def subtract(free: Sequence[Range], leased: Sequence[Range]) -> tuple[Range, ...]:
    """What is left of `free` (normalised) without `leased` (normalised). Raises ValueError if not all is in it."""
    left: list[Range] = []
    wanted = list(leased)
    for item in free:
        start, stop = item.start, item.start + item.count
        while wanted and wanted[0].start < stop:
            lease = wanted[0]
            if lease.start < start or lease.start + lease.count > stop:
                raise ValueError(f"batches from {lease.start} are not free")
            if lease.start > start:
                left.append(Range(start, lease.start - start))
            start = lease.start + lease.count
            wanted.pop(0)
        if start < stop:
            left.append(Range(start, stop - start))
    if wanted:
        raise ValueError(f"batches from {wanted[0].start} are not free")
    return tuple(left)
