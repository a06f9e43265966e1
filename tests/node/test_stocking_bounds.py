"""How much training data is held: within bounds and what the disk has, and what is needed last goes first."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from node.stocking import IDLE_S, PLAN_S
from node.training.shards import pieces_of_batches
from protos.messages import Range
from tests.node.pieces import Counting, Run, new_store, packed_run
from tests.node.stock import MEMBERS, N_TRAIN_PIECES, PIECE_BYTES, stock_of


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = tmp_path / "packed"
    folder.mkdir()
    return packed_run(folder)


def test_a_bound_holds_what_is_needed_next_and_what_is_needed_last_goes(run: Run, tmp_path: Path) -> None:
    stock = stock_of(run, tmp_path, Counting(run[1]), cache_bytes=5 * PIECE_BYTES, members=MEMBERS[:1])

    async def main() -> None:
        await stock.until_idle()
        assert sorted(stock.order()[:5]) == stock.held == [0, 1, 2, 3, 4]
        stock.cursor, stock.now_s = 8, stock.now_s + PLAN_S  # the run is at its fifth piece
        await stock.until_idle()
        assert stock.held == [4, 5, 6, 7, 8]
        await stock.store.ensure([Range(20, 2)])
        await stock.until_idle()
        assert stock.held == [4, 5, 6, 7, 10]
        await stock.store.ensure([Range(0, 12)])  # a lease of more than the bound allows
        await stock.until_idle()
        assert stock.held == [0, 1, 2, 3, 4, 5, 10]  # and the one before, whose trainer may still read it
        assert len(stock.said) == 0

    asyncio.run(main())
    held = new_store(stock.store.files.folder, run[0])
    assert [piece for piece in range(N_TRAIN_PIECES) if held.files.have(piece)] == [0, 1, 2, 3, 4, 5, 10]


def test_much_that_has_to_go_goes_a_little_at_a_time(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.stocking.GIVEN_UP_MOST", 3)
    before = stock_of(run, tmp_path, Counting(run[1]), members=MEMBERS[:1])
    asyncio.run(before.until_idle())
    stock = stock_of(run, tmp_path, Counting(run[1]), cache_bytes=5 * PIECE_BYTES, members=MEMBERS[:1])
    n_held: list[int] = []

    async def main() -> None:
        await stock.turns(1)  # a look at what there is
        while await stock.stocker.turn() != IDLE_S:
            n_held.append(len(stock.held))

    asyncio.run(main())
    assert n_held == [10, 7]
    assert stock.held == [0, 1, 2, 3, 4]


def test_on_a_disk_that_fills_up_data_make_room(run: Run, tmp_path: Path) -> None:
    stock = stock_of(run, tmp_path, Counting(run[1]), members=MEMBERS[:1])

    async def main() -> None:
        await stock.until_idle()
        assert len(stock.held) == N_TRAIN_PIECES
        stock.free_bytes = 0
        await stock.until_idle()
        assert stock.held == [0, 1, 2]  # a quarter of what the disk would have without them
        assert stock.stocker.status()["cache_bytes"] == 250

    asyncio.run(main())


def test_where_the_disk_takes_no_room_back_the_bound_ends_the_laying_in(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.piece_files.can_punch", lambda folder: False)
    stock = stock_of(run, tmp_path, Counting(run[1]), cache_bytes=5 * PIECE_BYTES, members=MEMBERS[:1])

    async def main() -> None:
        await stock.until_idle()
        stock.cursor, stock.now_s = 8, stock.now_s + PLAN_S
        await stock.until_idle()
        assert stock.held == [0, 1, 2, 3, 4]

    asyncio.run(main())


def test_without_a_cache_only_leases_are_kept(run: Run, tmp_path: Path) -> None:
    stock = stock_of(run, tmp_path, Counting(run[1]), cache_bytes=0)

    async def main() -> None:
        for batch in (0, 8, 16):
            await stock.store.ensure([Range(batch, 2)])
            await stock.until_idle()
        assert stock.held == [*pieces_of_batches(run[0], [Range(8, 2)]), *pieces_of_batches(run[0], [Range(16, 2)])]

    asyncio.run(main())
