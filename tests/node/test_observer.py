"""The observer's evaluations: a state that can't be had, or has no figure, is passed over with a word."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.observer import Evaluator
from node.training.link import Evaluated
from protos.messages import Evaluation
from tests.sim.options import sim_spec

SPEC = sim_spec(n_chunks=1)


class Bench:
    """An evaluator over one state whose θ is three bytes, and a trainer that reads it."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.reports: list[Evaluation] = []
        self.read: list[bytes] = []
        self.answer = Evaluated(8, 2.5, 100)
        self.state, self.work = folder / "state", folder / "work"
        self.state.mkdir()
        self.work.mkdir()
        (self.state / "theta.bin").write_bytes(b"abc")
        every = SPEC.evaluation.every_rounds
        held = SimpleNamespace(
            ledger=SimpleNamespace(round=8 * every, epoch=0), digest=bytes(32), theta=self.state / "theta.bin"
        )
        self.store = cast(Any, SimpleNamespace(current=held))
        self.trainer = cast(Any, SimpleNamespace(evaluate=self.evaluate))
        self.evaluator = Evaluator(SPEC, self.store, self.trainer, self.work, self.report, self.said.append)

    async def evaluate(self, round_: int, theta: Path) -> Evaluated:
        self.read.append(await asyncio.to_thread(theta.read_bytes))
        return self.answer

    async def report(self, figure: Evaluation) -> None:
        self.reports.append(figure)

    def run(self) -> None:
        async def main() -> None:
            self.evaluator.state_changed()
            running = asyncio.create_task(self.evaluator.run())
            await asyncio.wait([running], timeout=0.001)
            while not self.said:
                await asyncio.wait([running], timeout=0.005)
                assert not running.done(), running.exception()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

        asyncio.run(main())


def refusing(number: int) -> Callable[..., None]:
    def link(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return link


def test_a_state_is_evaluated_and_its_link_removed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run()
    assert (bench.read, [figure.val_loss for figure in bench.reports]) == ([b"abc"], [2.5])
    assert os.listdir(bench.work) == []


def test_where_there_are_no_links_the_state_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    bench = Bench(tmp_path)
    bench.run()
    assert (bench.read, len(bench.reports)) == ([b"abc"], 1)
    assert os.listdir(bench.work) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.ENOENT, errno.EMFILE])
def test_a_state_that_can_not_be_linked_is_passed_over(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refusing(number))
    bench = Bench(tmp_path)
    bench.run()
    assert (bench.read, bench.reports) == ([], [])
    assert "is not evaluated" in bench.said[0]


def test_a_copy_that_fails_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refusing(errno.EXDEV))
    monkeypatch.setattr("node.observer.shutil.copyfile", refusing(errno.ENOSPC))
    bench = Bench(tmp_path)
    bench.run()
    assert (bench.read, bench.reports) == ([], [])
    assert "No space left" in bench.said[0]


def test_a_loss_that_is_not_finite_is_said_and_not_reported(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.answer = Evaluated(8, 0.0, 0)
    bench.run()
    assert bench.reports == []
    assert "not finite" in bench.said[0]


def test_two_states_of_one_round_have_a_link_each(tmp_path: Path) -> None:
    """Before a rollback and after it: the later one's link is not the earlier one's, nor removed with it."""
    bench = Bench(tmp_path)
    every, go = SPEC.evaluation.every_rounds, asyncio.Event()
    evaluate = bench.evaluate

    async def slowly(round_: int, theta: Path) -> Evaluated:
        await go.wait()
        return await evaluate(round_, theta)

    def change(epoch: int, round_: int, content: bytes) -> None:
        theta = bench.state / content.decode()
        theta.write_bytes(content)
        ledger = SimpleNamespace(round=round_ * every, epoch=epoch)
        bench.store.current = SimpleNamespace(ledger=ledger, digest=content * 8, theta=theta)
        bench.evaluator.state_changed()

    async def main() -> None:
        bench.trainer.evaluate = slowly
        running = asyncio.create_task(bench.evaluator.run())
        change(0, 4, b"four")
        await asyncio.wait([running], timeout=0.001)
        for _ in range(2):  # while that one is evaluated: told of twice, it is done once
            change(0, 4, b"four")
            change(0, 5, b"five")
            change(1, 5, b"5556")
            change(1, 5, b"5557")
        go.set()
        while len(bench.reports) < 4:
            await asyncio.wait([running], timeout=0.005)
            assert not running.done(), running.exception()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())
    assert bench.read == [b"four", b"five", b"5556", b"5557"]
    figures = [(figure.epoch, figure.round // every, figure.digest[:4]) for figure in bench.reports]
    assert figures == [(0, 4, b"four"), (0, 5, b"five"), (1, 5, b"5556"), (1, 5, b"5557")]
    assert os.listdir(bench.work) == []
