"""A newcomer on a slow line, by a virtual clock: real session, stores and fetching; the run goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from aggregation import codec
from aggregation.digest import chunk_root, results_root, state_chunk_hash, state_digest
from coordinator.rounds import policy
from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.voter import Voter
from node.commits import CommitLog
from node.fetching import Fetcher
from node.holding import NodeHolder
from node.keeping import Keeper
from node.landmarks import Landmarks
from node.results import ResultsStore
from node.session import effects as fx
from node.session import events as ev
from node.session.machine import Session
from node.state import StateStore
from node.training.shared import frame_sizes
from node.whereabouts import Whereabouts
from protos import wire
from protos.hashes import body_hash, commit_hash
from protos.messages import Addresses, Body, Commit, PeerId, Vote, Welcome
from protos.signing import Identity
from tests.coordinator.made import spec
from tests.fakes.holder import FakeHolder
from tests.fakes.peers import FakeNetwork
from tests.fakes.records import FakeTable
from tests.fakes.sealer import FakeSealer, Registry
from tests.node.chain import COORDINATOR, RUN, body_after, commit_of, commit_zero, peer

SPEC = spec("rule.name=mean")
GRID = policy.grid(SPEC)
SIZES = frame_sizes(GRID, "int8", SPEC.codec.block)
ROUND_S = 6.0
ME = peer(99)
DONORS = [peer(number) for number in range(3)]


@cache
def frames_of(round_: int) -> tuple[list[bytes], tuple[bytes, ...]]:
    """The results of a round, and their hashes."""
    rng = np.random.default_rng(round_)
    block, leaf = SPEC.codec.block, SPEC.codec.leaf_values
    frames = [
        codec.encode("int8", rng.standard_normal(GRID.size(chunk)), block=block) for chunk in range(GRID.n_chunks)
    ]
    return frames, tuple(chunk_root(frame, leaf) for frame in frames)


def opened(commit: Commit) -> ev.CommitHeard:
    """With the vote of the coordinator, who is the only voter."""
    body = wire.decode(Body, commit.body)
    vote = Vote(body.epoch, body.round, 0, COORDINATOR, body_hash(commit.body), commit.digest)
    head = commit_hash(commit.body, commit.digest)
    return ev.CommitHeard(commit, body, head, ((COORDINATOR, vote),), COORDINATOR)


class World:
    """Donors (of the same files) that commit a round every few seconds, and a newcomer whose line carries so much."""

    def __init__(self, folder: Path, rate_bytes_s: float, seconds_in: float) -> None:
        self.now, self._next_at, self.rate_bytes_s = 0.0, ROUND_S, rate_bytes_s
        self.heard: deque[ev.CommitHeard] = deque()
        self.said: list[str] = []
        theta_D = np.random.default_rng(5).standard_normal(GRID.n_values).astype(np.float32)
        zeros_D = np.zeros_like(theta_D)
        cuts = [slice(*GRID.bounds(chunk)) for chunk in range(GRID.n_chunks)]
        digest = state_digest(*([state_chunk_hash(values[cut]) for cut in cuts] for values in (theta_D, zeros_D)))
        self.commit, self.ledger = commit_zero(digest)
        theta_D.tofile(folder / "theta.bin")
        self.network = FakeNetwork()
        self.donor = StateStore(folder / "state", GRID, seconds=lambda: self.now)
        self.donor.install_initial(folder / "theta.bin", None, self.commit, self.ledger)
        self.donor_results = ResultsStore(folder / "results", SIZES, SPEC.codec.leaf_values)
        commits = CommitLog(folder / "commits", 64)
        self.keeper = Keeper(self.donor, self.donor_results, commits, SPEC.keep)
        self.keeper.settle()
        for who in DONORS:
            holder = NodeHolder(self.donor, self.donor_results, cast(Any, None), commits, lambda: None, wait_s=1.0)
            self.network.join(who, holder)
        while self._next_at <= seconds_in:
            self.pass_time(1.0)
        self.began = self.now
        self.heard.clear()
        self.session = Session(
            ME, SPEC, FakeSealer(Registry(), ME), coordinator=COORDINATOR, voter=Voter(ME, None), ledger=None,
            now=Instant(self.now),
        )  # fmt: skip
        self.store = StateStore(folder / "mine", GRID, seconds=lambda: self.now)
        self.fetcher = self._fetcher(folder)

    def _fetcher(self, folder: Path) -> Fetcher:
        whereabouts = Whereabouts(RUN, FakeTable(RUN).join(Identity.generate()))
        for who in DONORS:
            whereabouts.know(who, ("there:1",))
        peers = self.network.join(ME, FakeHolder(folder))
        fetch = peers.fetch

        async def at_rate(who: PeerId, to: Any, kind: str, hashes: Any, most: int, sink: Any, **more: Any) -> Any:
            async def slowly(hash_: bytes, data: bytes) -> None:
                self.pass_time(len(data) / self.rate_bytes_s)
                await sink(hash_, data)

            return await fetch(who, to, kind, hashes, most, slowly, **more)

        peers.fetch = at_rate  # type: ignore[method-assign,assignment]

        async def away() -> Addresses:
            return nowhere

        nowhere = Addresses(1, (), (), PeerId(""), ())
        self.results = ResultsStore(folder / "my results", SIZES, SPEC.codec.leaf_values)
        return Fetcher(
            ME, SPEC, peers=peers, whereabouts=whereabouts,
            landmarks=Landmarks(ME, COORDINATOR, nowhere, away, whereabouts), store=self.store, results=self.results,
            pieces=cast(Any, None), pool=cast(Any, None), say=self.said.append, seconds=lambda: self.now,
            open_commit=opened,
        )  # fmt: skip

    def pass_time(self, seconds: float) -> None:
        """The run goes on meanwhile, and tells of its commits."""
        until = self.now + seconds
        while until >= self._next_at:
            self.now = self._next_at
            self._next_at += ROUND_S
            frames, hashes = frames_of(self.ledger.round + 1)
            body, folded = body_after(self.ledger, results_root=results_root(hashes), voters=(COORDINATOR,))
            name = body_hash(wire.encode(body))
            made, self.ledger = commit_of(body, folded, self.donor.prepare(name, body, frames.__getitem__))
            self.commit = Commit(made.body, made.digest, made.attempt, made.votes, hashes)
            area = self.donor_results.area(name)
            for chunk, frame in enumerate(frames):
                area.put(chunk, frame, hashes[chunk])
            self.donor.apply(name, self.commit, self.ledger)
            self.keeper.settle()
            heard = opened(self.commit)
            self.heard.append(heard)
            if hasattr(self, "fetcher"):
                self.fetcher.told(heard.commit, heard.body)
        self.now = until

    async def join(self, limit_s: float) -> float | None:
        """The seconds until the newcomer holds the newest state; None if that takes longer than this."""
        heard = opened(self.commit)
        welcome = Welcome(COORDINATOR, self.commit, self.ledger.to_bytes(), (), 0.0, 1.0)
        inbox: deque[ev.Event] = deque([ev.LineUp(welcome, heard.body, self.ledger, heard.signed)])
        while self.now - self.began < limit_s:
            inbox.extend(self.heard)
            self.heard.clear()
            if not inbox:
                if self.session.ledger is not None and self.session.ledger.head == self.ledger.head:
                    return self.now - self.began
                self.pass_time(0.5)
                inbox.append(ev.Woke())
                continue
            for effect in self.session.handle(inbox.popleft(), Instant(self.now)):
                answer = await self._carry_out(effect)
                if answer is not None:
                    inbox.append(answer)
        return None

    async def _carry_out(self, effect: fx.Effect) -> ev.Event | None:
        match effect:
            case fx.FetchState():
                state = await self.fetcher.state(effect)
                return ev.StateFetched(state) if isinstance(state, Ledger) else ev.StateFetchFailed(state)
            case fx.FetchCommits():
                return await self.fetcher.commits(effect)
            case fx.Verify():
                if fault := await self.fetcher.results(effect):
                    return ev.VerifyFailed(effect.body_hash, fault)
                digest = self.store.prepare(effect.body_hash, effect.body, self.fetcher.frames(effect))
                return ev.Verified(effect.body_hash, digest)
            case fx.Apply():
                self.store.apply(body_hash(effect.commit.body), effect.commit, effect.ledger)
                return ev.Applied(effect.commit_hash)
            case fx.Say(text):
                self.said.append(text)
        return None

    def close(self) -> None:
        self.donor_results.close()
        self.results.close()


def like(n_parameters: float, mbit: float = 3.0) -> float:
    """The rate at which this small model takes as long as so many parameters at a real line."""
    return mbit * 1e6 / 8 * GRID.n_values / n_parameters


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody loses power here."""
    monkeypatch.setattr("os.fsync", lambda _: None)


