"""A proposal that a voter reports in its promise or leave: whether an honest voter can have signed it.

The answer follows from the proposal's bytes and from the chain alone, by the checks that every voter makes before its
vote. So what is answered with a fault was voted for by nobody honest, in no attempt, and may be passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.rounds import policy
from coordinator.rounds.ledger import Ledger, LedgerError, revision_after
from coordinator.rounds.orders import Orders
from coordinator.rounds.proposing import Evidence
from coordinator.rounds.voter import body_faults
from protos.messages import Body, Leave, PeerId, Promise
from protos.orders import Kind
from protos.runspec import RunSpec


@dataclass(frozen=True, slots=True)
class Carried:
    """What a voter reports, opened. `fault` is why its evidence doesn't open, if it doesn't."""

    report: Promise | Leave
    body: Body
    evidence: Evidence | None
    fault: str = ""


def carried_fault(carried: Carried, ledger: Ledger, spec: RunSpec, coordinator: PeerId, orders: Orders) -> str:
    """Why no honest voter can have signed this in the round after the ledger; empty if one can, or nobody here can say.

    Args:
        spec: the revision of the RunSpec that is known here for the round.
        orders: those of the body, opened, with what of their needs is known here.
    """
    report, body = carried.report, carried.body
    if report.proposal is None:
        return ""
    own = report.attempt if isinstance(report, Leave) else report.attempt - 1
    if not 0 <= report.voted_attempt <= own:
        return f"it says that it voted in attempt {report.voted_attempt}, and promises number {report.attempt}"
    if carried.fault:
        return carried.fault
    if not _can_judge(ledger, spec, orders, body):
        return ""
    hashes = report.proposal.result_hashes
    at = report.voted_attempt
    faults = body_faults(body, carried.evidence, hashes, ledger, spec, coordinator, orders, attempt=at)
    return "; ".join(faults[:3])


def _can_judge(ledger: Ledger, spec: RunSpec, orders: Orders, body: Body) -> bool:
    """Whether all that a voter needs for its checks is here: revisions of the RunSpec, and books to go back to."""
    if ledger.spec_revision != spec.revision or policy.unknown(spec):
        return False
    if orders.envelopes != body.orders or (orders.rollback is not None and orders.target is None):
        return False
    known: Mapping[int, RunSpec] = {spec.revision: spec, **orders.known()}
    amendments = [each for each in orders.given if each.order.kind == Kind.AMEND]
    if amendments and ledger.newest_revision not in known:
        return False
    if any(each.spec is not None and policy.unknown(each.spec) for each in amendments):
        return False  # a newer version may know the rule that it names
    try:
        return revision_after(ledger, orders.given) in known
    except LedgerError:
        return True  # an old order, which is a fault whoever judges it
