"""What voters report to have signed: judged as a voter judges it, passed over where nobody can have, and said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from coordinator.rounds import promising, state
from coordinator.rounds.attempt import Phase
from coordinator.rounds.carried import Carried, carried_fault
from coordinator.rounds.events import Committed, Effect, Heard, Say
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.orders import NONE, Orders
from coordinator.rounds.voting import LEADER_SLACK
from protos.hashes import plan_hash
from protos.messages import Body, Leave, Outcome, PeerId, Prepare, Promise, Proposal, Propose, Refusal
from protos.orders import Kind
from tests.coordinator.rounds.cases import COORDINATOR, PEERS, REGISTRY, SPEC, beginning, empty_body, seated
from tests.coordinator.rounds.leader_script import Script, leave, training, voting
from tests.coordinator.rounds.obeyed import carrying
from tests.coordinator.rounds.ordered import amended, ordered
from tests.fakes.evidence import carried_evidence
from tests.fakes.sealer import Registry

STAND_IN = PEERS[2]


def whole() -> tuple[Registry, Proposal, Body]:
    """An honest proposal of round 2 of three members."""
    script = voting(3)
    proposal = script.last(Propose).proposal
    return script.registry, proposal, script.registry.decode(Body, proposal.body)


def carried(registry: Registry, proposal: Proposal, *, voted: int = 0, number: int = 1, left: bool = False) -> Carried:
    body = registry.decode(Body, proposal.body)
    ledger = seated(3)
    kind = Leave if left else Promise
    report = kind(0, 2, number, COORDINATOR, ledger.head, voted, proposal)
    return Carried(report, body, *carried_evidence(registry, proposal, body))


def fault(what: Carried, ledger: Ledger | None = None, orders: Orders = NONE) -> str:
    return carried_fault(what, ledger or seated(3), SPEC, COORDINATOR, orders)


def with_body(registry: Registry, proposal: Proposal, **changes: object) -> Proposal:
    body = registry.decode(Body, proposal.body)
    return replace(proposal, body=registry.encode(replace(body, **changes)))  # type: ignore[arg-type]


def test_an_honest_proposal_holds_up_in_whichever_later_attempt() -> None:
    registry, proposal, _ = whole()
    assert fault(carried(registry, proposal)) == ""
    assert fault(carried(registry, proposal, voted=6, number=7)) == ""
    assert fault(carried(registry, proposal, voted=7, number=7, left=True)) == "", "a leave comes after the vote"


@pytest.mark.parametrize(("voted", "number", "left"), [(1, 1, False), (9, 1, False), (-1, 1, False), (2, 1, True)])
def test_who_promises_a_number_has_voted_before_it(voted: int, number: int, left: bool) -> None:
    registry, proposal, _ = whole()
    assert "it says that it voted" in fault(carried(registry, proposal, voted=voted, number=number, left=left))


CHANGES: dict[str, Callable[[Registry, Proposal], Proposal]] = {
    "weights": lambda registry, proposal: with_body(registry, proposal, members=()),
    "the outer step": lambda registry, proposal: with_body(registry, proposal, outer_lr=9.0),
    "seats": lambda registry, proposal: with_body(registry, proposal, seats=()),
    "the leader": lambda registry, proposal: with_body(registry, proposal, leader=STAND_IN, attempt=1),
    "a later attempt": lambda registry, proposal: with_body(registry, proposal, attempt=3),
    "number 0 of a stand-in": lambda registry, proposal: replace(
        with_body(registry, proposal, leader=STAND_IN, outcome=Outcome.EMPTY), plan=b"", deal=b"", results=()
    ),
    "another run": lambda registry, proposal: with_body(registry, proposal, run=PeerId("elsewhere")),
    "no results": lambda registry, proposal: replace(proposal, results=()),
    "fewer results": lambda registry, proposal: replace(proposal, results=proposal.results[:1]),
    "other hashes": lambda registry, proposal: replace(proposal, result_hashes=proposal.result_hashes[::-1]),
    "no deal": lambda registry, proposal: replace(proposal, deal=b""),
    "no evidence": lambda registry, proposal: replace(proposal, plan=b"", deal=b"", results=()),
    "a plan by nobody": lambda registry, proposal: replace(proposal, plan=b"scrawl"),
    "a redeal by nobody": lambda registry, proposal: replace(proposal, redeal=b"scrawl"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_is_changed_in_it_nobody_can_have_signed_it(change: str) -> None:
    registry, proposal, _ = whole()
    assert fault(carried(registry, CHANGES[change](registry, proposal), voted=1, number=2)) != ""


def test_what_can_not_be_judged_here_is_not_called_a_lie() -> None:
    """It may be right by what others know: a revision of the RunSpec, or the books to go back to."""
    ledger = seated(3)
    amendment = ordered(1, Kind.AMEND, round_=2, spec=amended(work={"h": 2}))
    rollback = ordered(1, Kind.ROLLBACK, head=beginning().head)
    later = replace(ledger, next_revision=7, next_from=ledger.round + 9)
    for books, order, target in ((later, amendment, None), (ledger, rollback, None)):
        body, _ = carrying(ledger, order, target=beginning(), specs={})
        proposal = Proposal(REGISTRY.encode(body), b"", b"", (), ())
        report = Promise(0, 2, 1, COORDINATOR, ledger.head, 0, proposal)
        assert carried_fault(Carried(report, body, None), books, SPEC, COORDINATOR, Orders((order,), target)) == ""
    newer = ordered(1, Kind.AMEND, round_=2, spec=amended(rule={"name": "rule_of_a_later_version"}))
    body, orders = carrying(ledger, newer)
    report = Promise(0, 2, 1, COORDINATOR, ledger.head, 0, Proposal(REGISTRY.encode(body), b"", b"", (), ()))
    assert carried_fault(Carried(report, body, None), ledger, SPEC, COORDINATOR, orders) == ""
    other = replace(ledger, spec_revision=2)
    body = empty_body(ledger, PEERS[:3])
    report = Promise(0, 2, 1, COORDINATOR, ledger.head, 0, Proposal(REGISTRY.encode(body), b"", b"", (), ()))
    assert carried_fault(Carried(report, body, None), other, SPEC, COORDINATOR, NONE) == ""


# -- the leader ------------------------------------------------------------------------------------------------------


def preparing(n: int, registry: Registry) -> Script:
    script = training(n, opened=1, registry=registry)
    script.ready(*PEERS[:n])
    assert script.phase() is Phase.PREPARE
    return script


def named(effects: list[Effect], peer: PeerId) -> bool:
    return any(isinstance(effect, Say) and f"{peer[-6:]} reports a proposal" in effect.text for effect in effects)


def test_a_leader_passes_it_over_and_names_who_said_it() -> None:
    registry, proposal, _ = whole()
    script = preparing(3, registry)
    script.promise(PEERS[0], 1, replace(proposal, results=()))
    assert named(script.now_did, PEERS[0])
    assert any("no voter can have signed" in line for line in script.rounds.explain(PEERS[0]))
    script.promise(PEERS[1])
    assert script.phase() is Phase.COMMITMENT, "its promise counts, and the round is exchanged anew"


def test_what_others_have_signed_goes_before_it_though_its_number_is_higher() -> None:
    registry, proposal, _ = whole()
    script = preparing(3, registry)
    script.promise(PEERS[0], 1, with_body(registry, proposal, outer_lr=9.0))
    script.promise(PEERS[1], 0, proposal)
    assert script.phase() is Phase.VOTE
    assert script.last(Propose).proposal == proposal


def test_a_leave_with_it_takes_no_weight_out_and_stands_in_no_certificate() -> None:
    """It may be as long as a message: a commit that carried it would fit none."""
    before = voting(4)
    registry, script = before.registry, preparing(4, before.registry)
    false = replace(before.last(Propose).proposal, results=())
    lie = leave(script, 1, voted_attempt=1, proposal=false)
    script.say(PEERS[0], lie)
    assert named(script.now_did, PEERS[0])
    script.promise(PEERS[1])
    script.promise(PEERS[2])
    assert script.phase() is Phase.COMMITMENT, "with the coordinator's they are a quorum of all four"
    script.commit_to_plan(*PEERS[1:4])
    script.reduce()
    script.vote(PEERS[1], PEERS[2])
    assert script.phase() is Phase.VOTE, "without the coordinator's they are none"
    script.vote(PEERS[3])
    (committed,) = script.effects(Committed)
    assert registry.seal(PEERS[0], lie) not in committed.commit.votes
    assert PEERS[0] not in {seat.peer for seat in committed.body.seats}, "it has left all the same"


def test_leaves_take_weight_out_as_far_as_a_certificate_has_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    script = voting(4)
    for peer in PEERS[:2]:
        script.say(peer, leave(script))
    attempt = script.rounds._attempt
    assert attempt is not None
    assert script.rounds._left_for(attempt) == {*PEERS[:2]}
    one = len(script.registry.seal(PEERS[0], leave(script)))
    monkeypatch.setattr(state, "LEAVES_BYTES", 2 * one - 1)
    assert script.rounds._left_for(attempt) == {PEERS[0]}, "who else has left is merely absent"
    script.vote(PEERS[2])
    assert script.phase() is Phase.VOTE
    script.vote(PEERS[3])
    (committed,) = script.effects(Committed)
    assert len(committed.commit.votes) == 3
    assert sum(isinstance(script.registry.open(envelope)[1], Leave) for envelope in committed.commit.votes) == 1


def test_it_is_named_once_a_round() -> None:
    registry, proposal, _ = whole()
    script = preparing(3, registry)
    false = replace(proposal, results=())
    script.promise(PEERS[0], 1, false)
    script.say(PEERS[0], leave(script, 1, voted_attempt=1, proposal=false))
    assert not named(script.now_did, PEERS[0])


# -- what better is not proposed again -------------------------------------------------------------------------------


def groundless(script: Script) -> Proposal:
    """An empty round, right in all that anybody can check."""
    body = replace(empty_body(script.rounds.ledger, PEERS[:3]), reason="made up")
    return Proposal(script.registry.encode(body), b"", b"", (), ())


def test_an_empty_round_is_not_made_again_where_a_quorum_reports_none() -> None:
    script = preparing(3, Registry())
    script.promise(PEERS[0], 1, groundless(script))
    script.promise(PEERS[1])
    assert script.phase() is Phase.PREPARE
    assert "promises beside" in script.waiting_for
    script.promise(PEERS[2])
    assert script.phase() is Phase.COMMITMENT


def test_an_empty_round_is_made_again_where_no_quorum_reports_none() -> None:
    script = preparing(3, Registry())
    proposal = groundless(script)
    script.promise(PEERS[0], 1, proposal)
    script.promise(PEERS[1])
    for _ in range(20):
        script.keep_alive(*PEERS[:3])
        script.wait(SPEC.deadlines.vote_s * LEADER_SLACK / 20)
    assert script.last(Propose).proposal == proposal, "it may be what a quorum has voted for"


def test_orders_that_an_empty_round_carries_are_ground_enough() -> None:
    script = preparing(3, Registry())
    body, orders = carrying(script.rounds.ledger, ordered(1, Kind.PAUSE))
    proposal = Proposal(script.registry.encode(body), b"", b"", (), ())
    asked = script.last(Prepare)
    promise = Promise(0, 2, asked.attempt, asked.leader, script.rounds.ledger.head, 0, proposal)
    script.handle(Heard(PEERS[0], promise, b"", body, orders.given))
    script.promise(PEERS[1])
    assert script.last(Propose).proposal == proposal


def test_what_too_many_will_not_have_is_not_proposed_again_where_others_are_enough() -> None:
    """As when they have combined the same rows themselves, and come to other results."""
    script = voting(3)
    proposal = script.last(Propose).proposal
    for peer in PEERS[1:3]:
        script.say(peer, Refusal(0, 2, 0, "the result of chunk 0 is not what its rows give here"))
    script.wait(1.0)
    assert script.phase() is Phase.PREPARE
    script.promise(PEERS[0], 0, proposal)
    script.promise(PEERS[1])
    assert script.phase() is Phase.PREPARE
    script.promise(PEERS[2])
    assert script.phase() is Phase.COMMITMENT


def test_what_one_of_many_will_not_have_is() -> None:
    script = voting(5)
    proposal = script.last(Propose).proposal
    script.say(PEERS[1], Refusal(0, 2, 0, "no"))
    for _ in range(20):
        script.keep_alive(*PEERS[:5])
        script.wait(SPEC.deadlines.vote_s * LEADER_SLACK / 20)
    script.wait(1.0)
    assert script.phase() is Phase.PREPARE
    for peer, voted in ((PEERS[0], proposal), (PEERS[1], None), (PEERS[2], None)):
        script.promise(peer, 0 if voted else -1, voted)
    assert script.last(Propose).proposal == proposal
    assert script.last(Propose).attempt == 1


def test_plans_of_the_script_are_named_as_in_a_run() -> None:
    registry, proposal, body = whole()
    evidence, why = carried_evidence(registry, proposal, body)
    assert why == ""
    assert evidence is not None
    assert evidence.plan_hash == plan_hash(registry.encode(evidence.plan))


def test_what_many_voters_report_alike_is_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[Carried] = []

    def judging(what: Carried, *rest: object) -> str:
        judged.append(what)
        return carried_fault(what, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(promising, "carried_fault", judging)
    registry, proposal, _ = whole()
    script = preparing(3, registry)
    lie = with_body(registry, proposal, outer_lr=9.0)
    script.promise(PEERS[2], 0, lie)
    for peer in PEERS[:2]:
        script.promise(peer, 0, proposal)
    assert [each.report.proposal for each in judged] == [lie, proposal]
    assert script.last(Propose).proposal == proposal
