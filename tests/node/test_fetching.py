"""What a node fetches: results from whoever has them, a state that the leader has named, data until they are there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import pytest

from aggregation import codec
from aggregation.chunks import ChunkGrid
from aggregation.digest import chunk_root, results_root, state_chunk_hash, state_digest
from aggregation.errors import CodecError
from coordinator.rounds import policy
from node import fetching
from node.blocks import PieceStore
from node.centre import centre_of
from node.errors import Unreachable
from node.fetching import Fetcher
from node.landmarks import Landmarks
from node.results import ResultsStore
from node.session.effects import FetchState, Verify
from node.session.events import CommitHeard
from node.state import StateStore
from node.training.shared import frame_sizes
from node.whereabouts import Whereabouts
from protos import wire
from protos.hashes import body_hash, commit_hash
from protos.messages import ZERO_HASH, Addresses, Body, Commit, Outcome, PeerId, Range, StateOffer
from protos.runspec import RunSpec
from protos.signing import Identity
from tests.coordinator.made import genesis, spec
from tests.fakes.holder import FakeHolder
from tests.fakes.peers import FakeNetwork, Fault
from tests.fakes.records import FakeTable
from tests.node.chain import body_after, commit_of, commit_zero

ME, REDUCER, NEXT, HOLDER = (Identity.from_private_bytes(bytes([n]) * 32).peer for n in (2, 3, 4, 5))
SPEC: RunSpec = spec()
GRID: ChunkGrid = policy.grid(SPEC)
BODY_HASH = b"b" * 32
T = TypeVar("T")


def frame(chunk: int, seed: int = 0) -> bytes:
    rng = np.random.default_rng([seed, chunk])
    values_P = rng.standard_normal(GRID.size(chunk)).astype(np.float32)
    return codec.encode(SPEC.codec.name, values_P, block=SPEC.codec.block)


FRAMES = [frame(chunk) for chunk in range(GRID.n_chunks)]
HASHES = tuple(chunk_root(each, SPEC.codec.leaf_values) for each in FRAMES)


def opened(commit: Commit) -> CommitHeard:
    body = wire.decode(Body, commit.body)
    return CommitHeard(commit, body, commit_hash(commit.body, commit.digest), ())


class FakePieces:
    """Training data that is there after so many tries."""

    def __init__(self, n_failures: int) -> None:
        self.n_failures = n_failures

    async def ensure(self, ranges: object) -> None:
        if self.n_failures:
            self.n_failures -= 1
            raise Unreachable("the pieces", [])


@dataclass
class Bench:
    """A fetcher on a network in memory; its clock goes on by a second whenever it is looked at."""

    folder: Path
    network: FakeNetwork = field(default_factory=FakeNetwork)
    said: list[str] = field(default_factory=list)
    now_s: float = 0.0
    n_failures: int = 0
    spec: RunSpec = SPEC

    def __post_init__(self) -> None:
        sizes = frame_sizes(GRID, codec.result_codec(self.spec.codec.name), SPEC.codec.block)
        self.results = ResultsStore(self.folder / "results", sizes, SPEC.codec.leaf_values)
        self.store = StateStore(self.folder / "state", GRID)
        run = genesis()[1].run
        self.whereabouts = Whereabouts(run, FakeTable(run).join(Identity.generate()))
        self.peers = self.network.join(ME, FakeHolder(self.folder))

        async def away() -> Addresses:
            raise Unreachable("the coordinator", [])

        nowhere = Addresses(1, (), (), PeerId(""), ())
        self.fetcher = Fetcher(
            ME, self.spec, peers=self.peers, whereabouts=self.whereabouts,
            landmarks=Landmarks(ME, PeerId("c"), nowhere, away, self.whereabouts), store=self.store,
            results=self.results, pieces=cast(PieceStore, FakePieces(self.n_failures)), pool=None,  # type: ignore[arg-type]
            say=self.said.append, seconds=self._seconds, open_commit=opened,
        )  # fmt: skip

    def _seconds(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def holder(self, peer: PeerId, *chunks: int, frames: list[bytes] = FRAMES) -> FakeHolder:
        """Another node that has the results of these chunks."""
        made = FakeHolder(self.folder / peer[-6:])
        made.folder.mkdir()
        for chunk in chunks:
            made.put("result", HASHES[chunk], frames[chunk])
        self.network.join(peer, made)
        self.whereabouts.know(peer, ("there:1",))
        return made

    def verify(self, *lines: tuple[PeerId, ...], holders: tuple[PeerId, ...] = ()) -> str:
        """What comes of fetching all results, when chunks were reduced in these lines."""
        body = genesis()[1]
        return play(self.fetcher.results(Verify(body, BODY_HASH, HASHES, lines, holders)))

    def hold(self, *, outcome: Outcome = Outcome.COMMITTED, listed: tuple[bytes, ...] = HASHES) -> bytes:
        """Have it hold a state after a commit with these results; the hash of the commit's body."""
        theta_D = np.zeros(GRID.n_values, np.float32)
        theta_D.tofile(self.folder / "theta.bin")
        hashes = tuple(state_chunk_hash(theta_D[slice(*GRID.bounds(chunk))]) for chunk in range(GRID.n_chunks))
        digest = state_digest(hashes, hashes)
        _, first = commit_zero(digest)
        root = results_root(HASHES) if outcome is Outcome.COMMITTED else ZERO_HASH
        body, folded = body_after(first, outcome, results_root=root, clip_factor=0.5)
        commit, ledger = commit_of(body, folded, digest)
        commit = replace(commit, result_hashes=listed if outcome is Outcome.COMMITTED else ())
        self.store.install_initial(self.folder / "theta.bin", None, commit, ledger)
        return body_hash(commit.body)

    def whole(self, key: bytes = BODY_HASH) -> bool:
        area = self.results.area(key)
        return [bytes(area.frame(chunk)) for chunk in range(GRID.n_chunks)] == FRAMES


