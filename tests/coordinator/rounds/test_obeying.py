"""The leader's machine by scripts: orders as they come, wait and are carried, and those that can be obeyed no more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.rounds import leases
from coordinator.rounds.attempt import Phase
from coordinator.rounds.events import Branched, Close, Committed, Ended, Heard, Learned, Ordered, Say
from coordinator.rounds.ledger import Ledger
from protos.hashes import body_hash, commit_hash
from protos.messages import (
    Body,
    Commit,
    Goodbye,
    MemberState,
    Outcome,
    PeerId,
    Plan,
    Prepare,
    Promise,
    Proposal,
    Propose,
    Vote,
)
from protos.orders import Kind, OpenedOrder
from tests.coordinator.rounds.cases import COORDINATOR, NO_HASH, PEERS, SPEC, body_of, evidence_of
from tests.coordinator.rounds.leader_script import DIGEST, Script, training
from tests.coordinator.rounds.obeyed import LEDGER, PAUSE, RESUME, carrying, gone_on
from tests.coordinator.rounds.ordered import amended, ordered


def order(script: Script, each: OpenedOrder, target: Ledger | None = None) -> None:
    script.handle(Ordered(each, target))


def commit_empty(script: Script, *voters: PeerId, digest: bytes = b"") -> Body:
    """Vote for the body that is proposed; the anchor's digest if no other is given."""
    body = script.registry.decode(Body, script.last(Propose).proposal.body)
    script.vote(*voters, digest=digest or body.anchor_digest)
    return body


def test_a_pause_does_not_wait_for_training_and_holds_until_a_resume() -> None:
    script = training(3)
    order(script, PAUSE)
    assert script.phase() is Phase.VOTE
    body = commit_empty(script, *PEERS[:2])
    assert (body.outcome, body.reason) == (Outcome.EMPTY, "by the operator's order 1: pause")
    assert script.rounds.ledger.paused
    assert script.phase() is Phase.TRAIN
    (committed,) = script.effects(Committed)
    assert committed.orders == (PAUSE,)
    for peer in PEERS[:3]:
        script.beat(peer, MemberState.PAUSED, 1)
    script.wait(10.0)
    assert script.phase() is Phase.TRAIN
    assert script.waiting_for == "the operator, who has paused the run"
    order(script, RESUME)
    commit_empty(script, *PEERS[:2])
    assert not script.rounds.ledger.paused
    assert [seat.peer for seat in script.rounds.ledger.seats] == PEERS[:3]  # who paused by order keeps its seat
    script.ready(*PEERS[:2])
    assert "peer13" in script.waiting_for
    script.ready(PEERS[2])
    assert script.told(Plan)


def test_an_order_in_the_middle_of_an_attempt_travels_with_it() -> None:
    script = training(3)
    script.ready(*PEERS[:3])
    order(script, PAUSE)
    assert script.phase() is Phase.COMMITMENT
    script.commit_to_plan(*PEERS[:3])
    script.reduce()
    body = script.registry.decode(Body, script.last(Propose).proposal.body)
    assert (body.outcome, body.orders) == (Outcome.COMMITTED, (PAUSE.envelope,))


def test_an_amendment_waits_for_the_rounds_own_commit_unless_nobody_trains() -> None:
    spec = amended(work={"h": 2})
    script = training(3)
    order(script, ordered(1, Kind.AMEND, spec=spec))
    assert script.phase() is Phase.TRAIN
    script.ready(*PEERS[:3])
    script.commit_to_plan(*PEERS[:3])
    script.reduce()
    script.vote(*PEERS[:2])
    assert script.rounds.spec is spec
    assert script.rounds.ledger.spec_revision == 2
    assert all(leases.count(seat.ranges) == 2 for seat in script.rounds.ledger.seats)

    waiting = training(1, amended(SPEC, membership={"min_contributors": 2}).model_copy(update={"revision": 1}))
    waiting.ready(PEERS[0])
    assert waiting.waiting_for == "contributors: 1 of 2"
    order(waiting, ordered(1, Kind.AMEND, spec=amended(waiting.spec, membership={"min_contributors": 1})))
    assert waiting.phase() is Phase.VOTE


def test_an_end_now_ends_the_run_and_one_later_when_its_round_is_over() -> None:
    script = training(3)
    order(script, ordered(1, Kind.END, round_=LEDGER.round + 2, reason="enough"))
    assert script.phase() is Phase.TRAIN
    order(script, ordered(2, Kind.END, reason="right now"))
    commit_empty(script, *PEERS[:2])
    assert script.phase() is Phase.ENDED
    assert script.effects(Ended) == [Ended("the operator has ended the run: right now")]
    script.beat(PEERS[0], MemberState.WAITING)
    assert script.effects(Close) == [Close(PEERS[0], Goodbye("ended", "the operator has ended the run: right now"))]


