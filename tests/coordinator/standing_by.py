"""A leader and who stands by on one database, asking as often as a test likes; and what a standby says, waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from coordinator import standby
from coordinator.folder import RunFolder
from coordinator.journal import Journal
from coordinator.standby import Here, Leading, Standby
from tests.coordinator.made import RUN, Chained, append, journal, next_commit

FIRST, SECOND = Here("first:1", "first:2", 1), Here("second:1", "second:2", 2)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "ASK_S", 0.02)
    monkeypatch.setattr(standby, "RETRY_S", 0.02)


@dataclass
class Heard:
    """What was said, and a wait for a word in it."""

    lines: list[str] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, text: str) -> None:
        self.lines.append(text)
        self.came.set()

    async def wait_for(self, word: str) -> None:
        while not any(word in line for line in self.lines):
            self.came.clear()
            await self.came.wait()


def folder_at(path: Path) -> RunFolder:
    path.mkdir()
    return RunFolder(path)


def stands_by(path: Path, url: str, heard: Callable[[str], None], *, patient: bool = True) -> Standby:
    return Standby(folder_at(path), RUN.peer, url, SECOND, patient=patient, lease_s=5.0, say=heard)


@pytest.fixture
def first(url: str) -> Iterator[tuple[Journal, Chained]]:
    """A journal in which the first coordinator leads, with one commit, and the next one to append."""
    made, ledger = journal(url)
    made.begin_term(FIRST.name, 60.0)
    link = next_commit(ledger)
    append(made, link)
    yield made, next_commit(link.after)
    made.close()


@asynccontextmanager
async def waiting(by: Standby) -> AsyncIterator[asyncio.Task[Leading]]:
    """The standby's wait; what it leads in the end is closed."""
    task = asyncio.create_task(by.lead())
    try:
        async with asyncio.timeout(60):
            yield task
    finally:
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled() and task.exception() is None:
            task.result().journal.close()
