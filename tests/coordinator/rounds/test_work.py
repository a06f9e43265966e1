"""What each seat is asked for, and how leases go on over empty rounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds import leases, policy, proposing, work
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.voter import body_faults
from coordinator.rounds.work import Work
from protos.messages import Body, Outcome, PeerId, Range, Seat
from protos.runspec import RunSpec, WorkSpec
from tests.coordinator.rounds.cases import (
    COORDINATOR,
    NO_HASH,
    PEERS,
    after,
    beginning,
    commitment,
    evidence_of,
    seated,
)
from tests.sim.options import sim_spec

AIMED = sim_spec(n_chunks=3, work=WorkSpec(batch_tokens=8, h=10, steps_min=3, round_s=10.0))


@pytest.mark.parametrize(
    ("tokens_per_s", "asks"),
    [
        (0.0, Work(10)),  # nobody knows
        (8.0, Work(10)),
        (7.7, Work(10)),  # half a second late, as much as the deadline grants
        (7.0, Work(8)),  # fewer steps, not a smaller batch
        (2.4, Work(3)),
        (2.39, None),
        (15.9, Work(10)),
        (16.0, Work(10, 2)),
        (32.1, Work(10, 4)),
        (1e9, Work(10, 4)),  # batch_scale_max
        (1.7e308, Work(10, 4)),  # a figure that its member made up
        (5e-324, None),
    ],
)
def test_what_a_member_of_a_speed_is_asked_for(tokens_per_s: float, asks: Work | None) -> None:
    assert work.work_for(tokens_per_s, AIMED) == asks


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_the_policy_is_monotone_and_within_what_voters_allow(one: float, other: float) -> None:
    slow, fast = sorted((one, other))
    slower, faster = work.work_for(slow, AIMED), work.work_for(fast, AIMED)
    for asks in (slower, faster):
        if asks is not None:
            work.check(asks, None, AIMED)
    if slow > 0 and slower is not None:
        assert faster is not None
        assert (slower.steps, slower.batch_scale) <= (faster.steps, faster.batch_scale)
        took_s = slower.steps * slower.batch_scale * 8 / slow
        assert took_s <= work.LATE * 10.0 * (1 + 1e-9)


def test_without_an_aim_everybody_has_h_steps() -> None:
    spec = sim_spec(work=WorkSpec(batch_tokens=8, h=10, steps_min=3))
    assert {work.work_for(speed, spec) for speed in (0.0, 0.01, 8.0, 1e9)} == {Work(10)}


def test_who_is_too_slow_reads_its_figure_and_the_need() -> None:
    assert work.too_slow(2.4, AIMED) == ""
    assert work.too_slow(1.5, AIMED) == (
        "this machine trains 1.5 tokens/s, and this run needs 2.4: 3 steps of 8 tokens in 10 s"
    )


@pytest.mark.parametrize(
    ("asks", "why"),
    [
        (Work(11), "11 steps"),
        (Work(2), "2 steps"),
        (Work(10, 5), "batch scale of 5"),
        (Work(10, 0), "batch scale of 0"),
        (Work(9, 2), "9 steps"),
    ],
)
def test_what_a_leader_may_not_ask_for(asks: Work, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        work.check(asks, None, AIMED)


@pytest.mark.parametrize("asks", [Work(9), Work(41), Work(20, 2)])
def test_what_a_leader_may_not_make_of_a_lease_that_goes_on(asks: Work) -> None:
    with pytest.raises(ValueError, match="a lease"):
        work.check(asks, Seat(PEERS[0], (Range(0, 10),), 1), AIMED)
    work.check(Work(40), Seat(PEERS[0], (Range(0, 10),), 1), AIMED)


def test_a_lease_grows_by_what_was_done_of_it() -> None:
    seat = Seat(PEERS[0], (Range(0, 20),), 2)
    assert work.going_on(seat, Work(10), 0, AIMED) == Work(10, 2)
    assert work.going_on(seat, Work(10, 4), 7, AIMED) == Work(17, 2)  # the scale stays
    assert work.going_on(seat, Work(10), 99, AIMED) == Work(20, 2)
    assert work.going_on(Seat(PEERS[0], (Range(0, 38),), 1), Work(10), 38, AIMED) == Work(40, 1)  # 4 H, then it waits


def test_a_seat_of_part_of_a_step_is_none() -> None:
    with pytest.raises(ValueError, match="no steps of 3"):
        work.of(Seat(PEERS[0], (Range(0, 10),), 3))
    with pytest.raises(ValueError, match="no steps of 0"):
        work.of(Seat(PEERS[0], (Range(0, 10),), 0))


# -- leases over empty and committed rounds ---------------------------------------------------------------------------


def test_an_empty_round_keeps_and_extends_leases() -> None:
    ledger = seated(3)
    body = empty_of(ledger, {PEERS[0]: Work(7), PEERS[1]: Work(4), PEERS[3]: Work(4)})
    first, second, third = body.seats
    assert first == Seat(PEERS[0], (Range(0, 4), Range(8, 3)), 1)  # what the one who left had
    assert second == ledger.seats[1]
    assert third.peer == PEERS[3]
    assert body.returned == ledger.seats[2].ranges
    assert body_faults(body, None, (), ledger, sim_spec(n_chunks=3), COORDINATOR) == []


def test_voters_refuse_a_lease_that_does_not_go_on() -> None:
    ledger, spec = seated(2), sim_spec(n_chunks=3)
    with pytest.raises(ValueError, match="goes on with 17"):
        empty_of(ledger, {PEERS[0]: Work(17)})
    good = empty_of(ledger, {PEERS[0]: Work(8)})
    (seat,) = good.seats
    for bad in (Seat(PEERS[0], seat.ranges, 3), Seat(PEERS[0], (Range(4, 8),), 1), Seat(PEERS[0], (), 1)):
        body = Body(**{**{f: getattr(good, f) for f in Body.__dataclass_fields__}, "seats": (bad,)})
        assert body_faults(body, None, (), ledger, spec, COORDINATOR)


def empty_of(ledger: Ledger, works: dict[PeerId, Work], spec: RunSpec | None = None) -> Body:
    return proposing.build_body(
        ledger, spec or sim_spec(n_chunks=3), COORDINATOR, attempt=0, leader=COORDINATOR, evidence=None, reason="why",
        seated=works, left=(),
    )  # fmt: skip


MEMBERS = st.tuples(st.integers(0, 4), st.integers(0, 40), st.integers(0, 50))
ROUNDS = st.lists(
    st.tuples(st.booleans(), st.lists(MEMBERS, max_size=5)),
    min_size=1,
    max_size=7,
)


@given(ROUNDS)
def test_over_any_rounds_no_batch_is_lost_or_used_twice(rounds: list[tuple[bool, list[tuple[int, int, int]]]]) -> None:
    """Each round: whether it is empty, and per peer what is asked of it and how much it uses if it counts."""
    spec = AIMED.model_copy(update={"rule": AIMED.rule.model_copy(update={"name": "mean"})})
    ledger, used = beginning(), list[Range]()
    for empty, members in rounds:
        works: dict[PeerId, Work] = {}
        for number, speed, done in members:
            peer = PEERS[number]
            asks = work.work_for(float(speed), spec) or Work(3)
            seat = ledger.seat_of(peer)
            works[peer] = work.going_on(seat, asks, done, spec) if empty and seat is not None else asks
        before = {seat.peer: seat for seat in ledger.seats}
        if empty:
            body = empty_of(ledger, works, spec)
            for seat in body.seats:
                held = before.get(seat.peer)
                assert held is None or leases.begins_with(seat.ranges, held.ranges)
                assert work.asked(seat) <= 4 * spec.work.h
        else:
            spent = {PEERS[number]: min(done, work.asked(before.get(PEERS[number]))) for number, _, done in members}
            prefixes = {
                peer: leases.prefix(before[peer].ranges, n * before[peer].batch_scale)
                for peer, n in spent.items()
                if peer in before and n >= spec.work.steps_min
            }
            returned = policy.returned(ledger, prefixes)
            seats, _ = policy.seats_for(ledger, returned, works, spec)
            used += [r for ranges in prefixes.values() for r in ranges]
            body = committed_of(ledger, returned, seats)
        ledger = after(ledger, body)
        everything = leases.normalise((*ledger.pool, *used, *(r for seat in ledger.seats for r in seat.ranges)))
        assert everything in ((), (Range(0, ledger.cursor),))


def committed_of(ledger: Ledger, returned: tuple[Range, ...], seats: tuple[Seat, ...]) -> Body:
    """A committed body as far as its leases go."""
    body = empty_of(ledger, {})
    fields = {f: getattr(body, f) for f in Body.__dataclass_fields__}
    return Body(**{**fields, "outcome": Outcome.COMMITTED, "returned": returned, "seats": seats, "reason": ""})


# -- what counts ------------------------------------------------------------------------------------------------------


def test_fewer_steps_than_the_run_wants_do_not_count_and_are_no_fault() -> None:
    spec = sim_spec(n_chunks=3, work=WorkSpec(batch_tokens=8, h=4, steps_min=3))
    ledger = seated(4, spec)
    few = commitment(ledger, PEERS[0], NO_HASH, spec, steps=2)
    evidence = evidence_of(ledger, 4, spec, peer11=few)
    assert [(entry.peer, entry.reason) for entry in evidence.deal.excluded] == [(PEERS[0], policy.TOO_FEW_STEPS)]
    without = {peer: commitment for peer, commitment in evidence.commitments.items() if peer != PEERS[0]}
    assert policy.applied_rule(spec, evidence.included(), evidence.deal.excluded) == policy.applied_rule(
        spec, without, ()
    )


def test_a_commitment_of_larger_batches_weighs_its_tokens() -> None:
    spec = AIMED
    ledger = after(beginning(), empty_of(beginning(), {PEERS[0]: Work(10, 4), PEERS[1]: Work(10)}, spec))
    seat = ledger.seat_of(PEERS[0])
    assert seat is not None
    made = commitment(
        ledger, PEERS[0], NO_HASH, spec, steps=9, tokens=36 * 8, used=leases.prefix(seat.ranges, 36), sum_lr=0.09
    )
    assert policy.fault_of(made, seat, 0, spec) == ""
    both = {PEERS[0]: made, PEERS[1]: commitment(ledger, PEERS[1], NO_HASH, spec)}
    assert policy.weights(both, spec) == {PEERS[0]: 288.0, PEERS[1]: 80.0}
    over = commitment(ledger, PEERS[0], NO_HASH, spec, steps=10, tokens=36 * 8, used=leases.prefix(seat.ranges, 36))
    assert "10 steps claimed for 36 batches" in policy.fault_of(over, seat, 0, spec)
