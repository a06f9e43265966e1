"""Whether commits that were kept make one chain, and the books that they make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from coordinator.leading.orders import open_orders
from coordinator.rounds.ledger import Ledger, LedgerError, fold, genesis, rollback_of
from protos.hashes import commit_hash
from protos.messages import ZERO_HASH, Body, Commit
from protos.orders import OpenedOrder
from protos.signing import SignatureError


def refold(commits: Iterable[tuple[Commit, Body]], head: bytes) -> Ledger:
    """The ledger folded from commit 0 to this head, oldest first. Raises LedgerError where they don't lead to it."""
    ledger: Ledger | None = None
    chain = list(commits)
    kept: dict[bytes, Ledger] = {}  # the books that rollbacks go back to, by their heads
    orders = [_orders(body, chain[0][1]) if body.orders else () for _, body in chain]
    wanted = {each.order.spec for given in orders if (each := rollback_of(given)) is not None}
    for (commit, body), given in zip(chain, orders, strict=True):
        rollback = rollback_of(given)
        target = kept.get(rollback.order.spec) if rollback is not None else None
        ledger = genesis(body.run, body.leader) if ledger is None else fold(ledger, body, given, target)
        if ledger.hash() != body.ledger_hash:
            raise LedgerError(f"the books after round {body.round} are not what its commit names")
        ledger = ledger.at(commit_hash(commit.body, commit.digest), commit.digest)
        if ledger.head == head:  # more may have been appended since somebody asked
            return ledger
        if ledger.head in wanted:
            kept[ledger.head] = ledger
    if ledger is None or ledger.head != head:
        raise LedgerError("the chain doesn't lead to its head")
    return ledger


def _orders(body: Body, first: Body) -> tuple[OpenedOrder, ...]:
    """Raises LedgerError."""
    try:
        return open_orders(body, first.run, first.leader)
    except SignatureError as error:
        raise LedgerError(f"round {body.round}: {error}") from error


def broken_link(newest_first: Sequence[tuple[str, Body]], *, to_the_beginning: bool) -> str:
    """What is wrong with the links of these commits, each with its hash in hex; empty if nothing is.

    Args:
        to_the_beginning: whether the last of them is to be commit 0.
    """
    for (_, later), (hash_, _) in pairwise(newest_first):
        if later.previous.hex() != hash_:
            return f"is broken before round {later.round}: a commit is missing"
    if to_the_beginning and newest_first[-1][1].previous != ZERO_HASH:
        return "has lost its beginning"
    return ""
