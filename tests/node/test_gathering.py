"""In what order holders of results are asked, and that one who can't answer holds up nobody else's chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from aggregation import codec
from aggregation.chunks import ChunkGrid
from aggregation.digest import chunk_root
from coordinator.rounds import policy
from node.gathering import AVOIDED_S, Gatherer, Lacks
from node.ports import PeerFailed
from node.results import ResultsStore
from node.session.effects import Verify
from node.training.shared import frame_sizes
from node.whereabouts import Whereabouts
from protos.messages import PeerId
from protos.signing import Identity
from tests.coordinator.made import genesis, spec
from tests.fakes.holder import FakeHolder
from tests.fakes.loop import SkippingLoop, play
from tests.fakes.peers import FakeNetwork, FakePeers, Fault
from tests.fakes.records import FakeTable

ME, FIRST, SECOND, NOWHERE = (Identity.from_private_bytes(bytes([n]) * 32).peer for n in (2, 3, 4, 5))
SPEC = spec()
GRID: ChunkGrid = policy.grid(SPEC)


def frame(chunk: int, round_: int) -> bytes:
    values_P = np.random.default_rng([round_, chunk]).standard_normal(GRID.size(chunk)).astype(np.float32)
    return codec.encode(SPEC.codec.name, values_P, block=SPEC.codec.block)


class Watched(FakePeers):
    """Keeps who was asked for something, in order, and when each answer was there."""

    def __init__(self, network: FakeNetwork) -> None:
        super().__init__(network, ME)
        self.asked: list[PeerId] = []
        self.answered: list[PeerId] = []

    async def fetch(
        self,
        peer: PeerId,
        addresses: Sequence[str],
        kind: str,
        hashes: Sequence[bytes],
        max_bytes: int,
        sink: Callable[[bytes, bytes], Awaitable[None]],
        *,
        exchange: bool,
    ) -> list[bytes]:
        self.asked.append(peer)
        try:
            await self.asks(peer)
            return await super().fetch(peer, addresses, kind, hashes, max_bytes, sink, exchange=exchange)
        finally:
            self.answered.append(peer)

    async def asks(self, peer: PeerId) -> None:
        """What happens before a peer answers; what is raised here is its failure."""


@dataclass
class Bench:
    folder: Path
    pool: Executor
    network: FakeNetwork = field(default_factory=FakeNetwork)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.table = FakeTable(genesis()[1].run)
        self.whereabouts = Whereabouts(genesis()[1].run, self.table.join(Identity.generate()))
        self.peers = Watched(self.network)
        sizes = frame_sizes(GRID, codec.result_codec(SPEC.codec.name), SPEC.codec.block)
        self.results = ResultsStore(self.folder / "results", sizes, SPEC.codec.leaf_values)
        self.gatherer = Gatherer(
            ME, SPEC, peers=self.peers, whereabouts=self.whereabouts, results=self.results,
            pool=self.pool, lied=lambda peer, why: None, seconds=lambda: self.now_s,
        )  # fmt: skip

    def holder(self, peer: PeerId, round_: int, *chunks: int) -> None:
        """The peer has these results of a round."""
        if peer not in self.network.holders:
            made = FakeHolder(self.folder / peer[-6:])
            made.folder.mkdir()
            self.network.join(peer, made)
            self.whereabouts.know(peer, ("there:1",))
        holder = self.network.holders[peer]
        assert isinstance(holder, FakeHolder)
        for chunk in chunks:
            data = frame(chunk, round_)
            holder.put("result", chunk_root(data, SPEC.codec.leaf_values), data)

    def gather(self, round_: int, holders: tuple[PeerId, ...]) -> str:
        """What comes of one pass for all results of a round."""
        hashes = tuple(chunk_root(frame(chunk, round_), SPEC.codec.leaf_values) for chunk in range(GRID.n_chunks))
        key = bytes([round_]) * 32
        verify = Verify(genesis()[1], key, hashes, (), holders, replay=True)
        area = self.results.area(key)

        async def main() -> str:
            async with asyncio.timeout(60):
                return await self.gatherer.one_pass(area, verify, range(GRID.n_chunks), Lacks(), exchange=True)

        fault = asyncio.run(main())
        assert bool(fault) == bool(area.missing(hashes))
        return fault


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with ThreadPoolExecutor(1) as pool:
        yield Bench(tmp_path, pool)


def test_the_dht_is_asked_for_nobody_while_those_who_are_known_have_it_all(bench: Bench) -> None:
    """A member behind NAT is in every round's list of holders, and looking for it may take seconds each time."""
    bench.holder(FIRST, 1, 0, 1, 2)
    assert bench.gather(1, (NOWHERE, FIRST)) == ""
    assert bench.table.asked == []


def test_who_is_known_from_nowhere_is_looked_for_once_nobody_else_has_it(bench: Bench) -> None:
    bench.holder(FIRST, 1, 0, 1)
    assert "no address record" in bench.gather(1, (NOWHERE, FIRST))
    assert bench.table.asked == [NOWHERE]