def play(work: Awaitable[T]) -> T:
    async def main() -> T:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AGAIN_S", "DATA_AGAIN_FIRST_S"):
        monkeypatch.setattr(fetching, name, 0.0)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# -- results -------------------------------------------------------------------------------------------------------


def test_each_chunk_comes_from_its_reducer(bench: Bench) -> None:
    assert GRID.n_chunks == 3
    bench.holder(REDUCER, 0, 1)
    bench.holder(NEXT, 2)
    assert bench.verify((REDUCER, NEXT), (REDUCER, NEXT), (NEXT, REDUCER)) == ""
    assert bench.whole()
    assert bench.peers.traffic.exchange_received > sum(map(len, FRAMES))


def test_what_this_node_combined_itself_is_not_fetched(bench: Bench) -> None:
    own = bench.results.area(b"p" * 32)
    for chunk in range(GRID.n_chunks):
        own.put(chunk, FRAMES[chunk], HASHES[chunk])
    assert bench.verify((ME,), (ME,), (ME,)) == ""
    assert bench.whole()
    assert bench.peers.traffic.received == 0


def test_what_it_combined_in_the_attempt_becomes_the_bodys_where_it_lies(bench: Bench) -> None:
    plan = b"p" * 32
    own = bench.results.area(plan)
    own.put(1, FRAMES[1], HASHES[1])
    bench.holder(REDUCER, 0, 2)
    lines = ((REDUCER,), (ME,), (REDUCER,))
    assert play(bench.fetcher.results(Verify(genesis()[1], BODY_HASH, HASHES, lines, (), plan))) == ""
    assert bench.whole()
    assert bench.results.area(BODY_HASH) is own
    assert {path.name for path in (bench.folder / "results").iterdir()} == {BODY_HASH.hex()}


def test_an_empty_round_needs_nothing(bench: Bench) -> None:
    assert play(bench.fetcher.results(Verify(genesis()[1], BODY_HASH, (), (), ()))) == ""


def test_a_dead_reducers_results_come_from_whoever_has_them(bench: Bench) -> None:
    bench.holder(REDUCER, 0, 1, 2)
    bench.network.faults[REDUCER] = Fault(drop=True)
    bench.holder(NEXT, 0)
    bench.holder(HOLDER, 1, 2)
    assert bench.verify((REDUCER, NEXT), (REDUCER,), (REDUCER,), holders=(HOLDER,)) == ""
    assert bench.whole()


def test_a_stranger_to_the_deal_is_asked_when_no_line_is_known(bench: Bench) -> None:
    bench.holder(HOLDER, 0, 1, 2)
    assert bench.verify(holders=(HOLDER,)) == ""
    assert bench.whole()


@pytest.mark.parametrize(
    "lie",
    [
        lambda chunk: frame(chunk, seed=1),  # another result, canonical
        lambda chunk: FRAMES[chunk][:-1] + bytes([FRAMES[chunk][-1] ^ 1]),
        lambda chunk: FRAMES[chunk][:-1],
        lambda chunk: b"",
    ],
    ids=["another result", "a flipped bit", "cut off", "nothing"],
)
def test_a_liars_results_are_not_kept(bench: Bench, lie: Callable[[int], bytes]) -> None:
    bench.holder(REDUCER, 0, 1, 2, frames=[lie(chunk) for chunk in range(GRID.n_chunks)])
    bench.holder(NEXT, 0, 1, 2)
    line = (REDUCER, NEXT)
    assert bench.verify(line, line, line) == ""
    assert bench.whole()


