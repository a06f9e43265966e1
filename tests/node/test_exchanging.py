"""The bytes of an attempt on disk: a full disk refuses a row, and what is over makes no file again."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from aggregation.exchange import CheckRow, ExchangeEvent, RefuseRow, RowBroken, RowChecked, Unable
from coordinator.rounds import policy
from node import rows
from node.exchanging import Exchanging
from node.reducing import MESSAGE_EXTRA_BYTES
from node.results import ResultsStore
from node.session.effects import BeginExchange
from node.training.shared import frame_sizes
from protos.messages import ChunkHead, Commitment, Deal, Missing, PeerId, Plan, Range, Signed
from protos.sealer import KeySealer
from protos.signing import Identity
from tests.fakes.peers import FakeNetwork, FakePeers
from tests.node.runs import make_run

PLAN_HASH = b"p" * 32
SENDER = PeerId("a sender")


def exchange(
    folder: Path, happened: Callable[[ExchangeEvent], None], *, memory_bytes: int = 0
) -> tuple[Exchanging, ChunkHead]:
    """An attempt with one sender besides this member, and the head of its only row."""
    spec, me = make_run(folder), Identity.generate()
    zero = b"\0" * 32
    plan = Plan(
        me.peer, 0, 1, 0, me.peer, zero, zero, 1, (), "mean", 0, "", "", "int8", Range(0, 1), 0, "identity", 1, 1.0,
        1.0, 1.0,
    )  # fmt: skip
    commitments = {SENDER: Commitment(PLAN_HASH, zero, (1.0,), 1, 1, (), 0.1, 1.0)}
    begin = BeginExchange(plan, PLAN_HASH, Deal(PLAN_HASH, 0, (), (), ()), b"deal", commitments)
    grid = policy.grid(spec)
    sizes = frame_sizes(grid, spec.codec.name, spec.codec.block)

    async def where(_: PeerId) -> tuple[str, ...]:
        return ()

    async def tell(_: Signed | Missing) -> None:
        return None

    def failed(error: BaseException) -> None:
        raise error

    made = Exchanging(
        begin, me.peer, spec, KeySealer(me, me.peer), admit=lambda *_: "", codes=None, code_paths=(),
        results=ResultsStore(folder / "results", sizes, spec.codec.leaf_values).area(PLAN_HASH),
        work=folder / "rows", pool=ThreadPoolExecutor(1), peers=FakePeers(FakeNetwork(), me.peer), where=where,
        happened=happened, tell=tell, failed=failed, seconds=lambda: 0.0, memory_bytes=memory_bytes,
    )  # fmt: skip
    return made, ChunkHead(PLAN_HASH, 0, sizes[0], ())


@pytest.mark.parametrize("where", ["first part", "last part", "file"])
def test_a_row_that_the_disk_has_no_room_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def main() -> None:
        events: list[ExchangeEvent] = []
        made, head = exchange(tmp_path, events.append)
        row = memoryview(bytes(head.n_bytes))
        with monkeypatch.context() as disk:
            if where == "file":
                disk.setattr(os, "ftruncate", full)
                assert "no room" in made.admit_row(SENDER, head)
                assert events == [RowBroken(SENDER, 0), Unable()]  # the leader need not wait for this reducer
            else:
                disk.setattr(rows, "write_all", full)
                assert made.admit_row(SENDER, head) == ""
                await made.put(SENDER, 0, 0, row[:10] if where == "first part" else row)
                await made.put(SENDER, 0, 10, row[10:])
                waiting = asyncio.create_task(made.row_done(SENDER, 0))
                await asyncio.sleep(0)
                await made.carry_out(CheckRow(SENDER, 0))
                while not any(isinstance(event, RowChecked) for event in events):  # noqa: ASYNC110 - a thread does it
                    await asyncio.sleep(0.001)
                (checked,) = [event for event in events if isinstance(event, RowChecked)]
                assert "no room" in checked.fault
                assert Unable() in events
                await made.carry_out(RefuseRow(SENDER, 0, checked.fault))
                assert "no room" in await waiting
        assert made.admit_row(SENDER, head) == ""  # there is room again
        await made.put(SENDER, 0, 0, row)
        await made.close()

    asyncio.run(main())


@pytest.mark.parametrize("part", ["alone", "padded", "first"])
def test_a_row_in_memory_keeps_little_more_than_itself(tmp_path: Path, part: str) -> None:
    async def main() -> None:
        made, head = exchange(tmp_path, lambda _: None, memory_bytes=2**20)
        size = head.n_bytes
        message = b"head" + bytes(range(200)) * (size // 200 + 1) + (bytes(MESSAGE_EXTRA_BYTES) * (part == "padded"))
        data = memoryview(message)[4 : 4 + size]
        assert made.admit_row(SENDER, head) == ""
        row = made._rows[(SENDER, 0)]
        cut = 10 if part == "first" else size
        made._reducing.take(row, 0, data[:cut])
        if cut < size:
            made._reducing.take(row, cut, data[cut:])
        assert isinstance(row.place, memoryview) == (part == "alone")
        assert bytes(row.place or b"") == bytes(data)
        assert not (tmp_path / "rows").exists()
        await made.close()

    asyncio.run(main())


def test_rows_beyond_what_memory_may_hold_wait_in_the_file(tmp_path: Path) -> None:
    async def main() -> None:
        made, head = exchange(tmp_path, lambda _: None, memory_bytes=150)
        *fit, first, more = [PeerId(f"sender {i}") for i in range(150 // head.n_bytes + 1)]
        for sender in (first, *fit):
            assert made.admit_row(sender, head) == ""
        made.row_broken(first, 0)
        assert made.admit_row(first, head) == ""  # has its room from the first time
        assert not (tmp_path / "rows").exists()
        assert made.admit_row(more, head) == ""
        assert (tmp_path / "rows").exists()
        assert made._memory.n_bytes == (len(fit) + 1) * head.n_bytes
        await made.close()

    asyncio.run(main())


def test_a_row_does_not_come_again_while_its_part_is_still_being_written(tmp_path: Path) -> None:
    async def main() -> None:
        made, head = exchange(tmp_path, lambda _: None)
        go_on = threading.Event()
        made._pool.submit(go_on.wait)  # its only thread
        assert made.admit_row(SENDER, head) == ""
        putting = asyncio.create_task(made.put(SENDER, 0, 0, memoryview(bytes(10))))
        await asyncio.sleep(0)
        made.row_broken(SENDER, 0)
        assert "still being written" in made.admit_row(SENDER, head)  # or both could write to one place
        go_on.set()
        await putting
        assert made.admit_row(SENDER, head) == ""
        await made.close()

    asyncio.run(main())


def test_what_comes_after_the_end_makes_no_file_again(tmp_path: Path) -> None:
    async def main() -> None:
        made, head = exchange(tmp_path, lambda _: None)
        assert made.admit_row(SENDER, head) == ""
        await made.put(SENDER, 0, 0, memoryview(bytes(head.n_bytes)))
        await made.close()
        await made.put(SENDER, 0, 0, memoryview(bytes(head.n_bytes)))
        assert await made.row_done(SENDER, 0) == "the attempt is over, or the row counts no more"
        assert not (tmp_path / "rows").exists()

    asyncio.run(main())
