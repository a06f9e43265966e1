"""Orders in the books and before the voters: what they make of a run, amendments, and going back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.rounds import leases
from coordinator.rounds.ledger import Ledger, LedgerError, fold
from coordinator.rounds.orders import Orders, order_faults
from coordinator.rounds.voter import body_faults
from protos.messages import Body, PeerId, Standing, StandingChange
from protos.orders import Kind, OpenedOrder
from protos.runspec import RunSpec
from tests.coordinator.rounds.cases import COORDINATOR, NO_HASH, PEERS, SPEC, at_head, body_of, empty_body, evidence_of
from tests.coordinator.rounds.obeyed import LEDGER, PAUSE, RESUME, SPECS, carrying, gone_on, obeyed
from tests.coordinator.rounds.ordered import amended, ordered

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
