"""A disk that is full or broken, a machine without descriptors: what gives way, what is said, and what goes on."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aggregation.exchange import CombineChunk, CombineFailed, ExchangeEvent
from coordinator.rounds.events import Instant
from node import state as states
from node.driver import Driver, Parts
from node.errors import DiskFull, LocalStateError, MachineError
from node.files import replace_file
from node.obeying import Obeying
from node.residual import Residuals
from node.session import effects as fx
from node.session import events as ev
from node.specs import SpecsFolder
from node.state import StateStore
from protos.messages import Commit, Missing, Plan, Promise, Range, Refusal
from protos.runspec import RunSpec
from tests.node.states import advance, new_store
from tests.node.test_exchanging import PLAN_HASH, SENDER, exchange
from tests.node.test_residual import OTHER_ROOT, Node, entry
from tests.sim.options import sim_spec

FULL = DiskFull("a file", "here", 1, None)
NOBODY: Any = None
SPEC = sim_spec(n_chunks=1)
PLAN = Plan(
    SENDER, 0, 7, 3, SENDER, bytes(32), bytes(32), 1, (), "mean", 0, "", "", "int8", Range(0, 1), 0, "identity", 1,
    1.0, 1.0, 1.0,
)  # fmt: skip
BEGIN = fx.BeginExchange(PLAN, PLAN_HASH, None, b"", {})  # type: ignore[arg-type]


class Script:
    """A session that asks for these effects at once, and then waits for one event."""

    abstains = False

    def __init__(self, *effects: fx.Effect) -> None:
        self.effects = list(effects)
        self.heard: list[ev.Event] = []

    def handle(self, event: ev.Event, now: Instant) -> list[fx.Effect]:
        self.heard.append(event)
        if isinstance(event, ev.LeaveAsked):
            return [fx.Stop(0, "left")]
        effects, self.effects = self.effects, []
        return effects

    def next_wake(self, now: Instant) -> Instant:
        return Instant(now + 10)

    def idle_in(self, round_: int, now: Instant) -> Any:
        return SimpleNamespace(idle_s=0.0, worked_s=0.0)


class Line:
    def __init__(self) -> None:
        self.told: list[Any] = []

    async def say(self, message: Any, leader: str = "") -> None:
        self.told.append((message, leader))

    async def close(self) -> None:
        return None


class Bench:
    """A driver of which these parts are there, and what came of it."""

    def __init__(self, *effects: fx.Effect, **parts: Any) -> None:
        self.said: list[str] = []
        self.script, self.line = Script(*effects), Line()
        self.driver: Driver
        self.parts = {
            "say": self.said.append,
            "seconds": lambda: 0.0,
            "fetcher": SimpleNamespace(centre=self._centre),
            "peers": SimpleNamespace(traffic=SimpleNamespace(sent=0, received=0, exchange_sent=0, exchange_received=0)),
            "store": SimpleNamespace(current=None),
            "results": SimpleNamespace(relieve=lambda: False),
            "residuals": SimpleNamespace(settle=lambda held: None),
            "keeper": SimpleNamespace(settle=list),
            "applied": lambda: None,
            "spec": SPEC,
            **parts,
        }

    async def _centre(self) -> None:
        return None

    def make(self, pool: ThreadPoolExecutor | None = None) -> Driver:
        given = {field.name: None for field in fields(Parts)} | {"pool": pool} | self.parts
        return Driver(self.script, Parts(**given))  # type: ignore[arg-type]

    async def _main(self, then: tuple[ev.Event, ...]) -> None:
        with ThreadPoolExecutor(2) as pool:
            self.driver = self.make(pool)
            self.driver.line = self.line  # type: ignore[assignment]
            for event in (*then, ev.LeaveAsked("")):
                self.driver.post(event)
            await self.driver.run()

    def run(self, *then: ev.Event) -> Bench:
        asyncio.run(self._main(then))
        return self


def raising(error: Exception) -> Callable[..., Any]:
    def work(*_: Any) -> Any:
        raise error

    return work


# -- the driver ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [FULL, LocalStateError("the journal can't be used", "look")])
def test_a_head_that_can_not_be_kept_is_said_once_and_no_end(error: Exception) -> None:
    journal = SimpleNamespace(keep_head=raising(error))
    bench = Bench(fx.KeepHead(b"1"), fx.KeepHead(b"2"), journal=journal).run()
    assert bench.said == [f"going on without the coordinator's word on the head: {error}"]


def test_what_fails_again_after_it_went_well_is_said_again() -> None:
    outcomes = iter([FULL, None, FULL, FULL])

    def keep_head(_: bytes) -> None:
        if (error := next(outcomes)) is not None:
            raise error

    keep = (fx.KeepHead(b""),) * 4
    assert len(Bench(*keep, journal=SimpleNamespace(keep_head=keep_head)).run().said) == 2


def test_a_vote_that_is_not_on_disk_is_the_end_and_is_not_sent() -> None:
    promise = Promise(0, 1, 0, SENDER, bytes(32), -1, None)
    journal = SimpleNamespace(save=raising(FULL))
    bench = Bench(fx.Persist(promise), fx.TellLeader(Missing(PLAN_HASH, ())), journal=journal)
    with pytest.raises(DiskFull):
        bench.run()
    assert bench.line.told == []


def test_a_note_that_no_vote_is_lost_can_be_spared() -> None:
    bench = Bench(journal=SimpleNamespace(is_whole=raising(FULL)))
    handle = bench.script.handle

    def first_commit(event: ev.Event, now: Instant) -> list[fx.Effect]:
        bench.script.abstains = False
        return handle(event, now)

    bench.script.abstains, bench.script.handle = True, first_commit  # type: ignore[method-assign]
    assert "no vote is lost" in bench.run().said[0]


@pytest.mark.parametrize(
    "error", [FULL, MachineError("results can't be written: Too many open files", "look"), OSError(errno.EIO, "broken")]
)
def test_an_exchange_that_can_not_begin_goes_on_without_this_node(error: Exception) -> None:
    results = SimpleNamespace(area=raising(error), relieve=lambda: False)
    bench = Bench(BEGIN, fx.InExchange(PLAN_HASH, None), fx.EndExchange(PLAN_HASH), results=results).run()  # type: ignore[arg-type]
    assert bench.line.told == [
        (Missing(PLAN_HASH, (), unable=True), ""),
        (Refusal(0, 7, 3, str(error)), SENDER),
    ]
    assert bench.said == [f"takes no part in the exchange of attempt 3 of round 7: {error}"]


def applied(**parts: Any) -> Bench:
    commit = Commit(b"body", bytes(32), 0, (), ())
    body: Any = SimpleNamespace(epoch=0, round=1)
    return Bench(fx.Apply(commit, body, b"hash", None), **parts).run()  # type: ignore[arg-type]


def test_results_that_are_kept_for_others_give_way_to_the_state() -> None:
    kept = ["older", "old"]

    def apply(*_: Any) -> None:
        if kept:
            raise FULL

    def relieve() -> bool:
        return bool(kept) and bool(kept.pop())

    bench = applied(store=SimpleNamespace(current=None, apply=apply), results=SimpleNamespace(relieve=relieve))
    assert ev.Applied(b"hash") in drained(bench)
    with pytest.raises(DiskFull):  # nothing is left to give way
        applied(store=SimpleNamespace(current=None, apply=raising(FULL)))


def drained(bench: Bench) -> list[ev.Event]:
    """What was posted after the stop, too."""
    inbox = bench.driver._inbox
    return [*bench.script.heard, *(inbox.get_nowait() for _ in range(inbox.qsize()))]


@pytest.mark.parametrize("part", ["residuals", "keeper"])
def test_what_is_settled_after_a_state_is_spared_where_the_disk_is_broken(part: str) -> None:
    broken = {part: SimpleNamespace(settle=raising(OSError(errno.EIO, "broken")))}
    bench = applied(store=SimpleNamespace(current=None, apply=lambda *_: None), **broken)
    assert ev.Applied(b"hash") in drained(bench)
    assert "broken" in bench.said[0]


class Trainer:
    """Says that it has encoded, whatever lies in the area."""

    def load(self, *_: Any) -> None:
        return None

    async def encode(self, command: Any, written: Callable[[int], None]) -> Any:
        return SimpleNamespace(steps=1, tokens=1, used=(), sum_lr=0.1, inner_loss=1.0, encode_s=0.1)


@pytest.mark.parametrize("fault", ["area", "frames"])
def test_what_can_not_be_encoded_is_no_contribution_and_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "area":
        monkeypatch.setattr("node.driver.Reading", raising(OSError(errno.EMFILE, "Too many open files")))
    held: Any = SimpleNamespace(theta=tmp_path)
    bench = Bench(
        fx.Encode(7), trainer=Trainer(), store=SimpleNamespace(current=held), work=tmp_path,
        residuals=SimpleNamespace(begin=lambda _: None), stages=None,
    )  # fmt: skip

    async def main() -> None:
        with ThreadPoolExecutor(1) as pool:
            driver = bench.make(pool)
            running = asyncio.create_task(driver.run())
            while not any(isinstance(event, ev.EncodeFailed) for event in bench.script.heard):
                await asyncio.wait([running], timeout=0.005)
                assert not running.done(), running.exception()
            driver.post(ev.LeaveAsked(""))
            await running

    asyncio.run(main())
    (failed,) = [event for event in bench.script.heard if isinstance(event, ev.EncodeFailed)]
    assert failed.round == 7
    assert ("Too many open files" if fault == "area" else "can't be encoded") in failed.reason


# -- the state -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["commit.bin", "CURRENT.next"])
def test_all_that_is_kept_for_others_gives_way_to_the_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    store, ledger = new_store(tmp_path)
    name, _, commit, folded = advance(store, ledger)
    store.apply(name, commit, folded)
    store.freeze()
    before = commit
    name, _, commit, folded = advance(store, folded, seed=2)

    def while_there_is_room(path: Path, content: bytes) -> None:
        if path.name == where and (store.frozen is not None or len(store._held) > 1):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace_file(path, content)

    monkeypatch.setattr(states, "replace_file", while_there_is_room)
    assert store.apply(name, commit, folded).commit == commit
    assert (store.frozen, [served.held.commit for served in store._held]) == (None, [commit, before])
    assert len([note for note in store.take_notes() if "disk is full" in note]) == 2
    again = StateStore(tmp_path / "state", store.grid)
    assert again.open() == []
    assert again.current is not None
    assert again.current.commit == commit


@pytest.mark.parametrize("where", ["commit.bin", "CURRENT.next"])
def test_a_switch_for_which_nothing_is_left_to_give_way_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    store, ledger = new_store(tmp_path)
    name, _, commit, folded = advance(store, ledger)

    def full(path: Path, content: bytes) -> None:
        if path.name == where:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace_file(path, content)

    with monkeypatch.context() as disk:
        disk.setattr(states, "replace_file", full)
        with pytest.raises(DiskFull):
            store.apply(name, commit, folded)
    assert store.apply(name, commit, folded).commit == commit
    assert store.current is not None
    assert store.current.theta.exists()


def test_folders_that_can_not_be_removed_are_told_of_and_stop_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, ledger = new_store(tmp_path)
    name, _, commit, folded = advance(store, ledger)
    advance(store, ledger, seed=2, outer_lr=0.5)  # of another proposal, which is to be dropped
    removed = raising(OSError(errno.EMFILE, "Too many open files"))
    monkeypatch.setattr("node.files.shutil.rmtree", removed)
    assert store.apply(name, commit, folded).commit == commit
    assert "Too many open files" in store.take_notes()[0]
    name, _, commit, folded = advance(store, folded, seed=3)
    store.apply(name, commit, folded)
    body_again, *_ = advance(store, folded, seed=4)
    left = store.folder / f"candidate-{body_again.hex()[:16]}"
    store._candidates.clear()
    assert left.exists()
    with pytest.raises(MachineError, match="Too many open files"):
        advance(store, folded, seed=4)


# -- an amendment ----------------------------------------------------------------------------------------------------


def test_an_amendment_that_has_no_room_is_tried_again_until_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.obeying.AGAIN_FIRST_S", 0.0)
    said: list[str] = []
    in_force: list[RunSpec] = []
    n_left = 3

    def full_at_first(path: Path, content: bytes) -> None:
        nonlocal n_left
        n_left -= 1
        if n_left >= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace_file(path, content)

    monkeypatch.setattr("node.obeying.replace_file", full_at_first)
    obeying = Obeying(
        SpecsFolder(tmp_path / "specs", SENDER), NOBODY, tmp_path / "spec.json",
        ask=NOBODY, amended=in_force.append, say=said.append,
    )  # fmt: skip
    bench = Bench(fx.Amended(SPEC), obeying=obeying)

    async def main() -> None:
        driver = bench.make()
        running = asyncio.create_task(driver.run())
        while len(in_force) < 2:
            await asyncio.wait([running], timeout=0.005)
            assert not running.done(), running.exception()
        driver.post(ev.LeaveAsked(""))
        await running

    asyncio.run(main())
    assert in_force == [SPEC, SPEC]  # others work by it at once, the trainer once it can read it
    assert RunSpec.from_bytes((tmp_path / "spec.json").read_bytes()) == SPEC
    assert len(said) == 1
    assert "older settings" in said[0]


def test_an_amendment_that_is_in_force_no_more_is_not_written_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.obeying.AGAIN_FIRST_S", 0.0)
    specs = SpecsFolder(tmp_path / "specs", SENDER)
    obeying = Obeying(
        specs, NOBODY, tmp_path / "none" / "spec.json", ask=NOBODY, amended=lambda _: None, say=lambda _: None
    )
    newer = SPEC.model_copy(update={"revision": 9})

    async def main() -> None:
        assert not await obeying.at_once(fx.Amended(SPEC))
        (tmp_path / "none").mkdir()
        assert await obeying.at_once(fx.Amended(newer))
        assert await obeying.in_time(fx.Amended(SPEC)) == ev.Woke()

    asyncio.run(main())
    assert RunSpec.from_bytes((tmp_path / "none" / "spec.json").read_bytes()) == newer


def test_a_revision_that_can_not_be_kept_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "specs").write_text("no folder")
    specs = SpecsFolder(tmp_path / "specs", SENDER)
    obeying = Obeying(specs, NOBODY, tmp_path / "spec.json", ask=NOBODY, amended=lambda _: None, say=said.append)
    assert asyncio.run(obeying.at_once(fx.KeepSpec(b"envelope", 2)))
    assert "revision 2" in said[0]


# -- what encoding leaves over, and results --------------------------------------------------------------------------


def test_what_is_left_over_does_not_count_twice_where_it_could_not_be_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    node.encode(1.0)
    node.commit(entry())
    node.settle()
    assert node.begin(2.0).residual  # of the round before, which goes along now
    node.residuals.seal(node.held.ledger.round + 1, OTHER_ROOT)
    node.commit(entry(OTHER_ROOT))
    with monkeypatch.context() as disk:
        disk.setattr(Residuals, "_read", raising(OSError(errno.EIO, "broken")))
        with pytest.raises(MachineError):
            node.settle()
    assert node.begin(3.0).residual == ""


def test_results_that_are_closed_make_a_reducer_unable_and_no_end(tmp_path: Path) -> None:
    async def main() -> list[ExchangeEvent]:
        events: list[ExchangeEvent] = []
        made, head = exchange(tmp_path, events.append)
        made.admit_row(SENDER, head)
        made._reducing.combine = raising(ValueError("these results are closed"))  # type: ignore[method-assign]
        await made.carry_out(CombineChunk(0, (str(SENDER),), (1.0,), 0))
        await asyncio.wait(list(made._combines.values()))
        await made.close()
        return events

    assert asyncio.run(main()) == [CombineFailed(0, "these results are closed", 0)]