@pytest.mark.parametrize(
    ("n_parameters", "seconds_in"), [(120_000, 50.0), (820_000, 92.0), (1_200_000, 50.0), (1_200_000, 71.0)]
)
def test_a_newcomer_at_3_mbit_s_is_up_to_date_within_3_minutes(
    tmp_path: Path, n_parameters: int, seconds_in: float
) -> None:
    """Two rounds are left for its first contribution."""
    world = World(tmp_path, like(n_parameters), seconds_in)
    took_s = asyncio.run(world.join(180.0 - 2 * ROUND_S))
    assert took_s is not None, world.said
    assert world.store.current is not None
    assert world.store.current.digest == world.donor.current.digest  # type: ignore[union-attr]
    moved = any("taking a snapshot" in said for said in world.said)
    assert moved == (n_parameters > 500_000)
    world.close()


def test_a_line_that_can_not_keep_up_is_told_so(tmp_path: Path) -> None:
    world = World(tmp_path, like(2_000_000, mbit=2.0), 50.0)
    assert asyncio.run(world.join(240.0)) is None
    told = [said for said in world.said if "can't keep up" in said]
    assert told
    assert "every 6 s" in told[0]
    world.close()


def test_a_fast_line_takes_the_newest_state_and_no_results(tmp_path: Path) -> None:
    world = World(tmp_path, like(820_000, mbit=1000.0), 71.0)
    took_s = asyncio.run(world.join(60.0))
    assert took_s is not None
    assert took_s < ROUND_S
    assert not any("following" in said or "snapshot" in said for said in world.said)
    world.close()