def test_results_of_coarse_rows_come_as_int8(tmp_path: Path) -> None:
    bench = Bench(tmp_path, spec=spec("codec.name=int4"))
    block = SPEC.codec.block
    coarse = [codec.encode("int4", codec.decode(each, GRID.chunk_values), block=block) for each in FRAMES]
    bench.holder(REDUCER, 0, 1, 2, frames=coarse)
    bench.holder(NEXT, 0, 1, 2)
    line = (REDUCER, NEXT)
    assert bench.verify(line, line, line) == ""
    assert bench.whole()


def test_what_nobody_has_any_more_is_given_up_after_the_grace_for_who_has_gone(bench: Bench) -> None:
    bench.holder(REDUCER, 0, 1)
    bench.holder(HOLDER)
    fault = bench.verify((REDUCER,), (REDUCER,), (REDUCER,), holders=(HOLDER,))
    assert fault == f"the result of chunk 2 by {REDUCER} is not to be had: {HOLDER[-6:]}: 1 results are not there"
    assert bench.now_s < SPEC.deadlines.vote_s
    assert SPEC.deadlines.gone_grace_s < bench.now_s < 5 * SPEC.deadlines.gone_grace_s


def test_who_is_nowhere_is_no_error_but_a_reason(bench: Bench) -> None:
    assert "no address record" in bench.verify((REDUCER,), (REDUCER,), (REDUCER,))
    assert "nobody who could hold" in bench.verify((ME,), (ME,), (ME,))


@pytest.mark.parametrize("mine", [False, True], ids=["fetched", "combined here"])
def test_the_norm_that_a_reducer_signed_is_compared_with_its_results_own(bench: Bench, mine: bool) -> None:
    """One that says less than it made gets past the limit of a result's length, and the clip factor is reckoned so."""
    bench.holder(REDUCER, 0, 1, 2)
    plan = b"p" * 32
    if mine:
        bench.results.area(plan).put(1, FRAMES[1], HASHES[1])
    norms = tuple(codec.squared_norm(each) for each in FRAMES)
    lines = ((REDUCER, NEXT),) * 3
    honest = Verify(genesis()[1], BODY_HASH, HASHES, lines, (), plan, norms)
    assert play(bench.fetcher.results(honest)) == ""
    assert [bytes(bench.fetcher.frames(honest)(chunk)) for chunk in range(3)] == FRAMES
    lie = replace(honest, norms=(norms[0], norms[1] / 100, norms[2]))
    assert play(bench.fetcher.results(lie)) == ""
    frames = bench.fetcher.frames(lie)
    assert bytes(frames(0)) == FRAMES[0]
    with pytest.raises(CodecError, match=f"chunk 1 by {REDUCER} has another norm"):
        frames(1)
    voted = replace(lie, norms=())  # by a quorum: what it says is so
    assert [bytes(bench.fetcher.frames(voted)(chunk)) for chunk in range(3)] == FRAMES
    with pytest.raises(KeyError):
        bench.fetcher.frames(replace(honest, result_hashes=()))(0)


# -- the results of the held state's commit ------------------------------------------------------------------------

CENTRED = spec("rule.name=centered_clip")


def test_what_the_next_rounds_rule_starts_from_comes_from_donors_in_turn(tmp_path: Path) -> None:
    bench = Bench(tmp_path, spec=CENTRED)
    key = bench.hold()
    bench.holder(HOLDER, 0, 1)
    bench.holder(NEXT, 2, 1)
    play(bench.fetcher.centre())
    assert bench.whole(key)
    assert bench.said == []
    assert bench.peers.traffic.exchange_received == 0 < bench.peers.traffic.received


def test_what_is_here_is_not_asked_for_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, spec=CENTRED)
    area = bench.results.area(bench.hold())
    for chunk in range(GRID.n_chunks):
        area.put(chunk, FRAMES[chunk], HASHES[chunk])
    bench.holder(HOLDER)
    play(bench.fetcher.centre())
    assert bench.peers.traffic.received == 0
    assert bench.said == []


def test_what_a_power_cut_left_half_written_is_fetched_anew(tmp_path: Path) -> None:
    """Results are not put on disk one by one: the index may have got there, and a frame not."""
    bench = Bench(tmp_path, spec=CENTRED)
    key = bench.hold()
    area = bench.results.area(key)
    for chunk in range(GRID.n_chunks):
        area.put(chunk, FRAMES[chunk], HASHES[chunk])
    bench.results.close()
    with (area.folder / "frames.bin").open("r+b") as file:
        file.seek(100)
        file.write(bytes(64))
    again = Bench(tmp_path, spec=CENTRED)
    again.store.open()
    again.holder(HOLDER, 0, 1, 2)
    play(again.fetcher.centre())
    assert again.whole(key)
    assert again.peers.traffic.received > 0


