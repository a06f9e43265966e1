"""Voters that are here and can't vote are no quorum: the coordinator waits, and then opens an epoch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coordinator.rounds.attempt import Phase
from coordinator.rounds.events import Committed, DigestKnown, Disconnected, Instant, Probe, Reached, Seek, Sought, Woke
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.voter import ABSTAINS, Voter
from protos.hashes import body_hash
from protos.messages import Body, MemberState, PeerId, Prepare, Propose, Refusal
from tests.coordinator.rounds.cases import COORDINATOR, PEERS, SPEC, seated
from tests.coordinator.rounds.leader_script import DIGEST, OBSERVER, Script, leave, training, voting

A, B, C = PEERS[:3]
LOST = f"{ABSTAINS} until the next commit: its record of this round is lost"
MINORITY_S = SPEC.deadlines.minority_wait_s


def abstains(script: Script, *peers: PeerId) -> None:
    """They answer what they were asked last."""
    asked = script.last(Prepare) if script.phase() is Phase.PREPARE else script.last(Propose)
    for peer in peers:
        script.say(peer, Refusal(asked.epoch, asked.round, asked.attempt, LOST))


def passes(script: Script, seconds: float, *here: PeerId) -> None:
    """Time in which these are heard of; nobody has newer commits."""
    for _ in range(int(seconds)):
        script.at += 1.0
        begun = len(script.did)
        script.keep_alive(*here)
        script.handle(Woke())
        if script.effects(Seek, script.did[begun:]):
            script.handle(Sought())


def test_a_voter_that_abstains_is_missing_until_an_epoch_gives_it_its_vote_back() -> None:
    script = voting(1)
    abstains(script, A)
    passes(script, 2.0, A, OBSERVER)
    assert script.waiting_for == "voters for a quorum: peer11"
    number = script.rounds._next_number
    passes(script, MINORITY_S - 5.0, A, OBSERVER)
    assert script.rounds._next_number == number, "nothing is tried that can't be committed"
    passes(script, 8.0, A, OBSERVER)
    (committed,) = script.effects(Committed, script.did)
    assert (committed.body.epoch, committed.body.voters) == (1, (A, COORDINATOR))
    script.ready(A)
    script.commit_to_plan(A)
    script.reduce()
    script.vote(A)
    assert script.rounds.ledger.n_committed == 1


def test_who_abstains_is_asked_again_on_a_new_line() -> None:
    script = voting(1)
    abstains(script, A)
    passes(script, 2.0, A, OBSERVER)
    script.connect(A)
    script.ready(A)
    assert script.phase() is Phase.PREPARE
    script.promise(A)
    assert script.phase() is Phase.COMMITMENT
    assert not script.rounds._abstaining


def test_lines_that_break_again_and_again_put_no_epoch_off() -> None:
    script = voting(1)
    abstains(script, A)
    for _ in range(int(MINORITY_S // 50) + 1):
        passes(script, 49.0, A, OBSERVER)
        if script.rounds.ledger.epoch:
            break
        script.handle(Disconnected(A, "reset"))
        script.connect(A)
        script.ready(A)
        passes(script, 1.0, A, OBSERVER)
        assert script.phase() is Phase.PREPARE
        abstains(script, A)
    assert script.rounds.ledger.epoch == 1


def test_who_refuses_for_another_reason_is_no_absent_voter() -> None:
    script = voting(1)
    asked = script.last(Propose)
    script.say(A, Refusal(asked.epoch, asked.round, asked.attempt, "the body's weights are wrong"))
    script.ready(A)
    passes(script, 2.0, A, OBSERVER)
    assert script.phase() is Phase.PREPARE


def test_others_make_a_quorum_beside_who_abstains() -> None:
    script = voting(3)
    abstains(script, A)
    script.vote(B, C)
    assert script.effects(Committed)


def test_the_coordinators_own_vote_is_missing_without_an_observer() -> None:
    """Two members of which one is dead: with the coordinator's vote the other is a quorum, without it is none."""
    script = training(2, observer=False)
    script.handle(Disconnected(B, "dead"))
    script.ready(A)
    passes(script, 5.0, A)
    assert script.phase() is Phase.TRAIN
    assert (
        script.waiting_for == "voters for a quorum: peer12 and this leader, which has no observer to compute the digest"
    )
    script.connect(OBSERVER)
    assert script.phase() is not Phase.TRAIN, "with one the round goes on"


def test_an_observer_that_stays_away_and_a_voter_cost_an_epoch() -> None:
    script = training(2, observer=False)
    script.handle(Disconnected(B, "dead"))
    script.ready(A)
    passes(script, MINORITY_S + 10.0, A)
    (committed,) = script.effects(Committed, script.did)
    assert committed.body.epoch == 1
    script.ready(A)
    script.commit_to_plan(A)
    script.reduce()
    script.vote(A)
    assert script.rounds.ledger.n_committed == 1, "no digest of an observer's is needed now"


def test_too_few_that_can_be_reached_are_no_quorum_without_the_coordinators_vote() -> None:
    """What they alone hold would be lost with them."""
    script = Script(seated(3), SPEC)
    script.connect(A)
    script.connect(B, grpc=())
    script.ready(A, B)
    passes(script, 30.0, A, B)
    assert script.phase() is Phase.TRAIN
    assert "peer13" in script.waiting_for
    script.connect(OBSERVER)
    assert script.phase() is not Phase.TRAIN


