"""Training data beyond the leases: laid in politely, and soon twice among the members."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from node.errors import DiskFull, Unreachable
from node.sources import Sink
from node.stocking import BACK_OFF_FIRST_S, BACK_OFF_MAX_S, IDLE_S, LOOK_S, NOT_HAD_S, PIECES_MOST, PLAN_S
from node.training.shards import TRAIN_FILE, pieces_of_batches
from protos.messages import PeerId, Range
from tests.fakes.holder import FakeHolder
from tests.fakes.peers import FakeNetwork, Fault
from tests.node.pieces import OBSERVER, Counting, Run, Serving, new_store, nodes, packed_run
from tests.node.stock import MEMBERS, N_TRAIN_PIECES, PLENTY, Stock, books, stock_of


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = tmp_path / "packed"
    folder.mkdir()
    return packed_run(folder)


class Slow:
    """A source that takes its time, by the clock of whom it serves."""

    def __init__(self, inner: Counting, takes_s: float) -> None:
        self.inner, self.takes_s = inner, takes_s
        self.sizes: list[int] = []
        self.stock: Stock | None = None

    async def fetch(self, hashes: Sequence[bytes], max_bytes: int, sink: Sink, *, urgent: bool = True) -> None:
        assert self.stock is not None
        self.sizes.append(len(hashes))
        self.stock.now_s += self.takes_s * len(hashes)
        await self.inner.fetch(hashes, max_bytes, sink)


def test_the_train_shard_of_a_small_set_is_soon_held_whole(run: Run, tmp_path: Path) -> None:
    stock = stock_of(run, tmp_path, Counting(run[1]))
    asyncio.run(stock.until_idle())
    assert stock.held == list(range(N_TRAIN_PIECES))
    assert stock.store.n_here == N_TRAIN_PIECES  # nothing of the validation shard, which the observer reads
    train = (run[1].files.folder / TRAIN_FILE).read_bytes()
    assert (stock.store.files.folder / TRAIN_FILE).read_bytes() == train
    assert stock.stocker.status() == {
        "pieces": N_TRAIN_PIECES, "pieces_here": N_TRAIN_PIECES, "bytes_here": len(train), "cache_bytes": PLENTY,
        "damaged": 0, "problem": None,
    }  # fmt: skip
    assert asyncio.run(stock.stocker.turn()) == IDLE_S


def test_nothing_is_fetched_while_the_round_needs_the_line_or_nobody_has_told_where_the_run_is(
    run: Run, tmp_path: Path
) -> None:
    source = Counting(run[1])
    stock = stock_of(run, tmp_path, source, quiet=False)
    assert asyncio.run(stock.turns(3)) == LOOK_S
    assert source.asked == []
    stock.quiet, stock.joined = True, False
    asyncio.run(stock.turns(1))
    assert len(source.asked) == 1  # the list
    assert asyncio.run(stock.turns(3)) == LOOK_S
    assert len(source.asked) == 1


def test_a_lease_that_is_being_fetched_goes_first(run: Run, tmp_path: Path) -> None:
    class Stuck:
        def __init__(self) -> None:
            self.begun = asyncio.Event()

        async def fetch(self, hashes: Sequence[bytes], max_bytes: int, sink: Sink, *, urgent: bool = True) -> None:
            assert urgent
            self.begun.set()
            await asyncio.get_running_loop().create_future()

    async def main() -> None:
        source = Stuck()
        stock = stock_of(run, tmp_path, source)
        leased = asyncio.create_task(stock.store.ensure([Range(0, 1)]))
        await source.begun.wait()
        assert await stock.stocker.turn() == LOOK_S
        leased.cancel()
        await asyncio.gather(leased, return_exceptions=True)

    asyncio.run(main())


def test_it_goes_on_after_it_gave_way(run: Run, tmp_path: Path) -> None:
    class Once:
        """Stands still the first time that it is asked for what can wait."""

        def __init__(self) -> None:
            self.begun = asyncio.Event()

        async def fetch(self, hashes: Sequence[bytes], max_bytes: int, sink: Sink, *, urgent: bool = True) -> None:
            if not urgent and not self.begun.is_set():
                self.begun.set()
                await asyncio.get_running_loop().create_future()
            await Counting(run[1]).fetch(hashes, max_bytes, sink)

    async def main() -> None:
        source = Once()
        stock = stock_of(run, tmp_path, source)
        await stock.store.ensure([Range(0, 1)])
        first = next(piece for piece in stock.order() if not stock.store.files.have(piece))
        turn = asyncio.create_task(stock.stocker.turn())
        await source.begun.wait()
        batch = next(b for b in range(25) if first not in pieces_of_batches(run[0], [Range(b, 1)]) and b > 4)
        await stock.store.ensure([Range(batch, 1)])
        assert await turn == LOOK_S
        await stock.stocker.turn()
        assert stock.store.files.have(first)  # not passed over for it

    asyncio.run(main())


def test_a_slow_line_gets_one_piece_at_a_time_and_rests_as_long_as_it_worked(run: Run, tmp_path: Path) -> None:
    source = Slow(Counting(run[1]), 3.0)
    stock = source.stock = stock_of(run, tmp_path, source)

    async def main() -> None:
        await stock.stocker.turn()  # the list
        assert [await stock.stocker.turn() for _ in range(4)] == [3.0] * 4
        assert source.sizes == [1] * 5
        source.takes_s = 0.0
        await stock.until_idle()
        assert source.sizes[5:] == [1, 2, 4, 2]

    asyncio.run(main())
    assert max(source.sizes) <= PIECES_MOST


def test_what_nobody_has_is_passed_over_for_a_while_and_costs_less_and_less(run: Run, tmp_path: Path) -> None:
    half = new_store(tmp_path / "half", run[0], Counting(run[1]))
    asyncio.run(half.ensure_pieces(range(0, N_TRAIN_PIECES, 2)))
    source = Counting(half)
    stock = stock_of(run, tmp_path, source)

    async def main() -> None:
        rests = [await stock.stocker.turn() for _ in range(40)]
        assert stock.held == list(range(0, N_TRAIN_PIECES, 2))
        assert rests[-1] == IDLE_S
        assert max(rests[:-1], default=0.0) >= BACK_OFF_FIRST_S
        n_asked = len(source.asked)
        stock.now_s += NOT_HAD_S + 1
        source.inner = run[1]
        await stock.until_idle()
        assert stock.held == list(range(N_TRAIN_PIECES))
        assert len(source.asked) == n_asked + 6

    asyncio.run(main())


def test_while_nobody_answers_tries_grow_rare(run: Run, tmp_path: Path) -> None:
    stock = stock_of(run, tmp_path)
    rests = asyncio.run(_rests(stock, 9))
    assert rests == [BACK_OFF_FIRST_S * 2**n for n in range(6)] + [BACK_OFF_MAX_S] * 3
    assert stock.said == []


async def _rests(stock: Stock, n: int) -> list[float]:
    return [await stock.stocker.turn() for _ in range(n)]


def test_before_the_first_round_all_who_can_be_reached_share_the_work_and_later_those_who_are_seated(
    run: Run, tmp_path: Path
) -> None:
    stock = stock_of(run, tmp_path, Counting(run[1]))
    made: list[tuple[PeerId, ...]] = []

    def seat(*members: PeerId) -> None:
        stock.stocker._ledger = lambda: books(0, members)
        stock.now_s += PLAN_S

    async def main() -> None:
        for members in ((), MEMBERS[:3], MEMBERS):
            seat(*members)
            await stock.turns(2)
            made.append(stock.stocker._planned_for[1])  # type: ignore[arg-type]

    asyncio.run(main())
    assert made == [MEMBERS[1:], MEMBERS[1:3], MEMBERS[1:]]


def test_what_an_earlier_process_left_damaged_is_said_and_fetched_again(run: Run, tmp_path: Path) -> None:
    store = new_store(tmp_path / "mine", run[0], Counting(run[1]))
    asyncio.run(store.ensure_pieces(range(N_TRAIN_PIECES)))
    with (store.files.folder / TRAIN_FILE).open("r+b") as file:
        file.write(b"\0" * 100)
    source = Counting(run[1])
    stock = stock_of(run, tmp_path, source)
    asyncio.run(stock.until_idle())
    assert stock.said == ["2 pieces of the training data on this disk are damaged: they are fetched again"]
    assert stock.held == list(range(N_TRAIN_PIECES))
    assert len(source.asked) == 2
    assert stock.stocker.status()["damaged"] == 2


def test_a_full_disk_is_said_once_and_leaves_the_node_alone(run: Run, tmp_path: Path) -> None:
    class Full:
        async def fetch(self, hashes: Sequence[bytes], max_bytes: int, sink: Sink, *, urgent: bool = True) -> None:
            raise DiskFull("training data", "here", 1, 0)

    stock = stock_of(run, tmp_path, Full())
    assert asyncio.run(_rests(stock, 3)) == [BACK_OFF_MAX_S] * 3
    assert len(stock.said) == 1
    assert "training data needs" in str(stock.stocker.status()["problem"])


def test_it_runs_until_cancelled_and_sleeps_in_between(run: Run, tmp_path: Path) -> None:
    stock = stock_of(run, tmp_path, Counting(run[1]))
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if seconds == IDLE_S:
            raise asyncio.CancelledError
        await asyncio.sleep(0)

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError):
            await stock.stocker.run(sleep)

    asyncio.run(main())
    assert len(stock.held) == N_TRAIN_PIECES
    assert len(slept) == 6  # the list, and 1, 2, 4 and 6 pieces


# -- together ------------------------------------------------------------------------------------------------------


def village(run: Run, folder: Path) -> tuple[FakeNetwork, list[Stock]]:
    """The observer and members that lay in from each other."""
    spec, packed = run
    network = FakeNetwork()
    network.join(OBSERVER, Serving(packed))
    stocks = []
    for member in MEMBERS:
        peers = network.join(member, FakeHolder(folder))
        others = [other for other in MEMBERS if other != member]
        store = new_store(folder / member[-6:], spec, nodes(peers, OBSERVER, *others))
        network.join(member, Serving(store))
        stocks.append(Stock(spec, store, member))
    return network, stocks


def test_members_hold_everything_twice_before_one_has_it_all_and_then_need_the_observer_no_more(
    run: Run, tmp_path: Path
) -> None:
    network, stocks = village(run, tmp_path)

    async def main() -> None:
        for stock in stocks:
            await stock.stocker.turn()  # the list
        most = 0
        while not all(sum(piece in stock.held for stock in stocks) >= 2 for piece in range(N_TRAIN_PIECES)):
            for stock in stocks:
                await stock.stocker.turn()
            most = max(len(stock.held) for stock in stocks)
        assert most < N_TRAIN_PIECES
        network.faults[OBSERVER] = Fault(drop=True)
        await asyncio.gather(*(stock.store.ensure([Range(0, 100)]) for stock in stocks))
        assert all(len(stock.held) == N_TRAIN_PIECES for stock in stocks)

    asyncio.run(main())


def test_without_the_observer_members_lay_in_from_each_other_what_one_of_them_was_leased(
    run: Run, tmp_path: Path
) -> None:
    network, stocks = village(run, tmp_path)

    async def main() -> None:
        await stocks[3].store.ensure([Range(6, 4)])
        leased = pieces_of_batches(run[0], [Range(6, 4)])
        network.faults[OBSERVER] = Fault(drop=True)
        for _ in range(20):
            for stock in stocks:
                await stock.stocker.turn()
        assert [stock.held for stock in stocks] == [list(leased)] * len(stocks)
        with pytest.raises(Unreachable):
            await stocks[0].store.ensure([Range(0, 1)])

    asyncio.run(main())
