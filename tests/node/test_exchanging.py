"""The bytes of an attempt on disk: a full disk refuses a row, and what is over makes no file again."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from aggregation.exchange import ExchangeEvent, RowBroken, Unable
from coordinator.rounds import policy
from node import exchanging
from node.exchanging import Exchanging
from node.results import ResultsStore
from node.session.events import BeginExchange
from node.training.shared import frame_sizes
from protos.messages import ChunkHead, Commitment, Deal, Missing, PeerId, Plan, Range, Signed
from protos.sealer import KeySealer
from protos.signing import Identity
from tests.fakes.peers import FakeNetwork, FakePeers
from tests.node.runs import make_run

PLAN_HASH = b"p" * 32
SENDER = PeerId("a sender")


def exchange(folder: Path, happened: Callable[[ExchangeEvent], None]) -> tuple[Exchanging, ChunkHead]:
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
        happened=happened, tell=tell, failed=failed, seconds=lambda: 0.0,
    )  # fmt: skip
    return made, ChunkHead(PLAN_HASH, 0, sizes[0], ())


def test_a_row_that_the_disk_has_no_room_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def main() -> None:
        events: list[ExchangeEvent] = []
        made, head = exchange(tmp_path, events.append)
        with monkeypatch.context() as disk:
            disk.setattr(exchanging, "reserve_part", full)
            assert "no room" in made.admit_row(SENDER, head)
        assert events == [RowBroken(SENDER, 0), Unable()]  # the leader need not wait for this reducer
        assert made.admit_row(SENDER, head) == ""  # there is room again
        made.put(SENDER, 0, 0, bytes(head.n_bytes))
        await made.close()

    asyncio.run(main())


def test_what_comes_after_the_end_makes_no_file_again(tmp_path: Path) -> None:
    async def main() -> None:
        made, head = exchange(tmp_path, lambda _: None)
        assert made.admit_row(SENDER, head) == ""
        made.put(SENDER, 0, 0, bytes(head.n_bytes))
        await made.close()
        made.put(SENDER, 0, 0, bytes(head.n_bytes))
        assert await made.row_done(SENDER, 0) == "the attempt is over"
        with pytest.raises(ValueError, match="over"):
            made._mapped()
        assert not (tmp_path / "rows").exists()

    asyncio.run(main())
