"""What a voter compares: an honest body passes, and a change of any field does not."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from coordinator.rounds import policy, proposing
from coordinator.rounds.proposing import Evidence, batches_of, build_body
from coordinator.rounds.voter import body_faults
from protos.messages import Body, MemberEntry, Outcome, PeerId, Range, ReducerEntry, Seat, Standing, StandingChange
from protos.runspec import MembershipSpec, RuleSpec, RunSpec
from tests.coordinator.rounds.cases import (
    COORDINATOR,
    NO_HASH,
    PEERS,
    SPEC,
    after,
    beginning,
    body_of,
    commitment,
    empty_body,
    evidence_of,
    seated,
)
from tests.coordinator.rounds.honest import BODY, EVIDENCE, HASHES, LEDGER
from tests.sim.options import sim_spec


def faults(body: Body, evidence: Evidence | None = EVIDENCE, hashes: tuple[bytes, ...] = HASHES) -> list[str]:
    return body_faults(body, evidence, hashes, LEDGER, SPEC, COORDINATOR)


def test_an_honest_body_has_no_faults() -> None:
    assert faults(BODY) == []
    assert (BODY.outcome, BODY.reason) == (Outcome.COMMITTED, "")
    assert [entry.counted for entry in BODY.members] == [True] * 3
    assert batches_of(BODY) == 12
    assert BODY.returned == ()
    assert [entry.n_chunks for entry in BODY.reducers] == [3] * 3  # everyone reduces what is so small
    assert (BODY.rule, BODY.f, BODY.fallback, BODY.degraded, BODY.clip_factor) == ("default", 1, "", "", 1.0)
    assert BODY.aggregate_norm == pytest.approx(1.5**0.5)


OTHER: dict[str, Any] = {
    "run": PeerId("another"),
    "epoch": 1,
    "round": 3,
    "previous": NO_HASH,
    "attempt": 1,
    "leader": PEERS[0],
    "spec_revision": 2,
    "fragment": Range(0, 1),
    "tau": 1,
    "anchor_digest": NO_HASH,
    "outcome": Outcome.EMPTY,
    "reason": "because",
    "members": BODY.members[:2],
    "reducers": (ReducerEntry(PEERS[0], 3, 1.0),),
    "rule": "median",
    "f": 0,
    "fallback": "median",
    "degraded": "no robustness",
    "codec": "fp32",
    "results_root": NO_HASH,
    "clip_factor": 0.5,
    "aggregate_norm": 0.0,
    "numerics_version": 9,
    "h": 5,
    "lr": 1.0,
    "outer_lr": 0.1,
    "outer_momentum": 0.1,
    "returned": (Range(0, 1),),
    "standing": (StandingChange(PEERS[0], Standing.BANNED, ""),),
    "orders": (b"order",),
    "seats": (*BODY.seats[:2], Seat(PEERS[2], (Range(100, 4),), 1)),
    "voters": BODY.voters[1:],
    "ledger_hash": NO_HASH,
}


def test_every_field_of_a_body_is_tampered_with_below() -> None:
    assert set(OTHER) == {field.name for field in fields(Body)}


@pytest.mark.parametrize("name", sorted(OTHER))
def test_a_changed_field_is_refused(name: str) -> None:
    assert getattr(BODY, name) != OTHER[name]
    assert faults(replace(BODY, **{name: OTHER[name]}))


MEMBER: dict[str, Any] = {
    "peer": PEERS[9],
    "counted": False,
    "reason": "late",
    "steps": 3,
    "tokens": 1,
    "weight": 1.0,
    "used": (),
    "commitment_root": NO_HASH,
    "delta_norm": 0.0,
    "sum_lr": 0.0,
    "inner_loss": 0.0,
}


@pytest.mark.parametrize("name", sorted(MEMBER))
def test_a_changed_entry_of_a_member_is_refused(name: str) -> None:
    assert set(MEMBER) == {field.name for field in fields(MemberEntry)}
    entry = replace(BODY.members[0], **{name: MEMBER[name]})
    assert faults(replace(BODY, members=(entry, *BODY.members[1:])))


@pytest.mark.parametrize(
    "seats",
    [
        (Seat(PEERS[0], (Range(12, 12),), 1),),
        tuple(replace(seat, batch_scale=2) for seat in BODY.seats),
        (*BODY.seats, BODY.seats[0]),
        tuple(reversed(BODY.seats)),
        (replace(BODY.seats[0], ranges=(Range(0, 4),)), *BODY.seats[1:]),
        (replace(BODY.seats[0], ranges=(Range(12, 2),)), *BODY.seats[1:]),
    ],
    ids=["greedy", "scaled", "doubled", "out of order", "used batches", "short"],
)
def test_seats_that_policy_does_not_give(seats: tuple[Seat, ...]) -> None:
    assert faults(replace(BODY, seats=seats))


def test_a_leader_may_choose_whom_it_seats_and_say_who_left() -> None:
    fewer = body_of(LEDGER, EVIDENCE, seats=PEERS[1:3], left=[PEERS[0]])
    assert faults(fewer) == []
    assert fewer.voters == (*PEERS[1:3], COORDINATOR)
    more = body_of(LEDGER, EVIDENCE, seats=[*PEERS[:3], PEERS[7]])
    assert faults(more) == []
    assert [seat.peer for seat in more.seats] == [*PEERS[:3], PEERS[7]]


def test_a_voter_with_a_seat_is_not_dropped() -> None:
    dropped = body_of(LEDGER, EVIDENCE, seats=PEERS[:3], left=[PEERS[0]])
    assert "voters is not what the round's evidence makes it" in faults(dropped)


def test_bodies_come_with_their_evidence() -> None:
    assert faults(BODY, None, ()) != []
    assert faults(BODY, None, HASHES) == ["an empty round has no results"]
    assert faults(BODY, EVIDENCE, HASHES[:2]) == ["the result hashes are not those that the reducers signed"]
    assert faults(BODY, EVIDENCE, (NO_HASH, *HASHES[1:])) == [
        "the result hashes are not those that the reducers signed"
    ]
    assert faults(empty_body(LEDGER, PEERS[:3]), EVIDENCE)


def test_an_empty_round_keeps_the_anchor_and_the_leases_and_has_a_reason() -> None:
    body = empty_body(LEDGER, PEERS[:3])
    assert body_faults(body, None, (), LEDGER, SPEC, COORDINATOR) == []
    assert (body.returned, body.seats) == ((), LEDGER.seats)
    assert empty_body(LEDGER, PEERS[1:4]).returned == (Range(0, 4),)
    assert body.results_root == NO_HASH
    assert after(LEDGER, body).voters == LEDGER.voters
    silent = replace(body, reason="")
    assert body_faults(silent, None, (), LEDGER, SPEC, COORDINATOR) == ["an empty round without a reason"]


@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("rule", ["mean", "median", "bulyan", "arc+nnm+trimmed_mean"])
@pytest.mark.parametrize("replicas", [1, 2, "auto"])
def test_honest_bodies_of_other_runs(n: int, rule: str, replicas: Any) -> None:
    spec = sim_spec(n_chunks=3, rule=RuleSpec(name=rule, f_max=1, replicas=replicas))
    ledger = seated(n, spec)
    for _ in range(2):
        evidence = evidence_of(ledger, n, spec)
        body = body_of(ledger, evidence, spec)
        hashes = proposing.result_hashes(evidence, spec)
        assert body_faults(body, evidence, hashes, ledger, spec, COORDINATOR) == []
        ledger = after(ledger, body)
    assert ledger.n_committed == 2


def test_partial_work_absence_and_exclusion_are_in_the_books() -> None:
    some = commitment(LEDGER, PEERS[0], NO_HASH, steps=1, norms=(0.3,) * 3)
    wrong = commitment(LEDGER, PEERS[1], NO_HASH, tokens=1)
    ledger = seated(4)
    evidence = evidence_of(ledger, 4, peer11=some, peer12=wrong, peer13=None)
    body = body_of(ledger, evidence)
    assert body_faults(
        body, evidence, proposing.result_hashes(evidence, SPEC), ledger, SPEC, COORDINATOR
    ) == []  # fmt: skip
    by_peer = {entry.peer: entry for entry in body.members}
    assert (by_peer[PEERS[0]].counted, by_peer[PEERS[0]].used) == (True, (Range(0, 1),))
    assert by_peer[PEERS[1]].reason == "1 tokens claimed for 4 batches"
    assert by_peer[PEERS[2]].reason == "no commitment in time"
    assert (by_peer[PEERS[1]].used, by_peer[PEERS[1]].weight) == ((), 0.0)
    assert body.returned == (Range(1, 11),)
    assert body.voters == (PEERS[0], PEERS[1], PEERS[3], COORDINATOR)  # who signed, counted or not
    assert after(ledger, body).tokens == 5 * 8


def test_a_norm_that_overflows_is_out_and_can_be_written_down() -> None:
    huge = commitment(LEDGER, PEERS[0], NO_HASH, norms=(1.7e308,) * 3)
    evidence = evidence_of(LEDGER, 3, peer11=huge)
    body = body_of(LEDGER, evidence)
    entry = body.members[0]
    assert (entry.counted, entry.reason, entry.delta_norm) == (False, "a norm that no values have", 0.0)


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_body_that_can_not_be_built_is_refused() -> None:
    overlapping = replace(BODY, seats=(Seat(PEERS[0], (Range(0, 4),), 1), Seat(PEERS[0], (Range(0, 4),), 1)))
    assert faults(overlapping)


def test_a_run_that_refuses_degraded_rounds() -> None:
    spec: RunSpec = sim_spec(n_chunks=3, rule=RuleSpec(degraded=False), membership=MembershipSpec())
    ledger = seated(2, spec)
    evidence = evidence_of(ledger, 2, spec)
    committed = build_body(
        ledger,
        spec,
        COORDINATOR,
        attempt=0,
        leader=COORDINATOR,
        evidence=evidence,
        reason="",
        seated=PEERS[:2],
        left=(),
    )
    assert body_faults(committed, evidence, proposing.result_hashes(evidence, spec), ledger, spec, COORDINATOR)
    reason = policy.refused(spec, evidence.included(), ())
    empty = build_body(
        ledger,
        spec,
        COORDINATOR,
        attempt=0,
        leader=COORDINATOR,
        evidence=None,
        reason=reason,
        seated=PEERS[:2],
        left=(),
    )
    assert body_faults(empty, None, (), ledger, spec, COORDINATOR) == []


def test_the_first_round_seats_whoever_the_leader_names() -> None:
    ledger = beginning()
    body = empty_body(ledger, PEERS[:3])
    assert body_faults(body, None, (), ledger, SPEC, COORDINATOR) == []
    assert body.voters == (*PEERS[:3], COORDINATOR)
