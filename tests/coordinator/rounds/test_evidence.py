"""Evidence that a voter takes, and what is none: plans, deals, results and redeals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aggregation.rules import norm_growth
from coordinator.rounds import policy, proposing, redealing
from coordinator.rounds.proposing import Evidence, evidence_faults
from coordinator.rounds.voter import body_faults
from protos.messages import Bandwidth, Deal, Excluded, Moved, PeerId, PlanMember, Range, Redeal, ReducerEntry
from protos.runspec import RuleSpec
from tests.coordinator.rounds.cases import COORDINATOR, NO_HASH, PEERS, SPEC, body_of, evidence_of, results_of, seated
from tests.coordinator.rounds.honest import BODY, EVIDENCE, HASHES, LEDGER
from tests.coordinator.rounds.mishaps import ONCE
from tests.sim.options import sim_spec


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


# -- redeals ------------------------------------------------------------------------------------------------------


def after_redeal(**changes: Any) -> Evidence:
    """What a round of 5 has left that lost its last sender, which reduced as well."""
    ledger = seated(5, ONCE)
    evidence = evidence_of(ledger, 5, ONCE)
    lost = Excluded(PEERS[4], "lost in the exchange: gone")
    redeal = replace(Redeal(evidence.plan_hash, 1, (lost,), (PEERS[4],), (), 1, 10.0), **changes)
    changed = replace(evidence, redeal=redeal, results={})
    try:
        return replace(changed, results=results_of(changed, ONCE))
    except IndexError:
        return changed


def test_a_redeal_that_holds() -> None:
    ledger, evidence = seated(5, ONCE), after_redeal()
    assert evidence_faults(evidence, ledger, ONCE) == []
    body = body_of(ledger, evidence, ONCE)
    hashes = proposing.result_hashes(evidence, ONCE)
    assert body_faults(body, evidence, hashes, ledger, ONCE, COORDINATOR) == []
    assert {entry.peer for entry in body.members if entry.counted} == set(PEERS[:4])
    assert evidence.set_hash() != replace(evidence, redeal=None).set_hash()
    assert evidence_faults(replace(evidence, redeal=None), ledger, ONCE) != []
    without = body_of(ledger, evidence_of(ledger, 5, ONCE), ONCE)
    assert body_faults(without, evidence, hashes, ledger, ONCE, COORDINATOR) != []


LOST = Excluded(PEERS[4], "lost in the exchange: gone")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"plan": NO_HASH}, "another plan"),
        ({"number": 0}, "no redeal's number"),
        ({"number": redealing.REDEALS_MOST + 1}, "no redeal's number"),
        ({"excluded": (Excluded(PEERS[9], "?"),)}, "not included senders"),
        ({"excluded": (LOST, LOST)}, "not included senders"),
        ({"excluded": tuple(Excluded(peer, "?") for peer in PEERS[:5])}, "with some left"),
        ({"excluded": (Excluded(PEERS[4], ""),)}, "without a reason"),
        ({"lost": (PEERS[9],)}, "calls lost"),
        ({"lost": (PEERS[4], PEERS[3])}, "calls lost"),
        ({"lost": tuple(PEERS[:5])}, "without a reducer"),
        ({"moved": (Moved(9, PEERS[0]),)}, "moves are not the deal's"),
        ({"moved": (Moved(0, PEERS[9]),)}, "moves are not the deal's"),
        ({"moved": (Moved(1, PEERS[0]), Moved(0, PEERS[0]))}, "in order"),
        ({"moved": tuple(Moved(0, peer) for peer in PEERS[:5])}, "without a reducer"),
        ({"set_number": 0}, "a number that it can't have"),
        ({"set_number": 2}, "a number that it can't have"),
        ({"excluded": ()}, "a number that it can't have"),
    ],
)
def test_a_redeal_that_is_none(changes: dict[str, Any], why: str) -> None:
    (fault, *_) = evidence_faults(after_redeal(**changes), seated(5, ONCE), ONCE)
    assert why in fault


def test_results_of_another_set_or_of_other_chunks_are_no_evidence() -> None:
    ledger, evidence = seated(5, ONCE), after_redeal()
    old = evidence_of(ledger, 5, ONCE)
    faults = evidence_faults(replace(evidence, results=old.results), ledger, ONCE)
    assert any("another set" in fault for fault in faults)
    other = replace(evidence, redeal=replace(evidence.redeal, lost=(PEERS[3], PEERS[4])))  # type: ignore[type-var]
    assert any("not for the chunks dealt" in fault for fault in evidence_faults(other, ledger, ONCE))


def test_a_redeal_only_adds_to_the_one_before() -> None:
    first = Redeal(NO_HASH, 1, (), (PEERS[0],), (), 0, 10.0)
    second = replace(first, number=2, excluded=(LOST,), set_number=2)
    assert redealing.follows(second, first)
    assert redealing.follows(replace(second, number=3, moved=(Moved(0, PEERS[1]),)), second)
    for wrong in (
        replace(second, number=1),
        replace(second, lost=()),
        replace(second, set_number=1),
        replace(second, number=3, set_number=3),
        replace(second, excluded=(), set_number=0, number=1),
    ):
        assert not redealing.follows(wrong, second if wrong.number > 2 else first)


def test_the_rule_and_weights_are_those_of_the_smaller_set() -> None:
    ledger, evidence = seated(5, ONCE), after_redeal()
    body = body_of(ledger, evidence, ONCE)
    alone = body_of(seated(4, ONCE), evidence_of(seated(4, ONCE), 4, ONCE), ONCE)
    assert (body.rule, body.f, body.fallback) == (alone.rule, alone.f, alone.fallback)
    assert SPEC.rule.name == body.rule
    assert isinstance(evidence.deal, Deal)
