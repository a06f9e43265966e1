"""Several addresses of one thing: each is tried a moment after the one before, and the first that will do is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=Exception)

OVERLAP_S = 0.25
"""A second address is tried beside the first after so long (RFC 8305, section 5)."""


@dataclass(frozen=True, slots=True)
class NoneWillDo(Generic[E]):
    """Every address failed: what was raised for each, in the order in which they were given."""

    failures: dict[str, E]


async def first_of(
    addresses: Sequence[str],
    attempt: Callable[[str], Coroutine[Any, Any, T]],
    failing: type[E],
    *,
    overlap_s: float = OVERLAP_S,
    spare: Callable[[T], Awaitable[object]] | None = None,
) -> T | NoneWillDo[E]:
    """What the first attempt that succeeds gives, and the others are cancelled; or why there was none.

    Args:
        addresses: without doubles. The next one is tried once the one before has failed or `overlap_s` has passed.
        attempt: tries one of them.
        failing: what it raises for an address that won't do; anything else comes out.
        spare: takes what another attempt came to in the very moment in which this one did.
    """
    waiting = list(addresses)
    running: dict[asyncio.Task[T], str] = {}
    failures: dict[str, E] = {}
    try:
        while waiting or running:
            if waiting:
                address = waiting.pop(0)
                running[asyncio.create_task(attempt(address))] = address
            done, _ = await asyncio.wait(
                running, timeout=overlap_s if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                address = running.pop(task)
                error = task.exception()
                if error is None:
                    return task.result()
                if not isinstance(error, failing):
                    raise error
                failures[address] = error
    finally:
        for task in running:
            task.cancel()
        for outcome in await asyncio.gather(*running, return_exceptions=True):
            if not isinstance(outcome, BaseException) and spare is not None:
                await spare(outcome)
    return NoneWillDo({address: failures[address] for address in addresses})
