"""The driver's own order of things: nothing that takes time reaches the trainer after the state has changed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node import driver as drivers
from node.encoding import make_area
from node.session import effects as fx
from node.session import events as ev
from protos.runspec import RunSpec
from tests.node.test_full_disk_anywhere import Bench


class Trainer:
    """Notes what it is told; its contributions come to nothing."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def load(self, theta: Path, round_: int, *_: Any) -> None:
        self.told.append(("load", round_))

    def train(self, round_: int, *_: Any) -> None:
        self.told.append(("train", round_))

    async def encode(self, command: Any, written: Callable[[int], None]) -> None:
        self.told.append(("encode", command.round))


def held(round_: int) -> Any:
    return SimpleNamespace(theta=Path(), ledger=SimpleNamespace(round=round_, digest=b""))


def failures(bench: Bench, driver: drivers.Driver) -> list[ev.EncodeFailed]:
    return [event for event in driver._inbox._queue if isinstance(event, ev.EncodeFailed)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("slow", ["area", "residual"])
def test_a_commit_that_comes_while_the_disk_prepares_ends_the_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """The trainer would stop the next round's training for it, and idle until that round's end."""
    entered, gate = threading.Event(), threading.Event()

    def slowly(_: Any = None) -> None:
        entered.set()
        assert gate.wait(60)

    def made(path: Path, spec: RunSpec) -> None:
        if slow == "area":
            slowly()
        make_area(path, spec)

    monkeypatch.setattr(drivers, "make_area", made)
    store, trainer = SimpleNamespace(current=held(6)), Trainer()
    residuals = SimpleNamespace(begin=slowly if slow == "residual" else lambda _: None)
    bench = Bench(trainer=trainer, store=store, work=tmp_path, residuals=residuals, stages=None)

    async def main() -> None:
        with ThreadPoolExecutor(1) as pool:
            driver = bench.make(pool)
            driver._train(fx.Encode(7))
            assert await asyncio.to_thread(entered.wait, 60)
            store.current = held(7)
            driver._train(fx.LoadAnchor(8, 0, False))
            driver._train(fx.StartTraining(8, (), 10, 1))
            gate.set()
            await asyncio.gather(*driver._tasks)
            assert [failed.round for failed in failures(bench, driver)] == [7]

    asyncio.run(main())
    assert trainer.told == [("load", 7), ("train", 8)]


def test_of_two_encodings_the_later_one_has_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The area of one that is overtaken is never made in place of the other's."""
    entered, gate = threading.Event(), threading.Event()
    order: list[str] = []

    def made(path: Path, spec: RunSpec) -> None:
        first = not order
        order.append("begun")
        if first:
            entered.set()
            assert gate.wait(60)
        make_area(path, spec)
        order.append("made")

    monkeypatch.setattr(drivers, "make_area", made)
    store, trainer = SimpleNamespace(current=held(6)), Trainer()
    bench = Bench(
        trainer=trainer, store=store, work=tmp_path, residuals=SimpleNamespace(begin=lambda _: None), stages=None
    )

    async def main() -> None:
        with ThreadPoolExecutor(1) as pool:
            driver = bench.make(pool)
            driver._train(fx.Encode(7))
            assert await asyncio.to_thread(entered.wait, 60)
            store.current = held(7)
            driver._train(fx.Encode(8))
            for _ in range(5):
                await asyncio.sleep(0)
            assert order == ["begun"]
            gate.set()
            await asyncio.gather(*driver._tasks)
            assert [failed.round for failed in failures(bench, driver)] == [7, 8]  # this trainer encodes nothing

    asyncio.run(main())
    assert order == ["begun", "made", "begun", "made"]
    assert trainer.told == [("encode", 8)]
