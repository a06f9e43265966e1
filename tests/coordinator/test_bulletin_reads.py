"""A journal that can't be read for a moment: the ledger is shown later, and nothing ends but a lead that is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator import bulletin as bulletins
from coordinator.bulletin import Bulletin, Follower
from coordinator.errors import MachineError
from coordinator.journal import Journal
from coordinator.lead import LeadLost
from coordinator.ledger_file import LedgerFile
from coordinator.rounds.events import Committed
from coordinator.rows import round_rows
from coordinator.writer import Writer
from tests.coordinator.made import COORDINATOR, RUN, Chained, FakeClock, append, journal, next_commit, spec

LOCKED = MachineError("the database can't be used: database is locked", "check disk")
SHOWN_LATER = f"the ledger is shown later: {LOCKED.cause}"


class Scene:
    """A bulletin at work on a journal whose next reads fail with these errors."""

    def __init__(self, path: Path, kept: Journal, link: Chained) -> None:
        self.kept, self.link = kept, link
        self.errors: list[Exception] = []
        self.said: list[str] = []
        self.path = path / "ledger.jsonl"
        self.writer = Writer(kept, FakeClock())
        self.bulletin = Bulletin(
            RUN.peer, COORDINATOR.peer, spec(), kept, LedgerFile(self.path, round_rows(kept, spec(), COORDINATOR.peer)),
            flushed=self.writer.flushed, say=self.said.append,
        )  # fmt: skip
        follower = self.bulletin.follow()
        assert follower is not None
        self.follower: Follower = follower

    def commit(self) -> None:
        link = self.link
        append(self.kept, link)
        self.bulletin.committed(Committed(link.commit, link.body, link.after.head, ()), link.after)
        self.link = next_commit(link.after)

    async def shown(self, round_: int) -> None:
        while (await self.follower.next())[1].get("round") != round_:
            pass

    def lines(self) -> list[int]:
        return [json.loads(line)["round"] for line in self.path.read_text().splitlines()]


@pytest.fixture
def play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[Scene, asyncio.Task[None]], Awaitable[None]]], Scene]:
    monkeypatch.setattr(bulletins, "READ_AGAIN_S", (0.0, 0.001))

    def run(play_it: Callable[[Scene, asyncio.Task[None]], Awaitable[None]]) -> Scene:
        async def main() -> Scene:
            kept, ledger = journal(tmp_path / "j.sqlite")
            scene = Scene(tmp_path, kept, next_commit(ledger))

            def read(*arguments: Any) -> list[dict[str, Any]]:
                if scene.errors:
                    raise scene.errors.pop()
                return round_rows(*arguments)

            monkeypatch.setattr(bulletins, "round_rows", read)
            task = asyncio.ensure_future(scene.bulletin.run())
            async with asyncio.timeout(60):
                await play_it(scene, task)
                task.cancel()
                await asyncio.wait((task,))
            await scene.writer.close()
            kept.close()
            return scene

        return asyncio.run(main())

    return run


def test_what_can_t_be_read_is_shown_later(play: Any) -> None:
    async def scene(it: Scene, task: asyncio.Task[None]) -> None:
        it.errors = [LOCKED] * 4
        it.commit()
        await it.shown(1)
        it.commit()
        await it.shown(2)
        assert not task.done()

    it = play(scene)
    assert [text for text in it.said if "later" in text] == [SHOWN_LATER]
    assert it.lines() == [0, 1, 2]


def test_a_lead_that_is_lost_ends_it(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_lead(_: Journal) -> None:
        raise LeadLost("another term has begun")

    async def scene(it: Scene, task: asyncio.Task[None]) -> None:
        monkeypatch.setattr(Journal, "check_lead", check_lead)
        it.errors = [LOCKED]
        it.commit()
        await asyncio.wait((task,))
        with pytest.raises(LeadLost):
            task.result()

    play(scene)


def test_a_stop_is_a_stop_though_nothing_can_be_read(play: Any) -> None:
    async def scene(it: Scene, task: asyncio.Task[None]) -> None:
        it.commit()
        await it.shown(1)
        it.errors = [LOCKED] * 1000
        it.commit()
        while SHOWN_LATER not in it.said:
            await it.follower.next()
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()

    it = play(scene)
    assert it.said[-1] == f"the ledger's last lines are written at the next start: {LOCKED.cause}"
