"""What a node fetches: results from whoever has them, a state that the leader has named, data until they are there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from aggregation import codec
from aggregation.errors import CodecError
from node import fetching
from node.session.effects import FetchState, Verify
from protos.messages import Range, StateOffer
from tests.coordinator.made import genesis, spec
from tests.fakes.peers import Fault
from tests.node.fetcher import BODY_HASH, FRAMES, GRID, HASHES, HOLDER, ME, NEXT, REDUCER, SPEC, Bench, frame, play


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
