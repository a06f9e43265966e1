"""A fetcher on a network in memory, and the results that others have for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar, cast

import numpy as np

from aggregation import codec
from aggregation.chunks import ChunkGrid
from aggregation.digest import chunk_root, results_root, state_chunk_hash, state_digest
from coordinator.rounds import policy
from coordinator.rounds.ledger import Ledger
from node.blocks import PieceStore
from node.errors import Unreachable
from node.fetching import Fetcher
from node.landmarks import Landmarks
from node.results import ResultsStore
from node.session.effects import FetchCommits, Verify
from node.session.events import CommitHeard
from node.state import StateStore
from node.training.shared import frame_sizes
from node.whereabouts import Whereabouts
from protos import wire
from protos.hashes import body_hash, commit_hash
from protos.messages import ZERO_HASH, Addresses, Body, Commit, Outcome, PeerId
from protos.runspec import RunSpec
from protos.signing import Identity
from tests.coordinator.made import genesis, spec
from tests.fakes.holder import FakeHolder
from tests.fakes.peers import FakeNetwork
from tests.fakes.records import FakeTable
from tests.node.chain import body_after, commit_of, commit_zero

ME, REDUCER, NEXT, HOLDER = (Identity.from_private_bytes(bytes([n]) * 32).peer for n in (2, 3, 4, 5))
SPEC: RunSpec = spec()
GRID: ChunkGrid = policy.grid(SPEC)
BODY_HASH = b"b" * 32
T = TypeVar("T")


def frame(chunk: int, seed: int = 0) -> bytes:
    rng = np.random.default_rng([seed, chunk])
    values_P = rng.standard_normal(GRID.size(chunk)).astype(np.float32)
    return codec.encode(SPEC.codec.name, values_P, block=SPEC.codec.block)


FRAMES = [frame(chunk) for chunk in range(GRID.n_chunks)]
HASHES = tuple(chunk_root(each, SPEC.codec.leaf_values) for each in FRAMES)


def opened(commit: Commit) -> CommitHeard:
    body = wire.decode(Body, commit.body)
    return CommitHeard(commit, body, commit_hash(commit.body, commit.digest), ())


def ask(ledgers: list[Ledger], commits: list[Commit], held: int, n_tries: int = 0) -> FetchCommits:
    """What a member asks that holds the state after commit `held` of these, towards the last one."""
    at = ledgers[held]
    return FetchCommits(at.epoch, at.round, at.head, opened(commits[-1]), n_tries)


class FakePieces:
    """Training data that is there after so many tries."""

    def __init__(self, n_failures: int) -> None:
        self.n_failures = n_failures

    async def ensure(self, ranges: object) -> None:
        if self.n_failures:
            self.n_failures -= 1
            raise Unreachable("the pieces", [])


@dataclass
class Bench:
    """A fetcher on a network in memory; its clock goes on by a second whenever it is looked at."""

    folder: Path
    network: FakeNetwork = field(default_factory=FakeNetwork)
    said: list[str] = field(default_factory=list)
    now_s: float = 0.0
    n_failures: int = 0
    spec: RunSpec = SPEC

    def __post_init__(self) -> None:
        sizes = frame_sizes(GRID, codec.result_codec(self.spec.codec.name), SPEC.codec.block)
        self.results = ResultsStore(self.folder / "results", sizes, SPEC.codec.leaf_values)
        self.store = StateStore(self.folder / "state", GRID)
        run = genesis()[1].run
        self.whereabouts = Whereabouts(run, FakeTable(run).join(Identity.generate()))
        self.peers = self.network.join(ME, FakeHolder(self.folder))

        async def away() -> Addresses:
            raise Unreachable("the coordinator", [])

        nowhere = Addresses(1, (), (), PeerId(""), ())
        self.fetcher = Fetcher(
            ME, self.spec, peers=self.peers, whereabouts=self.whereabouts,
            landmarks=Landmarks(ME, PeerId("c"), nowhere, away, self.whereabouts), store=self.store,
            results=self.results, pieces=cast(PieceStore, FakePieces(self.n_failures)), pool=None,  # type: ignore[arg-type]
            say=self.said.append, seconds=self._seconds, open_commit=opened,
        )  # fmt: skip

    def _seconds(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def holder(self, peer: PeerId, *chunks: int, frames: list[bytes] = FRAMES) -> FakeHolder:
        """Another node that has the results of these chunks."""
        made = FakeHolder(self.folder / peer[-6:])
        made.folder.mkdir()
        for chunk in chunks:
            made.put("result", HASHES[chunk], frames[chunk])
        self.network.join(peer, made)
        self.whereabouts.know(peer, ("there:1",))
        return made

    def verify(self, *lines: tuple[PeerId, ...], holders: tuple[PeerId, ...] = ()) -> str:
        """What comes of fetching all results, when chunks were reduced in these lines."""
        body = genesis()[1]
        return play(self.fetcher.results(Verify(body, BODY_HASH, HASHES, lines, holders)))

    def hold(self, *, outcome: Outcome = Outcome.COMMITTED, listed: tuple[bytes, ...] = HASHES) -> bytes:
        """Have it hold a state after a commit with these results; the hash of the commit's body."""
        theta_D = np.zeros(GRID.n_values, np.float32)
        theta_D.tofile(self.folder / "theta.bin")
        hashes = tuple(state_chunk_hash(theta_D[slice(*GRID.bounds(chunk))]) for chunk in range(GRID.n_chunks))
        digest = state_digest(hashes, hashes)
        _, first = commit_zero(digest)
        root = results_root(HASHES) if outcome is Outcome.COMMITTED else ZERO_HASH
        body, folded = body_after(first, outcome, results_root=root, clip_factor=0.5)
        commit, ledger = commit_of(body, folded, digest)
        commit = replace(commit, result_hashes=listed if outcome is Outcome.COMMITTED else ())
        self.store.install_initial(self.folder / "theta.bin", None, commit, ledger)
        return body_hash(commit.body)

    def whole(self, key: bytes = BODY_HASH) -> bool:
        area = self.results.area(key)
        return [bytes(area.frame(chunk)) for chunk in range(GRID.n_chunks)] == FRAMES


def play(work: Awaitable[T]) -> T:
    async def main() -> T:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(main())
