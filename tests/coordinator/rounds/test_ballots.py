"""The leader's machine by scripts: numbers, promises, leaves, and votes that can't succeed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.rounds import policy
from coordinator.rounds.attempt import Phase
from coordinator.rounds.events import (
    Committed,
    DigestKnown,
    Disconnected,
    Instant,
    Reached,
)
from coordinator.rounds.learning import AWAITED_MOST, LEARN_MOST_S
from coordinator.rounds.voting import LEADER_SLACK, RETRY_FIRST_S, RETRY_MAX_S
from protos.hashes import body_hash
from protos.messages import (
    AttemptFailed,
    Body,
    Deal,
    Inquiry,
    Leave,
    MemberState,
    Plan,
    Prepare,
    Propose,
    Refusal,
    Vote,
)
from tests.coordinator.rounds.cases import (
    COORDINATOR,
    PEERS,
    beginning,
)
from tests.coordinator.rounds.leader_script import DIGEST, OBSERVER, Script, exchanging, leave, training, voting

# -- numbers, promises, leaves ---------------------------------------------------------------------------------------


def test_after_a_restart_a_used_number_is_passed() -> None:
    script = training(1, opened=4)
    script.ready(PEERS[0])
    assert script.last(Prepare).attempt == 5


def test_a_stand_in_never_leads_number_zero() -> None:
    script = training(1, me=PEERS[25])
    script.ready(PEERS[0])
    assert script.last(Prepare) == Prepare(0, 2, 1, PEERS[25])


def test_what_a_promise_reports_is_proposed_again_byte_for_byte() -> None:
    first = voting(3)
    proposal = first.last(Propose).proposal
    script = training(3, opened=0, registry=first.registry)
    script.ready(*PEERS[:3])
    script.promise(PEERS[0])
    script.promise(PEERS[1], 0, proposal)
    assert script.phase() is Phase.VOTE
    propose = script.last(Propose)
    assert propose.proposal == proposal
    assert propose.attempt == 1
    script.vote(*PEERS[:2])
    (committed,) = script.effects(Committed)
    assert (committed.commit.attempt, committed.body.attempt, committed.commit.body) == (1, 0, proposal.body)


def test_of_several_the_one_signed_last_is_proposed() -> None:
    first = voting(3)
    newer = first.last(Propose).proposal
    older = replace(newer, results=newer.results[::-1])
    assert older != newer
    script = training(3, opened=1, registry=first.registry)
    script.ready(*PEERS[:3])
    script.promise(PEERS[0], 0, older)
    script.promise(PEERS[1], 1, newer)
    assert script.last(Propose).proposal == newer


def test_a_proposal_of_another_round_is_no_proposal() -> None:
    strange = Script(beginning())
    strange.connect(PEERS[0])
    proposal = strange.last(Propose).proposal
    script = training(1, opened=0, registry=strange.registry)
    script.ready(PEERS[0])
    script.promise(PEERS[0], 0, proposal)
    assert script.phase() is Phase.PREPARE


def test_a_refusal_names_a_number_that_is_passed() -> None:
    script = training(3, opened=0)
    script.ready(*PEERS[:3])
    script.say(PEERS[0], Refusal(0, 2, 7, "promised number 7"))
    assert script.phase() is Phase.PREPARE
    script.say(PEERS[1], Refusal(0, 2, 7, "promised number 7"))
    assert "promised number 7" in script.last(AttemptFailed).reason
    script.wait(RETRY_FIRST_S)
    assert script.last(Prepare).attempt == 8


def test_one_member_can_not_use_up_a_rounds_numbers() -> None:
    script = training(3, opened=0)
    script.ready(*PEERS[:3])
    for number in (10**6, 2**31 - 1, 2**40):
        script.say(PEERS[2], Refusal(0, 2, number, "promised"))
    assert script.phase() is Phase.PREPARE
    assert script.rounds._next_number == policy.numbers_most(0.0)
    # Where others are bound to more, room comes by itself, as it has come at the voters before.
    bound = policy.numbers_most(0.0) + 7
    for _ in range(2):
        script.say(PEERS[0], Refusal(0, 2, bound, f"promised number {bound}"))
        script.say(PEERS[1], Refusal(0, 2, bound, f"promised number {bound}"))
        script.wait(RETRY_MAX_S)
    assert script.last(Prepare).attempt == bound + 1


def test_voters_without_whom_there_is_no_quorum_are_believed_as_far_as_voters_follow() -> None:
    script = training(5, me=PEERS[25])
    script.ready(*PEERS[:5])
    bound, tried = policy.numbers_most(0.0) + 9_000, [1]
    for _ in range(6):
        number = tried[-1]
        script.say(PEERS[4], Refusal(0, 2, 2 * policy.numbers_most(0.0), "a lie that can be done without"))
        script.say(PEERS[3], Refusal(0, 2, number + 1, "a lie, each time"))
        for peer in PEERS[:3]:
            if script.phase() is Phase.PREPARE and script.last(Prepare).attempt == number:
                script.say(peer, Refusal(0, 2, bound, f"promised number {bound}"))
        script.wait(RETRY_MAX_S)
        tried.append(script.last(Prepare).attempt)
        if tried[-1] > bound:
            break
    assert tried[-1] == bound + 1, tried


def test_a_coordinator_that_comes_back_passes_what_voters_were_bound_to_meanwhile() -> None:
    script = training(3, opened=0)
    script.ready(*PEERS[:3])
    bound = 2 * policy.numbers_most(86400.0)
    for peer in PEERS[:2]:
        script.say(peer, Refusal(0, 2, bound, f"promised number {bound}"))
    script.wait(RETRY_FIRST_S)
    assert script.last(Prepare).attempt == bound + 1


def test_a_stand_in_that_has_just_begun_knows_how_long_the_round_has_lasted() -> None:
    script = training(3, me=PEERS[25], head_since=Instant(-1000.0))
    script.ready(*PEERS[:3])
    script.say(PEERS[0], Refusal(0, 2, 10**5, "promised number 100000"))
    script.say(PEERS[1], Refusal(0, 2, 10**5, "promised number 100000"))
    script.wait(RETRY_FIRST_S)
    assert script.last(Prepare).attempt == 10**5 + 1


def test_who_names_higher_numbers_again_and_again_is_left_out() -> None:
    script = training(4)
    for _ in range(10):
        script.ready(*PEERS[:4])
        if script.phase() is Phase.PREPARE:
            for peer in PEERS[:3]:
                script.promise(peer)
        assert script.phase() is Phase.COMMITMENT
        script.say(PEERS[3], Refusal(0, 2, script.last(Plan).attempt + 1, "promised another number"))
        if script.phase() is Phase.COMMITMENT:
            break
        script.wait(RETRY_MAX_S)
    script.commit_to_plan(*PEERS[:3])
    assert script.phase() is Phase.EXCHANGE
    assert len(script.last(Deal).commitments) == 3


def test_who_names_commits_that_never_come_is_not_waited_for_for_ever() -> None:
    script = training(3)
    n_waits = 0
    for number in range(8):
        script.beat(PEERS[2], MemberState.TRAINING, 1, head=bytes([number]) * 32, round=9)
        n_waits += "commits after round" in script.waiting_for
        script.wait(LEARN_MOST_S / 4)
        script.keep_alive(*PEERS[:2])
        script.beat(PEERS[2], MemberState.TRAINING, 1)
    assert n_waits == AWAITED_MOST


def test_absurd_numbers_are_not_believed() -> None:
    script = training(3, opened=0)
    script.ready(*PEERS[:3])
    for peer in PEERS[:2]:
        script.say(peer, Refusal(0, 2, 2**50, "far away"))
    script.wait(RETRY_FIRST_S)
    assert script.last(Prepare).attempt == 2


def test_refusals_of_earlier_attempts_and_rounds_say_nothing() -> None:
    script = training(3, opened=3)
    script.ready(*PEERS[:3])
    for peer in PEERS[:3]:
        script.say(peer, Refusal(0, 2, 3, "old"))
        script.say(peer, Refusal(0, 1, 9, "older"))
    assert script.phase() is Phase.PREPARE
    script.promise(PEERS[0])
    script.promise(PEERS[1])
    assert script.phase() is Phase.COMMITMENT


def test_a_leave_takes_range_and_weight_out() -> None:
    script = voting(3)
    script.say(PEERS[1], leave(script))
    script.vote(PEERS[0])
    hash_ = body_hash(script.last(Propose).proposal.body)
    script.handle(DigestKnown(hash_, DIGEST))
    (committed,) = script.effects(Committed)  # 3 of 5
    kinds = {type(script.registry.open(envelope)[1]) for envelope in committed.commit.votes}
    assert kinds == {Vote, Leave}


def test_a_leave_before_the_proposal_takes_the_seat_away() -> None:
    script = training(3)
    script.say(PEERS[1], leave(script))
    script.ready(PEERS[0], PEERS[2])
    assert [member.peer for member in script.last(Plan).members if member.sender] == [PEERS[0], PEERS[2]]
    script.commit_to_plan(PEERS[0], PEERS[2])
    script.reduce()
    body = script.registry.decode(Body, script.last(Propose).proposal.body)
    assert body.voters == (PEERS[0], PEERS[2], COORDINATOR)
    assert [seat.peer for seat in body.seats] == [PEERS[0], PEERS[2]]


def test_a_leave_in_the_exchange_is_a_death_at_once() -> None:
    script = exchanging(3)
    script.say(PEERS[1], leave(script))
    assert script.last(Inquiry).senders == (PEERS[1],)


def test_who_voted_and_left_has_voted() -> None:
    script = voting(3)
    script.vote(PEERS[0])
    script.say(PEERS[0], leave(script))
    script.vote(PEERS[1])
    (committed,) = script.effects(Committed)
    assert [type(script.registry.open(envelope)[1]) for envelope in committed.commit.votes] == [Vote, Vote]


def test_a_leave_counts_only_where_its_promise_allows() -> None:
    script = voting(3)
    script.say(PEERS[1], leave(script, attempt=5, leader=PEERS[25]))
    script.vote(PEERS[0])
    script.handle(DigestKnown(body_hash(script.last(Propose).proposal.body), DIGEST))
    assert not script.effects(Committed, script.did)  # 3 of 7: what was promised to another leader holds
    script.say(PEERS[2], Refusal(0, 2, 0, "no"))
    script.wait(RETRY_FIRST_S)
    assert script.last(Prepare).attempt == 6  # past what the leaver had promised
    script.promise(PEERS[0])
    assert script.phase() is not Phase.PREPARE  # 3 of 5


@pytest.mark.parametrize("changes", [{"round": 1}, {"round": 3}, {"epoch": 1}])
def test_a_leave_of_another_round_is_none(changes: dict[str, Any]) -> None:
    script = training(2)
    script.say(PEERS[0], leave(script, **changes))
    assert script.rounds._left == {}


def test_the_last_promise_tells_of_a_vote() -> None:
    first = voting(2)
    proposal = first.last(Propose).proposal
    script = training(2, opened=0, registry=first.registry)
    script.say(PEERS[0], leave(script, attempt=0, voted_attempt=0, proposal=proposal))
    script.ready(PEERS[1])
    script.promise(PEERS[1])
    assert script.last(Propose).proposal == proposal


# -- giving a vote up ------------------------------------------------------------------------------------------------


def test_a_vote_that_can_not_succeed_any_more_is_given_up_if_another_attempt_could_be_opened() -> None:
    """N = 2: one voted and died with the results. The other can't fetch them, nor can the observer."""
    script = voting(2)
    script.vote(PEERS[1])
    script.say(PEERS[0], Refusal(0, 2, 0, "results: nobody has them"))
    assert script.phase() is Phase.VOTE  # the observer may still have them
    script.say(OBSERVER, Refusal(0, 2, 0, "results: nobody has them"))
    assert script.phase() is Phase.TRAIN
    assert "the observer: results: nobody has them" in script.last(AttemptFailed).reason


