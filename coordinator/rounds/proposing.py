"""The body of a round, built from its evidence: by the leader to propose it, by every voter to compare.

What a leader may choose (whom it seats, who has left, why a round is empty) is an argument; all else follows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from aggregation.digest import results_root
from aggregation.exchange import set_hash
from coordinator.rounds import leases, policy
from coordinator.rounds.ledger import Ledger, fold, went_back
from coordinator.rounds.orders import NONE, Orders, spec_after
from coordinator.rounds.redealing import Lines, chunks_of, n_sharing, redeal_faults, reducers_now
from coordinator.rounds.work import Works
from protos.messages import (
    ZERO_HASH,
    Bandwidth,
    Body,
    Commitment,
    Deal,
    MemberEntry,
    Outcome,
    PeerId,
    Plan,
    Range,
    Redeal,
    ReducerEntry,
    Results,
)
from protos.runspec import RunSpec


@dataclass(frozen=True, slots=True)
class Evidence:
    """What an exchange left: signed by those whom it concerns, opened and verified."""

    plan: Plan
    plan_hash: bytes
    deal: Deal
    commitments: Mapping[PeerId, Commitment]  # all that the deal lists, the excluded ones too
    results: Mapping[PeerId, Results]
    redeal: Redeal | None = None  # the last one of the attempt

    def dealt(self) -> dict[PeerId, Commitment]:
        """The commitments that the deal includes: the lines follow from them, whoever is lost afterwards."""
        out = {entry.peer for entry in self.deal.excluded}
        return {peer: self.commitments[peer] for peer in sorted(self.commitments) if peer not in out}

    def included(self) -> dict[PeerId, Commitment]:
        """Those of them that the exchange has not lost: they are combined."""
        out = {entry.peer for entry in self.redeal.excluded} if self.redeal else ()
        return {peer: commitment for peer, commitment in self.dealt().items() if peer not in out}

    def applied(self, spec: RunSpec) -> policy.Applied | None:
        """The rule for what is included. Who is lost in the exchange counts like one that never came."""
        return policy.applied_rule(spec, self.included(), self.deal.excluded)

    @property
    def set_number(self) -> int:
        return self.redeal.set_number if self.redeal and self.redeal.set_number else self.deal.number

    def set_hash(self) -> bytes:
        """The name of the included set, which results carry."""
        roots = {str(peer): commitment.root for peer, commitment in self.included().items()}
        return set_hash(self.plan_hash, self.set_number, roots)


def build_body(
    ledger: Ledger,
    spec: RunSpec,
    coordinator: PeerId,
    *,
    attempt: int,
    leader: PeerId,
    evidence: Evidence | None,
    reason: str,
    seated: Works | Collection[PeerId],
    left: Collection[PeerId],
    orders: Orders = NONE,
) -> Body:
    """The body of the round after `ledger`. Without evidence the round is empty, for this reason.

    `seated`: what is asked of whom in the next round; peers alone: H steps of one batch.
    `orders`: what it carries, and the revisions of the RunSpec that are known: the next round may be under another.

    Raises LedgerError or ValueError where leases, orders or revisions don't fit.
    """
    before, coming = ledger, spec_after(ledger, orders, spec)
    if (rollback := orders.rollback) is not None:
        ledger = went_back(ledger, rollback, orders.target)
    banned = orders.banned(ledger)
    seated = _without(seated, banned)
    left = {*left, *banned}
    included = evidence.included() if evidence else {}
    weights = policy.weights(included, spec)
    applied = evidence.applied(spec) if evidence else None
    committed = evidence is not None and applied is not None and not reason
    used = {peer: commitment.used for peer, commitment in included.items()} if committed else {}
    goes_on = not committed and coming.revision == spec.revision
    kept = policy.kept_over(ledger, seated, coming) if goes_on else set()
    returned = policy.returned(ledger, used, kept)
    seats, _ = policy.seats_for(ledger, returned, seated, coming, kept)
    hashes = result_hashes(evidence, spec) if evidence and committed else ()
    members = _members(evidence, weights if committed else {})
    norm = _aggregate_norm(evidence) if committed else 0.0
    body = Body(
        run=ledger.run,
        epoch=ledger.epoch,
        round=ledger.round + 1,
        previous=ledger.head,
        attempt=attempt,
        leader=leader,
        spec_revision=ledger.spec_revision,
        fragment=Range(0, spec.model.n_values),
        tau=0,
        anchor_digest=ledger.digest,
        outcome=Outcome.COMMITTED if committed else Outcome.EMPTY,
        reason="" if committed else reason,
        members=members,
        reducers=_reducers(evidence) if committed else (),
        rule=applied.rule if applied and committed else spec.rule.name,
        f=applied.f if applied and committed else 0,
        fallback=applied.fallback if applied and committed else "",
        degraded=applied.degraded if applied and committed else "",
        codec=spec.codec.name,
        results_root=results_root(hashes) if hashes else ZERO_HASH,
        clip_factor=policy.clip_factor(spec, ledger, norm, members) if committed else 1.0,
        aggregate_norm=norm,
        numerics_version=spec.numerics_version,
        h=spec.work.h,
        lr=spec.inner.lr * spec.inner.warmed(ledger.nominal_step + spec.work.h - 1),
        outer_lr=spec.outer.lr,
        outer_momentum=spec.outer.momentum,
        returned=returned,
        standing=orders.standing(),
        orders=orders.envelopes,
        seats=seats,
        voters=policy.voters_for(ledger, evidence.commitments if evidence else (), seats, left, coordinator),
        ledger_hash=ZERO_HASH,
    )
    after = fold(before, body, orders.given, orders.target)
    return replace(body, ledger_hash=after.hash())


def _without(seated: Works | Collection[PeerId], banned: Collection[PeerId]) -> Works | Collection[PeerId]:
    if isinstance(seated, Mapping):
        return {peer: asks for peer, asks in seated.items() if peer not in banned}
    return [peer for peer in seated if peer not in banned]


def result_hashes(evidence: Evidence, spec: RunSpec) -> tuple[bytes, ...]:
    """Per chunk the hash of its result, empty where none has been reported."""
    hashes = [b""] * policy.grid(spec).n_chunks
    for peer in sorted(evidence.results):
        for result in evidence.results[peer].results:
            hashes[result.chunk] = result.hash
    return tuple(hashes)


def result_norms(evidence: Evidence, spec: RunSpec) -> tuple[float, ...]:
    """Per chunk the ‖·‖² of its result, as its reducers signed it."""
    norms = [0.0] * policy.grid(spec).n_chunks
    for peer in sorted(evidence.results):
        for result in evidence.results[peer].results:
            norms[result.chunk] = result.norm_sq
    return tuple(norms)


def lines_of(evidence: Evidence, spec: RunSpec) -> Lines:
    """Per chunk the reducers in line."""
    n_chunks = policy.grid(spec).n_chunks
    reserves = {member.peer for member in evidence.plan.members if member.reserve}
    return policy.lines(evidence.plan_hash, evidence.dealt(), evidence.deal.bandwidths, n_chunks, reserves)


def evidence_faults(evidence: Evidence, ledger: Ledger, spec: RunSpec) -> list[str]:
    """What is wrong with the evidence of a round after `ledger`; signatures have been verified before."""
    if faults := deal_faults(evidence, ledger, spec):
        return faults
    lines = lines_of(evidence, spec)
    return evidence_redeal_faults(evidence, lines) or _result_faults(evidence, ledger, spec, lines)


def evidence_redeal_faults(evidence: Evidence, lines: Lines) -> list[str]:
    """What is wrong with the redeal of an attempt, whose deal holds and gives these lines."""
    if evidence.redeal is None:
        return []
    return redeal_faults(evidence.redeal, evidence.plan_hash, evidence.plan, evidence.dealt(), lines)


def deal_faults(evidence: Evidence, ledger: Ledger, spec: RunSpec) -> list[str]:
    """What is wrong with plan, commitments and deal, before there are results."""
    plan, deal = evidence.plan, evidence.deal
    faults: list[str] = []
    if (plan.run, plan.epoch, plan.round) != (ledger.run, ledger.epoch, ledger.round + 1):
        faults.append("the plan is of another round")
    if (plan.previous, plan.anchor_digest, plan.spec_revision) != (ledger.head, ledger.digest, ledger.spec_revision):
        faults.append("the plan starts from another head")
    if deal.plan != evidence.plan_hash:
        faults.append("the deal is of another plan")
    if deal.number != 0:
        faults.append("the deal has a number that it can't have")
    if plan.codec != spec.codec.name:
        faults.append("the plan's codec is not the run's")
    if plan.fragment != Range(0, spec.model.n_values) or plan.tau != 0 or plan.privatise != "identity":
        faults.append("the plan names a fragment, delay or privatise step that the run doesn't have")
    if [member.peer for member in plan.members] != sorted({member.peer for member in plan.members}):
        faults.append("the plan's members are not in order")
    senders = {member.peer for member in plan.members if member.sender}
    reducers = {member.peer for member in plan.members if member.reducer}
    if any(member.reserve and not member.reducer for member in plan.members):
        faults.append("the plan holds somebody in reserve who is no reducer")
    n_reducers = n_sharing(plan.members)
    applied = policy.planned_rule(spec, len(senders))
    if applied != policy.Applied(plan.rule, plan.f, plan.fallback, plan.degraded):
        faults.append("the plan's rule is not what so many senders make it")
    elif plan.replicas != policy.replicas(spec, plan.f, len(senders), n_reducers):
        faults.append("the plan's replicas are not what so many senders and reducers make them")
    if not set(evidence.commitments) <= senders:
        faults.append("a commitment of someone not planned")
    if any(commitment.plan != evidence.plan_hash for commitment in evidence.commitments.values()):
        faults.append("a commitment of another plan")
    excluded = policy.excluded(evidence.commitments, ledger, spec)
    if [(entry.peer, entry.reason) for entry in deal.excluded] != sorted(excluded.items()):
        faults.append("the excluded are not those that the gate gives")
    dealt = [entry.peer for entry in deal.bandwidths]
    if not dealt or dealt != sorted(set(dealt)) or not set(dealt) <= reducers:
        faults.append("the deal's reducers are not planned ones, in order")
    elif deal.bandwidths != bandwidths(ledger, dealt):
        faults.append("the deal's bandwidths are not the measured ones")
    if not set(evidence.commitments) - set(excluded):
        faults.append("nobody is included")
    return faults


def _result_faults(evidence: Evidence, ledger: Ledger, spec: RunSpec, lines: Lines) -> list[str]:
    included, applied = evidence.included(), evidence.applied(spec)
    if applied is None:
        return ["nothing can be combined"]
    expected_set = evidence.set_hash()
    limits = [
        policy.result_norm_limit(spec, included, chunk, applied, ledger.centre_norm) for chunk in range(len(lines))
    ]
    dealt = chunks_of(reducers_now(evidence.plan, lines, evidence.redeal))
    faults: list[str] = []
    for peer, results in sorted(evidence.results.items()):
        if results.plan != evidence.plan_hash or results.set_hash != expected_set:
            faults.append(f"results of {peer} are for another set")
        if [result.chunk for result in results.results] != dealt.get(peer):
            faults.append(f"results of {peer} are not for the chunks dealt to it")
            continue
        for result in results.results:
            if not 0 <= result.norm_sq <= limits[result.chunk] ** 2:
                faults.append(f"the result of chunk {result.chunk} by {peer} is longer than any contribution to it")
    if faults:
        return faults
    by_chunk = reported(evidence)
    if missing := len(lines) - len(by_chunk):
        faults.append(f"{missing} chunks have no result")
    for chunk, camps in by_chunk.items():
        if len(camps) > 1:
            faults.append(f"replicas differ on chunk {chunk}: {' against '.join('+'.join(camp) for camp in camps)}")
    return faults


def reported(evidence: Evidence) -> dict[int, list[list[PeerId]]]:
    """Per chunk that has a result who reported the same one (its hash and its norm), the largest camp first."""
    camps: dict[int, dict[tuple[bytes, float], list[PeerId]]] = {}
    for peer, results in sorted(evidence.results.items()):
        for result in results.results:
            camps.setdefault(result.chunk, {}).setdefault((result.hash, result.norm_sq), []).append(peer)
    return {chunk: sorted(camps[chunk].values(), key=len, reverse=True) for chunk in sorted(camps)}


def dissenters(evidence: Evidence) -> set[PeerId]:
    """Reducers whose result of some chunk is not that of most; all of them where no camp is the largest."""
    found: set[PeerId] = set()
    for camps in reported(evidence).values():
        if len(camps) > 1:
            tied = len(camps[0]) == len(camps[1])
            found |= {peer for camp in camps[0 if tied else 1 :] for peer in camp}
    return found


def bandwidths(ledger: Ledger, reducers: Collection[PeerId]) -> tuple[Bandwidth, ...]:
    """The measured KiB/s by which chunks are dealt: the chain's, 0 where unknown."""
    return tuple(Bandwidth(peer, ledger.bandwidths.get(peer, 0.0)) for peer in sorted(reducers))


