"""What the leader says, opened: events of what holds, and a BadWord that says what doesn't."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.founding import genesis_commit
from coordinator.rounds.ledger import Ledger
from node.opening import BadWord, Opener
from node.session import events as ev
from protos import hashes, wire
from protos.messages import (
    AttemptFailed,
    Body,
    Commit,
    Commitment,
    Deal,
    Goodbye,
    Head,
    Leave,
    PeerId,
    Plan,
    PlanMember,
    Prepare,
    Proposal,
    Propose,
    Range,
    Records,
    Results,
    Signed,
    Vote,
    Welcome,
)
from protos.sealer import KeySealer
from protos.signing import Identity
from tests.coordinator.made import spec

RUN, LEADER, A, B, STRANGER = (Identity.from_private_bytes(bytes([n]) * 32) for n in (1, 2, 3, 4, 5))
COMMIT, BODY, LEDGER = genesis_commit(RUN, LEADER.peer, spec())
HASH = b"h" * 32
PLAN = Plan(
    RUN.peer, 0, 1, 0, LEADER.peer, LEDGER.head, LEDGER.digest, 1,
    tuple(sorted((PlanMember(who.peer, 1, True, True) for who in (A, B)), key=lambda m: m.peer)),
    "mean", 0, "", "", "int8", Range(0, 1), 0, "identity", 1, 1.0, 1.0, 1.0,
)  # fmt: skip
PLAN_HASH = hashes.plan_hash(wire.encode(PLAN))
OPENER = Opener(RUN.peer, LEADER.peer)


def seal(message: Any, by: Identity = LEADER) -> bytes:
    return KeySealer(by, RUN.peer).seal(message)


def commitment(plan: bytes = PLAN_HASH) -> Commitment:
    return Commitment(plan, HASH, (1.0,), 1, 4, (Range(0, 1),), 0.1, 2.0)


def deal(*envelopes: bytes, plan: bytes = PLAN_HASH) -> Deal:
    return Deal(plan, 0, envelopes, (), ())


def opened(message: Any) -> ev.Event:
    return OPENER.event(message, LEADER.peer)


def refused(message: Any) -> str:
    with pytest.raises(BadWord) as caught:
        opened(message)
    return str(caught.value)


def test_a_plan_comes_with_its_hash_and_envelope() -> None:
    envelope = seal(PLAN)
    assert opened(Signed(envelope)) == ev.Planned(PLAN, PLAN_HASH, envelope)


def test_what_another_signed_is_refused() -> None:
    assert "signed" in refused(Signed(seal(replace(PLAN, leader=STRANGER.peer), STRANGER)))
    other_run = KeySealer(LEADER, STRANGER.peer).seal(PLAN)
    assert refused(Signed(other_run)).startswith("Signed: ")
    assert refused(Signed(seal(PLAN)[:-1] + b"\0")).startswith("Signed: ")
    assert refused(Signed(b"")).startswith("Signed: ")


@pytest.mark.parametrize(
    "message",
    [commitment(), Results(PLAN_HASH, HASH, (), 0.0), Vote(0, 1, 0, LEADER.peer, HASH, HASH)],
    ids=lambda message: type(message).__name__,
)
def test_the_leader_has_no_say_in_what_members_sign(message: Any) -> None:
    assert f"no say in a {type(message).__name__}" in refused(Signed(seal(message)))


def test_a_deal_comes_with_its_commitments_by_signer() -> None:
    envelope = seal(deal(seal(commitment(), A), seal(commitment(), B)))
    event = opened(Signed(envelope))
    assert isinstance(event, ev.Dealt)
    assert dict(event.commitments) == {A.peer: commitment(), B.peer: commitment()}
    assert event.envelope == envelope


@pytest.mark.parametrize(
    "commitments",
    [
        (seal(commitment(), A), seal(commitment(), A)),
        (seal(commitment(HASH), A),),
        (seal(Vote(0, 1, 0, LEADER.peer, HASH, HASH), A),),
        (seal(commitment(), A)[:-1] + b"\0",),
    ],
    ids=["doubled", "of another plan", "a vote", "forged"],
)
def test_a_deal_that_can_not_be_is_refused(commitments: tuple[bytes, ...]) -> None:
    assert refused(Signed(seal(deal(*commitments))))


def test_a_prepare_is_opened() -> None:
    prepare = Prepare(0, 1, 3, LEADER.peer)
    assert opened(Signed(seal(prepare))) == ev.Prepared(prepare)


def propose(plan: bytes, dealt: bytes, results: tuple[bytes, ...] = (), body: Body | None = None) -> Propose:
    raw = wire.encode(body or replace(BODY, round=1))
    return Propose(0, 1, 0, LEADER.peer, 1.0, Proposal(raw, plan, dealt, results, ()), ())


def test_an_empty_rounds_proposal_needs_no_evidence() -> None:
    said = propose(b"", b"")
    event = opened(Signed(seal(said)))
    assert isinstance(event, ev.Proposed)
    assert (event.plan, event.deal, event.body.round) == (None, None, 1)
    assert event.body_hash == hashes.body_hash(said.proposal.body)


def test_a_proposals_evidence_is_opened() -> None:
    results = Results(PLAN_HASH, HASH, (), 5.0)
    dealt = seal(deal(seal(commitment(), A)))
    event = opened(Signed(seal(propose(seal(PLAN), dealt, (seal(results, A),)))))
    assert isinstance(event, ev.Proposed)
    assert (event.plan, event.plan_hash) == (PLAN, PLAN_HASH)
    assert (dict(event.commitments), dict(event.results)) == ({A.peer: commitment()}, {A.peer: results})


def test_evidence_must_be_signed_by_the_bodys_leader() -> None:
    foreign = replace(PLAN, leader=STRANGER.peer)
    assert refused(Signed(seal(propose(seal(foreign, STRANGER), seal(deal())))))
    assert refused(Signed(seal(propose(seal(PLAN), seal(PLAN)))))


def test_a_commit_comes_with_the_votes_whose_signatures_hold() -> None:
    vote, leave = Vote(0, 1, 0, LEADER.peer, HASH, HASH), Leave(0, 1, -1, PeerId(""), HASH, -1, None)
    body = wire.encode(replace(BODY, round=1))
    commit = Commit(body, HASH, 0, (seal(vote, A), seal(leave, B), seal(PLAN)), ())
    event = opened(commit)
    assert isinstance(event, ev.CommitHeard)
    assert event.signed == ((A.peer, vote), (B.peer, leave)), "a plan is no vote"
    assert event.commit_hash == hashes.commit_hash(body, HASH)
    assert refused(replace(commit, votes=(seal(vote, A)[:-1] + b"\0",))).startswith("Commit: ")
    assert refused(replace(commit, body=b"nonsense")).startswith("Commit: ")


def test_the_rest_is_handed_on_or_out_of_place() -> None:
    assert opened(AttemptFailed(0, 1, 2, "why")) == ev.AttemptOver(0, 1, 2, "why", LEADER.peer)
    assert opened(Goodbye("ended", "over")) == ev.SaidGoodbye(Goodbye("ended", "over"), LEADER.peer)
    assert "a Records where none is due" in refused(Records(()))


def test_a_leader_speaks_in_no_others_name() -> None:
    assert "in the name of" in refused(Signed(seal(replace(PLAN, leader=STRANGER.peer))))
    assert "in the name of" in refused(Signed(seal(Prepare(0, 1, 0, STRANGER.peer))))
    assert "in the name of" in refused(Signed(seal(replace(propose(seal(PLAN), seal(deal())), leader=STRANGER.peer))))


def test_a_head_is_the_coordinators_word_whoever_passes_it_on() -> None:
    head = Head(0, 3, HASH, HASH)
    by_coordinator = seal(head)
    assert opened(Signed(by_coordinator)) == ev.HeadSigned(head, by_coordinator)
    assert refused(Signed(seal(head, A))) != ""
    stand_in = Opener(RUN.peer, LEADER.peer)
    assert stand_in.event(Signed(by_coordinator), A.peer) == ev.HeadSigned(head, by_coordinator)
    up = OPENER.welcome(replace(welcome(), signed_head=by_coordinator))
    assert up.signed_head == ev.HeadSigned(head, by_coordinator)


# -- where the chain is --------------------------------------------------------------------------------------------


def welcome(commit: Commit = COMMIT, ledger: Ledger | bytes = LEDGER) -> Welcome:
    raw = ledger if isinstance(ledger, bytes) else ledger.to_bytes()
    return Welcome(LEADER.peer, commit, raw, (), 1.0, 1.0)


def test_a_welcome_leads_to_the_heads_ledger() -> None:
    event = OPENER.welcome(welcome())
    assert (event.body, event.ledger, event.signed) == (BODY, LEDGER, ())
    assert event.ledger.head == hashes.commit_hash(COMMIT.body, COMMIT.digest)


def test_commit_zero_is_the_run_keys_alone() -> None:
    other, _, ledger = genesis_commit(RUN, LEADER.peer, spec("work.h=3"))
    with pytest.raises(BadWord, match="another first commit"):
        OPENER.welcome(welcome(replace(COMMIT, votes=other.votes)))
    forged, _, _ = genesis_commit(STRANGER, LEADER.peer, spec())
    with pytest.raises(BadWord):
        OPENER.welcome(welcome(replace(COMMIT, votes=forged.votes)))
    assert OPENER.welcome(welcome(other, ledger)).body.h == 3


@pytest.mark.parametrize(
    ("ledger", "why"),
    [
        (replace(LEDGER, tokens=1), "not the one that the commit's body names"),
        (b"{}", "not the one that the commit's body names"),  # they are not even read
        (b"", "not the one that the commit's body names"),
    ],
)
def test_books_that_are_not_the_heads_are_refused(ledger: Ledger | bytes, why: str) -> None:
    with pytest.raises(BadWord, match=why):
        OPENER.welcome(welcome(ledger=ledger))


def test_another_runs_head_is_refused() -> None:
    commit, _, ledger = genesis_commit(STRANGER, LEADER.peer, spec())
    with pytest.raises(BadWord, match="of run"):
        OPENER.welcome(welcome(commit, ledger))
    late = replace(BODY, round=5)
    with pytest.raises(BadWord, match="another round"):
        OPENER.welcome(welcome(replace(COMMIT, body=wire.encode(late))))
