"""What an operator sees while a run is served: each round, and what is awaited when nothing happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from coordinator.bulletin import Bulletin
from coordinator.display import ROUNDS_SHOWN, Display, Row, ServingDisplay
from coordinator.leading.driver import Driver
from protos.messages import Outcome

LOOK_S = 1.0


class Following(Protocol):
    """Someone who hears of events."""

    async def next(self) -> tuple[str, Any]: ...


async def watched(bulletin: Bulletin, driver: Driver, display: ServingDisplay) -> None:
    """Open the display and show the run that is served, until cancelled. That nobody can see it is no fault."""
    follower = bulletin.follow()
    if follower is None:
        return
    display.open()
    try:
        with suppress(OSError):
            await watch(follower, lambda: bulletin.status(driver), display)
    finally:
        display.close()
        bulletin.unfollow(follower)


async def watch(follower: Following, status: Callable[[], Mapping[str, Any]], display: Display) -> None:
    """Show the run until cancelled.

    Args:
        follower: hears of each round, and again when more of it is known.
        status: gives the contract's status.
    """
    rows: dict[tuple[int, int], Row] = {}
    while True:
        try:
            async with asyncio.timeout(LOOK_S):
                kind, content = await follower.next()
        except TimeoutError:
            kind, content = "", None
        if kind == "round" and content["outcome"] == Outcome.COMMITTED.value:  # of empty ones the status tells
            rows[content["epoch"], content["round"]] = content
            for old in sorted(rows)[:-ROUNDS_SHOWN]:
                del rows[old]
        display.update(status(), [rows[at] for at in sorted(rows)])