def _members(evidence: Evidence | None, weights: Mapping[PeerId, float]) -> tuple[MemberEntry, ...]:
    if evidence is None:
        return ()
    lost = evidence.redeal.excluded if evidence.redeal else ()
    reasons = {entry.peer: entry.reason for entry in (*evidence.deal.excluded, *lost)}
    entries: list[MemberEntry] = []
    for planned in evidence.plan.members:
        if not planned.sender:
            continue
        peer = planned.peer
        commitment = evidence.commitments.get(peer)
        if commitment is None:
            entries.append(MemberEntry(peer, False, "no commitment in time", 0, 0, 0.0, (), ZERO_HASH, 0.0, 0.0, 0.0))
            continue
        counted = peer in weights
        norm = policy.delta_norm(commitment)
        entries.append(
            MemberEntry(
                peer=peer,
                counted=counted,
                reason="" if counted else reasons.get(peer, "the round is empty"),
                steps=commitment.steps,
                tokens=commitment.tokens,
                weight=weights.get(peer, 0.0),
                used=commitment.used if counted else (),
                commitment_root=commitment.root,
                delta_norm=norm if math.isfinite(norm) else 0.0,
                sum_lr=commitment.sum_lr,
                inner_loss=commitment.inner_loss,
            )
        )
    return tuple(entries)


def _reducers(evidence: Evidence | None) -> tuple[ReducerEntry, ...]:
    if evidence is None:
        return ()
    return tuple(
        ReducerEntry(peer, len(results.results), results.kib_s) for peer, results in sorted(evidence.results.items())
    )


def _aggregate_norm(evidence: Evidence | None) -> float:
    """The root of the results' ‖·‖², added in chunk order in fp64."""
    if evidence is None:
        return 0.0
    by_chunk = {result.chunk: result.norm_sq for results in evidence.results.values() for result in results.results}
    total = 0.0
    for chunk in sorted(by_chunk):
        total += by_chunk[chunk]
    return math.sqrt(total)


def batches_of(body: Body) -> int:
    """Batches that a body counts."""
    return sum(leases.count(member.used) for member in body.members)
