"""Which state to fetch, and from whom: what donors offer, checked, and the best of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from aggregation.chunks import ChunkGrid
from aggregation.digest import results_root, state_digest, tagged_hash
from coordinator.rounds.ledger import Ledger, LedgerError, hash_of
from node.ports import PeerFailed, Peers
from protos import wire
from protos.hashes import commit_hash
from protos.messages import Body, Commit, PeerId, StateOffer

OFFERS_AT_ONCE = 8
OFFERS_ENOUGH = 8
"""With so many donors of what is wanted nobody else is asked: offers are long, and there may be thousands."""

Donor = tuple[PeerId, Sequence[str]]
VerifyCommit = Callable[[PeerId, Sequence[str], Commit], Awaitable[Body]]
"""The body of a commit that is known to be the run's, of a donor with addresses; else ValueError or PeerFailed."""


class StateUnavailable(Exception):
    """No donor could give the state: says what each of them said. Worth another try; what was fetched is kept."""


@dataclass(frozen=True, slots=True)
class Wish:
    """Which state will do.

    Attributes:
        newer_than: one of a later round; results from there on are to be had.
        frozen: rather a frozen snapshot, for the current state moves on too fast.
        begun: the head of one that is partly here, gone on with if somebody still has it and its kind fits.
        least: where an offer of this round or a later one has come, further donors need not be asked.
    """

    newer_than: int = -1
    frozen: bool = False
    begun: bytes = b""
    least: int = 2**62


@dataclass(slots=True)
class Target:
    """The state to fetch: what it must be, and who has it."""

    commit: Commit
    ledger: Ledger
    theta: tuple[bytes, ...]
    momentum: tuple[bytes, ...]
    frozen: bool
    donors: dict[PeerId, Sequence[str]] = field(default_factory=dict)


def spread(me: PeerId, donors: Sequence[Donor]) -> list[Donor]:
    """Donors in this node's own order, so that not everybody asks the same ones first."""
    return sorted(donors, key=lambda donor: tagged_hash("donor", me.encode(), donor[0].encode()))


async def choose(
    peers: Peers, donors: Sequence[Donor], grid: ChunkGrid, verify: VerifyCommit, wish: Wish, said: dict[PeerId, str]
) -> Target:
    """The best state that donors offer and that holds up, with all who offer it; asks them in their order.

    `said` takes what others said instead. Raises StateUnavailable.
    """
    targets: dict[bytes, Target] = {}
    kinds = (True, False) if wish.frozen or wish.begun else (False,)
    for start in range(0, len(donors), OFFERS_AT_ONCE):
        await _ask(peers, donors[start : start + OFFERS_AT_ONCE], grid, verify, kinds, targets, said)
        best = _best(targets, wish)
        if best is not None and len(best.donors) >= OFFERS_ENOUGH and best.ledger.round >= wish.least:
            break
    if _best(targets, wish) is None and True not in kinds:
        await _ask(peers, donors[:OFFERS_AT_ONCE], grid, verify, (True,), targets, said)
    best = _best(targets, wish)
    if best is not None:
        return best
    older = f"; none of a later round than {wish.newer_than} is offered" if targets else ""
    raise StateUnavailable(f"no donor offers the state: {words(said)}{older}")


def _best(targets: Mapping[bytes, Target], wish: Wish) -> Target | None:
    """What is begun goes before, then the kind that is wished for, then the newest, then the one that most have."""
    fit = [target for target in targets.values() if target.ledger.round > wish.newer_than]
    return max(
        fit,
        key=lambda target: (
            target.ledger.head == wish.begun and (target.frozen or not wish.frozen),
            target.frozen == wish.frozen,
            target.ledger.epoch,
            target.ledger.round,
            len(target.donors),
        ),
        default=None,
    )


async def _ask(
    peers: Peers,
    donors: Sequence[Donor],
    grid: ChunkGrid,
    verify: VerifyCommit,
    kinds: Sequence[bool],
    targets: dict[bytes, Target],
    said: dict[PeerId, str],
) -> None:
    async def ask(peer: PeerId, addresses: Sequence[str], frozen: bool) -> None:
        try:
            offer = await peers.offer(peer, addresses, frozen=frozen)
            body = await verify(peer, addresses, offer.commit)
            target = await asyncio.to_thread(_checked, offer, body, grid, frozen)
        except PeerFailed as error:
            said.setdefault(peer, error.why)
        except ValueError as error:
            said[peer] = f"its offer doesn't hold: {error}"
        else:
            known = targets.setdefault(target.ledger.head, target)
            known.donors[peer] = addresses
            known.frozen |= frozen  # one that stands still at some donors is as good as any snapshot
            if not known.commit.result_hashes:
                known.commit = target.commit  # the first one may have come without what the next round starts from

    async with asyncio.TaskGroup() as group:
        for peer, addresses in donors:
            for frozen in kinds:
                group.create_task(ask(peer, addresses, frozen), name=f"offer of {peer}")


def _checked(offer: StateOffer, body: Body, grid: ChunkGrid, frozen: bool) -> Target:
    """Raises ValueError where the offer isn't the state after its commit."""
    n_chunks = grid.n_chunks
    if (len(offer.theta_hashes), len(offer.momentum_hashes)) != (n_chunks, n_chunks):
        raise ValueError(f"it has {len(offer.theta_hashes)} and {len(offer.momentum_hashes)} chunks, not {n_chunks}")
    if state_digest(offer.theta_hashes, offer.momentum_hashes) != offer.commit.digest:
        raise ValueError("its chunks don't have the commit's digest")
    if offer.commit.result_hashes and results_root(offer.commit.result_hashes) != body.results_root:
        raise ValueError("its result hashes are not those that its commit names")
    if hash_of(offer.ledger) != body.ledger_hash:  # before it is read: read, it takes many times its bytes
        raise LedgerError("its ledger is not the one that the commit names")
    ledger = Ledger.from_bytes(offer.ledger)
    head = commit_hash(offer.commit.body, offer.commit.digest)
    ledger = ledger.at(head, offer.commit.digest)
    return Target(offer.commit, ledger, offer.theta_hashes, offer.momentum_hashes, frozen)


class Ancestry:
    """The heads that the leader has named and all that they follow from: each commit names the one before by hash."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._known: dict[bytes, None] = {}
        self.newest_round = -1

    def __contains__(self, head: bytes) -> bool:
        return head in self._known

    def told(self, head: bytes, body: Body) -> None:
        """The leader has named this head."""
        self._know(head)
        self._know(body.previous)
        self.newest_round = max(self.newest_round, body.round)

    def learn(self, commits: Sequence[Commit]) -> None:
        """Take in what leads up to a head that is known, from a row of commits in their order. Raises WireError."""
        for commit in reversed(commits):
            if commit_hash(commit.body, commit.digest) in self._known:
                self._know(wire.decode(Body, commit.body).previous)

    def _know(self, head: bytes) -> None:
        self._known.pop(head, None)
        self._known[head] = None
        while len(self._known) > self._kept:
            del self._known[next(iter(self._known))]


def words(said: Mapping[PeerId, str]) -> str:
    return "; ".join(f"{peer[-6:]}: {why}" for peer, why in said.items()) or "nobody was asked"
