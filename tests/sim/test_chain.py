"""What the simulation watches over is really watched: each thing that must not happen is done once, and found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger, LedgerError
from node.session import effects as fx
from node.session.machine import Session
from protos.messages import Body, Commit, Promise, Proposal, Propose, Range, Vote
from tests.coordinator.rounds.cases import (
    COORDINATOR,
    NO_HASH,
    PEERS,
    REGISTRY,
    body_of,
    empty_body,
    evidence_of,
    seated,
)
from tests.sim.chain import Chain, Violated, check_record
from tests.sim.options import Options
from tests.sim.world import World


def commit(body: Body, digest: bytes = b"") -> Commit:
    return Commit(REGISTRY.encode(body), digest or bytes([body.round]) * 32, 0, (), ())


def two_rounds() -> tuple[Chain, Ledger, Body]:
    """A chain with one committed round, the ledger after it, and the body of that round."""
    ledger = seated(2)
    chain = Chain(ledger)
    body = body_of(ledger, evidence_of(ledger, 2))
    after = chain.ledgers[chain.commit(commit(body), body)]
    return chain, after, body


def test_the_same_commit_may_be_seen_by_many() -> None:
    chain, _, body = two_rounds()
    chain.commit(commit(body), body)
    assert len(chain.commits) == 1
    assert chain.n_used == 8


@pytest.mark.parametrize("what", ["body", "digest"])
def test_two_commits_of_a_round(what: str) -> None:
    chain, _, body = two_rounds()
    ledger = seated(2)
    other = body_of(ledger, evidence_of(ledger, 2), seats=PEERS[:1]) if what == "body" else body
    with pytest.raises(Violated, match="two commits of round 2"):
        chain.commit(commit(other, b"" if what == "body" else NO_HASH), other)


def test_a_head_from_nowhere() -> None:
    chain, after, _ = two_rounds()
    body = replace(empty_body(after, PEERS[:2]), previous=NO_HASH)
    with pytest.raises(Violated, match="a head that nobody committed"):
        chain.commit(commit(body), body)


def test_batches_used_twice_and_contributions_counted_twice() -> None:
    chain, after, first = two_rounds()
    body = body_of(after, evidence_of(after, 2))
    again = replace(body, members=(replace(body.members[0], commitment_root=first.members[0].commitment_root),))
    with pytest.raises(Violated, match="counts twice"):
        chain.commit(commit(again), again)
    chain, after, first = two_rounds()
    stolen = replace(body, members=(replace(body.members[0], used=first.members[0].used),))
    with pytest.raises(Violated, match="no lease of"):
        chain.commit(commit(stolen), stolen)


def test_books_that_lose_batches() -> None:
    chain, after, _ = two_rounds()
    body = empty_body(after, PEERS[:2])
    lossy = replace(body, returned=(Range(8, 4),), seats=body.seats[:1])
    with pytest.raises((Violated, LedgerError), match=r"lose or double|leased twice"):
        chain.commit(commit(lossy), lossy)


def test_votes_for_two_proposals_of_a_number() -> None:
    chain, _, _ = two_rounds()
    vote = Vote(0, 3, 1, COORDINATOR, NO_HASH, NO_HASH)
    chain.vote(PEERS[0], vote)
    chain.vote(PEERS[0], vote)
    chain.vote(PEERS[0], replace(vote, attempt=2, body_hash=bytes([1]) * 32))
    with pytest.raises(Violated, match="two proposals"):
        chain.vote(PEERS[0], replace(vote, body_hash=bytes([1]) * 32))


def test_proposing_twice_under_a_number() -> None:
    chain, after, body = two_rounds()
    one = Propose(0, 2, 0, COORDINATOR, 1.0, _proposal(body), ())
    chain.propose(COORDINATOR, one)
    with pytest.raises(Violated, match="proposed twice"):
        chain.propose(COORDINATOR, replace(one, proposal=_proposal(empty_body(after, PEERS[:1]))))


def _proposal(body: Body) -> Proposal:
    return Proposal(REGISTRY.encode(body), b"", b"", (), ())


def test_what_is_not_on_disk_may_not_be_said() -> None:
    vote = Vote(0, 3, 1, COORDINATOR, NO_HASH, NO_HASH)
    record = Promise(0, 3, 1, COORDINATOR, NO_HASH, 1, None)
    check_record(record, vote, PEERS[0])
    check_record(record, record, PEERS[0])
    for kept in (None, replace(record, attempt=0), replace(record, voted_attempt=-1), replace(record, round=2)):
        with pytest.raises(Violated, match="before it was on disk"):
            check_record(kept, vote, PEERS[0])


def test_a_machine_that_spins_is_found() -> None:
    class Sleepless(Session):
        def next_wake(self, now: Instant) -> Instant:
            return now

    with pytest.raises(Violated, match="wants to be woken"):
        World(Options(n_members=1), session_type=Sleepless).start().run_for(1.0)


def test_a_member_that_applies_what_is_not_committed_is_found() -> None:
    class Eager(Session):
        def _was_verified(self, body_hash: bytes, digest: bytes) -> list[fx.Effect]:
            proposed, ledger = self._proposed, self.ledger
            if proposed is None or ledger is None or proposed.body.round < 2:
                return super()._was_verified(body_hash, digest)
            commit_ = Commit(proposed.propose.proposal.body, NO_HASH, 0, (), ())
            return [fx.Apply(commit_, proposed.body, NO_HASH, ledger)]

    with pytest.raises(Violated, match="leads elsewhere"):
        World(Options(n_members=1, h=1), session_type=Eager).start().run_for(10.0)
