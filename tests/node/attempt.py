"""One attempt of two members in memory: what each contributes, and either side's exchange at work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np

from aggregation import codec
from aggregation.exchange import Exchange, ExchangeEvent
from aggregation.rules import combine
from coordinator.rounds import policy
from node.encoding import Contribution, make_area, read_contribution
from node.exchanging import Exchanging
from node.holding import NodeHolder
from node.ports import PeerFailed, RowSource
from node.results import ResultsStore
from node.rows import ROWS_IN_MEMORY_BYTES
from node.session.effects import BeginExchange
from node.training.shared import CodesArea, frame_sizes
from protos import hashes, wire
from protos.messages import (
    Bandwidth,
    ChunkHead,
    Commitment,
    Deal,
    Missing,
    PeerId,
    Plan,
    PlanMember,
    Range,
    Results,
    Signed,
)
from protos.sealer import KeySealer, open_signed
from protos.signing import Identity
from tests.coordinator.made import COORDINATOR, RUN, spec
from tests.fakes.peers import FakeNetwork

SPEC = spec("rule.name=mean")
GRID = policy.grid(SPEC)
SIZES = frame_sizes(GRID, SPEC.codec.name, SPEC.codec.block)
A, B, STRANGER = (Identity.from_private_bytes(bytes([n]) * 32) for n in (3, 4, 5))
BOTH = tuple(sorted((A.peer, B.peer)))
PLAN = Plan(
    RUN.peer, 0, 1, 0, COORDINATOR.peer, b"p" * 32, b"d" * 32, 1, tuple(PlanMember(p, 1, True, True) for p in BOTH),
    "mean", 0, "", "no robustness", SPEC.codec.name, Range(0, SPEC.model.n_values), 0, "identity", 1, 1.0, 1.0, 1.0,
)  # fmt: skip
PLAN_HASH = hashes.plan_hash(wire.encode(PLAN))


def contribution(folder: Path, seed: int) -> Contribution:
    """An encoded Δ of random numbers."""
    folder.mkdir()
    make_area(folder / "codes.0", SPEC)
    area = CodesArea(folder / "codes.0", GRID, SPEC.codec.name, SPEC.codec.block, writable=True)
    rng = np.random.default_rng(seed)
    for chunk in range(GRID.n_chunks):
        values_P = rng.standard_normal(GRID.size(chunk)).astype(np.float32)
        codec.encode_into(SPEC.codec.name, values_P, area.frame(chunk), block=SPEC.codec.block)
    return read_contribution(folder / "codes.0", SPEC)


class Member:
    """One member's side of the attempt: the deciding exchange, and what carries it out."""

    def __init__(self, world: World, identity: Identity, folder: Path, pool: ThreadPoolExecutor) -> None:
        self.me = identity.peer
        self.contribution = world.contributions[self.me]
        weights = policy.weights(world.commitments, SPEC)
        self.exchange = Exchange(
            self.me, PLAN_HASH, 0, {str(peer): each.root for peer, each in world.commitments.items()},
            {str(peer): weight for peer, weight in weights.items()}, world.lines, SIZES,
        )  # fmt: skip
        self.results = ResultsStore(folder / "results", SIZES, SPEC.codec.leaf_values)
        self.told: asyncio.Queue[Results | Missing] = asyncio.Queue()
        self.faults: list[BaseException] = []
        self.failed = asyncio.Event()
        self.work = folder / "rows"
        self._events: asyncio.Queue[ExchangeEvent] = asyncio.Queue()
        none = cast(Any, None)
        holder = NodeHolder(none, self.results, none, none, lambda: self.exchanging, wait_s=1.0)
        self.peers = world.network.join(self.me, holder)
        self.exchanging: Exchanging | None = Exchanging(
            world.begin, self.me, SPEC, KeySealer(identity, RUN.peer),
            admit=self.exchange.admit, codes=self.contribution.area, code_paths=self.contribution.paths,
            results=self.results.area(PLAN_HASH), work=self.work, pool=pool, peers=self.peers, where=_where,
            happened=self._events.put_nowait, tell=self._tell, failed=self._failed, seconds=lambda: 0.0,
            memory_bytes=world.memory_bytes,
        )  # fmt: skip

    async def run(self) -> None:
        """Decide and carry out, as a driver does."""
        effects = self.exchange.begin()
        while True:
            for effect in effects:
                if self.exchanging is not None:
                    await self.exchanging.carry_out(effect)
            effects = self.exchange.handle(await self._events.get())

    def rows(self, change: Callable[[ChunkHead, bytes], tuple[ChunkHead, bytes]]) -> RowSource:
        """Its rows, changed."""
        area, paths = self.contribution.area, self.contribution.paths

        def source(chunk: int) -> tuple[ChunkHead, memoryview]:
            data = bytes(area.frame(chunk))
            head, row = change(ChunkHead(PLAN_HASH, chunk, len(data), paths[chunk]), data)
            return head, memoryview(row)

        return source

    def _failed(self, fault: BaseException) -> None:
        self.faults.append(fault)
        self.failed.set()

    async def _tell(self, message: Signed | Missing) -> None:
        if isinstance(message, Signed):
            opened = open_signed(message.envelope, RUN.peer, signer=self.me, kind=Results)
            assert isinstance(opened.message, Results)
            self.told.put_nowait(opened.message)
        else:
            self.told.put_nowait(message)


