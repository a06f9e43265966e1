"""Rate limits of a contributor's line: token buckets for each stream and for all together, as pure arithmetic.

A bucket lets a burst through and then its rate. Whoever takes more than there is runs it into debt, and is told how
long to wait until the debt is paid; so those who come at the same time wait behind each other, in their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from protos import limits

BURST_S = 0.25
"""A bucket holds what its rate gives in this time."""
PART_S = 2.0
"""A part takes about so long at the rate: a slower line sends smaller ones, so that its peer sees it move."""
PART_LEAST_BYTES = 16 * 1024
RATE_LEAST_BYTES_S = 64 * 1024
"""Who may be sent parts of `limits.PART_BYTES` and takes them any slower looks as if it stood still."""


@dataclass(slots=True)
class TokenBucket:
    """Fills with `rate_bytes_s` up to `burst_bytes`; full when it is made. Instants may come from any clock."""

    rate_bytes_s: float
    burst_bytes: float
    _level_bytes: float = field(init=False)
    _at: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if not (self.rate_bytes_s > 0 and self.burst_bytes > 0):
            raise ValueError(f"no rate of {self.rate_bytes_s} bytes/s with bursts of {self.burst_bytes}")
        self._level_bytes = self.burst_bytes

    def take(self, n_bytes: int, now: float) -> float:
        """Take so many bytes; the seconds to wait before they may go."""
        if self._at is not None:
            gained = max(0.0, now - self._at) * self.rate_bytes_s
            self._level_bytes = min(self.burst_bytes, self._level_bytes + gained)
        self._at = now if self._at is None else max(now, self._at)
        self._level_bytes -= n_bytes
        return max(0.0, -self._level_bytes / self.rate_bytes_s)


@dataclass(frozen=True, slots=True)
class Rates:
    """What one direction of a line may carry; None is without limit."""

    total_bytes_s: float | None = None
    stream_bytes_s: float | None = None

    def __post_init__(self) -> None:
        for rate in (self.total_bytes_s, self.stream_bytes_s):
            if rate is not None and not rate >= RATE_LEAST_BYTES_S:
                raise ValueError(f"a rate of {rate:g} bytes/s; at least {RATE_LEAST_BYTES_S} are needed")


class Direction:
    """One direction of a line, sending or receiving: its streams share its total."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._total = _bucket(rates.total_bytes_s)

    def stream(self) -> StreamPace:
        """The pace of another stream."""
        return StreamPace(self._total, _bucket(self._rates.stream_bytes_s))

    @property
    def part_bytes(self) -> int:
        """How long a part may be at these rates."""
        known = [rate for rate in (self._rates.total_bytes_s, self._rates.stream_bytes_s) if rate is not None]
        if not known:
            return limits.PART_BYTES
        return max(PART_LEAST_BYTES, min(limits.PART_BYTES, int(PART_S * min(known))))


class StreamPace:
    """When a stream's bytes may go."""

    def __init__(self, total: TokenBucket | None, own: TokenBucket | None) -> None:
        self._buckets = tuple(bucket for bucket in (total, own) if bucket is not None)

    @property
    def limited(self) -> bool:
        return bool(self._buckets)

    def take(self, n_bytes: int, now: float) -> float:
        """Take so many bytes; the seconds to wait before they may go."""
        return max((bucket.take(n_bytes, now) for bucket in self._buckets), default=0.0)

    async def wait(
        self,
        n_bytes: int,
        *,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Take so many bytes and wait until they may go; by the event loop's clock where no other is given."""
        if self._buckets:
            now = (clock or asyncio.get_running_loop().time)()
            delay_s = self.take(n_bytes, now)
            if delay_s > 0:
                await sleep(delay_s)


def _bucket(rate_bytes_s: float | None) -> TokenBucket | None:
    if rate_bytes_s is None:
        return None
    return TokenBucket(rate_bytes_s, max(PART_LEAST_BYTES, BURST_S * rate_bytes_s))


UNLIMITED = Direction(Rates())
