"""A member whose attempt is dealt again: at any time, twice, out of order; and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aggregation import exchange as ex
from coordinator.rounds import proposing, redealing
from coordinator.rounds.proposing import Evidence
from node.session import effects as fx
from node.session import events as ev
from protos.messages import Excluded, Inquiry, Moved, PeerId, Proposal, Propose, Redeal, Refusal
from protos.runspec import RuleSpec
from tests.coordinator.rounds.cases import (
    COORDINATOR,
    NO_HASH,
    PEERS,
    REGISTRY,
    body_of,
    evidence_of,
    results_of,
    seated,
)
from tests.node.session.member_script import ME, Script, events_of
from tests.sim.options import sim_spec

ONCE = sim_spec(n_chunks=6, rule=RuleSpec(replicas=1))
LEDGER = seated(4, ONCE)
EVIDENCE = evidence_of(LEDGER, 4, ONCE)
LINES = proposing.lines_of(EVIDENCE, ONCE)
GONE = PEERS[3]
LOST = Excluded(GONE, "lost in the exchange: gone")


def redeal(number: int = 1, **changes: Any) -> Redeal:
    """Without the last member, as sender and as reducer."""
    return replace(Redeal(EVIDENCE.plan_hash, number, (LOST,), (GONE,), (), 1, 10.0), **changes)


def after(made: Redeal) -> Evidence:
    bare = replace(EVIDENCE, redeal=made, results={})
    return replace(bare, results=results_of(bare, ONCE))


def mine(made: Redeal | None = None) -> list[int]:
    reducers = redealing.reducers_now(EVIDENCE.plan, LINES, made)
    return [chunk for chunk, peers in enumerate(reducers) if ME in peers]


def planned() -> Script:
    script = Script(LEDGER, spec=ONCE)
    script.train()
    script.commit(EVIDENCE)
    return script


def dealt() -> Script:
    script = planned()
    script.handle(events_of(EVIDENCE)[1])
    return script


def told(script: Script, made: Redeal, leader: PeerId = COORDINATOR) -> list[ex.ExchangeEffect]:
    script.handle(ev.Redealt(made, leader))
    return [effect.effect for effect in script.effects(fx.InExchange)]


def sent(effects: list[ex.ExchangeEffect]) -> dict[str, tuple[int, ...]]:
    return {effect.reducer: effect.chunks for effect in effects if isinstance(effect, ex.SendRows)}


def test_rows_go_to_who_reduces_now() -> None:
    script = dealt()
    effects = told(script, redeal())
    moved = [chunk for chunk, line in enumerate(LINES) if line[0] == GONE]
    assert moved
    assert ex.StopRows(str(GONE), tuple(moved)) in effects
    assert sorted(chunk for chunks in sent(effects).values() for chunk in chunks) == moved
    assert script.session.admit_row(EVIDENCE.plan_hash, GONE, mine()[0], 1) == "not in the included set"


def test_the_same_again_an_older_one_and_another_leaders_change_nothing() -> None:
    script = dealt()
    told(script, redeal(2, set_number=1))
    assert told(script, redeal(2, set_number=1)) == []
    assert told(script, redeal(1)) == []
    assert told(script, redeal(3, lost=(PEERS[2], GONE), set_number=1), leader=PEERS[9]) == []
    assert told(script, replace(redeal(3), plan=NO_HASH)) == []
    assert sent(told(script, redeal(3, lost=(PEERS[2], GONE), set_number=1))) != {}


def test_a_redeal_before_the_deal_is_kept_for_it() -> None:
    script = planned()
    assert told(script, redeal(2, set_number=1)) == []
    assert told(script, redeal(1)) == []
    script.handle(events_of(EVIDENCE)[1])
    assert len(script.effects(fx.BeginExchange)) == 1
    effects = [effect.effect for effect in script.effects(fx.InExchange)]
    assert str(GONE) not in sent(effects)
    assert sorted(chunk for chunks in sent(effects).values() for chunk in chunks) == list(range(6))
    script.handle(events_of(EVIDENCE)[1])  # told again
    assert sent([effect.effect for effect in script.effects(fx.InExchange)]) == {}


def test_there_is_time_anew() -> None:
    script = dealt()
    plan = EVIDENCE.plan
    script.wait(plan.exchange_s - 1.0)
    told(script, redeal(exchange_s=30.0))
    script.wait(29.0)
    assert not [e for e in script.effects(fx.InExchange, script.did) if isinstance(e.effect, ex.ReportMissing)]
    did = script.wait(2.0)
    assert [e for e in script.effects(fx.InExchange, did) if isinstance(e.effect, ex.ReportMissing)]


def test_an_inquiry_is_answered() -> None:
    script = dealt()
    asked = tuple(sorted(EVIDENCE.included()))
    script.handle(ev.Inquired(Inquiry(EVIDENCE.plan_hash, asked)))
    (answer,) = [effect.effect for effect in script.effects(fx.InExchange)]
    assert answer == ex.ReportMissing(tuple((chunk, str(peer)) for chunk in mine() for peer in asked), asked)
    script.handle(ev.Inquired(Inquiry(EVIDENCE.plan_hash, (GONE,))))  # it lacks others' rows as well
    assert script.effects(fx.InExchange) == []
    script.handle(ev.Inquired(Inquiry(NO_HASH, (GONE,))))
    assert script.effects(fx.InExchange) == []


def test_nobody_has_stalled_right_after_a_deal() -> None:
    script = dealt()
    stalled = ev.Exchanged(EVIDENCE.plan_hash, ex.Stalled((str(PEERS[1]),)))
    script.handle(stalled)
    assert script.effects(fx.InExchange) == []
    script.at += ONCE.deadlines.no_progress_s
    script.handle(stalled)
    (claim,) = [effect.effect for effect in script.effects(fx.InExchange)]
    assert isinstance(claim, ex.ReportMissing)
    assert {sender for _, sender in claim.lacks} == {str(PEERS[1])}


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (redeal(2, excluded=(), set_number=0), "takes back"),
        (redeal(2, lost=()), "takes back"),
        (redeal(2, set_number=2), "takes back"),
        (redeal(2, lost=tuple(PEERS[:4])), "without a reducer"),
        (redeal(2, moved=(Moved(99, PEERS[0]),)), "the chunks that the redeal moves"),
    ],
)
def test_what_can_not_follow_is_refused_aloud(second: Redeal, why: str) -> None:
    script = dealt()
    told(script, redeal())
    told(script, second)
    (refusal,) = script.told(Refusal)
    assert why in refusal.reason
    assert script.effects(fx.InExchange) == []


def test_a_set_that_shrinks_for_the_fourth_time_is_refused() -> None:
    spec = sim_spec(n_chunks=1, rule=RuleSpec(replicas=1))
    ledger = seated(8, spec)
    evidence = evidence_of(ledger, 8, spec)
    script = Script(ledger, spec=spec)
    script.train()
    script.commit(evidence)
    script.handle(events_of(evidence)[1])
    out = tuple(Excluded(peer, "gone") for peer in PEERS[1:6])
    for number in range(1, 5):
        told(script, Redeal(evidence.plan_hash, number, out[:number], (), (), number, 10.0))
    assert [refusal.reason for refusal in script.told(Refusal, script.did)] == ["the set has shrunk 3 times already"]


# -- the vote ---------------------------------------------------------------------------------------------------------


def proposal(evidence: Evidence) -> ev.Proposed:
    body = body_of(LEDGER, evidence, ONCE)
    raw = REGISTRY.encode(body)
    hashes = proposing.result_hashes(evidence, ONCE)
    made = Proposal(raw, b"plan", b"deal", (), hashes, b"redeal" if evidence.redeal else b"")
    ask = Propose(body.epoch, body.round, 0, COORDINATOR, 10.0, made, (PEERS[1],))
    return ev.Proposed(
        ask, body, ex.set_hash(raw, 0, {}), evidence.plan, evidence.plan_hash, evidence.deal, evidence.commitments,
        evidence.results, redeal=evidence.redeal,
    )  # fmt: skip


def test_results_are_fetched_from_who_reduces_now() -> None:
    script = dealt()
    told(script, redeal())
    script.handle(proposal(after(redeal())))
    (verify,) = script.effects(fx.Verify)
    assert all(line[0] != GONE for line in verify.reducers)
    now = redealing.reducers_now(EVIDENCE.plan, LINES, redeal())
    assert [line[0] for line in verify.reducers] == [line[0] for line in now]
    assert {peer for line in verify.reducers for peer in line} == set(PEERS[:4])  # others may have them, too


def test_who_is_left_out_with_all_its_receipts_refuses() -> None:
    out = redeal(excluded=(Excluded(ME, "lost in the exchange: gone"),), lost=())
    for receipted in (True, False):
        script = dealt()
        for reducer, chunks in script.session._part.exchange.unreceipted().items():  # type: ignore[union-attr]
            some = chunks if receipted else chunks[1:]
            script.handle(ev.Exchanged(EVIDENCE.plan_hash, ex.Receipted(reducer, some)))
        told(script, out)
        script.handle(proposal(after(out)))
        refusals = [refusal.reason for refusal in script.told(Refusal)]
        assert refusals == (["left out, though every reducer has acknowledged all rows"] if receipted else [])


def test_what_was_combined_of_the_larger_set_is_not_held_against_the_smaller_ones_results() -> None:
    script = dealt()
    chunk = mine()[0]
    own = script.session._part.exchange  # type: ignore[union-attr]
    assert own is not None
    for peer in PEERS[:4]:
        assert own.admit(str(peer), chunk, own._row_bytes[chunk]) == ""
        script.handle(ev.Exchanged(EVIDENCE.plan_hash, ex.RowArrived(str(peer), chunk)))
        script.handle(ev.Exchanged(EVIDENCE.plan_hash, ex.RowChecked(str(peer), chunk, "")))
    told(script, redeal())
    script.handle(ev.Exchanged(EVIDENCE.plan_hash, ex.Combined(chunk, b"of four", 0.1, 0)))  # it was under way
    script.handle(proposal(after(redeal())))
    assert script.told(Refusal) == []
    assert len(script.effects(fx.Verify)) == 1