@pytest.mark.parametrize("why", ["a rule without a centre", "an empty round", "no state"])
def test_nobody_is_asked_for_what_is_not_needed(tmp_path: Path, why: str) -> None:
    bench = Bench(tmp_path, spec=spec("rule.name=median") if why == "a rule without a centre" else CENTRED)
    if why != "no state":
        bench.hold(outcome=Outcome.EMPTY if why == "an empty round" else Outcome.COMMITTED)
    bench.holder(HOLDER, 0, 1, 2)
    play(bench.fetcher.centre())
    assert bench.peers.traffic.received == 0
    assert bench.said == []


def test_without_them_it_goes_on_and_says_so(tmp_path: Path) -> None:
    bench = Bench(tmp_path, spec=CENTRED)
    bench.hold()
    bench.holder(HOLDER, 0)
    play(bench.fetcher.centre())
    (said,) = bench.said
    assert "going on without them" in said
    assert "not there" in said


def test_a_donor_that_lets_them_trickle_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, spec=spec("rule.name=centered_clip", "deadlines.vote_s=0.01"))
    bench.hold()

    async def trickles(*_: object) -> str:
        await asyncio.Event().wait()
        return ""

    monkeypatch.setattr(bench.fetcher, "_have", trickles)
    play(bench.fetcher.centre())
    assert bench.said == [
        "the results of round 1 could not be fetched: that took more than 0.01 s; going on without them"
    ]


def test_hashes_that_the_commit_does_not_vouch_for_are_not_asked_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path, spec=CENTRED)
    bench.hold(listed=HASHES[::-1])
    bench.holder(HOLDER, 0, 1, 2)
    play(bench.fetcher.centre())
    assert bench.peers.traffic.received == 0
    assert "came without their hashes" in bench.said[0]


@pytest.mark.parametrize("listed", [HASHES, HASHES[::-1], ()], ids=["known", "not its own", "not known"])
def test_the_centre_is_what_the_heads_body_names(tmp_path: Path, listed: tuple[bytes, ...]) -> None:
    bench = Bench(tmp_path)
    area = bench.results.area(bench.hold(listed=listed))
    for chunk in (0, 2):
        area.put(chunk, FRAMES[chunk], HASHES[chunk])
    centre = centre_of(bench.store.current, bench.results)
    assert centre is not None
    assert centre.scale == 0.5
    found = [centre.previous(chunk) for chunk in range(GRID.n_chunks + 1)]
    if listed == HASHES:
        assert [None if frame is None else bytes(frame) for frame in found] == [FRAMES[0], None, FRAMES[2], None]
    else:
        assert found == [None] * (GRID.n_chunks + 1)


def test_after_an_empty_round_there_is_no_centre(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert centre_of(None, bench.results) is None
    bench.hold(outcome=Outcome.EMPTY)
    assert centre_of(bench.store.current, bench.results) is None


# -- the state -----------------------------------------------------------------------------------------------------


def test_a_state_whose_commit_the_leader_has_not_named_is_not_taken(bench: Bench) -> None:
    commit, body, ledger = genesis()
    other, _, other_ledger = genesis(spec("work.h=3"))
    hashes = (bytes(32),) * GRID.n_chunks
    bench.holder(HOLDER).offer = StateOffer(other, other_ledger.to_bytes(), hashes, hashes)
    reason = play(bench.fetcher.state(FetchState(commit, body)))
    assert isinstance(reason, str)
    assert "none that the leader has named lately" in reason
    bench.network.holders[HOLDER].offer = StateOffer(commit, ledger.to_bytes(), hashes, hashes)  # type: ignore[attr-defined]
    reason = play(bench.fetcher.state(FetchState(commit, body)))
    assert isinstance(reason, str)
    assert "don't have the commit's digest" in reason


def test_without_a_donor_it_says_so(bench: Bench) -> None:
    commit, body, _ = genesis()
    assert "nobody was asked" in str(play(bench.fetcher.state(FetchState(commit, body))))


# -- data ----------------------------------------------------------------------------------------------------------


def test_data_are_tried_for_until_they_are_there(tmp_path: Path) -> None:
    bench = Bench(tmp_path, n_failures=3)
    play(bench.fetcher.data([Range(0, 1)]))
    assert len(bench.said) == 3
    assert all(text.startswith("waiting for training data: ") for text in bench.said)
