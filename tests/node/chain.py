"""Short chains of commits for tests of what stores and fetches them: well formed, signed by nobody."""

from __future__ import annotations

from dataclasses import replace

from coordinator.rounds.ledger import Ledger, fold, genesis
from protos import wire
from protos.hashes import commit_hash
from protos.messages import ZERO_HASH, Body, Commit, Outcome, PeerId, Range
from protos.signing import Identity

RUN = Identity.from_private_bytes(bytes(32)).peer
COORDINATOR = Identity.from_private_bytes(bytes(31) + b"\1").peer


def peer(number: int) -> PeerId:
    return Identity.from_private_bytes(bytes(30) + b"\2" + bytes([number])).peer


def body_after(ledger: Ledger, outcome: Outcome = Outcome.COMMITTED, **changes: object) -> tuple[Body, Ledger]:
    """The body of the next round after a ledger at its head, and the ledger after it, not yet at its own."""
    body = Body(
        run=ledger.run, epoch=ledger.epoch, round=ledger.round + 1, previous=ledger.head, attempt=0, leader=COORDINATOR,
        spec_revision=1, fragment=Range(0, 1), tau=0, anchor_digest=ledger.digest, outcome=outcome, reason="",
        members=(), reducers=(), rule="mean", f=0, fallback="", degraded="", codec="int8", results_root=ZERO_HASH,
        clip_factor=1.0, aggregate_norm=0.0, numerics_version=1, h=30, lr=0.0, outer_lr=0.7, outer_momentum=0.6,
        returned=(), standing=(), orders=(), seats=(), voters=(COORDINATOR,), ledger_hash=ZERO_HASH,
    )  # fmt: skip
    body = replace(body, **changes)  # type: ignore[arg-type]
    folded = fold(ledger, body)
    return replace(body, ledger_hash=folded.hash()), folded


def commit_of(body: Body, ledger: Ledger, digest: bytes) -> tuple[Commit, Ledger]:
    """The commit of a body, and its ledger at that head."""
    commit = Commit(wire.encode(body), digest, body.attempt, (b"vote",), ())
    return commit, ledger.at(commit_hash(commit.body, digest), digest)


def commit_zero(digest: bytes) -> tuple[Commit, Ledger]:
    """Commit 0 over a state: its ledger is that of the beginning."""
    ledger = genesis(RUN, COORDINATOR)
    first, _ = body_after(ledger.at(ZERO_HASH, ZERO_HASH), Outcome.EMPTY)
    body = replace(first, round=0, ledger_hash=ledger.hash(), anchor_digest=digest)
    return commit_of(body, ledger, digest)


def rows(n: int, start: Ledger | None = None, seed: int = 0) -> tuple[list[Commit], list[Ledger]]:
    """So many commits after a ledger, and the ledgers after each."""
    ledger = start or commit_zero(bytes(32))[1]
    commits, ledgers = [], []
    for _ in range(n):
        body, folded = body_after(ledger, clip_factor=1.0 + seed)
        commit, ledger = commit_of(body, folded, bytes([ledger.round + 1, seed]) * 16)
        commits.append(commit)
        ledgers.append(ledger)
    return commits, ledgers
