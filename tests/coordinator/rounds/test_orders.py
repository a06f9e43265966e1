"""Orders in the books, before the voters, and at the leader."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.rounds import leases
from coordinator.rounds.attempt import Phase
from coordinator.rounds.events import Branched, Close, Committed, Ended, Heard, Learned, Ordered, Say
from coordinator.rounds.ledger import Ledger, LedgerError, fold
from coordinator.rounds.orders import Orders, order_faults
from coordinator.rounds.proposing import build_body
from coordinator.rounds.voter import body_faults
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
    Standing,
    StandingChange,
    Vote,
)
from protos.orders import Kind, OpenedOrder
from protos.runspec import RunSpec
from tests.coordinator.rounds.cases import (
    COORDINATOR,
    NO_HASH,
    PEERS,
    SPEC,
    after,
    at_head,
    body_of,
    empty_body,
    evidence_of,
    seated,
)
from tests.coordinator.rounds.leader_script import DIGEST, Script, training
from tests.coordinator.rounds.ordered import amended, ordered

SPECS = {SPEC.revision: SPEC}
LEDGER = seated(3)
PAUSE, RESUME = ordered(1, Kind.PAUSE), ordered(2, Kind.RESUME)


def carrying(ledger: Ledger, *given: OpenedOrder, n: int = 3, **more: Any) -> tuple[Body, Orders]:
    """An empty body with these orders, as a leader makes it."""
    orders = Orders(given, more.pop("target", None), more.pop("specs", SPECS))
    body = build_body(
        ledger, more.pop("spec", SPEC), COORDINATOR, attempt=0, leader=COORDINATOR, evidence=None, reason="by order",
        seated=more.pop("seated", PEERS[:n]), left=(), orders=orders,
    )  # fmt: skip
    return body, orders


def obeyed(ledger: Ledger, *given: OpenedOrder, **more: Any) -> Ledger:
    body, orders = carrying(ledger, *given, **more)
    folded = fold(ledger, body, orders.given, orders.target)
    assert folded.hash() == body.ledger_hash
    return at_head(folded, f"{given}")


# -- the books ---------------------------------------------------------------------------------------------------


def test_the_books_keep_what_orders_make_of_the_run() -> None:
    paused = obeyed(LEDGER, PAUSE)
    assert paused.paused
    assert paused.n_orders == 1
    assert Ledger.from_bytes(paused.to_bytes()).at(paused.head, paused.digest) == paused
    ended = obeyed(paused, ordered(3, Kind.END, round_=9, reason="enough"))
    assert (ended.ends_after, ended.end_reason, ended.n_orders) == (9, "enough", 3)
    again = obeyed(ended, ordered(4, Kind.RESUME))
    assert (again.paused, again.ends_after, again.end_reason) == (False, 0, "")
    assert obeyed(LEDGER, ordered(1, Kind.END)).ends_after == LEDGER.round + 1


def test_leases_go_on_over_a_pause_and_do_not_grow() -> None:
    assert obeyed(obeyed(LEDGER, PAUSE), RESUME).seats == LEDGER.seats


@pytest.mark.parametrize("raw", [b'{"n_orders":1}', b"[]"])
def test_books_without_the_fields_of_orders_are_none(raw: bytes) -> None:
    with pytest.raises(LedgerError):
        Ledger.from_bytes(raw)


def test_a_body_is_not_folded_without_its_orders_opened() -> None:
    body, orders = carrying(LEDGER, PAUSE)
    with pytest.raises(LedgerError, match="other orders"):
        fold(LEDGER, body)
    with pytest.raises(LedgerError, match="other orders"):
        fold(LEDGER, body, (ordered(1, Kind.RESUME),))
    assert fold(LEDGER, body, orders.given).paused


def test_an_order_is_obeyed_once() -> None:
    paused = obeyed(LEDGER, PAUSE)
    with pytest.raises(LedgerError, match="order 1 is an old one"):
        obeyed(paused, PAUSE)


def test_who_is_evicted_has_neither_seat_nor_vote_and_may_be_taken_back() -> None:
    body, orders = carrying(LEDGER, ordered(1, Kind.EVICT, peer=PEERS[1], reason="it lies"))
    assert body.standing == (StandingChange(PEERS[1], Standing.BANNED, "it lies"),)
    out = at_head(fold(LEDGER, body, orders.given), "out")
    assert [seat.peer for seat in out.seats] == [PEERS[0], PEERS[2]]
    assert PEERS[1] not in out.voters
    assert out.is_banned(PEERS[1])
    lease = LEDGER.seat_of(PEERS[1])
    assert lease is not None
    assert leases.count(out.pool) == leases.count(lease.ranges)
    with pytest.raises(LedgerError, match="banned"):
        fold(out, replace(empty_body(out, [PEERS[0]]), voters=(PEERS[1], COORDINATOR)))
    assert PEERS[1] not in {seat.peer for seat in empty_body(out, PEERS[:3]).seats}
    back = obeyed(out, ordered(2, Kind.RESUME, peer=PEERS[1]))
    assert back.standing[PEERS[1]] is Standing.NEWCOMER
    assert back.seat_of(PEERS[1]) is not None


# -- amendments --------------------------------------------------------------------------------------------------


def test_an_amendment_is_in_force_from_its_round_and_seats_are_made_by_it() -> None:
    spec = amended(work={"h": 2})
    order = ordered(1, Kind.AMEND, round_=LEDGER.round + 3, spec=spec)
    first = obeyed(LEDGER, order)
    assert (first.spec_revision, first.next_revision, first.next_from) == (1, 2, LEDGER.round + 3)
    assert first.newest_revision == 2
    assert first.seats == LEDGER.seats
    specs = {**SPECS, 2: spec}
    second = obeyed(first, specs=specs)
    assert (second.spec_revision, second.next_revision) == (2, 0)  # round 4 is the next
    assert all(leases.count(seat.ranges) == 2 for seat in second.seats)
    third, _ = carrying(second, spec=spec, specs=specs)
    assert (third.spec_revision, third.h) == (2, 2)
    with pytest.raises(LedgerError, match="revision 1 of the RunSpec is not in force"):
        fold(second, replace(third, spec_revision=1))


def test_an_amendment_at_once_is_in_force_in_the_next_round() -> None:
    spec = amended(work={"h": 2})
    now = obeyed(LEDGER, ordered(1, Kind.AMEND, spec=spec))
    assert now.spec_revision == 2
    assert all(leases.count(seat.ranges) == 2 for seat in now.seats)


def test_without_the_revision_in_force_no_body_is_built() -> None:
    waiting = obeyed(LEDGER, ordered(1, Kind.AMEND, round_=LEDGER.round + 3, spec=amended(work={"h": 2})))
    with pytest.raises(ValueError, match="revision 2 of the RunSpec is not known"):
        carrying(waiting)


@pytest.mark.parametrize(
    ("order", "why"),
    [
        (ordered(1, Kind.AMEND, spec=SPEC), "revision 1 doesn't follow revision 1"),
        (ordered(1, Kind.AMEND, spec=amended(codec={"block": 32})), "codec.block can't change"),
        (ordered(1, Kind.AMEND, spec=amended(rule={"name": "mode"})), "rule.name is 'mode'"),
        (ordered(0, Kind.PAUSE), "old one"),
        (ordered(5000, Kind.PAUSE), "too far ahead"),
        (ordered(1, Kind.PAUSE, run=PeerId("another")), "another run"),
        (ordered(1, Kind.EVICT, peer=COORDINATOR), "can't be evicted"),
        (ordered(1, Kind.ROLLBACK, round_=7, head=NO_HASH), "still to come"),
    ],
)  # fmt: skip
def test_orders_that_can_not_be_obeyed(order: OpenedOrder, why: str) -> None:
    assert why in order_faults([order], LEDGER, SPECS)[0]


def test_a_rollback_goes_alone_and_orders_go_up() -> None:
    back = ordered(2, Kind.ROLLBACK, round_=1, head=NO_HASH)
    assert "alone" in order_faults([PAUSE, back], LEDGER, SPECS)[0]
    assert "old one" in order_faults([RESUME, PAUSE], LEDGER, SPECS)[0]
    assert order_faults([PAUSE, RESUME], LEDGER, SPECS) == []
    two = [ordered(1, Kind.AMEND, spec=amended(work={"h": 2}))]
    two.append(ordered(2, Kind.AMEND, spec=amended(two[0].spec or SPEC, work={"h": 3})))
    assert order_faults(two, LEDGER, SPECS) == []


# -- going back --------------------------------------------------------------------------------------------------


def gone_on(ledger: Ledger, n: int = 3) -> Ledger:
    """A committed round more."""
    return after(ledger, body_of(ledger, evidence_of(ledger, n)))


def test_a_rollback_restores_the_books_and_numbers_go_on() -> None:
    target = gone_on(LEDGER)
    paused = obeyed(gone_on(gone_on(target)), PAUSE)
    back = ordered(2, Kind.ROLLBACK, round_=target.round, head=target.head)
    body, orders = carrying(paused, back, target=target)
    assert (body.round, body.previous, body.anchor_digest) == (paused.round + 1, paused.head, target.digest)
    restored = fold(paused, body, orders.given, target)
    assert restored.hash() == body.ledger_hash
    for name in ("tokens", "credit", "nominal_step", "n_committed", "norms"):
        assert getattr(restored, name) == getattr(target, name), name
    assert restored.paused
    assert restored.n_orders == 2
    assert restored.rollbacks == 1
    assert restored.round == paused.round + 1
    assert {*restored.since} == {*PEERS[:3]}
    assert restored.voters == paused.voters
    # What was leased since the target is free again, and so is what was leased there.
    leased = [r for seat in restored.seats for r in seat.ranges]
    free = leases.normalise([*leased, *restored.pool])
    assert leases.count(free) + target.tokens // SPEC.work.batch_tokens == restored.cursor
    assert restored.cursor == target.cursor


@pytest.mark.parametrize("changes", [{"head": NO_HASH}, {"round_": 1}])
def test_a_rollback_needs_the_very_books_that_it_names(changes: dict[str, Any]) -> None:
    target = gone_on(LEDGER)
    now = gone_on(target)
    named: dict[str, Any] = {"round_": target.round, "head": target.head} | changes
    back = ordered(1, Kind.ROLLBACK, **named)
    with pytest.raises(LedgerError, match="go back"):
        carrying(now, back, target=target)
    with pytest.raises(LedgerError, match="go back"):
        carrying(now, ordered(1, Kind.ROLLBACK, round_=target.round, head=target.head))


# -- the voters --------------------------------------------------------------------------------------------------


def faults(body: Body, orders: Orders, ledger: Ledger = LEDGER, spec: RunSpec = SPEC) -> list[str]:
    return body_faults(body, None, (), ledger, spec, COORDINATOR, orders)


@pytest.mark.parametrize(
    "order",
    [
        PAUSE,
        ordered(1, Kind.END, round_=4),
        ordered(1, Kind.EVICT, peer=PEERS[0]),
        ordered(1, Kind.AMEND, spec=amended(outer={"lr": 0.5})),
    ],
)
def test_a_voter_takes_what_a_leader_makes_of_an_order(order: OpenedOrder) -> None:
    body, orders = carrying(LEDGER, order)
    assert faults(body, orders) == []


def test_a_voter_takes_a_rollback_to_the_state_that_the_order_names() -> None:
    target = gone_on(LEDGER)
    now = gone_on(target)
    body, orders = carrying(now, ordered(1, Kind.ROLLBACK, round_=target.round, head=target.head), target=target)
    assert faults(body, orders, now) == []
    assert faults(replace(body, anchor_digest=now.digest), orders, now) != []
    assert "leases don't fit" in faults(body, replace(orders, target=None), now)[0]


def test_a_voter_refuses_what_the_orders_do_not_say() -> None:
    body, orders = carrying(LEDGER, ordered(1, Kind.EVICT, peer=PEERS[0], reason="it lies"))
    assert faults(body, Orders(specs=SPECS)) == ["the body carries other orders than have been opened"]
    assert faults(replace(body, orders=()), Orders(specs=SPECS)) != []
    assert faults(replace(body, standing=()), orders) != []
    extra = StandingChange(PEERS[1], Standing.BANNED, "for fun")
    assert faults(replace(body, standing=(*body.standing, extra)), orders) != []
    old, given = carrying(LEDGER, ordered(1, Kind.PAUSE))
    assert "old one" in faults(old, given, replace(LEDGER, n_orders=1))[0]


def test_while_the_run_is_paused_no_contribution_is_voted_for() -> None:
    paused = obeyed(LEDGER, PAUSE)
    evidence = evidence_of(paused, 3)
    body = body_of(paused, evidence)
    assert body_faults(body, evidence, (), paused, SPEC, COORDINATOR) == ["the operator has paused the run"]
    going_on, orders = carrying(paused, RESUME)
    assert faults(going_on, orders, paused) == []


# -- the leader --------------------------------------------------------------------------------------------------


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
