"""Following the chain: commits from whoever has them all the way, and the results of earlier rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from node import fetching
from node.errors import DiskFull
from node.results import ResultsArea
from node.session.effects import FetchState, Verify
from node.session.events import CommitsFetched, CommitsFetchFailed
from protos import wire
from protos.messages import Body, PeerId
from tests.coordinator.made import genesis
from tests.fakes.holder import FakeHolder
from tests.fakes.peers import Fault
from tests.node.chain import rows
from tests.node.fetcher import BODY_HASH, GRID, HASHES, HOLDER, NEXT, REDUCER, SPEC, Bench, ask, frame, play


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_commits_since_come_from_whoever_has_them_all_the_way(bench: Bench) -> None:
    commits, ledgers = rows(6)
    bench.holder(REDUCER).commits = commits[3:]  # has none that follow from the held one
    bench.holder(NEXT).commits = []
    bench.holder(HOLDER).commits = commits[2:]
    got = play(bench.fetcher.commits(ask(ledgers, commits, 1)))
    assert isinstance(got, CommitsFetched)
    assert [heard.commit for heard in got.commits] == commits[2:]


def test_a_donor_that_lags_gives_what_leads_to_a_head_that_is_known(bench: Bench) -> None:
    commits, ledgers = rows(6)
    body = wire.decode(Body, commits[4].body)
    bench.fetcher.told(commits[4], body)
    bench.holder(HOLDER).commits = commits[2:5]
    got = play(bench.fetcher.commits(ask(ledgers, commits, 1)))
    assert isinstance(got, CommitsFetched)
    assert [heard.commit for heard in got.commits] == commits[2:5]


@pytest.mark.parametrize("what", ["another branch", "out of order", "nothing"])
def test_commits_that_lead_elsewhere_are_no_use(bench: Bench, what: str) -> None:
    commits, ledgers = rows(6)
    given = {
        "another branch": rows(3, ledgers[1], seed=1)[0], "out of order": [commits[3], commits[2]], "nothing": [],
    }[what]  # fmt: skip
    bench.holder(HOLDER).commits = given
    got = play(bench.fetcher.commits(ask(ledgers, commits, 1)))
    assert isinstance(got, CommitsFetchFailed)
    assert got.gone


def test_who_can_not_be_reached_may_have_them_still(bench: Bench) -> None:
    commits, ledgers = rows(6)
    bench.holder(REDUCER).commits = []
    bench.holder(HOLDER).commits = commits[2:]
    bench.network.faults[HOLDER] = Fault(drop=True)
    got = play(bench.fetcher.commits(ask(ledgers, commits, 1)))
    assert isinstance(got, CommitsFetchFailed)
    assert not got.gone
    assert "connection refused" in got.reason


def test_without_anybody_to_ask_they_may_be_there_later(bench: Bench) -> None:
    commits, ledgers = rows(3)
    got = play(bench.fetcher.commits(ask(ledgers, commits, 1)))
    assert isinstance(got, CommitsFetchFailed)
    assert not got.gone


def test_a_snapshot_is_known_by_the_commits_that_lead_from_it_to_the_newest(bench: Bench) -> None:
    commits, ledgers = rows(6)
    holder = bench.holder(HOLDER)
    bench.fetcher.told(commits[-1], wire.decode(Body, commits[-1].body))
    holder.commits = commits[2:]
    verify = bench.fetcher._verify_commit
    assert play(verify(HOLDER, (), commits[1])) == wire.decode(Body, commits[1].body)
    other = rows(1, ledgers[0], seed=1)[0][0]
    with pytest.raises(ValueError, match="leads to none"):
        play(verify(HOLDER, (), other))


def test_after_a_change_of_branch_what_led_to_the_old_one_is_not_taken(bench: Bench) -> None:
    commits, ledgers = rows(4)
    for commit in commits:
        bench.fetcher.told(commit, wire.decode(Body, commit.body))
    others, _ = rows(2, ledgers[0], seed=1)
    bench.holder(HOLDER).commits = []
    newest = wire.decode(Body, others[-1].body)
    play(bench.fetcher.state(FetchState(others[-1], newest, anew=True)))
    with pytest.raises(ValueError, match="leads to none"):
        play(bench.fetcher._verify_commit(HOLDER, (), commits[-1]))
    assert play(bench.fetcher._verify_commit(HOLDER, (), others[-1])) == newest


# -- results of earlier rounds -------------------------------------------------------------------------------------


def replay(bench: Bench, *holders: PeerId) -> str:
    return play(bench.fetcher.results(Verify(genesis()[1], BODY_HASH, HASHES, (), holders, replay=True)))


def test_who_is_here_now_is_asked_for_the_results_of_an_earlier_round(bench: Bench) -> None:
    bench.holder(NEXT, 0, 1)
    bench.holder(HOLDER, 2)
    assert replay(bench, REDUCER) == ""  # who made them is gone
    assert bench.whole()


def test_what_nobody_has_is_given_up_at_once_and_asked_for_once(bench: Bench) -> None:
    asked: list[tuple[PeerId, bytes]] = []
    for peer, chunks in ((NEXT, (0, 1)), (HOLDER, (0,))):
        holder = bench.holder(peer, *chunks)

        def locate(caller: PeerId, kind: str, hash_: bytes, holder: FakeHolder = holder, peer: PeerId = peer) -> object:
            asked.append((peer, hash_))
            return holder.things.get((kind, hash_))

        holder.locate = locate  # type: ignore[assignment,method-assign]
    reason = replay(bench)
    assert "chunk 2 is not to be had" in reason
    assert len(asked) == len(set(asked))
    assert bench.now_s < SPEC.deadlines.gone_grace_s * 5


def test_holders_share_the_results_of_a_round(bench: Bench) -> None:
    for peer in (REDUCER, NEXT, HOLDER):
        bench.holder(peer, 0, 1, 2)
    served: list[PeerId] = []
    fetch = bench.peers.fetch

    async def watched(peer: PeerId, *rest: Any, **more: Any) -> list[bytes]:
        served.append(peer)
        return await fetch(peer, *rest, **more)

    bench.peers.fetch = watched  # type: ignore[method-assign]
    assert replay(bench) == ""
    assert sorted(served) == sorted((REDUCER, NEXT, HOLDER))


def test_a_holder_that_sends_something_else_is_named_and_left_out(bench: Bench) -> None:
    bench.holder(NEXT, 0, 1, 2, frames=[frame(chunk, seed=1) for chunk in range(GRID.n_chunks)])
    bench.holder(HOLDER, 0, 1, 2)
    assert replay(bench) == ""
    assert bench.whole()
    (said,) = bench.said
    assert NEXT in said
    assert "doesn't have its hash" in said
    assert [peer for peer, _ in play(bench.fetcher._donors(()))] == [HOLDER]
    bench.now_s += fetching.LIAR_S + 1
    assert len(play(bench.fetcher._donors(()))) == 2


def test_a_full_disk_makes_room_of_what_is_kept_for_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.holder(HOLDER, 0, 1, 2)
    keys = [bytes([number]) * 32 for number in range(3)]
    for key in keys:
        bench.results.area(key)
    bench.results.hold(keys)
    put, refused = ResultsArea.put, [2]

    def fills(area: ResultsArea, *asked: Any) -> None:
        if refused[0]:
            refused[0] -= 1
            raise DiskFull("results", "here", 1, 0)
        put(area, *asked)

    monkeypatch.setattr(ResultsArea, "put", fills)
    assert replay(bench) == ""
    assert bench.whole()
    assert (bench.results.folder / keys[0].hex()).exists()
    assert not (bench.results.folder / keys[1].hex()).exists()
    assert not (bench.results.folder / keys[2].hex()).exists()
