"""The leader's machine by scripts: a whole round, its training phase, and its lines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.rounds.attempt import Phase
from coordinator.rounds.events import (
    Close,
    Committed,
    DigestKnown,
    Disconnected,
    Ended,
    Heard,
    Instant,
    Opened,
    Persist,
    Probe,
    Reached,
    RecordChanged,
    Say,
    Tell,
    Woke,
)
from coordinator.rounds.state import InvariantBroken
from protos.hashes import body_hash
from protos.messages import (
    Body,
    Commit,
    Deal,
    Goodbye,
    MemberState,
    Outcome,
    Plan,
    Promise,
    Proposal,
    Propose,
    Record,
    Records,
    Refusal,
    Vote,
    Welcome,
)
from protos.runspec import DeadlineSpec, MembershipSpec, WorkSpec
from tests.coordinator.rounds.cases import (
    COORDINATOR,
    NO_HASH,
    PEERS,
    beginning,
    evidence_of,
    seated,
)
from tests.coordinator.rounds.leader_script import DIGEST, OBSERVER, Script, exchanging, training, voting
from tests.sim.options import sim_spec

# -- a round ---------------------------------------------------------------------------------------------------------


def test_the_first_round_gives_seats_to_who_holds_the_state() -> None:
    spec = sim_spec(n_chunks=3)
    script = Script(beginning(), spec)
    assert script.handle(Woke()) == []
    assert script.waiting_for == "members that hold the state: 0 of 1"
    script.connect(PEERS[0], holds=False)
    assert script.phase() is Phase.TRAIN
    script.beat(PEERS[0], MemberState.WAITING)
    opened, *rest = script.now_did
    assert opened == Persist(Opened(0, 1, 0))
    assert isinstance(rest[0], Persist)
    assert isinstance(rest[0].entry, Proposal)
    (committed,) = script.effects(Committed)
    assert (committed.body.outcome, committed.body.reason) == (Outcome.EMPTY, "seats for who holds the state")
    assert [seat.peer for seat in committed.body.seats] == [PEERS[0]]
    assert script.told(Commit)[0][0] == (PEERS[0],)
    assert script.rounds.ledger.voters == (PEERS[0], COORDINATOR)


def test_a_whole_round() -> None:
    script = training(3)
    assert script.phase() is Phase.TRAIN
    assert script.waiting_for == "training: peer11, peer12, peer13, the slowest at step 1 of 4"
    script.ready(PEERS[0], PEERS[2])
    assert script.waiting_for == "training: peer12, the slowest at step 1 of 4"
    script.ready(PEERS[1])
    assert script.effects(Persist)[0].entry == Opened(0, 2, 0)
    ((told, plan),) = script.told(Plan)
    assert told == (*PEERS[:3], OBSERVER)
    assert [(member.peer, member.reducer, member.sender, member.reserve) for member in plan.members] == [
        *((peer, True, True, False) for peer in PEERS[:3]),
        (OBSERVER, True, False, True),  # three can be reached: the observer reduces what they can't
    ]
    script.commit_to_plan(*PEERS[:2])
    assert script.waiting_for == "commitments of peer13"
    script.commit_to_plan(PEERS[2])
    ((told, deal),) = script.told(Deal)
    assert told == (*PEERS[:3], OBSERVER)
    assert deal.excluded == ()
    script.reduce()
    persisted = [effect.entry for effect in script.effects(Persist)]
    ((told, propose),) = script.told(Propose)
    assert persisted == [propose.proposal]
    assert told == (*PEERS[:3], OBSERVER)
    assert set(propose.holders) == {*PEERS[:3], OBSERVER}
    script.vote(PEERS[0])
    assert script.phase() is Phase.VOTE
    script.vote(PEERS[2])
    (committed,) = script.effects(Committed)
    assert script.effects(Tell)[0].message is committed.commit
    assert script.now_did.index(committed) == 0  # on disk before it is told
    assert (committed.body.round, committed.commit.digest, len(committed.commit.votes)) == (2, DIGEST, 2)
    assert script.rounds.ledger.head == committed.commit_hash
    assert script.phase() is Phase.TRAIN
    assert script.rounds.view(Instant(0.0)).n_committed == 1


def test_the_coordinator_votes_with_the_observers_digest() -> None:
    script = voting(2)
    propose = script.last(Propose)
    hash_ = body_hash(propose.proposal.body)
    script.handle(DigestKnown(bytes(32), DIGEST))
    assert script.effects(Persist) == []
    script.handle(DigestKnown(hash_, DIGEST))
    (record,) = [effect.entry for effect in script.effects(Persist)]
    assert isinstance(record, Promise)
    assert (record.voted_attempt, record.proposal) == (0, propose.proposal)
    assert script.phase() is Phase.VOTE
    script.vote(PEERS[1])
    (committed,) = script.effects(Committed)
    assert len(committed.commit.votes) == 2


def test_votes_on_different_digests_are_not_added_up() -> None:
    script = voting(3)
    script.vote(PEERS[0])
    script.vote(PEERS[1], digest=NO_HASH)
    assert script.phase() is Phase.VOTE
    script.vote(PEERS[2])
    assert script.effects(Committed)[0].commit.digest == DIGEST


@pytest.mark.parametrize(
    "changes", [{"attempt": 1}, {"round": 3}, {"epoch": 1}, {"leader": PEERS[9]}, {"body_hash": NO_HASH}]
)
def test_votes_for_something_else_do_not_count(changes: dict[str, Any]) -> None:
    script = voting(1)
    propose = script.last(Propose)
    vote = Vote(0, 2, 0, COORDINATOR, body_hash(propose.proposal.body), DIGEST)
    script.say(PEERS[0], replace(vote, **changes))
    assert script.phase() is Phase.VOTE
    script.say(PEERS[0], vote)
    assert script.effects(Committed)


def test_strangers_and_doubles_count_nothing() -> None:
    script = training(3)
    script.ready(*PEERS[:3])
    script.connect(PEERS[5])
    script.commit_to_plan(PEERS[5])
    script.commit_to_plan(PEERS[0], PEERS[0], PEERS[1])
    assert script.phase() is Phase.COMMITMENT
    script.commit_to_plan(PEERS[0], steps=1)  # another word on the same plan
    script.commit_to_plan(PEERS[2])
    evidence = script.rounds._attempt.evidence() if script.rounds._attempt else None
    assert evidence is not None
    assert sorted(evidence.commitments) == PEERS[:3]
    assert evidence.commitments[PEERS[0]].steps == 4


# -- the training phase ----------------------------------------------------------------------------------------------


def test_at_the_limit_who_has_steps_contributes_them() -> None:
    script = training(2, sim_spec(n_chunks=3))
    limit_s = script.spec.deadlines.train_limit_s
    while script.at < limit_s - 2.0:
        script.wait(1.0)
        script.keep_alive(*PEERS[:2], OBSERVER)
    assert script.phase() is Phase.TRAIN
    script.wait(3.0)
    assert script.phase() is Phase.COMMITMENT
    assert [member.peer for member in script.last(Plan).members if member.sender] == PEERS[:2]


def test_who_made_no_step_is_not_planned() -> None:
    script = training(2, sim_spec(n_chunks=3))
    script.beat(PEERS[1], MemberState.TRAINING, 0)
    script.ready(PEERS[0])
    assert script.phase() is Phase.COMMITMENT  # it fell from step 1 to 0: nobody waits for it
    assert [member.peer for member in script.last(Plan).members if member.sender] == [PEERS[0]]


@pytest.mark.parametrize("state", [MemberState.JOINING, MemberState.PAUSED])
def test_nobody_waits_for_the_idle(state: MemberState) -> None:
    script = training(2)
    script.ready(PEERS[0])
    assert script.phase() is Phase.TRAIN
    script.beat(PEERS[1], state, 1)
    assert script.phase() is Phase.COMMITMENT


def test_a_broken_line_is_waited_for_a_moment() -> None:
    script = training(2)
    script.handle(Disconnected(PEERS[1], "reset"))
    script.ready(PEERS[0])
    assert script.phase() is Phase.TRAIN
    script.wait(script.spec.deadlines.gone_grace_s + 0.1)
    assert script.phase() is Phase.COMMITMENT


def test_a_silent_member_is_given_up_at_the_timeout() -> None:
    script = training(2, sim_spec(n_chunks=3, deadlines=DeadlineSpec(deadline_k=0.0)))
    script.ready(PEERS[0])
    for _ in range(14):
        script.wait(1.0)
        script.keep_alive(PEERS[0], OBSERVER)
    assert script.phase() is Phase.TRAIN
    script.wait(1.1)
    assert script.phase() is Phase.COMMITMENT


def test_without_voters_for_a_quorum_nothing_is_opened() -> None:
    script = training(3)
    for peer in PEERS[1:3]:
        script.handle(Disconnected(peer, "gone"))
    script.ready(PEERS[0])
    script.wait(10.0)
    assert script.phase() is Phase.TRAIN
    assert script.waiting_for == "voters for a quorum: peer12, peer13"
    script.connect(PEERS[1])
    script.beat(PEERS[1], MemberState.READY, 4)
    assert script.phase() is Phase.COMMITMENT


def test_below_the_minimum_a_newcomer_ends_the_round_with_seats() -> None:
    script = training(2, sim_spec(n_chunks=3, membership=MembershipSpec(min_contributors=2)))
    script.handle(Disconnected(PEERS[1], "gone"))
    script.ready(PEERS[0])
    script.wait(4.0)
    assert script.waiting_for == "contributors: 1 of 2"
    script.connect(PEERS[5])
    assert script.phase() is Phase.VOTE
    body = script.registry.decode(Body, script.last(Propose).proposal.body)
    assert (body.outcome, body.reason) == (Outcome.EMPTY, "1 of 2 contributors: seats for who came since")
    assert [seat.peer for seat in body.seats] == [PEERS[0], PEERS[5]]


def test_a_heartbeat_of_the_same_stage_decides_nothing() -> None:
    script = training(3)
    script.beat(PEERS[0], MemberState.TRAINING, 2)
    assert script.now_did == []
    script.at = script.spec.deadlines.train_limit_s + 1  # even if a wake is due: that is the wake's matter
    assert script.beat(PEERS[0], MemberState.TRAINING, 3) == []


# -- lines -----------------------------------------------------------------------------------------------------------


def test_a_lagging_member_is_told_the_head_again() -> None:
    script = training(2)
    while not script.told(Commit):
        script.wait(1.0)
        script.beat(PEERS[1], MemberState.TRAINING, 1, head=NO_HASH, round=1)
    assert script.at == pytest.approx(script.spec.deadlines.heartbeat_timeout_s, abs=1.0)
    script.beat(PEERS[1], MemberState.APPLYING, 0, head=NO_HASH, round=1)
    script.wait(16.0)
    assert not script.told(Commit, script.beat(PEERS[1], MemberState.APPLYING, 0, head=NO_HASH, round=1))


def test_addresses_are_passed_on_together() -> None:
    script = training(3, relay=True)
    flushed = script.told(Records, script.did)
    assert len(flushed) == 1  # the first at once, the others wait for each other
    assert flushed[0][1].records == (PEERS[0].encode(),)
    did = script.wait(1.1)
    ((peers, records),) = script.told(Records, did)
    assert set(records.records) == {PEERS[1].encode(), PEERS[2].encode(), OBSERVER.encode()}
    assert set(peers) == {*PEERS[:3], OBSERVER}
    (welcome,) = [message for peers, message in script.told(Welcome, script.did) if peers == (OBSERVER,)]
    assert set(welcome.records) == {peer.encode() for peer in (*PEERS[:3], OBSERVER)}


def test_addresses_are_passed_on_before_a_plan_needs_them() -> None:
    script = training(2, relay=True)
    script.ready(*PEERS[:2])
    kinds = [type(message) for _, message in script.told(object)]
    assert kinds.index(Records) < kinds.index(Plan)


def test_a_changed_address_is_passed_on_and_tried() -> None:
    script = training(2, relay=True)
    script.wait(2.0)
    moved = Record(PEERS[0], 2, ("there:1",), (), 0, 1, NO_HASH)
    did = script.handle(RecordChanged(PEERS[0], moved, b"new"))
    assert script.effects(Probe) == [Probe(PEERS[0], ("there:1",))]
    assert script.told(Records, did)[0][1].records == (b"new",)
    script.wait(2.0)
    same = replace(moved, sequence=3, round=2)
    assert not script.told(Records, script.handle(RecordChanged(PEERS[0], same, b"newer")))


def test_who_could_not_be_reached_is_tried_again_each_round() -> None:
    script = voting(3)
    script.handle(Reached(PEERS[1], False))
    script.vote(*PEERS[:2])
    script.vote(PEERS[2])
    assert script.effects(Probe, script.did)[-1] == Probe(PEERS[1], ("here:1",))


def test_the_end_is_told_to_who_has_the_last_state() -> None:
    script = voting(1, spec=sim_spec(n_chunks=3, work=WorkSpec(batch_tokens=8, h=4, end_rounds=1)))
    script.vote(PEERS[0])
    assert script.effects(Ended)[0].reason == "the run has reached its end of 1 rounds"
    assert script.phase() is Phase.ENDED
    assert script.effects(Close) == []
    assert script.beat(PEERS[0], MemberState.APPLYING) == []
    (close,) = script.effects(Close, script.beat(PEERS[0], MemberState.WAITING))
    assert close == Close(PEERS[0], Goodbye("ended", "the run has reached its end of 1 rounds"))
    script.connect(PEERS[6], holds=False)
    assert script.effects(Close) == []


def test_stories_and_views() -> None:
    script = training(2)
    script.handle(Disconnected(PEERS[0], "reset by peer"))
    assert script.rounds.explain(PEERS[0]) == ["line open", "can be reached", "line lost: reset by peer"]
    assert script.rounds.explain(PEERS[9]) == []
    view = script.rounds.view(Instant(script.at))
    assert (view.round, view.phase, view.attempt, view.deadline_at) == (2, "train", -1, 600.0)
    assert [member.state for member in view.members] == ["gone", "training", "waiting"]


def test_every_refusal_is_said() -> None:
    script = voting(3)
    script.say(PEERS[0], Refusal(0, 2, 0, "I don't like it"))
    (said,) = script.effects(Say)
    assert said.text == "peer11 refuses attempt 0 of round 2: I don't like it"


def test_states_that_can_not_be_are_loud() -> None:
    script = exchanging(2)
    assert script.rounds._attempt is not None
    script.rounds._attempt.included = (PEERS[0], PEERS[9])
    with pytest.raises(InvariantBroken, match="not planned"):
        script.rounds.check()
    script = training(1)
    script.rounds.phase = Phase.VOTE
    with pytest.raises(InvariantBroken, match=r"with attempt None"):
        script.rounds.check()
    with pytest.raises(InvariantBroken):
        script.rounds.handle(Woke(), Instant(0.0))


def test_a_proposal_must_come_opened() -> None:
    script = training(1, opened=0)
    script.ready(PEERS[0])
    promise = Promise(0, 2, 1, COORDINATOR, NO_HASH, 0, Proposal(b"unopened", b"", b"", (), ()))
    script.handle(Heard(PEERS[0], promise, b"envelope", None))
    assert script.phase() is Phase.PREPARE  # not counted: nobody knows what it would be


def test_evidence_of_the_script_is_honest() -> None:
    ledger = seated(2)
    assert evidence_of(ledger, 2).included().keys() == set(PEERS[:2])
