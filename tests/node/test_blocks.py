"""Training data: fetched by hash, verified, remembered, served, laid in, and given up again."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from node.blocks import GAVE_WAY
from node.errors import DiskFull, LocalStateError, Unreachable
from node.piece_files import HAVE_FILE, LIST_FILE, PieceFiles
from node.sources import Sink
from node.training.shards import PIECES_FILE, TRAIN_FILE, VAL_FILE, pieces_of_batches
from protos.messages import Range
from tests.fakes.holder import FakeHolder
from tests.fakes.peers import FakeNetwork, Fault
from tests.node.pieces import ME, OBSERVER, OTHER, Counting, Run, Serving, new_store, nodes, packed_run, whole
from tests.node.runs import N_PIECES


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = tmp_path / "packed"
    folder.mkdir()
    return packed_run(folder)


def test_a_packed_folder_is_taken_as_it_is_and_served(run: Run) -> None:
    spec, store = run
    assert store.n_here == N_PIECES
    place = store.locate(bytes.fromhex(spec.data.root))
    assert place == (str(store.files.folder / LIST_FILE), 0, 32 * N_PIECES)
    asyncio.run(store.ensure([Range(0, 100)]))
    assert store.locate(bytes(32)) is None


def test_only_the_pieces_of_the_lease_are_fetched_and_remembered(run: Run, tmp_path: Path) -> None:
    spec, packed = run
    source = Counting(packed)
    store = new_store(tmp_path / "mine", spec, source)
    ranges = [Range(3, 2), Range(30, 4)]  # the second runs over the end of the first pass
    asyncio.run(store.ensure(ranges))
    wanted = pieces_of_batches(spec, ranges)
    assert [piece for piece in range(N_PIECES) if store.files.have(piece)] == list(wanted)
    assert len(source.asked) == len(wanted) + 1  # and the list
    for piece in wanted:
        place, theirs = store.files.shards.place(piece), (packed.files.folder / TRAIN_FILE).read_bytes()
        mine = (store.files.folder / place.file).read_bytes()
        assert len(mine) == len(theirs)
        assert mine[place.offset :][: place.n_bytes] == theirs[place.offset :][: place.n_bytes]
    asyncio.run(store.ensure(ranges))
    again = new_store(store.files.folder, spec, source)
    asyncio.run(again.ensure(ranges))
    assert len(source.asked) == len(wanted) + 1
    assert again.locate(store.files.hashes[wanted[0]]) is not None


def test_everything_fetched_is_everything_packed(run: Run, tmp_path: Path) -> None:
    spec, packed = run
    store = new_store(tmp_path / "mine", spec, Counting(packed))
    asyncio.run(store.ensure_pieces(range(N_PIECES)))
    assert whole(store.files.folder) == whole(packed.files.folder)


def test_other_nodes_are_asked_first_and_fill_in_for_each_other(run: Run, tmp_path: Path) -> None:
    spec, packed = run
    half = new_store(tmp_path / "half", spec, Counting(packed))
    asyncio.run(half.ensure_pieces(range(0, N_PIECES, 2)))
    network = FakeNetwork()
    observer, other, last = Serving(half), Serving(packed), Counting(packed)
    network.join(OBSERVER, observer)
    network.join(OTHER, other)
    peers = network.join(ME, FakeHolder(tmp_path))
    store = new_store(tmp_path / "mine", spec, nodes(peers, OTHER, OBSERVER), last)
    asyncio.run(store.ensure_pieces(range(N_PIECES)))
    assert whole(store.files.folder) == whole(packed.files.folder)
    assert len(other.asked) == N_PIECES // 2
    assert last.asked == []
    assert peers.traffic.exchange_received == 0


def test_who_breaks_off_or_lies_is_made_up_for_by_the_next_source(run: Run, tmp_path: Path) -> None:
    spec, packed = run
    network = FakeNetwork()
    network.join(OBSERVER, Serving(packed))
    network.faults[OBSERVER] = Fault(break_at_byte=1200)
    peers = network.join(ME, FakeHolder(tmp_path))

    class Liar:
        async def fetch(self, hashes: Sequence[bytes], max_bytes: int, sink: Sink, *, urgent: bool = True) -> None:
            for hash_ in hashes:
                await sink(hash_, b"x" * max_bytes)

    store = new_store(tmp_path / "mine", spec, Liar(), nodes(peers, OBSERVER), Counting(packed))
    asyncio.run(store.ensure_pieces(range(N_PIECES)))
    assert whole(store.files.folder) == whole(packed.files.folder)


def test_nobody_having_it_says_what_each_said_and_keeps_what_came(run: Run, tmp_path: Path) -> None:
    spec, packed = run
    half = new_store(tmp_path / "half", spec, Counting(packed))
    asyncio.run(half.ensure_pieces(range(5)))
    network = FakeNetwork()
    network.join(OBSERVER, Serving(half))
    peers = network.join(ME, FakeHolder(tmp_path))
    store = new_store(tmp_path / "mine", spec, nodes(peers, OBSERVER, OTHER))
    with pytest.raises(Unreachable, match=f"10 pieces of the training data.*{OTHER}: connection refused"):
        asyncio.run(store.ensure_pieces(range(N_PIECES)))
    assert new_store(store.files.folder, spec).n_here == 5
    alone = new_store(tmp_path / "alone", spec)
    with pytest.raises(Unreachable, match="list of the training data's pieces"):
        asyncio.run(alone.ensure([Range(0, 1)]))


def test_a_damaged_packed_folder_gives_only_what_is_whole(run: Run) -> None:
    spec, store = run
    (store.files.folder / HAVE_FILE).unlink()
    with (store.files.folder / TRAIN_FILE).open("r+b") as file:
        file.seek(85)
        file.write(b"\0")
    again = new_store(store.files.folder, spec)
    assert [piece for piece in range(N_PIECES) if not again.files.have(piece)] == [1]
    (store.files.folder / HAVE_FILE).write_bytes(b"\x07" * N_PIECES)  # damaged: looked at again
    assert new_store(store.files.folder, spec).n_here == N_PIECES - 1


def test_data_of_another_run_are_refused(run: Run, tmp_path: Path) -> None:
    spec, store = run
    other = spec.model_copy(update={"data": spec.data.model_copy(update={"root": "1" * 64})})
    with pytest.raises(LocalStateError, match="move the folder away"):
        new_store(store.files.folder, other)
    (store.files.folder / LIST_FILE).unlink()
    (store.files.folder / PIECES_FILE).write_text("{}")
    with pytest.raises(LocalStateError, match="no list of hashes"):
        new_store(store.files.folder, spec)


# -- what can wait -------------------------------------------------------------------------------------------------


class Held:
    """A source that gives nothing until it is let go."""

    def __init__(self, inner: Counting) -> None:
        self.inner = inner
        self.begun, self.go = asyncio.Event(), asyncio.Event()
        self.urgent: list[bool] = []

    async def fetch(self, hashes: Sequence[bytes], max_bytes: int, sink: Sink, *, urgent: bool = True) -> None:
        self.urgent.append(urgent)
        if not urgent:
            self.begun.set()
            await self.go.wait()
        await self.inner.fetch(hashes, max_bytes, sink)


def test_what_is_laid_in_gives_way_to_a_lease_at_once(run: Run, tmp_path: Path) -> None:
    spec, packed = run

    async def main() -> None:
        source = Held(Counting(packed))
        store = new_store(tmp_path / "mine", spec, source)
        await store.ensure([Range(0, 1)])
        laying_in = asyncio.create_task(store.lay_in([10, 11]))
        await source.begun.wait()
        assert store.busy
        await store.ensure([Range(2, 2)])
        assert await laying_in == GAVE_WAY
        assert not store.busy
        assert not store.files.have(10)
        assert store.leased == {*pieces_of_batches(spec, [Range(0, 1)]), *pieces_of_batches(spec, [Range(2, 2)])}

        source.begun.clear()
        laying_in = asyncio.create_task(store.lay_in([10, 11]))
        await source.begun.wait()
        await store.ensure([Range(2, 2)])  # all here: nothing has to give way
        source.go.set()
        assert await laying_in == ""
        assert store.files.have(10)

    asyncio.run(main())


def test_what_cannot_be_laid_in_says_why_and_a_cancelled_task_leaves_nothing_behind(run: Run, tmp_path: Path) -> None:
    spec, packed = run

    async def main() -> None:
        alone = new_store(tmp_path / "alone", spec)
        assert "nobody is known" in await alone.lay_in([1])
        source = Held(Counting(packed))
        store = new_store(tmp_path / "mine", spec, source)
        await store.ensure([Range(0, 1)])
        laying_in = asyncio.create_task(store.lay_in([10]))
        await source.begun.wait()
        laying_in.cancel()
        with pytest.raises(asyncio.CancelledError):
            await laying_in
        assert not store.busy
        half = new_store(tmp_path / "half", spec, Counting(packed))
        await half.ensure_pieces([3])
        store = new_store(tmp_path / "other", spec, Counting(half))
        assert await store.lay_in([3, 4]) != ""
        assert new_store(store.files.folder, spec).files.have(3)

    asyncio.run(main())


def test_what_waits_to_be_laid_in_lets_a_lease_by_that_came_later(run: Run, tmp_path: Path) -> None:
    spec, packed = run

    class Stuck:
        """Gives nothing the first time, and nothing to what can wait."""

        def __init__(self) -> None:
            self.begun = asyncio.Event()

        async def fetch(self, hashes: Sequence[bytes], max_bytes: int, sink: Sink, *, urgent: bool = True) -> None:
            if not self.begun.is_set() or not urgent:
                self.begun.set()
                await asyncio.get_running_loop().create_future()
            await Counting(packed).fetch(hashes, max_bytes, sink)

    async def main() -> None:
        source = Stuck()
        store = new_store(tmp_path / "mine", spec, source)
        earlier = asyncio.create_task(store.ensure([Range(0, 1)]))
        await source.begun.wait()
        laying_in = asyncio.create_task(store.lay_in([10]))
        await asyncio.sleep(0)
        later = asyncio.create_task(store.ensure_pieces([3]))
        await asyncio.sleep(0)
        earlier.cancel()
        async with asyncio.timeout(60):
            await later
            assert await laying_in == GAVE_WAY
        assert store.files.have(3)

    asyncio.run(main())


def test_who_is_cancelled_ends_whatever_the_disk_says(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, packed = run

    async def main() -> None:
        source = Held(Counting(packed))
        store = new_store(tmp_path / "mine", spec, source)
        await store.ensure([Range(0, 1)])
        laying_in = asyncio.create_task(store.lay_in([10]))
        await source.begun.wait()

        def full(pieces: Sequence[int]) -> None:
            raise DiskFull("training data", "here", 1, 0)

        monkeypatch.setattr(store.files, "note", full)
        laying_in.cancel()
        with pytest.raises(asyncio.CancelledError):
            await laying_in

    asyncio.run(main())


def test_a_lease_that_comes_back_is_the_one_in_force_again(run: Run) -> None:
    spec, store = run
    first, second, third = [Range(0, 1)], [Range(8, 1)], [Range(16, 1)]
    for lease in (first, second, first, third):
        asyncio.run(store.ensure(lease))
    assert store.leased == {*pieces_of_batches(spec, first), *pieces_of_batches(spec, third)}


def test_a_torn_piece_of_an_earlier_process_is_found_and_fetched_again(run: Run, tmp_path: Path) -> None:
    spec, packed = run
    first = new_store(tmp_path / "mine", spec, Counting(packed))
    asyncio.run(first.ensure_pieces(range(N_PIECES)))
    with (first.files.folder / TRAIN_FILE).open("r+b") as file:
        file.seek(85)
        file.write(b"\0\0")
    source = Counting(packed)
    again = new_store(first.files.folder, spec, source)
    assert again.n_here == N_PIECES
    asyncio.run(again.ensure_pieces([0, 1, 2]))
    assert (again.n_damaged, len(source.asked)) == (1, 1)
    assert whole(again.files.folder) == whole(packed.files.folder)
    (again.files.folder / VAL_FILE).write_bytes(b"")
    asyncio.run(again.look_at(again.files.unseen(100)))
    assert again.n_damaged == 3  # both pieces of the validation shard
    assert new_store(again.files.folder, spec).n_here == N_PIECES - 2


def test_a_slow_look_takes_nothing_away_that_was_fetched_again_meanwhile(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, packed = run
    store = new_store(tmp_path / "mine", spec, Counting(packed))
    asyncio.run(store.ensure_pieces([0, 1]))
    again = new_store(store.files.folder, spec)

    def slow(piece: int) -> bool:
        if piece == 1:
            again.files.note([1])  # as it comes from another node
        return False

    monkeypatch.setattr(again.files, "_is_whole", slow)
    assert again.files.look_at([0, 1]) == [0]
    assert [piece for piece in range(N_PIECES) if again.files.have(piece)] == [1]


def test_dropped_pieces_are_gone_for_good_but_none_of_a_lease_in_force(run: Run, tmp_path: Path) -> None:
    spec, packed = run
    store = new_store(tmp_path / "mine", spec, Counting(packed))
    asyncio.run(store.ensure_pieces(range(N_PIECES)))
    asyncio.run(store.ensure([Range(0, 2)]))
    leased = pieces_of_batches(spec, [Range(0, 2)])
    assert asyncio.run(store.drop([*leased, 7, 8])) == 2
    assert store.locate(store.files.hashes[7]) is None
    assert [piece for piece in range(N_PIECES) if not store.files.have(piece)] == [7, 8]
    train = whole(store.files.folder)[0]
    assert train[560:720] == bytes(160)
    assert (train[:560], train[720:]) == (whole(packed.files.folder)[0][:560], whole(packed.files.folder)[0][720:])
    assert new_store(store.files.folder, spec).n_here == N_PIECES - 2
    asyncio.run(store.ensure_pieces([7, 8]))
    assert whole(store.files.folder) == whole(packed.files.folder)


def test_on_a_disk_without_any_room_pieces_are_noted_and_dropped_all_the_same(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, packed = run
    store = new_store(tmp_path / "mine", spec, Counting(packed))
    asyncio.run(store.ensure_pieces(range(4)))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr("node.piece_files.replace_file", full)
    monkeypatch.setattr("tempfile.NamedTemporaryFile", full)
    asyncio.run(store.ensure_pieces([5]))
    assert asyncio.run(store.drop([0, 1])) == 2
    assert whole(store.files.folder)[0][:160] == bytes(160)
    monkeypatch.undo()
    again = new_store(store.files.folder, spec)
    assert [piece for piece in range(N_PIECES) if again.files.have(piece)] == [2, 3, 5]


def test_what_was_packed_here_is_never_given_up(run: Run) -> None:
    spec, store = run
    before = whole(store.files.folder)
    assert asyncio.run(store.drop(range(N_PIECES))) == 0
    assert (store.n_here, whole(store.files.folder)) == (N_PIECES, before)
    (store.files.folder / HAVE_FILE).unlink()
    assert new_store(store.files.folder, spec).n_here == N_PIECES


def test_a_shard_that_is_gone_is_made_anew_without_a_look_at_what_it_does_not_hold(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, packed = run
    store = new_store(tmp_path / "mine", spec, Counting(packed))
    asyncio.run(store.ensure_pieces(range(N_PIECES)))
    (store.files.folder / TRAIN_FILE).unlink()
    looked_at: list[int] = []
    is_whole = PieceFiles._is_whole

    def look(files: PieceFiles, piece: int) -> bool:
        looked_at.append(piece)
        return is_whole(files, piece)

    monkeypatch.setattr(PieceFiles, "_is_whole", look)
    again = new_store(store.files.folder, spec, Counting(packed))
    val_pieces = list(again.files.shards.val_pieces)
    assert looked_at == [piece for piece in range(N_PIECES) if again.files.have(piece)] == val_pieces
    asyncio.run(again.ensure_pieces(range(N_PIECES)))
    assert whole(again.files.folder) == whole(packed.files.folder)


def test_a_note_of_what_is_here_that_is_gone_is_written_whole_again(run: Run, tmp_path: Path) -> None:
    spec, packed = run
    store = new_store(tmp_path / "mine", spec, Counting(packed))
    asyncio.run(store.ensure_pieces([1]))
    (store.files.folder / HAVE_FILE).unlink()
    asyncio.run(store.ensure_pieces([2]))
    assert (store.files.folder / HAVE_FILE).read_bytes() == bytes([0, 1, 1] + [0] * (N_PIECES - 3))


def test_where_the_disk_takes_no_room_back_nothing_is_dropped(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, packed = run
    store = new_store(tmp_path / "mine", spec, Counting(packed))
    asyncio.run(store.ensure_pieces(range(N_PIECES)))
    monkeypatch.setattr("node.piece_files.can_punch", lambda folder: False)
    assert asyncio.run(store.drop([7, 8])) == 0
    assert store.n_here == N_PIECES
