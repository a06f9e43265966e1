"""The driver: effects in order, on disk before sent, lines that replace each other, sleep until woken, observations."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from coordinator.leading.ports import Departed, Observed, Renewed, Spoken
from coordinator.rounds.events import (
    Close,
    Committed,
    Connected,
    Disconnected,
    Effect,
    Ended,
    Event,
    Heard,
    Instant,
    Opened,
    Ordered,
    Persist,
    Probe,
    Reached,
    RecordChanged,
    Say,
    Tell,
    Woke,
)
from protos.messages import (
    Evaluation,
    ExchangeReport,
    Goodbye,
    Promise,
    Proposal,
    Refusal,
    Welcome,
)
from protos.orders import Kind
from tests.coordinator.driving import ALICE, BOB, FAILED, Bench, FakeLine, Machine, World, arrived, driven, heartbeat
from tests.coordinator.made import RUN, genesis, identity, next_commit, record
from tests.coordinator.rounds.ordered import ordered

PAUSE = Ordered(ordered(1, Kind.PAUSE))


def test_what_must_be_on_disk_is_there_before_anything_after_it_is_sent() -> None:
    def answers(event: Event) -> list[Effect]:
        if isinstance(event, Heard):
            return [Persist(Opened(0, 1, 0)), Tell((ALICE.peer,), FAILED), Say("after")]
        return []

    async def scene(bench: Bench) -> None:
        bench.world.on_disk = asyncio.Event()
        line = bench.line()
        bench.driver.post(arrived(line))
        bench.driver.post(Spoken(line, Heard(ALICE.peer, Refusal(0, 1, 0, "no"), b"")))
        await bench.settle()
        assert bench.world.trace == ["persisting Opened"]
        bench.world.on_disk.set()
        await bench.settle()

    bench = driven(scene, machine=Machine(answers))
    assert bench.world.trace == ["persisting Opened", "persisted Opened", "sent AttemptFailed", "said after"]


def test_a_commit_is_appended_folded_and_shown_before_it_is_told() -> None:
    _, _, ledger = genesis()
    link = next_commit(ledger)

    def answers(event: Event) -> list[Effect]:
        if isinstance(event, Heard):
            return [
                Committed(link.commit, link.body, link.after.head, (FAILED,)),
                Tell((ALICE.peer, BOB.peer), link.commit),
            ]
        return []

    async def scene(bench: Bench) -> None:
        bench.world.on_disk = asyncio.Event()
        line = bench.line()
        bench.driver.post(arrived(line))
        bench.driver.post(Spoken(line, Heard(ALICE.peer, heartbeat(), b"")))
        await bench.settle()
        assert bench.driver.ledger == ledger
        bench.world.on_disk.set()
        await bench.settle()
        assert bench.driver.ledger == link.after

    bench = driven(scene, machine=Machine(answers))
    assert bench.world.trace == ["committing 0>1", "committed 1", "shown 1", "sent Commit"]


def test_a_journal_that_fails_stops_the_leader_before_it_speaks() -> None:
    class Broken(World):
        async def persist(self, entry: Opened | Promise | Proposal) -> None:
            raise OSError("disk full")

    def answers(event: Event) -> list[Effect]:
        return [Persist(Opened(0, 1, 0)), Tell((ALICE.peer,), FAILED)] if isinstance(event, Heard) else []

    lines: list[FakeLine] = []

    async def scene(bench: Bench) -> None:
        lines.append(bench.line())
        bench.driver.post(arrived(lines[0]))
        bench.driver.post(Spoken(lines[0], Heard(ALICE.peer, heartbeat(), b"")))
        await bench.settle()

    with pytest.raises(ExceptionGroup) as caught:
        driven(scene, machine=Machine(answers), world=Broken())
    assert caught.group_contains(OSError, match="disk full")
    assert lines[0].frames == []


def test_a_welcome_leaves_with_the_runs_time() -> None:
    commit, _, ledger = genesis()
    welcome = Welcome(identity(2).peer, commit, ledger.to_bytes(), (), 0.0, 1.0)

    def answers(event: Event) -> list[Effect]:
        return [Tell((event.peer,), welcome)] if isinstance(event, Connected) else []

    lines: list[FakeLine] = []

    async def scene(bench: Bench) -> None:
        bench.clock.at = 7.0
        lines.append(bench.line())
        bench.driver.post(arrived(lines[0]))

    driven(scene, machine=Machine(answers))
    (sent,) = lines[0].frames
    assert isinstance(sent, Welcome)
    assert sent.run_time_s == 107.0
    assert sent.commit == commit


def test_a_newer_line_of_the_same_peer_wins() -> None:
    def answers(event: Event) -> list[Effect]:
        return [Tell((ALICE.peer,), FAILED)] if isinstance(event, Heard) else []

    old_new: list[FakeLine] = []

    async def scene(bench: Bench) -> None:
        old, new = bench.line(name=" old"), bench.line(name=" new")
        old_new.extend((old, new))
        bench.driver.post(arrived(old))
        bench.driver.post(arrived(new))
        bench.driver.post(Spoken(old, Heard(ALICE.peer, heartbeat(), b"")))  # too late
        bench.driver.post(Departed(old, "gone"))  # says nothing about the new one
        bench.driver.post(Spoken(new, Heard(ALICE.peer, heartbeat(), b"")))

    bench = driven(scene, machine=Machine(answers))
    old, new = old_new
    assert old.goodbye is not None
    assert old.goodbye.code == "superseded"
    assert new.frames == [FAILED]
    kinds = [type(event) for event, _ in bench.machine.heard if not isinstance(event, Woke)]
    assert kinds == [Connected, Disconnected, Connected, Heard]


def test_a_hello_that_is_read_late_takes_no_line_away() -> None:
    lines: list[FakeLine] = []

    async def scene(bench: Bench) -> None:
        new, late = bench.line(name=" new"), bench.line(name=" late")
        lines.extend((new, late))
        hello = arrived(new)
        bench.driver.post(replace(hello, record=replace(hello.record, sequence=8)))
        stale = arrived(late)
        bench.driver.post(replace(stale, record=replace(stale.record, sequence=7)))
        bench.driver.post(Departed(late, "gone"))

    bench = driven(scene)
    new, late = lines
    assert late.goodbye is not None
    assert late.goodbye.reason == "a newer line of this peer is open"
    assert new.goodbye is not None
    assert "the coordinator stops" in new.goodbye.reason, "its line was open to the end"
    kinds = [type(event) for event, _ in bench.machine.heard if not isinstance(event, Woke)]
    assert kinds == [Connected]


def test_a_banned_peer_hears_why() -> None:
    from protos.messages import Standing

    lines: list[FakeLine] = []

    async def scene(bench: Bench) -> None:
        lines.append(bench.line())
        bench.driver._ledger = replace(bench.driver.ledger, standing={ALICE.peer: Standing.BANNED})
        bench.driver.post(arrived(lines[0]))

    bench = driven(scene)
    assert lines[0].goodbye is not None
    assert (lines[0].goodbye.code, bench.machine.events(Connected)) == ("refused", [])


def test_it_sleeps_until_the_machine_wants_to_be_woken() -> None:
    async def scene(bench: Bench) -> None:
        assert [event for event, _ in bench.machine.heard] == [Woke()]
        woken = asyncio.Event()

        def answers(event: Event) -> list[Effect]:
            if isinstance(event, Woke):
                bench.machine.wake = None
                woken.set()
            return []

        bench.machine.answers, bench.machine.wake = answers, Instant(0.002)
        bench.driver.order(PAUSE)
        await woken.wait()

    bench = driven(scene)
    kinds = [type(event) for event, _ in bench.machine.heard][:3]
    assert kinds == [Woke, Ordered, Woke]


def test_probes_come_back_as_events_and_a_newer_one_replaces_an_older() -> None:
    world = World(reachable=True)

    def answers(event: Event) -> list[Effect]:
        if isinstance(event, Connected):
            return [Probe(ALICE.peer, ("a:1",))]
        if isinstance(event, RecordChanged):
            return [Probe(ALICE.peer, ("b:2",))]
        return []

    async def scene(bench: Bench) -> None:
        world.probe_gate = asyncio.Event()
        line = bench.line()
        bench.driver.post(arrived(line))
        await bench.settle()
        bench.driver.post(Renewed(line, record(ALICE, RUN.peer, sequence=2), b"newer"))
        await bench.settle()
        assert bench.driver.record_of(ALICE.peer) == b"newer"
        world.probe_gate.set()
        await bench.settle()

    bench = driven(scene, machine=Machine(answers), world=world)
    assert bench.machine.events(Reached) == [Reached(ALICE.peer, True)]
    assert world.trace == ["probed ('b:2',)"]


def test_stopping_says_goodbye_and_ends_probes() -> None:
    world = World()
    lines: list[FakeLine] = []

    def answers(event: Event) -> list[Effect]:
        return [Probe(ALICE.peer, ("a:1",))] if isinstance(event, Connected) else []

    async def scene(bench: Bench) -> None:
        world.probe_gate = asyncio.Event()
        lines.append(bench.line())
        bench.driver.post(arrived(lines[0]))
        await bench.settle()

    driven(scene, machine=Machine(answers), world=world)
    assert lines[0].goodbye is not None
    assert lines[0].goodbye.code == "shutdown"
    assert world.trace == []


def test_closing_and_ending_are_carried_out() -> None:
    def answers(event: Event) -> list[Effect]:
        if isinstance(event, Heard):
            return [Close(ALICE.peer, Goodbye("ended", "done")), Close(BOB.peer, Goodbye("ended", "x")), Ended("done")]
        return []

    lines: list[FakeLine] = []

    async def scene(bench: Bench) -> None:
        lines.append(bench.line())
        bench.driver.post(arrived(lines[0]))
        bench.driver.post(Spoken(lines[0], Heard(ALICE.peer, heartbeat(), b"")))
        bench.driver.post(Departed(lines[0], "closed by us"))

    bench = driven(scene, machine=Machine(answers))
    assert lines[0].goodbye == Goodbye("ended", "done")
    assert bench.driver.ended == "done"
    assert bench.machine.events(Disconnected) == [Disconnected(ALICE.peer, "closed by us")]


def test_orders_that_waited_are_given_at_the_start() -> None:
    async def scene(bench: Bench) -> None:
        pass

    assert driven(scene, orders=[PAUSE]).machine.events(Ordered) == [PAUSE]


def test_reports_are_checked_and_kept_once() -> None:
    head = b"h" * 32

    def report(round_: int, **changes: Any) -> ExchangeReport:
        values = {"epoch": 0, "round": round_, "bytes_sent": 1, "bytes_received": 2, "train_s": 1.0, "exchange_s": 1.0}
        return ExchangeReport(**{**values, "apply_s": 1.0, **changes})

    async def scene(bench: Bench) -> None:
        line = bench.line()
        bench.driver.post(arrived(line, head=head, digest=b"d" * 32, holds_state=True))
        for _ in range(3):
            bench.driver.post(Spoken(line, Heard(ALICE.peer, heartbeat(head, b"d" * 32), b"")))
            bench.driver.post(Observed(line, report(1)))
        bench.driver.post(Spoken(line, Heard(ALICE.peer, heartbeat(head, b"e" * 32), b"")))
        bench.driver.post(Observed(line, report(9)))  # no such round yet
        bench.driver.post(Observed(line, report(0, train_s=1e12)))
        bench.driver.post(Observed(line, report(0, idle_s=1e12)))
        bench.driver.post(Observed(line, Evaluation(0, 0, b"d" * 32, 2.5, 100)))
        bench.driver.post(Observed(line, Evaluation(0, 0, b"f" * 32, 1e9, 100)))
        await bench.settle()
        assert bench.driver.heartbeats()[ALICE.peer].bytes_sent == 5

    bench = driven(scene)
    kinds = [(each.kind, each.subject[:4]) for each in bench.world.observations]
    assert kinds == [("digest", head.hex()[:4]), ("report", "0.1"), ("digest", head.hex()[:4]), ("evaluation", "6464")]
    assert {each.peer for each in bench.world.observations} == {ALICE.peer}


@pytest.mark.parametrize(
    ("spent", "kept"),
    [((1.5, 4.5), {"idle_s": 1.5, "worked_s": 4.5}), ((0.0, 2.0), {"idle_s": 0.0, "worked_s": 2.0}), ((0.0, 0.0), {})],
)
def test_a_report_says_how_the_trainer_spent_the_round_if_it_was_measured(
    spent: tuple[float, float], kept: dict[str, float]
) -> None:
    async def scene(bench: Bench) -> None:
        line = bench.line()
        bench.driver.post(arrived(line))
        bench.driver.post(Observed(line, ExchangeReport(0, 1, 5, 6, 1.0, 2.0, 3.0, *spent)))
        await bench.settle()

    (observation,) = driven(scene).world.observations
    said = {"bytes_sent": 5, "bytes_received": 6, "train_s": 1.0, "exchange_s": 2.0, "apply_s": 3.0}
    assert (observation.kind, observation.content) == ("report", said | kept)


def test_a_full_inbox_holds_readers_back() -> None:
    async def scene(bench: Bench) -> None:
        bench.world.on_disk = asyncio.Event()
        line = bench.line()
        bench.driver.post(arrived(line))
        for _ in range(1100):
            bench.driver.post(Spoken(line, Heard(ALICE.peer, heartbeat(), b"")))
        waiting = asyncio.ensure_future(bench.driver.room())
        await asyncio.sleep(0)
        assert not waiting.done()
        bench.world.on_disk.set()
        await waiting

    def answers(event: Event) -> list[Effect]:
        return [Persist(Opened(0, 1, 0))] if isinstance(event, Heard) else []

    driven(scene, machine=Machine(answers))