def test_who_stood_still_is_asked_after_the_others_until_it_may_be_better(bench: Bench) -> None:
    for round_ in (1, 2, 3):
        bench.holder(FIRST, round_, 0, 1, 2)
        bench.holder(SECOND, round_, 0, 1, 2)
    bench.network.faults[FIRST] = Fault(stall=True)
    assert bench.gather(1, (FIRST, SECOND)) == ""
    assert FIRST in bench.peers.asked
    bench.peers.asked.clear()
    assert bench.gather(2, (FIRST, SECOND)) == ""
    assert bench.peers.asked == [SECOND]
    bench.now_s += AVOIDED_S
    assert bench.gather(3, (FIRST, SECOND)) == ""
    assert FIRST in bench.peers.asked


def test_it_is_still_asked_where_it_alone_has_something(bench: Bench) -> None:
    bench.holder(FIRST, 2, 0, 1, 2)
    bench.network.faults[FIRST] = Fault(drop=True)
    assert "connection refused" in bench.gather(1, (FIRST,))
    del bench.network.faults[FIRST]
    bench.holder(SECOND, 2, 0, 2)
    assert bench.gather(2, (FIRST, SECOND)) == ""
    assert bench.peers.asked[-2:] == [SECOND, FIRST]
    bench.peers.asked.clear()
    bench.holder(FIRST, 3, 0, 1, 2)
    bench.holder(SECOND, 3, 0, 1, 2)
    assert bench.gather(3, (FIRST, SECOND)) == ""
    assert FIRST in bench.peers.asked, "it has answered since"


class Waiting(Watched):
    """One that is asked fails, but not before something has happened."""

    def __init__(self, network: FakeNetwork, slow: PeerId) -> None:
        super().__init__(network)
        self.slow = slow
        self.go_on: Callable[[], bool] = lambda: True

    async def asks(self, peer: PeerId) -> None:
        if peer != self.slow:
            return
        while not self.go_on():  # noqa: ASYNC110 - threads have a part in it
            await asyncio.sleep(0.001)
        raise PeerFailed(peer, "nothing moved")


def test_chunks_go_on_to_their_next_source_whatever_others_wait_for(bench: Bench) -> None:
    bench.holder(FIRST, 1)  # it has nothing of what it is asked for
    bench.holder(SECOND, 1, 0, 1, 2)
    third = Identity.from_private_bytes(bytes([9]) * 32).peer
    bench.holder(third, 1, 0, 1, 2)
    slow = bench.peers = bench.gatherer._peers = Waiting(bench.network, third)
    slow.go_on = lambda: slow.answered.count(SECOND) == 2
    assert bench.gather(1, (FIRST, SECOND, third)) == ""
    before = bench.peers.answered[: bench.peers.answered.index(third)]
    assert before.count(SECOND) == 2, "its own chunk, and the one that the first one lacked"


class Trickling(Watched):
    """Some of those who are asked go on for ever without a whole thing."""

    def __init__(self, network: FakeNetwork, *slow: PeerId) -> None:
        super().__init__(network)
        self.slow = slow
        self.n_slow = 0

    async def fetch(
        self,
        peer: PeerId,
        addresses: Sequence[str],
        kind: str,
        hashes: Sequence[bytes],
        max_bytes: int,
        sink: Callable[[bytes, bytes], Awaitable[None]],
        *,
        exchange: bool,
    ) -> list[bytes]:
        if peer not in self.slow:
            return await super().fetch(peer, addresses, kind, hashes, max_bytes, sink, exchange=exchange)
        self.asked.append(peer)
        self.n_slow += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.n_slow -= 1
        raise AssertionError("it never ends")


def test_beside_a_source_that_trickles_the_next_one_is_asked(bench: Bench) -> None:
    slow = bench.peers = bench.gatherer._peers = Trickling(bench.network, FIRST)
    bench.gatherer._patience_s = 0.01
    for round_ in (1, 2):
        bench.holder(FIRST, round_, 0, 1, 2)
        bench.holder(SECOND, round_, 0, 1, 2)
    assert bench.gather(1, (FIRST, SECOND)) == ""
    assert FIRST in bench.peers.asked
    assert slow.n_slow == 0, "nobody goes on asking it"
    bench.peers.asked.clear()
    bench.gatherer._patience_s = 30.0
    assert bench.gather(2, (FIRST, SECOND)) == ""
    assert bench.peers.asked == [SECOND], "it is asked after the others for a while"


def test_no_more_than_one_is_asked_beside_another(bench: Bench) -> None:
    """Else who has a slow line itself would ask all for the same."""
    third = Identity.from_private_bytes(bytes([9]) * 32).peer
    slow = bench.peers = bench.gatherer._peers = Trickling(bench.network, FIRST, SECOND)
    bench.gatherer._patience_s = 0.01
    for peer in (FIRST, SECOND, third):
        bench.holder(peer, 1, 0)
    hashes = (chunk_root(frame(0, 1), SPEC.codec.leaf_values),)
    verify = Verify(genesis()[1], b"k" * 32, hashes, ((FIRST,),), (SECOND, third))
    area = bench.results.area(b"k" * 32)

    async def main(loop: SkippingLoop) -> None:
        bench.whereabouts.know(third, ("there:1",))
        line = bench.gatherer._line(verify)(0)
        slow.slow = tuple(line[:2])  # the first two that are asked
        passing = asyncio.create_task(bench.gatherer.one_pass(area, verify, [0], Lacks(), exchange=True))
        for _ in range(20):
            await loop.skip(2 * bench.gatherer._patience_s)
        assert not passing.done()
        assert bench.peers.asked == list(line[:2])
        passing.cancel()
        await asyncio.gather(passing, return_exceptions=True)

    play(main)
