"""Learning the chain that went on without a leader: what extends it, and where another branch leaves it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.leading.learning import Learner, Past, Unknown, opened
from coordinator.rounds.branches import is_larger, verified
from coordinator.rounds.events import Branched, Learned
from coordinator.rounds.ledger import Ledger
from protos.hashes import body_hash
from protos.messages import Body, Commit, PeerId, Range, Seat, Vote
from protos.sealer import KeySealer
from protos.signing import Identity
from protos.wire import decode
from tests.coordinator.made import COORDINATOR, RUN, Chained, append, genesis, identity, journal, next_commit

MEMBER = identity(7)
ADDRESS = ("here:1",)
SEATS = tuple(Seat(MEMBER.peer, (Range(start, 4),), 1) for start in range(0, 400, 4))


class FakeChain:
    """A member that has these commits."""

    def __init__(self, *commits: Commit) -> None:
        self.commits = commits
        self.asked: list[tuple[int, int]] = []

    async def commits_after(
        self, peer: PeerId, addresses: Sequence[str], epoch: int, round_: int, n_most: int
    ) -> Sequence[Commit]:
        assert (peer, addresses) == (MEMBER.peer, ADDRESS)
        self.asked.append((epoch, round_))
        later = [c for c in self.commits if (b := decode(Body, c.body)) and (b.epoch, b.round) > (epoch, round_)]
        return later[:n_most]


class FakeMemory:
    """This leader's own chain, oldest first."""

    def __init__(self, *chain: tuple[Commit, Ledger]) -> None:
        self.chain = chain

    async def heads(self) -> list[tuple[int, int, bytes]]:
        return [(books.epoch, books.round, books.head) for _, books in reversed(self.chain)]

    async def at(self, head: bytes) -> Past | None:
        return next((Past(commit, books) for commit, books in self.chain if books.head == head), None)


def voted(link: Chained, *signers: Identity, round_: int | None = None) -> Commit:
    """The commit with real votes."""
    vote = Vote(
        link.body.epoch,
        link.body.round if round_ is None else round_,
        0,
        COORDINATOR.peer,
        body_hash(link.commit.body),
        link.commit.digest,
    )
    return replace(link.commit, votes=tuple(KeySealer(each, RUN.peer).seal(vote) for each in signers))


def chain(n: int, start: Ledger, *, counts: bool = True) -> list[Chained]:
    links: list[Chained] = []
    for _ in range(n):
        before = links[-1].after if links else start
        counted = (MEMBER.peer,) if counts and before.seat_of(MEMBER.peer) else ()
        seats = (SEATS[before.round],) if counts else ()
        links.append(next_commit(before, counted=counted, seats=seats))
    return links


def learn(chain_: FakeChain, books: Ledger, memory: FakeMemory | None = None) -> list[Learned] | Branched:
    learner = Learner(RUN.peer, COORDINATOR.peer, chain_, memory)
    return asyncio.run(learner.learn(MEMBER.peer, ADDRESS, books))


def test_commits_that_extend_the_books_come_in_order_and_hold_by_their_quorum() -> None:
    _, _, first = genesis()
    links = chain(4, first)
    told = learn(FakeChain(*(voted(link, COORDINATOR, MEMBER) for link in links)), links[0].after)
    assert isinstance(told, list)
    assert [item.body.round for item in told] == [2, 3, 4]
    held = verified(links[0].after, told, COORDINATOR.peer)
    assert [books for _, books in held] == [link.after for link in links[1:]]


def test_what_no_quorum_has_signed_ends_the_chain() -> None:
    _, _, first = genesis()
    links = chain(3, first)
    for bad in (voted(links[1], COORDINATOR), voted(links[1], identity(9)), voted(links[1], MEMBER, round_=7)):
        told = [opened(c, RUN.peer, COORDINATOR.peer) for c in (voted(links[0], COORDINATOR), bad, links[2].commit)]
        assert [item.body.round for item, _ in verified(first, told, COORDINATOR.peer)] == [1]


def test_another_branch_is_found_by_looking_back_and_the_larger_one_is_followed() -> None:
    commit, _, first = genesis()
    common = chain(3, first)
    fork = common[-1].after
    mine, theirs = chain(12, fork, counts=False), chain(9, fork)
    memory = FakeMemory((commit, first), *((link.commit, link.after) for link in (*common, *mine)))
    told = learn(FakeChain(*(voted(link, COORDINATOR, MEMBER) for link in (*common, *theirs))), mine[-1].after, memory)
    assert isinstance(told, Branched), "though it has fewer rounds"
    assert told.fork.head == fork.head
    held = verified(told.fork, told.chain, COORDINATOR.peer)
    assert held[-1][1] == theirs[-1].after
    assert is_larger(held[-1][1], mine[-1].after)
    assert not is_larger(mine[-1].after, held[-1][1])
    behind = FakeChain(*(voted(link, COORDINATOR, MEMBER) for link in (*common, *mine[:4])))
    assert learn(behind, mine[-1].after, memory) == []


def test_a_chain_with_nothing_in_common_teaches_nothing() -> None:
    commit, _, first = genesis()
    mine = chain(2, first, counts=False)
    other = [replace(link.commit, digest=b"x" * 32) for link in chain(4, first)]
    memory = FakeMemory((commit, first), *((link.commit, link.after) for link in mine))
    with pytest.raises(Unknown):
        learn(FakeChain(*other[2:]), mine[-1].after, memory)


def test_nonsense_is_refused() -> None:
    _, _, first = genesis()
    link = chain(1, first)[0]
    with pytest.raises(Unknown, match="makes no sense"):
        opened(replace(link.commit, body=b"\xff\xff"), RUN.peer, COORDINATOR.peer)
    with pytest.raises(Unknown, match="of run"):
        opened(link.commit, identity(3).peer, COORDINATOR.peer)


def test_a_branch_that_is_given_up_stays_in_the_journal_as_orphaned(tmp_path: Path) -> None:
    kept, first = journal(tmp_path / "journal.sqlite")
    mine = chain(3, first, counts=False)
    for link in mine:
        append(kept, link)
    fork = mine[0].after
    theirs = chain(3, fork)
    kept.orphan(fork)
    for link in theirs:
        append(kept, link)
    assert [entry.orphaned for entry in kept.entries()] == [False, False, True, True, False, False, False]
    assert kept.recover().ledger == theirs[-1].after
    past = kept.at(theirs[1].after.head)
    assert past is not None
    assert past.books == theirs[1].after
    assert kept.at(mine[2].after.head) is None
    assert [round_ for _, round_, _ in kept.heads()] == [4, 3, 2, 1, 0]
    kept.orphan(fork)
    for link in mine[1:]:
        append(kept, link)
    assert kept.recover().ledger == mine[-1].after, "a branch that was given up may be followed again"
    kept.close()
