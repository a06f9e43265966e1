"""Learns the chain that went on without this leader: asks a member for its commits, opens them, finds where they fork.

What comes back is an event for the deciding code, which judges each commit by its quorum.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.rounds.events import Branched, Learned
from coordinator.rounds.ledger import Ledger
from protos import hashes, limits
from protos.messages import Body, Commit, Leave, PeerId, Vote
from protos.orders import Kind, OrderError, open_order
from protos.sealer import open_signed
from protos.signing import SignatureError
from protos.wire import WireError, decode_terse

BRANCH_BYTES_MOST = 256 * 2**20
"""Of its commits: whoever asks keeps them all in memory until they are judged."""
BRANCH_MOST = 4096
"""Commits of another branch that are looked through for the place where it leaves ours."""


class Unknown(Exception):
    """A member could not be asked, or what it said makes no sense."""


class Chain(Protocol):
    """Asks others for commits. Takes a bounded time."""

    async def commits_after(
        self, peer: PeerId, addresses: Sequence[str], epoch: int, round_: int, n_most: int
    ) -> Sequence[Commit]:
        """Commits after a round, the oldest first. Raises Unknown."""


@dataclass(frozen=True, slots=True)
class Past:
    """One commit of this leader's own chain, with the books after it."""

    commit: Commit
    books: Ledger


class Memory(Protocol):
    """This leader's own chain."""

    async def heads(self) -> list[tuple[int, int, bytes]]:
        """Epoch, round and hash of its commits, the newest first; as far back as it is kept."""

    async def at(self, head: bytes) -> Past | None:
        """A commit of the chain and the books after it; None if it is none of the chain, or not kept."""


class Learner:
    """Asks members for one leader.

    Args:
        memory: this leader's own chain; None for one that can't leave its branch.
    """

    def __init__(self, run: PeerId, coordinator: PeerId, chain: Chain, memory: Memory | None = None) -> None:
        self._run, self._coordinator = run, coordinator
        self._chain, self._memory = chain, memory

    async def learn(self, peer: PeerId, addresses: Sequence[str], books: Ledger) -> list[Learned] | Branched:
        """What a member has beyond these books: commits that extend them, or another branch. Raises Unknown."""
        told = await self._after(peer, addresses, books.epoch, books.round)
        if told and told[0].body.previous == books.head:
            return [await self._whole(item) for item in told]
        # Another branch, maybe of fewer rounds than ours, or nothing that isn't here.
        own = await self._memory.heads() if self._memory is not None else []
        known = {hash_ for _, _, hash_ in own}
        back = 1
        while own:
            epoch, round_, _ = own[min(back, len(own) - 1)]
            all_of_it = await self._after(peer, addresses, epoch, round_)
            branch = [item for item in all_of_it if item.commit_hash not in known]
            if branch and branch[0].body.previous in known:
                return await self._branch(branch)
            if not branch and all_of_it:
                return []
            if back >= len(own):
                break
            back *= 8
        raise Unknown("its chain has nothing in common with the one here, as far as both are kept")

    async def _branch(self, branch: list[Learned]) -> Branched:
        fork = await self._memory.at(branch[0].body.previous) if self._memory is not None else None
        if fork is None:
            raise Unknown("the books at the fork are not kept")
        return Branched(fork.books, fork.commit, tuple([await self._whole(item) for item in branch]))

    async def _after(self, peer: PeerId, addresses: Sequence[str], epoch: int, round_: int) -> list[Learned]:
        found: list[Learned] = []
        n_bytes = 0
        while len(found) < BRANCH_MOST:
            commits = await self._chain.commits_after(peer, addresses, epoch, round_, limits.COMMITS)
            n_bytes += sum(len(commit.body) + sum(map(len, commit.votes)) for commit in commits)
            if n_bytes > BRANCH_BYTES_MOST:
                raise Unknown(f"it sends more than {BRANCH_BYTES_MOST} bytes of commits")
            for commit in commits:
                # Thousands of signatures take seconds, and the leader's loop has others to hear meanwhile.
                item = await asyncio.to_thread(opened, commit, self._run, self._coordinator)
                if (item.body.epoch, item.body.round) <= (epoch, round_):
                    raise Unknown("it sends commits that were not asked for")
                if found and item.body.previous != found[-1].commit_hash:
                    return found  # what comes after a gap leads nowhere
                found.append(item)
                epoch, round_ = item.body.epoch, item.body.round
            if len(commits) <= 1:  # one at a time is what a node says that keeps no others
                break
        return found

    async def _whole(self, item: Learned) -> Learned:
        """With the books that a rollback among its orders goes back to."""
        heads = [each.order.spec for each in item.orders if each.order.kind == Kind.ROLLBACK]
        past = await self._memory.at(heads[0]) if heads and self._memory is not None else None
        if past is None:
            return item
        return Learned(item.commit, item.body, item.commit_hash, item.signed, item.orders, past.books)


def opened(commit: Commit, run: PeerId, coordinator: PeerId) -> Learned:
    """A commit with its votes and leaves whose signatures hold, and its orders. Raises Unknown."""
    try:
        body = decode_terse(Body, commit.body)
        orders = tuple(open_order(raw, run=run, coordinator=coordinator) for raw in body.orders)
    except (WireError, OrderError) as error:
        raise Unknown(f"it sends a commit that makes no sense: {error}") from error
    if body.run != run:
        raise Unknown(f"it sends a commit of run {body.run}")
    hash_ = hashes.commit_hash(commit.body, commit.digest)
    return Learned(commit, body, hash_, _signed(commit, run), orders)


def _signed(commit: Commit, run: PeerId) -> tuple[tuple[PeerId, Vote | Leave], ...]:
    signed: list[tuple[PeerId, Vote | Leave]] = []
    for envelope in commit.votes:
        try:
            item = open_signed(envelope, run)
        except (SignatureError, WireError):
            continue
        if isinstance(item.message, Vote | Leave):
            signed.append((item.signer, item.message))
    return tuple(signed)
