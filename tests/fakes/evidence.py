"""What a proposal shows for itself, opened from a registry in the place of signatures."""

from __future__ import annotations

from coordinator.rounds.proposing import Evidence
from protos.hashes import plan_hash
from protos.messages import Body, Commitment, Deal, PeerId, Plan, Proposal, Redeal, Results
from tests.fakes.sealer import Registry, Unknown


def commitments_of(registry: Registry, deal: Deal) -> dict[PeerId, Commitment]:
    return dict(registry.opened(Commitment, envelope) for envelope in deal.commitments)


def evidence_in(registry: Registry, proposal: Proposal, body: Body) -> Evidence | None:
    """The evidence of a proposal, None for an empty round's. Raises Unknown."""
    if not proposal.plan:
        return None
    (planner, plan), (dealer, deal) = registry.opened(Plan, proposal.plan), registry.opened(Deal, proposal.deal)
    results = dict(registry.opened(Results, envelope) for envelope in proposal.results)
    redealer, redeal = registry.opened(Redeal, proposal.redeal) if proposal.redeal else (planner, None)
    if not planner == dealer == redealer == body.leader:
        raise Unknown("a proposal of several leaders")
    return Evidence(plan, plan_hash(registry.encode(plan)), deal, commitments_of(registry, deal), results, redeal)


def carried_evidence(registry: Registry, proposal: Proposal, body: Body) -> tuple[Evidence | None, str]:
    """What a voter's report of a proposal shows, or why it doesn't open."""
    try:
        return evidence_in(registry, proposal, body), ""
    except Unknown as error:
        return None, str(error)
