"""Training data beyond the leases: politely, within bounds, and soon twice among the members."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from coordinator.rounds.ledger import Ledger
from node.blocks import PieceStore
from node.errors import DiskFull, Unreachable
from node.sources import Sink, Source
from node.spreading import places_of, stock_order
from node.stocking import (
    BACK_OFF_FIRST_S,
    BACK_OFF_MAX_S,
    IDLE_S,
    LOOK_S,
    NOT_HAD_S,
    PIECES_MOST,
    PLAN_S,
    Stocker,
)
from node.training.shards import TRAIN_FILE, pieces_of_batches
from protos.messages import PeerId, Range, Seat
from protos.runspec import RunSpec
from tests.coordinator.made import genesis
from tests.fakes.holder import FakeHolder
from tests.fakes.peers import FakeNetwork, Fault
from tests.node.chain import peer
from tests.node.pieces import OBSERVER, Counting, Run, Serving, new_store, nodes, packed_run

N_TRAIN_PIECES = 13
PIECE_BYTES = 80
PLENTY, FREE = 2**40, 2**45
MEMBERS = tuple(peer(n) for n in range(10, 15))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = tmp_path / "packed"
    folder.mkdir()
    return packed_run(folder)


def books(cursor: int, members: Sequence[PeerId]) -> Ledger:
    return replace(genesis()[2], cursor=cursor, seats=tuple(Seat(member, (), 1) for member in members))


@dataclass
class Stock:
    """One member that lays in; its clock stands still unless it is told to go on."""

    spec: RunSpec
    store: PieceStore
    me: PeerId = MEMBERS[0]
    members: tuple[PeerId, ...] = MEMBERS
    cache_bytes: int = PLENTY
    free_bytes: int = FREE
    quiet: bool = True
    cursor: int = 0
    now_s: float = 1000.0
    said: list[str] = field(default_factory=list)
    joined: bool = True

    def __post_init__(self) -> None:
        self.stocker = Stocker(
            self.me, self.store, spec=lambda: self.spec, ledger=self._books,
            reachable=lambda: [member for member in self.members if member != self.me], quiet=lambda: self.quiet,
            cache_bytes=self.cache_bytes, free_bytes=lambda: self.free_bytes, seconds=lambda: self.now_s,
            say=self.said.append,
        )  # fmt: skip

    def _books(self) -> Ledger | None:
        return books(self.cursor, self.members) if self.joined else None

    @property
    def held(self) -> list[int]:
        return [piece for piece in range(N_TRAIN_PIECES) if self.store.files.have(piece)]

    async def turns(self, n: int) -> float:
        """So many turns; how long to rest after the last."""
        rest_s = 0.0
        for _ in range(n):
            rest_s = await self.stocker.turn()
        return rest_s

    async def until_idle(self) -> None:
        for _ in range(100):
            if await self.stocker.turn() == IDLE_S:
                return
        raise AssertionError(self.said)

    def order(self) -> list[int]:
        places_P = places_of(self.store.files.hashes[:N_TRAIN_PIECES])
        order: list[int] = stock_order(self.spec, self.cursor, places_P, self.me, self.members).tolist()
        return order


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


def stock_of(run: Run, folder: Path, *sources: Source, **settings: object) -> Stock:
    return Stock(run[0], new_store(folder / "mine", run[0], *sources), **settings)  # type: ignore[arg-type]


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


def test_without_a_cache_only_leases_are_kept(run: Run, tmp_path: Path) -> None:
    stock = stock_of(run, tmp_path, Counting(run[1]), cache_bytes=0)

    async def main() -> None:
        for batch in (0, 8, 16):
            await stock.store.ensure([Range(batch, 2)])
            await stock.until_idle()
        assert stock.held == [*pieces_of_batches(run[0], [Range(8, 2)]), *pieces_of_batches(run[0], [Range(16, 2)])]

    asyncio.run(main())


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
