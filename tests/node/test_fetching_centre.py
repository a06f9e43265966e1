"""What the next round's rule starts from: the results of the held state's commit, fetched where they lack."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from node.centre import centre_of
from protos.messages import Outcome
from tests.coordinator.made import spec
from tests.node.fetcher import FRAMES, GRID, HASHES, HOLDER, NEXT, Bench, play

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
