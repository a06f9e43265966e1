"""What a voter compares: an honest body passes, and a change of any field of body or evidence does not."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from aggregation.rules import norm_growth
from coordinator.rounds import policy, proposing
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.proposing import Evidence, batches_of, build_body, evidence_faults
from coordinator.rounds.voter import body_faults
from protos.messages import (
    Bandwidth,
    Body,
    Excluded,
    MemberEntry,
    Outcome,
    PeerId,
    PlanMember,
    Range,
    ReducerEntry,
    Seat,
    Standing,
    StandingChange,
)
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
    results_of,
    seated,
)
from tests.sim.options import sim_spec

LEDGER = seated(3)
EVIDENCE = evidence_of(LEDGER, 3)
BODY = body_of(LEDGER, EVIDENCE)
HASHES = proposing.result_hashes(EVIDENCE, SPEC)


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
    "numerics_version": 2,
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


# -- evidence --------------------------------------------------------------------------------------------------------


def with_plan(**changes: Any) -> Evidence:
    return replace(EVIDENCE, plan=replace(EVIDENCE.plan, **changes))


def with_deal(**changes: Any) -> Evidence:
    return replace(EVIDENCE, deal=replace(EVIDENCE.deal, **changes))


def with_results(peer: PeerId, **changes: Any) -> Evidence:
    results = dict(EVIDENCE.results)
    results[peer] = replace(results[peer], **changes)
    return replace(EVIDENCE, results=results)


REDUCER = next(iter(EVIDENCE.results))
FIRST, *REST = EVIDENCE.results[REDUCER].results
MEMBERS = EVIDENCE.plan.members


@pytest.mark.parametrize(
    ("evidence", "why"),
    [
        (with_plan(run=PeerId("another")), "another round"),
        (with_plan(epoch=1), "another round"),
        (with_plan(round=3), "another round"),
        (with_plan(previous=NO_HASH), "another head"),
        (with_plan(anchor_digest=NO_HASH), "another head"),
        (with_plan(spec_revision=2), "another head"),
        (with_plan(codec="fp32"), "codec is not"),
        (with_plan(replicas=2), "the plan's replicas"),
        (with_plan(fragment=Range(0, 7)), "fragment"),
        (with_plan(tau=1), "fragment"),
        (with_plan(privatise="noise"), "fragment"),
        (with_plan(rule="median"), "the plan's rule"),
        (with_plan(f=0), "the plan's rule"),
        (with_plan(fallback="median"), "the plan's rule"),
        (with_plan(degraded="no robustness"), "the plan's rule"),
        (with_plan(members=MEMBERS[::-1]), "not in order"),
        (with_plan(members=(*MEMBERS, MEMBERS[-1])), "not in order"),
        (with_plan(members=MEMBERS[:2]), "someone not planned"),
        (with_plan(members=(replace(MEMBERS[0], sender=False), *MEMBERS[1:])), "someone not planned"),
        (with_plan(members=tuple(replace(m, reducer=False) for m in MEMBERS)), "not planned ones"),
        (with_deal(plan=NO_HASH), "another plan"),
        (with_deal(excluded=(Excluded(PEERS[0], "unloved"),)), "gate"),
        (with_deal(bandwidths=()), "not planned ones"),
        (with_deal(bandwidths=EVIDENCE.deal.bandwidths[::-1]), "not planned ones"),
        (with_deal(bandwidths=(Bandwidth(PEERS[9], 0.0),)), "not planned ones"),
        (with_deal(bandwidths=tuple(replace(b, kib_s=5.0) for b in EVIDENCE.deal.bandwidths)), "measured"),
        (with_deal(number=1), "a number that it can't have"),
        (with_deal(number=2**32), "a number that it can't have"),
        (replace(EVIDENCE, plan_hash=NO_HASH), "another plan"),
        (replace(EVIDENCE, commitments={}), "nobody is included"),
        (with_results(REDUCER, plan=NO_HASH), "another set"),
        (with_results(REDUCER, set_hash=NO_HASH), "another set"),
        (with_results(REDUCER, results=()), "not for the chunks dealt"),
        (with_results(REDUCER, results=(replace(FIRST, chunk=7),)), "not for the chunks dealt"),
        (with_results(REDUCER, results=(replace(FIRST, norm_sq=2.0), *REST)), "longer than any contribution"),
        (with_results(REDUCER, results=(replace(FIRST, norm_sq=float("nan")), *REST)), "longer than any contribution"),
        (replace(EVIDENCE, results={}), "3 chunks have no result"),
    ],
)
def test_evidence_that_is_none(evidence: Evidence, why: str) -> None:
    assert any(why in fault for fault in evidence_faults(evidence, LEDGER, SPEC))
    assert body_faults(BODY, evidence, HASHES, LEDGER, SPEC, COORDINATOR)


def test_plans_name_every_member_once() -> None:
    assert [member.peer for member in MEMBERS] == PEERS[:3]
    assert isinstance(MEMBERS[0], PlanMember)


def saying(evidence: Evidence, peer: PeerId, chunk: int, **changes: Any) -> Evidence:
    """With another word of a reducer on one chunk."""
    results = dict(evidence.results)
    said = tuple(replace(item, **changes) if item.chunk == chunk else item for item in results[peer].results)
    results[peer] = replace(results[peer], results=said)
    return replace(evidence, results=results)


def test_replicas_must_agree() -> None:
    for changes in ({"hash": NO_HASH}, {"norm_sq": 0.25}):
        lie = saying(EVIDENCE, PEERS[1], 2, **changes)
        assert evidence_faults(lie, LEDGER, SPEC) == ["replicas differ on chunk 2: peer11+peer13 against peer12"]
        assert proposing.dissenters(lie) == {PEERS[1]}
    assert proposing.dissenters(EVIDENCE) == set()


def test_where_no_side_has_more_replicas_all_are_suspect() -> None:
    spec = sim_spec(n_chunks=3, rule=RuleSpec(replicas=2))
    ledger = seated(3, spec)
    evidence = evidence_of(ledger, 3, spec)
    assert evidence_faults(evidence, ledger, spec) == []
    assert {len(item.results) for item in evidence.results.values()} == {2}
    peer = next(iter(evidence.results))
    chunk = evidence.results[peer].results[0].chunk
    lie = saying(evidence, peer, chunk, hash=NO_HASH)
    (fault,) = evidence_faults(lie, ledger, spec)
    assert fault.startswith(f"replicas differ on chunk {chunk}: ")
    assert proposing.dissenters(lie) == {
        each for each, r in evidence.results.items() if chunk in [i.chunk for i in r.results]
    }


def test_who_was_dealt_nothing_reports_nothing() -> None:
    """Its word would be in the body, and the rate that it gives itself in the books."""
    more = {**EVIDENCE.results, PEERS[8]: replace(EVIDENCE.results[PEERS[0]], results=(), kib_s=1e9)}
    assert evidence_faults(replace(EVIDENCE, results=more), LEDGER, SPEC) == [
        "results of peer19 are not for the chunks dealt to it"
    ]


def test_one_result_a_chunk_is_enough() -> None:
    """A dead replica is not in the way; a chunk that nobody has reduced is."""
    alone = replace(EVIDENCE, results={PEERS[1]: EVIDENCE.results[PEERS[1]]})
    assert evidence_faults(alone, LEDGER, SPEC) == []
    body = body_of(LEDGER, alone)
    assert body_faults(body, alone, HASHES, LEDGER, SPEC, COORDINATOR) == []
    assert (body.reducers, body.aggregate_norm) == ((ReducerEntry(PEERS[1], 3, 100.0),), BODY.aggregate_norm)


@pytest.mark.parametrize("rule", ["mean", "median", "default", "nnm+trimmed_mean"])
def test_how_long_a_result_may_be(rule: str) -> None:
    spec = sim_spec(n_chunks=3, rule=RuleSpec(name=rule))
    ledger = seated(3, spec)
    evidence = evidence_of(ledger, 3, spec)
    applied = evidence.applied(spec)
    assert applied is not None
    limit = policy.result_norm_limit(spec, evidence.included(), 0, applied, ledger.centre_norm)
    assert limit == pytest.approx((1.02 + 1023**0.5 / 254) * norm_growth(rule, 3, 1))
    for factor, fine in ((0.999, True), (1.001, False)):
        results = {
            peer: replace(
                item,
                results=tuple(replace(result, norm_sq=(factor * limit) ** 2) for result in item.results),
            )
            for peer, item in results_of(evidence, spec).items()
        }
        assert (evidence_faults(replace(evidence, results=results), ledger, spec) == []) is fine


# -- the clip factor and the centre, round after round ---------------------------------------------------------------


def scaled(ledger: Ledger, times: float, spec: RunSpec = SPEC, **changed: Any) -> Evidence:
    """A round whose contributions and whose results are so many times as long as usual."""
    longer: dict[str, Any] = {
        str(peer): commitment(ledger, peer, NO_HASH, spec, norms=(times * times,) * 3, **changed) for peer in PEERS[:3]
    }
    evidence = evidence_of(ledger, 3, spec, **longer)
    results = {
        peer: replace(item, results=tuple(replace(r, norm_sq=r.norm_sq * times * times) for r in item.results))
        for peer, item in evidence.results.items()
    }
    return replace(evidence, results=results)


def test_the_aggregate_is_clipped_once_three_are_known_and_jumps_stay_bounded() -> None:
    ledger, usual = seated(3), BODY.aggregate_norm
    for _ in range(2):
        ledger = after(ledger, body_of(ledger, scaled(ledger, 1.0)))
    third = body_of(ledger, scaled(ledger, 100.0))
    assert third.clip_factor == 1.0  # nothing to compare with yet
    ledger = after(ledger, body_of(ledger, scaled(ledger, 1.0)))
    steps = []
    for _ in range(12):
        evidence = scaled(ledger, 1000.0)
        body = body_of(ledger, evidence)
        hashes = proposing.result_hashes(evidence, SPEC)
        assert body_faults(body, evidence, hashes, ledger, SPEC, COORDINATOR) == []
        assert np.float32(body.clip_factor) == body.clip_factor
        steps.append(body.clip_factor * body.aggregate_norm / usual)
        ledger = after(ledger, body)
        assert ledger.centre_norm == pytest.approx(body.clip_factor * body.aggregate_norm)
    assert steps[:4] == pytest.approx([2, 2, 2, 3])  # the median moves only when half of what is kept is long
    assert steps[-1] < 10


def test_more_steps_are_no_jump() -> None:
    ledger = seated(3)
    for _ in range(3):
        ledger = after(ledger, body_of(ledger, scaled(ledger, 1.0, steps=1)))
    assert body_of(ledger, scaled(ledger, 3.0)).clip_factor == 1.0  # 4^0.8 is 3.03
    assert body_of(ledger, scaled(ledger, 7.0)).clip_factor < 1.0


def test_after_an_empty_round_there_is_no_centre() -> None:
    ledger = after(LEDGER, BODY)
    assert ledger.centre_norm == pytest.approx(BODY.aggregate_norm)
    assert len(ledger.norms) == 1
    evidence = evidence_of(ledger, 3)
    lengthened = replace(
        evidence,
        results={
            peer: replace(item, results=tuple(replace(r, norm_sq=2.0) for r in item.results))
            for peer, item in evidence.results.items()
        },
    )
    assert evidence_faults(lengthened, ledger, SPEC) == []  # the centre may be longer than all contributions
    ledger = after(ledger, empty_body(ledger, PEERS[:3]))
    assert (ledger.centre_norm, len(ledger.norms)) == (0.0, 1)
    evidence = evidence_of(ledger, 3)
    lengthened = replace(
        evidence,
        results={
            peer: replace(item, results=tuple(replace(r, norm_sq=2.0) for r in item.results))
            for peer, item in evidence.results.items()
        },
    )
    assert "longer than any contribution" in evidence_faults(lengthened, ledger, SPEC)[0]


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
