"""Ledgers, evidence and bodies of small runs, made as a leader makes them, for tests of what checks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aggregation.digest import tagged_hash
from coordinator.rounds import leases, policy, proposing, redealing
from coordinator.rounds.attempt import plan_for
from coordinator.rounds.ledger import Ledger, fold, genesis
from coordinator.rounds.proposing import Evidence, build_body
from protos.hashes import commit_hash, plan_hash
from protos.messages import Body, ChunkResult, Commitment, Deal, Excluded, PeerId, Plan, Results
from protos.runspec import RunSpec
from tests.fakes.sealer import Registry
from tests.sim.options import sim_spec

RUN, COORDINATOR = PeerId("run"), PeerId("coordinator")
PEERS = [PeerId(f"peer{number // 9 + 1}{number % 9 + 1}") for number in range(40)]  # base58 has no 0
SPEC = sim_spec(n_chunks=3)
REGISTRY = Registry("cases.")
NO_HASH = bytes(32)


def at_head(ledger: Ledger, name: str = "head") -> Ledger:
    return ledger.at(tagged_hash("head", name.encode()), tagged_hash("state", name.encode()))


def beginning(voters: Sequence[PeerId] = ()) -> Ledger:
    """The ledger of commit 0; `voters` are beside the coordinator."""
    return at_head(replace(genesis(RUN, COORDINATOR), voters=(*voters, COORDINATOR)))


def after(ledger: Ledger, body: Body) -> Ledger:
    """The ledger after a body that has been committed."""
    raw = REGISTRY.encode(body)
    digest = tagged_hash("state", raw)
    return fold(ledger, body).at(commit_hash(raw, digest), digest)


def empty_body(ledger: Ledger, seated: Sequence[PeerId], spec: RunSpec = SPEC, left: Sequence[PeerId] = ()) -> Body:
    return build_body(
        ledger,
        spec,
        COORDINATOR,
        attempt=0,
        leader=COORDINATOR,
        evidence=None,
        reason="seats",
        seated=seated,
        left=left,
    )


def seated(n: int, spec: RunSpec = SPEC) -> Ledger:
    """The ledger of round 1: n peers have a seat and a vote."""
    ledger = beginning()
    return after(ledger, empty_body(ledger, PEERS[:n], spec))


def commitment(ledger: Ledger, peer: PeerId, plan: bytes, spec: RunSpec = SPEC, **changes: Any) -> Commitment:
    """An honest commitment of a seated peer that made all its steps."""
    seat = ledger.seat_of(peer)
    steps = changes.pop("steps", spec.work.h)
    made = Commitment(
        plan=plan,
        root=tagged_hash("delta", peer.encode(), ledger.head),
        norms=(1.0,) * policy.grid(spec).n_chunks,
        steps=steps,
        tokens=steps * spec.work.batch_tokens,
        used=leases.prefix(seat.ranges, steps) if seat else (),
        sum_lr=steps * spec.inner.lr,
        inner_loss=2.5,
    )
    return replace(made, **changes)


def commitments(n: int, *, tokens: tuple[int, ...] = ()) -> dict[PeerId, Commitment]:
    ledger = seated(n) if n else beginning()
    made = {peer: commitment(ledger, peer, NO_HASH) for peer in PEERS[:n]}
    return {peer: replace(made[peer], tokens=claimed) for peer, claimed in zip(made, tokens or (32,) * n, strict=True)}


def evidence_of(
    ledger: Ledger,
    n: int,
    spec: RunSpec = SPEC,
    *,
    reducers: Sequence[PeerId] = (),
    attempt: int = 0,
    leader: PeerId = COORDINATOR,
    **changed: Commitment | None,
) -> Evidence:
    """What an exchange of n seated peers leaves. `changed`: a peer's commitment, or None for none."""
    senders = PEERS[:n]
    reducing = sorted(reducers or senders)
    plan = plan_for(
        ledger,
        spec,
        attempt=attempt,
        leader=leader,
        senders=dict.fromkeys(senders, 1),
        reducers=dict.fromkeys(reducing, 1),
    )
    hash_ = plan_hash(REGISTRY.encode(plan))
    commitments = {peer: commitment(ledger, peer, hash_, spec) for peer in senders}
    for name, other in changed.items():
        if other is None:
            del commitments[PeerId(name)]
        else:
            commitments[PeerId(name)] = replace(other, plan=hash_)
    return dealt(plan, hash_, commitments, reducing, ledger, spec)


def dealt(
    plan: Plan,
    hash_: bytes,
    commitments: dict[PeerId, Commitment],
    reducers: Sequence[PeerId],
    ledger: Ledger,
    spec: RunSpec,
) -> Evidence:
    """The evidence of a plan, once its commitments have been dealt and reduced."""
    excluded = policy.excluded(commitments, ledger, spec)
    deal = Deal(
        plan=hash_,
        number=0,
        commitments=tuple(REGISTRY.seal(peer, commitments[peer]) for peer in sorted(commitments)),
        excluded=tuple(Excluded(peer, excluded[peer]) for peer in sorted(excluded)),
        bandwidths=proposing.bandwidths(ledger, reducers),
    )
    bare = Evidence(plan, hash_, deal, commitments, {})
    return replace(bare, results=results_of(bare, spec))


def results_of(evidence: Evidence, spec: RunSpec = SPEC) -> dict[PeerId, Results]:
    """What honest reducers report."""
    included = evidence.included()
    if not included:
        return {}
    name = evidence.set_hash()
    reducers = redealing.reducers_now(evidence.plan, proposing.lines_of(evidence, spec), evidence.redeal)
    results: dict[PeerId, Results] = {}
    for peer, mine in sorted(redealing.chunks_of(reducers).items()):
        listed = tuple(ChunkResult(chunk, tagged_hash("result", bytes([chunk]), name), 0.5) for chunk in mine)
        results[peer] = Results(evidence.plan_hash, name, listed, 100.0)
    return results


def body_of(
    ledger: Ledger,
    evidence: Evidence,
    spec: RunSpec = SPEC,
    *,
    left: Sequence[PeerId] = (),
    seats: Sequence[PeerId] = (),
) -> Body:
    """The body that an honest leader makes of an exchange."""
    return build_body(
        ledger,
        spec,
        COORDINATOR,
        attempt=evidence.plan.attempt,
        leader=evidence.plan.leader,
        evidence=evidence,
        reason=policy.refused(spec, evidence.included(), evidence.deal.excluded),
        seated=seats or [peer for peer in PEERS[: len(ledger.seats)] if peer not in left],
        left=left,
    )
