"""A stand-in whose line stays up although the coordinator is back: its word moves nobody, whatever it says."""

from __future__ import annotations

from dataclasses import replace

from coordinator.rounds import policy
from coordinator.rounds.voter import Voter
from node.session import events as ev
from protos.messages import Commit, Commitment, MemberState, Prepare, Promise, Refusal, Vote, Welcome
from tests.coordinator.rounds.cases import NO_HASH, PEERS, REGISTRY, SPEC, at_head, empty_body, evidence_of
from tests.node.session.member_script import BODY, EVIDENCE, LEDGER, Script, committed, events_of, proposed

STAND_IN = PEERS[2]
NUMBER = 2**31 - 1
HIGH = policy.numbers_most(0.0)


def online() -> Script:
    """A member that trains and hears the coordinator, with a line to a stand-in."""
    script = Script()
    script.train()
    return script


def still_follows(script: Script) -> None:
    """Whether the coordinator's next attempt is taken part in, and voted on."""
    script.commit(EVIDENCE)
    assert len(script.told(Commitment)) == 1
    mine = proposed(BODY, EVIDENCE)
    script.handle(mine)
    script.verify(mine)
    assert [vote.attempt for vote in script.told(Vote)] == [0]


def test_a_plan_of_the_highest_number_is_refused() -> None:
    script = online()
    script.handle(events_of(evidence_of(LEDGER, 3, attempt=NUMBER, leader=STAND_IN))[0])
    assert script.told(Refusal) == [Refusal(0, 2, NUMBER, "hears the coordinator")]
    still_follows(script)


def test_the_coordinators_plan_goes_before_a_stand_ins_of_a_higher_number() -> None:
    script = online()
    script.leaders_fall_silent()
    script.handle(events_of(evidence_of(LEDGER, 3, attempt=HIGH, leader=STAND_IN))[0])
    assert script.told(Refusal) == []
    script.line_up()
    still_follows(script)


def test_a_proposal_of_the_highest_number_has_no_vote() -> None:
    script = online()
    empty = empty_body(LEDGER, PEERS[:3], SPEC)
    script.handle(proposed(empty, None, NUMBER, STAND_IN))
    assert script.told(Refusal) == [Refusal(0, 2, NUMBER, "hears the coordinator")]
    still_follows(script)


def test_what_was_promised_before_the_coordinator_came_back_is_kept() -> None:
    script = online()
    script.leaders_fall_silent()
    script.handle(ev.Prepared(Prepare(0, 2, 3, STAND_IN)))
    assert len(script.told(Promise)) == 1
    script.line_up()
    evidence = evidence_of(LEDGER, 3, attempt=3, leader=STAND_IN)
    script.handle(events_of(evidence)[0])
    script.encode(evidence)
    assert len(script.told(Commitment)) == 1


def test_a_number_that_leaves_others_none_is_neither_promised_nor_followed_nor_voted_on() -> None:
    """Else one word of a stand-in's would be the last of its round: nobody has a number above it."""
    script = online()
    script.leaders_fall_silent()
    too_far = 2 * policy.numbers_most(script.at) + 1
    for number in (NUMBER, too_far):
        asked: list[ev.Event] = [
            events_of(evidence_of(LEDGER, 3, attempt=number, leader=STAND_IN))[0],
            ev.Prepared(Prepare(0, 2, number, STAND_IN)),
            proposed(empty_body(LEDGER, PEERS[:3], SPEC), None, number, STAND_IN),
        ]
        for event in asked:
            script.handle(event)
            (refusal,) = script.told(Refusal)
            assert refusal.attempt == number
            assert "too far ahead" in refusal.reason
    script.handle(ev.Prepared(Prepare(0, 2, 7, PEERS[1])))
    assert [promise.attempt for promise in script.told(Promise)] == [7]


def test_who_restarts_still_follows_beyond_the_number_that_it_is_bound_to() -> None:
    bound = 2 * policy.numbers_most(86400.0)
    record = Promise(0, 2, bound, STAND_IN, LEDGER.head, -1, None)
    script = Script(voter=Voter(PEERS[0], record))
    script.train()
    script.leaders_fall_silent()
    script.handle(ev.Prepared(Prepare(0, 2, bound + 1, PEERS[1])))
    assert [promise.attempt for promise in script.told(Promise)] == [bound + 1]
    script.handle(ev.Prepared(Prepare(0, 2, 2 * bound, PEERS[1])))
    assert "too far ahead" in script.told(Refusal)[0].reason


def test_a_commit_from_nowhere_is_not_gone_after() -> None:
    script = online()
    script.handle(replace(committed(replace(BODY, round=10**9, previous=NO_HASH), LEDGER), leader=STAND_IN))
    assert script.state() is MemberState.READY
    still_follows(script)


def test_a_welcome_from_nowhere_is_not_gone_after() -> None:
    script = online()
    far = at_head(replace(LEDGER, round=10**6, tokens=10**12, voters=(STAND_IN, LEDGER.voters[-1])), "far")
    body = replace(empty_body(LEDGER, PEERS[:3], SPEC), round=10**6, previous=NO_HASH, anchor_digest=LEDGER.digest)
    welcome = Welcome(STAND_IN, Commit(REGISTRY.encode(body), far.digest, 0, (), ()), far.to_bytes(), (), 0.0, 1.0)
    script.handle(ev.LineUp(welcome, body, far, ()))
    assert script.session.ledger == LEDGER
    assert script.state() is MemberState.READY
    still_follows(script)