def test_an_order_takes_an_ended_run_up_again() -> None:
    script = training(3)
    order(script, ordered(1, Kind.END))
    commit_empty(script, *PEERS[:2])
    assert script.phase() is Phase.ENDED
    order(script, ordered(2, Kind.RESUME))
    commit_empty(script, *PEERS[:2])
    assert script.phase() is Phase.TRAIN
    assert script.rounds.ledger.ends_after == 0


def test_who_is_evicted_loses_its_line_with_the_commit() -> None:
    script = training(3)
    order(script, ordered(1, Kind.EVICT, peer=PEERS[1], reason="it lies"))
    commit_empty(script, PEERS[0], PEERS[2])
    (closed,) = script.effects(Close)
    assert closed == Close(PEERS[1], Goodbye("refused", "this peer has been evicted from the run: it lies"))
    assert [seat.peer for seat in script.rounds.ledger.seats] == [PEERS[0], PEERS[2]]
    script.connect(PEERS[1])
    script.ready(PEERS[0], PEERS[2])
    assert PEERS[1] not in {member.peer for member in script.last(Plan).members if member.sender}


def test_a_refused_order_is_said_and_forgotten() -> None:
    script = training(3)
    order(script, ordered(1, Kind.AMEND, spec=amended(codec={"block": 32})))
    (said,) = script.effects(Say)
    assert said.text.startswith("order 1 is refused: order 1: codec.block can't change")
    order(script, ordered(1, Kind.ROLLBACK, round_=1, head=NO_HASH))
    assert "the books after round 1 are not here" in script.effects(Say)[0].text
    assert script.phase() is Phase.TRAIN


def test_an_order_given_again_is_carried_once() -> None:
    script = training(3)
    order(script, PAUSE)
    order(script, PAUSE)
    body = commit_empty(script, *PEERS[:2])
    assert body.orders == (PAUSE.envelope,)
    order(script, PAUSE)
    assert script.phase() is Phase.TRAIN
    assert script.rounds.ledger.n_orders == 1


def test_a_rollback_is_voted_for_by_who_holds_the_state() -> None:
    target = replace(LEDGER, head=b"t" * 32, digest=b"d" * 32)
    now = gone_on(target)
    script = Script(now)
    script.connect(*PEERS[:3])
    for peer in PEERS[:3]:
        script.beat(peer, MemberState.TRAINING, 1)
    order(script, ordered(1, Kind.ROLLBACK, round_=target.round, head=target.head), target)
    assert script.phase() is Phase.VOTE
    body = commit_empty(script, PEERS[0], digest=target.digest)
    assert script.phase() is Phase.VOTE  # the coordinator has no word of its own on a state that it can't see
    commit_empty(script, PEERS[1], digest=target.digest)
    ledger = script.rounds.ledger
    assert (ledger.digest, ledger.rollbacks, ledger.tokens) == (target.digest, 1, target.tokens)
    assert body.round == now.round + 1 == ledger.round
    (committed,) = script.effects(Committed)
    assert committed.target == target


def test_a_stand_in_goes_on_with_a_proposal_that_carries_orders() -> None:
    script = Script(LEDGER, me=PEERS[1], voter=None)
    body, _ = carrying(LEDGER, PAUSE)
    script.connect(*PEERS[:3])
    for peer in PEERS[:3]:
        script.beat(peer, MemberState.READY, SPEC.work.h)
    proposal = proposal_of(script, body)
    for peer in PEERS[:2]:
        asked = script.last(Prepare)
        voted = proposal if peer == PEERS[0] else None
        promise = Promise(asked.epoch, asked.round, asked.attempt, asked.leader, LEDGER.head, 0, voted)
        given = (PAUSE,) if peer == PEERS[0] else ()
        opened = body if peer == PEERS[0] else None
        script.handle(Heard(peer, promise, script.registry.seal(peer, promise), opened, given))
    assert script.phase() is Phase.VOTE
    commit_empty(script, *PEERS[:2])
    assert script.rounds.ledger.paused
    assert isinstance(script.rounds.commit, Commit)


def proposal_of(script: Script, body: Body) -> Proposal:
    return Proposal(script.registry.encode(body), b"", b"", (), ())