def test_without_a_quorum_a_vote_is_waited_for_until_its_deadline() -> None:
    script = voting(1)
    script.handle(Disconnected(PEERS[0], "reset"))
    script.wait(20.0)
    assert script.phase() is Phase.VOTE
    script.connect(PEERS[0])
    assert script.told(Propose, script.did)[-1][0] == (PEERS[0],)
    script.vote(PEERS[0])
    assert script.effects(Committed)


def test_votes_end_at_their_deadline() -> None:
    script = voting(3)
    limit_s = script.spec.deadlines.vote_s * LEADER_SLACK + 1.0
    while script.at < limit_s:
        script.wait(1.0)
        script.keep_alive(*PEERS[:3], OBSERVER)
    assert script.last(AttemptFailed).reason == "no quorum of votes"


def test_dial_out_members_alone_do_not_keep_a_result() -> None:
    script = training(3, observer=True)
    for peer in PEERS[:2]:
        script.handle(Reached(peer, False))
    script.ready(*PEERS[:3])
    script.commit_to_plan(*PEERS[:3])
    script.reduce()
    script.vote(*PEERS[:2])
    assert script.phase() is Phase.VOTE  # a quorum, but nobody could fetch the results from them
    script.vote(PEERS[2])
    assert script.effects(Committed)
