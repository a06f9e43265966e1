"""What a member that has no part in something says of it, and numbers and lengths that nobody honest sends."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from coordinator.rounds.attempt import Phase
from coordinator.rounds.events import Committed, Say
from coordinator.rounds.ledger import Ledger, LedgerError
from protos import limits
from protos.messages import AttemptFailed, Deal, Plan, Refusal, Vote
from tests.coordinator.rounds.cases import PEERS, seated
from tests.coordinator.rounds.leader_script import Script, exchanging, leave, training, voting

STRANGERS = PEERS[20:24]


def a_vote(script: Script) -> Vote:
    """What an honest voter would say now."""
    script.vote(PEERS[0])
    attempt = script.rounds._attempt
    assert attempt is not None
    return attempt.votes[PEERS[0]][0]


def test_votes_of_who_is_no_voter_are_in_no_certificate() -> None:
    script = voting(3)
    script.connect(*STRANGERS)
    vote = a_vote(script)
    for stranger in STRANGERS:
        script.say(stranger, vote)
    script.vote(PEERS[1])
    (committed,) = script.effects(Committed, script.did)
    assert {script.registry.open(envelope)[0] for envelope in committed.commit.votes} == {*PEERS[:2]}


def test_refusals_of_who_has_no_part_end_nothing() -> None:
    script = exchanging(3)
    script.connect(*STRANGERS)
    number = script.last(Plan).attempt
    for stranger in STRANGERS:
        assert script.say(stranger, Refusal(0, 2, number + 1, "promised another")) == []
        assert script.say(stranger, Refusal(0, 2, number, f"results: {PEERS[0]} is to blame")) == []
    assert script.phase() is Phase.EXCHANGE
    script.reduce()
    assert script.phase() is Phase.VOTE
    for stranger in STRANGERS:
        assert script.say(stranger, Refusal(0, 2, number, f"results: {PEERS[0]} is to blame")) == []
    script.vote(*PEERS[:3])
    assert script.effects(Committed, script.did)
    assert script.told(AttemptFailed, script.did) == []


def test_a_leave_with_a_proposal_counts_from_voters_only_and_once() -> None:
    script = voting(3)
    attempt = script.rounds._attempt
    assert attempt is not None
    script.connect(*STRANGERS)
    said = leave(script, 0, voted_attempt=0, proposal=attempt.proposal)
    script.say(STRANGERS[0], said)
    assert STRANGERS[0] not in script.rounds._left
    script.say(PEERS[0], leave(script))
    kept = script.rounds._left[PEERS[0]]
    judged = dict(script.rounds._judged)
    script.say(PEERS[0], said)  # another word of the same peer: not even looked at
    assert script.rounds._left[PEERS[0]] == kept
    assert script.rounds._judged == judged


def test_a_reported_deal_with_an_absurd_number_is_a_fault_and_no_more() -> None:
    script = voting(3)
    attempt = script.rounds._attempt
    assert attempt is not None
    assert attempt.deal is not None
    assert attempt.proposal is not None
    absurd = script.registry.seal(script.me, replace(attempt.deal, number=2**32))
    proposal = replace(attempt.proposal, deal=absurd)
    script.say(PEERS[0], leave(script, 0, voted_attempt=0, proposal=proposal))
    assert "no voter can have signed" in script.effects(Say)[0].text
    taken, _ = script.rounds._left[PEERS[0]]
    assert taken.proposal is None


@pytest.mark.parametrize("n_norms", [0, 1, 10_000])
def test_norms_of_other_chunks_than_the_models_are_not_passed_on(n_norms: int) -> None:
    script = training(2)
    script.ready(*PEERS[:2])
    script.commit_to_plan(PEERS[0], norms=(1.0,) * n_norms)
    script.commit_to_plan(PEERS[1])
    assert script.phase() is Phase.EXCHANGE
    attempt = script.rounds._attempt
    assert attempt is not None
    assert list(attempt.commitments) == [PEERS[1]]
    assert len(script.last(Deal).commitments) == 1


@pytest.mark.parametrize("field", ["epoch", "round", "cursor", "tokens", "nominal_step", "spec_revision", "n_orders"])
@pytest.mark.parametrize("number", [-1, limits.INTEGER, 2**60, 10**30])
def test_a_ledgers_numbers_are_such_as_messages_carry(field: str, number: int) -> None:
    content = json.loads(seated(2).to_bytes()) | {field: number}
    with pytest.raises(LedgerError):
        Ledger.from_bytes(json.dumps(content).encode())


@pytest.mark.parametrize("name", ["", "\ud800", "no name", "1" * 200])
@pytest.mark.parametrize("field", ["voters", "seats", "credit", "since", "standing", "bandwidths"])
def test_a_ledgers_peers_are_such_as_messages_carry(field: str, name: str) -> None:
    content = json.loads(seated(2).to_bytes())
    one = {"credit": 1, "since": 1, "standing": "good", "bandwidths": 1.0}.get(field)
    if field == "voters":
        content[field] = [name]
    elif field == "seats":
        content[field][0]["peer"] = name
    else:
        content[field] = {PEERS[0]: one}
        Ledger.from_bytes(json.dumps(content).encode())
        content[field] = {name: one}
    with pytest.raises(LedgerError):
        Ledger.from_bytes(json.dumps(content).encode())


def test_more_voters_than_a_commit_can_seat_are_no_ledger() -> None:
    content = json.loads(seated(2).to_bytes())
    content["voters"] = [str(peer) for peer in PEERS[:33]]
    with pytest.raises(LedgerError, match="33 voters"):
        Ledger.from_bytes(json.dumps(content).encode())