@pytest.mark.parametrize("known", [True, False])
def test_a_stand_in_that_knows_the_books_proposes_a_rollback_again(known: bool) -> None:
    target = replace(LEDGER, head=b"t" * 32, digest=b"d" * 32)
    now = gone_on(target)
    back = ordered(1, Kind.ROLLBACK, round_=target.round, head=target.head)
    body, _ = carrying(now, back, target=target)
    script = Script(now, me=PEERS[1], voter=None, targets={target.head: target} if known else {})
    script.connect(*PEERS[:3])
    script.ready(*PEERS[:3])
    proposal = proposal_of(script, body)
    for peer in PEERS[:2]:
        asked = script.last(Prepare)
        voted = (0, proposal, body, (back,)) if peer == PEERS[0] else (-1, None, None, ())
        promise = Promise(asked.epoch, asked.round, asked.attempt, asked.leader, now.head, voted[0], voted[1])
        script.handle(Heard(peer, promise, script.registry.seal(peer, promise), voted[2], voted[3]))
    assert (script.phase() is Phase.VOTE) is known
    if known:
        commit_empty(script, *PEERS[:2], digest=target.digest)
        assert script.effects(Committed)[0].target == target
        assert script.rounds.ledger.rollbacks == 1


def test_a_leader_waits_for_settings_that_the_next_round_is_to_be_under() -> None:
    """Without them it can build no body: it joined, or started, after the commit that ordered them."""
    spec = amended(work={"h": 2})
    coming = replace(LEDGER, next_revision=2, next_from=LEDGER.round + 2)
    script = Script(coming)
    script.connect(*PEERS[:3])
    script.ready(*PEERS[:3])
    assert script.phase() is Phase.TRAIN
    assert script.waiting_for == "revision 2 of the RunSpec, which is not known here"
    later = Script(replace(coming, next_from=LEDGER.round + 3))
    later.connect(*PEERS[:3])
    later.ready(*PEERS[:3])
    assert later.phase() is Phase.COMMITMENT, "this round's own body is still under what is known"
    knows = Script(coming, specs={2: spec})
    knows.connect(*PEERS[:3])
    knows.ready(*PEERS[:3])
    knows.commit_to_plan(*PEERS[:3])
    knows.reduce()
    assert knows.phase() is Phase.VOTE


def test_an_order_that_a_commit_leaves_no_place_for_is_said() -> None:
    """It was acknowledged, so it isn't dropped without a word."""
    script = training(3)
    second = amended(outer={"lr": 0.5})
    order(script, ordered(2, Kind.AMEND, spec=second))
    body, _ = carrying(LEDGER, ordered(1, Kind.AMEND, spec=amended(work={"h": 2})))
    script.handle(learned(script, body, ordered(1, Kind.AMEND, spec=amended(work={"h": 2}))))
    assert script.rounds.ledger.n_orders == 1
    told = [said.text for said in script.effects(Say)]
    assert any(text.startswith("order 2 (amend) can't be obeyed any more: ") for text in told), told
    assert not script.rounds._pending
    script.wait(5.0)
    assert sum("order 2" in said.text for said in script.effects(Say, script.did)) == 1


def test_an_order_that_the_chain_has_another_one_for_is_said() -> None:
    script = training(3)
    order(script, ordered(1, Kind.AMEND, spec=amended(outer={"lr": 0.5})))
    other = ordered(1, Kind.AMEND, spec=amended(work={"h": 2}), reason="another one")
    script.handle(learned(script, carrying(LEDGER, other)[0], other))
    told = "order 1 (amend) can't be obeyed any more: the chain goes on with another one"
    assert told in [said.text for said in script.effects(Say)]
    assert not script.rounds._pending


def test_an_order_that_the_chain_has_carried_is_not_said() -> None:
    script = training(3)
    mine = ordered(1, Kind.AMEND, round_=40, spec=amended(work={"h": 2}))
    order(script, mine)
    script.handle(learned(script, carrying(LEDGER, mine)[0], mine))
    assert not any("order 1" in said.text for said in script.effects(Say))


def test_an_order_that_was_learned_waits_again_after_a_change_of_branch() -> None:
    """It was given to a leader of before: nobody gives it again, and later ones build on it."""
    script = training(3)
    second = amended(work={"h": 2})
    first = ordered(1, Kind.AMEND, round_=40, spec=second)
    fork = script.rounds.commit
    script.handle(learned(script, carrying(LEDGER, first)[0], first))
    assert script.rounds.ledger.n_orders == 1
    larger = learned(script, body_of(LEDGER, evidence_of(LEDGER, 3)))
    script.handle(Branched(LEDGER, fork, (larger,)))
    assert script.rounds.ledger.n_orders == 0
    assert "order 1 (amend) waits again for a commit" in [said.text for said in script.effects(Say)]
    order(script, ordered(2, Kind.AMEND, spec=amended(second, work={"h": 3})))
    assert [each.order.number for each in script.rounds._pending] == [1, 2]


def learned(script: Script, body: Body, *given: OpenedOrder) -> Learned:
    """A commit that others have made."""
    raw = script.registry.encode(body)
    votes = tuple((peer, Vote(body.epoch, body.round, 0, COORDINATOR, body_hash(raw), DIGEST)) for peer in PEERS[1:3])
    return Learned(Commit(raw, DIGEST, 0, (), ()), body, commit_hash(raw, DIGEST), votes, given)