def test_a_probe_that_failed_by_accident_opens_no_epoch() -> None:
    script = Script(seated(3), SPEC)
    script.connect(A, B)
    script.handle(Reached(B, False))
    script.ready(A, B)
    begun, end = len(script.did), script.at + MINORITY_S - 5.0
    while script.at < end:
        script.wait(1.0)
        script.keep_alive(A, B)
    assert script.phase() is Phase.TRAIN
    probes = script.effects(Probe, script.did[begun:])
    assert set(probes) == {Probe(B, ("here:1",))}
    assert 9 <= len(probes) <= 10, "every half minute"
    script.handle(Reached(B, True))
    assert script.phase() is not Phase.TRAIN
    assert script.rounds.ledger.epoch == 0


def test_it_wakes_for_the_next_probe() -> None:
    script = Script(seated(3), SPEC)
    script.connect(A, B)
    script.handle(Reached(B, False))
    script.ready(A, B)
    assert script.effects(Probe, script.did)[-1] == Probe(B, ("here:1",))
    script.at += 29.0
    script.keep_alive(A, B)
    assert script.rounds.next_wake(Instant(script.at)) == Instant(30.0)


def test_what_is_awaited_in_a_vote_is_named() -> None:
    script = voting(5)
    own = "the observer's digest, for this leader's own vote"
    script.vote(A)
    abstains(script, B)
    script.say(C, leave(script))
    assert script.waiting_for == f"votes of peer14, peer15 and {own}"
    asked = script.last(Propose)
    script.handle(DigestKnown(body_hash(asked.proposal.body), DIGEST))
    assert script.waiting_for == "votes of peer14, peer15"


def test_the_coordinators_vote_is_named_where_it_alone_is_awaited() -> None:
    script = voting(2)
    script.vote(A)
    asked = script.last(Propose)
    script.say(B, Refusal(asked.epoch, asked.round, asked.attempt, "it is not what I have"))
    assert script.waiting_for == "the observer's digest, for this leader's own vote"


# -- a coordinator that has lost its memory --------------------------------------------------------------------------


def restored(fresh_epoch: int = 0) -> Script:
    """Its database is an old copy; the only voter of the round after its head is gone, and a newcomer is here."""
    script = Script(seated(1), SPEC, voter=Voter(COORDINATOR, None, lost=True), opened=0, fresh_epoch=fresh_epoch)
    script.connect(PEERS[5], OBSERVER)
    script.beat(PEERS[5], MemberState.WAITING)
    return script


def test_who_has_lost_its_memory_opens_an_epoch_that_it_can_not_have_opened_then() -> None:
    script = restored(fresh_epoch=5_000_000)
    passes(script, MINORITY_S + 10.0, PEERS[5], OBSERVER)
    (committed,) = script.effects(Committed, script.did)
    assert (committed.body.epoch, committed.body.round) == (5_000_000, 2)
    assert committed.body.voters == (PEERS[5], COORDINATOR)


def lone_epoch(head: Ledger, newcomer: PeerId, **more: Any) -> Body:
    """The first body of the epoch that is opened where this newcomer alone is here."""
    script = Script(head, SPEC, **more)
    script.connect(newcomer, OBSERVER)
    script.beat(newcomer, MemberState.WAITING)
    passes(script, MINORITY_S + 10.0, newcomer, OBSERVER)
    (committed,) = script.effects(Committed, script.did)
    return committed.body


def test_an_epoch_opened_without_memory_differs_from_those_counted_from_a_drawn_one() -> None:
    head = replace(seated(1), epoch=2**39)
    lost = Voter(COORDINATOR, None, lost=True)
    then = lone_epoch(head, PEERS[5], fresh_epoch=3_000_000)
    now = lone_epoch(head, PEERS[6], fresh_epoch=2_000_000, voter=lost, opened=0)
    assert (then.epoch, now.epoch) == (2**39 + 3_000_000, 2**39 + 2_000_000)


def test_an_old_copy_that_abstains_no_more_opens_another_epoch_than_in_the_lost_time() -> None:
    script = Script(seated(1), SPEC, voter=Voter(COORDINATOR, None, lost=True), opened=0, fresh_epoch=7_000_000)
    newcomer = PEERS[6]
    script.connect(A, newcomer, OBSERVER)
    script.beat(newcomer, MemberState.WAITING)
    script.ready(A)
    script.promise(A)
    script.commit_to_plan(A)
    script.reduce()
    script.vote(A)
    script.handle(Disconnected(A, "dead"))
    script.beat(newcomer, MemberState.WAITING)
    passes(script, MINORITY_S + 10.0, newcomer, OBSERVER)
    bodies = [committed.body for committed in script.effects(Committed, script.did)]
    assert [(body.epoch, body.round) for body in bodies] == [(0, 2), (7_000_000, 3)]


def test_without_such_a_number_it_opens_none_and_says_why() -> None:
    script = restored()
    passes(script, MINORITY_S + 10.0, PEERS[5], OBSERVER)
    assert not script.effects(Committed, script.did)
    assert script.rounds.ledger.epoch == 0
    assert "this leader, which has lost what it signed in this round; it opens no epoch" in script.waiting_for


def test_it_signs_nothing_in_the_old_epoch_though_the_voters_are_back() -> None:
    script = restored(fresh_epoch=5_000_000)
    passes(script, MINORITY_S - 10.0, PEERS[5], OBSERVER)
    script.connect(A)
    script.ready(A)
    script.promise(A)
    script.commit_to_plan(A)
    script.reduce()
    script.vote(A)
    (committed,) = script.effects(Committed, script.did)
    assert committed.body.epoch == 0
    assert {script.registry.open(envelope)[0] for envelope in committed.commit.votes} == {A}
