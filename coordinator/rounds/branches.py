"""The chain as others tell it: whether a commit that this process had no part in extends the books, by its quorum.

Where a run was parted, two branches may have gone on; `policy.branch_key` says which one is followed.
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.rounds import policy
from coordinator.rounds.events import Learned
from coordinator.rounds.ledger import Ledger, LedgerError, fold
from coordinator.rounds.voter import certificate_faults
from protos.hashes import body_hash
from protos.messages import PeerId


def books_after(books: Ledger, told: Learned, coordinator: PeerId) -> Ledger:
    """The books after a commit that somebody tells of. Raises LedgerError unless a quorum made it after these.

    The first commit of an epoch that was opened after a lost quorum is the coordinator's alone.
    """
    body, commit = told.body, told.commit
    before = books if body.epoch <= books.epoch else books.in_epoch(body.epoch, coordinator)
    folded = fold(books, body, told.orders, told.target)
    if folded.hash() != body.ledger_hash:
        raise LedgerError(f"the books after round {body.round} are not those that it names")
    hash_ = body_hash(commit.body)
    if fault := certificate_faults(told.signed, hash_, commit.digest, commit.attempt, before, coordinator):
        raise LedgerError(f"round {body.round}: {fault}")
    return folded.at(told.commit_hash, commit.digest)


def verified(fork: Ledger, chain: Iterable[Learned], coordinator: PeerId) -> list[tuple[Learned, Ledger]]:
    """As many of these commits as extend the books one after the other, each with the books after it."""
    books, found = fork, []
    for told in chain:
        try:
            books = books_after(books, told, coordinator)
        except LedgerError:
            break
        found.append((told, books))
    return found


def is_larger(other: Ledger, mine: Ledger) -> bool:
    """Whether the branch that ends in other books is to be followed instead of the one that ends in mine."""
    return other.head != mine.head and policy.branch_key(other) > policy.branch_key(mine)
