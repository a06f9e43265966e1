"""One attempt's rows between two members in memory: sent, checked, receipted; and what is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from node.exchanging import STALLED_TIMES, Exchanging
from protos.messages import Receipt, Results
from protos.sealer import open_signed
from tests.coordinator.made import RUN
from tests.fakes.peers import Fault
from tests.node.attempt import PLAN_HASH, SPEC, STRANGER, A, B, Member, Sender, World, play, send


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda head, row: (head, row[:-1] + bytes([row[-1] ^ 1])), "not what its commitment names"),
        (lambda head, row: (replace(head, path=tuple(bytes(32) for _ in head.path)), row), "not what its commitment"),
        (lambda head, row: (replace(head, path=()), row), "chunk"),
        (lambda head, row: (head, bytes(len(row))), "chunk"),
        (lambda head, row: (replace(head, plan=bytes(32)), row), "not of the current attempt"),
        (lambda head, row: (replace(head, n_bytes=len(row) - 1), row[:-1]), "bytes, not"),
        (lambda head, row: (head, row[:-1]), "too short"),
    ],
    ids=["flipped", "another path", "no path", "not canonical", "another plan", "shorter", "cut off"],
)
def test_a_wrong_row_is_refused_and_the_right_one_still_taken(tmp_path: Path, change: Any, why: str) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        async with world.living(A) as (a,):
            by = cast(Member, Sender(world, B.peer))
            chunk = world.dealt_to(A.peer)[0]
            said = await send(by, a, world, Member.rows(by, change), chunk)
            assert isinstance(said, str)
            assert why in said
            await asyncio.sleep(0)
            right = await send(by, a, world, Member.rows(by, lambda head, row: (head, row)), chunk)
            assert len(right) == 1
            assert a.faults == []

    play(scenario)


def test_whoever_is_not_in_the_set_or_has_another_deal_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        async with world.living(A) as (a,):
            chunk = world.dealt_to(A.peer)[0]
            stranger = cast(Member, Sender(world, STRANGER.peer))
            rows = Member.rows(stranger, lambda head, row: (head, row))
            assert await send(stranger, a, world, rows, chunk) == "refused: not in the included set"
            by = cast(Member, Sender(world, B.peer))
            world.deal += b"\0"
            said = await send(by, a, world, Member.rows(by, lambda head, row: (head, row)), chunk)
            assert said == "refused: not the deal of the current attempt"

    play(scenario)


def test_a_norm_that_was_not_committed_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path, lambda commitment: replace(commitment, norms=tuple(n * 2 for n in commitment.norms)))
        async with world.living(A) as (a,):
            by = cast(Member, Sender(world, B.peer))
            chunk = world.dealt_to(A.peer)[0]
            said = await send(by, a, world, Member.rows(by, lambda head, row: (head, row)), chunk)
            assert f"chunk {chunk} has another norm than committed" in said

    play(scenario)


def test_a_lost_receipt_is_given_again_for_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        async with world.living(A, B) as (a, b):
            await asyncio.gather(a.told.get(), b.told.get())
            chunk = world.dealt_to(A.peer)[0]
            nonsense = Member.rows(b, lambda head, row: (head, bytes(len(row))))
            first = await send(b, a, world, nonsense, chunk)
            again = await send(b, a, world, nonsense, chunk)
            assert first == again
            assert isinstance(first, list)
            (envelope,) = first
            receipt = open_signed(envelope, RUN.peer, signer=A.peer, kind=Receipt).message
            assert receipt == Receipt(PLAN_HASH, B.peer, (chunk,))

    play(scenario)


@pytest.mark.parametrize("fault", [Fault(drop=True), Fault(break_at_byte=3000)], ids=["unreachable", "breaks"])
def test_rows_are_sent_again_until_they_are_receipted(tmp_path: Path, fault: Fault) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        world.network.faults[A.peer] = fault
        async with world.living(A, B) as (a, b):
            await b.told.get()  # a reached it all along
            assert world.network.faults
            del world.network.faults[A.peer]
            assert isinstance(await a.told.get(), Results)
            assert b.exchange.unreceipted() == {}

    play(scenario)


def test_the_end_settles_who_still_waits_and_takes_no_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        async with world.living(A) as (a,):
            chunk = world.dealt_to(A.peer)[0]
            head, row = Member.rows(cast(Member, Sender(world, B.peer)), lambda head, row: (head, row))(chunk)
            running = a.exchanging
            assert running is not None
            assert running.admit_row(B.peer, head) == ""
            await running.put(B.peer, chunk, 0, row)
            waiting = asyncio.create_task(_checked(running, chunk))
            await asyncio.sleep(0)
            await running.close()
            assert (await waiting).startswith("the attempt is over")
            assert running.receipt(B.peer, (chunk,)) == b""
            assert running.admit_row(B.peer, head) == "not of the current attempt"
            assert running.admit_deal(world.deal) == "not the deal of the current attempt"
            a.exchanging = None
            holder = world.network.holders[A.peer]
            assert holder.admit_deal(B.peer, world.deal) == "no exchange runs here now"
            assert holder.admit_row(B.peer, head) == "no exchange runs here now"
            assert await holder.row_done(B.peer, head) == "the attempt is over"

    play(scenario)


async def _checked(running: Exchanging, chunk: int) -> str:
    return await running.row_done(B.peer, chunk)


def test_a_fault_of_ours_is_said_aloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> str:
        raise ZeroDivisionError("ours")

    async def scenario() -> None:
        world = World(tmp_path)
        async with world.living(A) as (a,):
            monkeypatch.setattr(a.exchanging._reducing, "fault_of", broken)
            by = cast(Member, Sender(world, B.peer))
            chunk = world.dealt_to(A.peer)[0]
            sending = asyncio.create_task(send(by, a, world, Member.rows(by, lambda head, row: (head, row)), chunk))
            await a.failed.wait()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            assert all(isinstance(fault, ZeroDivisionError) for fault in a.faults)

    play(scenario)


def test_a_receipt_names_rows_that_are_held_and_no_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        async with world.living(A, B) as (a, b):
            await asyncio.gather(a.told.get(), b.told.get())
            running = a.exchanging
            assert running is not None
            mine = tuple(world.dealt_to(A.peer))
            envelope = running.receipt(B.peer, (*mine, *world.dealt_to(B.peer)))
            receipt = open_signed(envelope, RUN.peer, signer=A.peer, kind=Receipt).message
            assert receipt == Receipt(PLAN_HASH, B.peer, mine)
            assert running.receipt(STRANGER.peer, mine) == b""

    play(scenario)


def test_whom_nothing_is_heard_of_for_long_has_stalled(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        async with world.living(A) as (a,):
            running, now_s = a.exchanging, [0.0]
            assert running is not None
            running._seconds = lambda: now_s[0]
            limit_s = STALLED_TIMES * SPEC.deadlines.no_progress_s
            assert running.stalled() == ()
            now_s[0] = limit_s - 1.0
            assert running.admit_deal(world.deal, B.peer) == ""
            now_s[0] = 2 * limit_s - 2.0
            assert running.stalled() == ()
            now_s[0] = 2 * limit_s
            assert running.stalled() == (str(B.peer),)

    play(scenario)
