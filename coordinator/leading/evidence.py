"""Opens what a proposal shows for itself, alike for who votes on it and for a leader that is told of it.

So whether it opens is a matter of its bytes alone, and what doesn't open has no honest vote.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from coordinator.rounds.proposing import Evidence
from protos.hashes import plan_hash
from protos.messages import Commitment, Deal, PeerId, Plan, Proposal, Redeal, Results
from protos.sealer import Opened, open_signed
from protos.signing import SignatureError
from protos.wire import WireError

OPENED_KEPT = 4
"""Proposals whose evidence is kept opened: many voters report the same one, and it may hold thousands of signatures."""


def open_evidence(proposal: Proposal, leader: PeerId, run: PeerId) -> Evidence | None:
    """The evidence of a proposal that this leader was the first to make; None for an empty round's, which has none.

    Raises SignatureError or WireError.
    """
    if not proposal.plan:
        return None
    planned = open_signed(proposal.plan, run, signer=leader, kind=Plan)
    plan, deal = planned.message, open_signed(proposal.deal, run, signer=leader, kind=Deal).message
    if not isinstance(plan, Plan) or not isinstance(deal, Deal):
        raise SignatureError("a proposal without plan and deal")
    commitments, results = open_commitments(deal, run), _results(proposal.results, run)
    redeal = _redeal(proposal.redeal, leader, run) if proposal.redeal else None
    return Evidence(plan, plan_hash(planned.body), deal, commitments, results, redeal)


@lru_cache(maxsize=OPENED_KEPT)
def carried_evidence(proposal: Proposal, leader: PeerId, run: PeerId) -> tuple[Evidence | None, str]:
    """The evidence of a proposal that a voter reports, or why it doesn't open."""
    try:
        return open_evidence(proposal, leader, run), ""
    except (SignatureError, WireError) as error:
        return None, str(error)


def open_commitments(deal: Deal, run: PeerId) -> dict[PeerId, Commitment]:
    """The commitments that a deal lists, by their senders. Raises SignatureError or WireError."""
    commitments: dict[PeerId, Commitment] = {}
    for opened in _open_all(deal.commitments, run, Commitment):
        if isinstance(opened.message, Commitment) and opened.message.plan == deal.plan:
            commitments[opened.signer] = opened.message
    if len(commitments) != len(deal.commitments):
        raise SignatureError("a deal with a doubled commitment, or one of another plan")
    return commitments


def _redeal(envelope: bytes, leader: PeerId, run: PeerId) -> Redeal:
    redeal = open_signed(envelope, run, signer=leader, kind=Redeal).message
    if not isinstance(redeal, Redeal):
        raise SignatureError("a proposal with another word in the place of its redeal")
    return redeal


def _results(envelopes: Iterable[bytes], run: PeerId) -> dict[PeerId, Results]:
    opened = _open_all(envelopes, run, Results)
    return {item.signer: item.message for item in opened if isinstance(item.message, Results)}


def _open_all(envelopes: Iterable[bytes], run: PeerId, kind: type) -> list[Opened]:
    return [open_signed(envelope, run, kind=kind) for envelope in envelopes]
