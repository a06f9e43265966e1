"""Exchanges that go wrong, by hand: who dies, what reducers lack or can't do, and what body is proposed after all."""

from __future__ import annotations

from coordinator.rounds.attempt import Phase
from coordinator.rounds.events import Disconnected
from coordinator.rounds.voter import body_faults
from protos.hashes import plan_hash
from protos.messages import AttemptFailed, Body, Inquiry, Lack, Missing, PeerId, Plan, Propose
from protos.runspec import RuleSpec
from tests.coordinator.rounds.cases import COORDINATOR
from tests.coordinator.rounds.leader_script import Script
from tests.sim.options import sim_spec

ONCE = sim_spec(n_chunks=5, rule=RuleSpec(replicas=1))
TWICE = sim_spec(n_chunks=4, rule=RuleSpec(replicas=2))


def missing(script: Script, *lacks: tuple[int, PeerId], asked: tuple[PeerId, ...] = ()) -> Missing:
    plan = plan_hash(script.registry.encode(script.last(Plan)))
    return Missing(plan, tuple(Lack(chunk, sender) for chunk, sender in lacks), asked)


def dies(script: Script, *peers: PeerId) -> None:
    for peer in peers:
        script.handle(Disconnected(peer, "reset"))
    script.wait(script.spec.deadlines.gone_grace_s + 0.1)


def dealt(script: Script) -> dict[PeerId, list[int]]:
    attempt = script.rounds._attempt
    assert attempt is not None
    return attempt.dealt


def proposed(script: Script) -> Body:
    """The body that is proposed; its evidence is what a voter takes."""
    attempt = script.rounds._attempt
    assert attempt is not None
    assert script.phase() is Phase.VOTE
    evidence = attempt.evidence()
    assert evidence is not None
    propose = script.last(Propose)
    body: Body = script.registry.decode(Body, propose.proposal.body)
    hashes = propose.proposal.result_hashes
    assert body_faults(body, evidence, hashes, script.rounds.ledger, script.spec, COORDINATOR) == []
    assert bool(propose.proposal.redeal) == (evidence.redeal is not None)
    assert script.told(AttemptFailed, script.did) == []
    return body


def counted(body: Body) -> set[PeerId]:
    return {entry.peer for entry in body.members if entry.counted}


def answer(script: Script, sender: PeerId, chunk: int = 0) -> Missing:
    """That this chunk of a sender who is gone has not come."""
    plan = plan_hash(script.registry.encode(script.last(Plan)))
    return Missing(plan, (Lack(chunk, sender),), asked=script.last(Inquiry).senders)


def unable(script: Script, *peers: PeerId) -> None:
    plan = plan_hash(script.registry.encode(script.last(Plan)))
    for peer in peers:
        script.say(peer, Missing(plan, (), unable=True))
