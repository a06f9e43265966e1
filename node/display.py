"""What a contributor sees while the node runs: a live line on a terminal, else plain lines, one in 30 s at least."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress

from rich.console import Console
from rich.status import Status
from rich.text import Text

from node.session.view import View

LOOK_S = 0.5
LINE_EVERY_S = 20.0


class Display:
    """Shows one node's view on standard error.

    Args:
        view: what the session sees now; may be replaced.
        seconds: a monotonic clock.
    """

    def __init__(self, view: Callable[[], View], seconds: Callable[[], float]) -> None:
        self.view, self._seconds = view, seconds
        self._console = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._said = ""
        self._said_at_s = seconds()

    def say(self, text: str) -> None:
        """A line that stays. That nobody can read it, or its file's disk is full, is no reason to stop."""
        with suppress(OSError, SystemExit):  # rich leaves the process where a pipe is broken
            self._console.print(text, markup=False, soft_wrap=True)
        self._said_at_s = self._seconds()

    async def run(self) -> None:
        """Until cancelled."""
        if not self._console.is_terminal:
            while True:
                self._plain()
                await asyncio.sleep(LOOK_S)
        with self._console.status("starting") as self._status:
            while True:
                self._status.update(Text(describe(self.view(), self._seconds())))  # reasons may look like markup
                await asyncio.sleep(LOOK_S)

    def _plain(self) -> None:
        view = self.view()
        key = f"{view.state} {view.round} {view.waiting_for}"
        if key != self._said or self._seconds() - self._said_at_s > LINE_EVERY_S:
            self._said = key
            self.say(describe(view, self._seconds()))
            with suppress(OSError, ValueError):
                sys.stderr.flush()


def describe(view: View, now_s: float) -> str:
    """One line: where this node is in the run, and whom it waits for since when."""
    parts = [f"round {view.round}", view.state]
    if view.role == "member":
        parts.append(f"step {view.step}/{view.h}")
    if view.tokens_per_s:
        parts.append(f"{view.tokens_per_s:,.0f} tokens/s")
    if view.inner_loss:
        parts.append(f"loss {view.inner_loss:.3f}")
    parts.append(f"accepted {view.accepted}")
    if view.rejected:
        parts.append("not counted " + ", ".join(f"{n}x {reason}" for reason, n in view.rejected.items()))
    if view.waiting_for:
        parts.append(f"waits for {view.waiting_for}, {max(0.0, now_s - view.since):.0f} s")
    return " · ".join(parts)
