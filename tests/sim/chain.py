"""What nobody in a simulated world may contradict: one commit a round, batches and contributions counted once."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.rounds import leases
from coordinator.rounds.ledger import Ledger, fold, rollback_of
from protos.hashes import body_hash, commit_hash
from protos.messages import Body, Commit, Leave, PeerId, Promise, Propose, Range, Vote
from protos.orders import OpenedOrder


class Violated(AssertionError):
    """Something happened that must never happen."""


class Chain:
    """All commits that anyone has made or applied, checked against each other."""

    def __init__(self, genesis: Ledger) -> None:
        self._by_round: dict[tuple[int, int], bytes] = {}
        self.ledgers: dict[bytes, Ledger] = {genesis.head: genesis}
        self.commits: list[tuple[Commit, Body, bytes]] = []
        # What has counted, and which contributions, up to each head: of two branches each counts for itself.
        self._past: dict[bytes, tuple[set[int], set[bytes]]] = {genesis.head: (set(), set())}
        self._used: set[int] = set()
        self._roots: set[bytes] = set()
        self.orders: dict[bytes, OpenedOrder] = {}
        """All that the operator has given, by envelope."""
        self._votes: dict[tuple[PeerId, int, int, int], tuple[bytes, PeerId]] = {}
        self._proposed: dict[tuple[PeerId, int, int, int], bytes] = {}

    def commit(self, commit: Commit, body: Body) -> bytes:
        """A commit that someone holds for true."""
        hash_ = commit_hash(commit.body, commit.digest)
        known = self._by_round.setdefault((body.epoch, body.round), hash_)
        if known != hash_:
            raise Violated(f"two commits of round {body.round} of epoch {body.epoch}")
        if hash_ in self.ledgers:
            return hash_
        before = self.ledgers.get(body.previous)
        if before is None:
            raise Violated(f"round {body.round} extends a head that nobody committed")
        orders = self.orders_of(body)
        rollback = rollback_of(orders)
        target = self.ledgers.get(rollback.order.spec) if rollback is not None else None
        ledger = fold(before, body, orders, target).at(hash_, commit.digest)
        self.ledgers[hash_] = ledger
        self.commits.append((commit, body, hash_))
        used, roots = self._past[body.previous if rollback is None else rollback.order.spec]
        self._used, self._roots = set(used), set(roots)
        self._count(before, body)
        self._past[hash_] = (self._used, self._roots)
        self._check_books(ledger)
        return hash_

    def orders_of(self, body: Body) -> tuple[OpenedOrder, ...]:
        """The orders that a body carries, as a driver opens them."""
        return tuple(self.orders[envelope] for envelope in body.orders)

    def _count(self, before: Ledger, body: Body) -> None:
        seats = {seat.peer: seat for seat in before.seats}
        for entry in body.members:
            if not entry.counted:
                continue
            if entry.commitment_root in self._roots:
                raise Violated(f"a contribution of {entry.peer} counts twice")
            self._roots.add(entry.commitment_root)
            leased = _batches(seats[entry.peer].ranges)
            used = _batches(entry.used)
            if not used <= leased:
                raise Violated(f"{entry.peer} used batches that it had no lease of")
            if used & self._used:
                raise Violated(f"batches are counted twice: {sorted(used & self._used)}")
            self._used |= used

    def _check_books(self, ledger: Ledger) -> None:
        """Every batch below the cursor is used, leased or waiting, and only one of these."""
        leased = [r for seat in ledger.seats for r in seat.ranges]
        parts = [*ledger.pool, *leased]
        outside = leases.normalise(parts)
        n_outside = leases.count(outside)
        if n_outside + len(self._used) != ledger.cursor or _batches(outside) & self._used:
            raise Violated(f"the books of round {ledger.round} lose or double batches")

    def vote(self, voter: PeerId, vote: Vote) -> None:
        key = (voter, vote.epoch, vote.round, vote.attempt)
        if self._votes.setdefault(key, (vote.body_hash, vote.leader)) != (vote.body_hash, vote.leader):
            raise Violated(f"{voter} signed two proposals of number {vote.attempt} of round {vote.round}")

    def propose(self, leader: PeerId, propose: Propose) -> None:
        hash_ = body_hash(propose.proposal.body)
        key = (leader, propose.epoch, propose.round, propose.attempt)
        if self._proposed.setdefault(key, hash_) != hash_:
            raise Violated(f"{leader} proposed twice under number {propose.attempt} of round {propose.round}")

    @property
    def n_used(self) -> int:
        return len(self._used)

    def used(self) -> set[int]:
        return self._used


def check_record(
    record: Promise | Leave | None,
    message: Promise | Leave | Vote,
    voter: PeerId,
    signed: Mapping[int, int] | None = None,
) -> None:
    """What a voter says about its promises must be on its disk already. `signed`: its last round of each epoch."""
    if isinstance(message, Vote):
        kept = isinstance(record, Promise) and (record.epoch, record.round, record.attempt, record.voted_attempt) == (
            message.epoch,
            message.round,
            message.attempt,
            message.attempt,
        )
    elif isinstance(record, Leave) and isinstance(message, Leave) and message.round == record.round + 1:
        kept = message == Leave(record.epoch, message.round, -1, PeerId(""), b"", -1, None)
        kept = kept and (signed or {}).get(message.epoch) == message.round
    else:
        kept = record == message
    if not kept:
        raise Violated(f"{voter} sent {message} before it was on disk")


def _batches(ranges: tuple[Range, ...]) -> set[int]:
    return {batch for r in ranges for batch in range(r.start, r.start + r.count)}