async def _where(peer: PeerId) -> tuple[str, ...]:
    return (f"{peer[-4:]}:1",)


class World:
    """An attempt of two members."""

    def __init__(
        self, folder: Path, change: Callable[[Commitment], Commitment] = lambda commitment: commitment
    ) -> None:
        self.folder = folder
        self.memory_bytes = ROWS_IN_MEMORY_BYTES
        self.network = FakeNetwork()
        self.contributions = {who.peer: contribution(folder / who.peer[-4:], seed) for seed, who in enumerate((A, B))}
        self.commitments = {who.peer: change(self._commitment(who.peer)) for who in (A, B)}
        envelopes = [KeySealer(who, RUN.peer).seal(self.commitments[who.peer]) for who in (A, B)]
        bandwidths = tuple(Bandwidth(peer, 0.0) for peer in BOTH)
        deal = Deal(PLAN_HASH, 0, tuple(envelopes), (), bandwidths)
        self.deal = KeySealer(COORDINATOR, RUN.peer).seal(deal)
        self.lines = policy.lines(PLAN_HASH, self.commitments, bandwidths, GRID.n_chunks)
        self.begin = BeginExchange(PLAN, PLAN_HASH, deal, self.deal, self.commitments)
        self.members: dict[PeerId, Member] = {}

    def _commitment(self, peer: PeerId) -> Commitment:
        mine = self.contributions[peer]
        steps = 1 if peer == A.peer else 3
        return Commitment(PLAN_HASH, mine.root, mine.norms, steps, 16 * steps, (Range(0, steps),), 0.1, 1.0)

    @asynccontextmanager
    async def living(self, *who: Identity) -> Any:
        """These members, at work."""
        with ThreadPoolExecutor(2) as pool:
            made = [Member(self, identity, self.folder / identity.peer[-4:], pool) for identity in who]
            self.members = {member.me: member for member in made}
            running = [asyncio.create_task(member.run()) for member in made]
            try:
                yield made
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
                for member in made:
                    if member.exchanging is not None:
                        await member.exchanging.close()
                    member.results.close()

    def dealt_to(self, peer: PeerId) -> list[int]:
        return [chunk for chunk, line in enumerate(self.lines) if line[0] == peer]

    def combined(self, chunk: int) -> bytes:
        """What a chunk's reducer should make of both contributions."""
        frames = [bytes(self.contributions[peer].area.frame(chunk)) for peer in BOTH]
        weights = policy.weights(self.commitments, SPEC)
        made, _ = combine(
            "mean", frames, weights_N=[weights[peer] for peer in BOTH], f=0, codec=SPEC.codec.name,
            block=SPEC.codec.block,
        )  # fmt: skip
        return bytes(made)


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(main())


async def send(by: Member, to: Member, world: World, source: RowSource, chunk: int) -> str | list[bytes]:
    """Send a row to another member as a stranger's program could; the receipts, or why it was refused."""
    receipts: list[bytes] = []

    async def receipted(envelope: bytes) -> None:
        receipts.append(envelope)

    try:
        await by.peers.send_rows(to.me, (), world.deal, [chunk], source, receipted)
    except PeerFailed as error:
        return error.why
    return receipts


class Sender:
    """A member without an exchange of its own: what `send` needs of one."""

    def __init__(self, world: World, peer: PeerId) -> None:
        self.me, self.contribution = peer, world.contributions.get(peer, world.contributions[B.peer])
        self.peers = world.network.join(peer, world.network.holders[A.peer])
