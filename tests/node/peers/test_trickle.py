"""What comes in parts must come at a least rate: who lets it trickle is given up, and the next one is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from node import donors, fetching
from node.donors import Donor, Wish
from node.peers.dialing import Dialer
from node.peers.grpc import GrpcPeers
from node.peers.pacing import RATE_LEAST_BYTES_S, UNLIMITED, Direction, Rates, StreamPace, TokenBucket
from node.peers.server import NodeServer
from node.peers.transport import ACCEPTED, LEAST_PART_BYTES, Progress, open_call
from node.ports import PeerFailed
from node.session.effects import Verify
from node.session.events import CommitsFetched
from protos import limits, services, wire
from protos.messages import ChunkHead, Fetch, FetchHead, Part, PeerId, Signed
from tests.coordinator.made import genesis
from tests.fakes.holder import FakeHolder
from tests.fakes.loop import SkippingLoop, play, until
from tests.node.chain import rows
from tests.node.donors import Scene as StateScene
from tests.node.donors import StateHolder, verify
from tests.node.fetcher import FRAMES, GRID, HASHES, Bench, ask
from tests.node.peers.served import AUTHORITY, drop, ignore, new_peer, raw_server
from tests.node.peers.test_transport import stand_still
from tests.node.states import GRID as STATE_GRID

LIMIT_S = 30.0
STEP_S = LIMIT_S / 10
N_DROPS = 40
"""A trickle that nobody ends is over after four times the limit."""
TRICKLED = r"too slow: it sent \d+ bytes in \d+(\.\d+)? s"
Context = grpc.aio.ServicerContext[bytes, bytes]


# -- the limit ---------------------------------------------------------------------------------------------------


async def trickle(loop: SkippingLoop, progress: Progress, standing: asyncio.Task[None], n_bytes: int) -> int:
    """So many bytes a step, until that ends the task; after how many steps, or 100 if it doesn't."""
    for n_steps in range(100):
        if standing.done():
            with pytest.raises(TimeoutError):
                standing.result()
            return n_steps
        progress.came(n_bytes)
        await loop.skip(STEP_S)
    return 100


def test_single_bytes_buy_no_more_than_their_share() -> None:
    async def scenario(loop: SkippingLoop) -> None:
        progress = Progress(LIMIT_S)
        standing = await stand_still(progress)
        assert 10 <= await trickle(loop, progress, standing, 1) <= 11
        assert progress.expired
        assert progress.why.startswith("too slow: it sent 1")

    play(scenario)


@pytest.mark.parametrize(("share", "lasts"), [(1.2, True), (0.7, False)])
def test_what_is_slow_and_steady_is_over_only_below_the_least_rate(share: float, lasts: bool) -> None:
    async def scenario(loop: SkippingLoop) -> None:
        progress = Progress(LIMIT_S)
        standing = await stand_still(progress)
        n_steps = await trickle(loop, progress, standing, int(share * LEAST_PART_BYTES / 10))
        assert (n_steps == 100) == lasts
        standing.cancel()
        assert n_steps > 10

    play(scenario)


def test_a_long_part_buys_the_whole_limit_again_and_no_more() -> None:
    async def scenario(loop: SkippingLoop) -> None:
        progress = Progress(LIMIT_S)
        standing = await stand_still(progress)
        for _ in range(5):
            await loop.skip(0.9 * LIMIT_S)
            assert not standing.done()
            progress.came(LEAST_PART_BYTES)
        progress.came(1000 * LEAST_PART_BYTES)
        assert await trickle(loop, progress, standing, 1) <= 21

    play(scenario)


def test_what_stands_still_after_much_came_is_over_in_time() -> None:
    async def scenario(loop: SkippingLoop) -> None:
        progress = Progress(LIMIT_S)
        standing = await stand_still(progress)
        progress.came(1000 * LEAST_PART_BYTES)
        await loop.skip(1.1 * LIMIT_S)
        assert standing.done()
        assert progress.why == "nothing moved for 30 s"
        with pytest.raises(TimeoutError):
            await standing

    play(scenario)


def test_what_we_do_with_each_byte_neither_counts_nor_buys_time() -> None:
    async def scenario(loop: SkippingLoop) -> None:
        progress = Progress(LIMIT_S)
        standing = await stand_still(progress)
        n_steps = 0
        while not standing.done() and n_steps < 100:
            progress.came(1)
            with progress.ours():
                await loop.skip(5 * STEP_S)
            await loop.skip(STEP_S)
            n_steps += 1
        assert 10 <= n_steps <= 16  # the timer looks once a limit
        with pytest.raises(TimeoutError):
            await standing

    play(scenario)


def test_each_part_of_the_slowest_line_that_may_be_set_is_long_enough() -> None:
    for rates in (Rates(total_bytes_s=RATE_LEAST_BYTES_S), Rates(stream_bytes_s=RATE_LEAST_BYTES_S)):
        assert Direction(rates).part_bytes >= LEAST_PART_BYTES
    assert limits.PART_BYTES >= LEAST_PART_BYTES


# -- over gRPC ---------------------------------------------------------------------------------------------------


class Held(Direction):
    """A line whose limits hold us up for twice the limit, each time."""

    def __init__(self, loop: SkippingLoop) -> None:
        super().__init__(Rates(total_bytes_s=1e9))
        self.n_waits = 0
        self._loop = loop

    def stream(self) -> StreamPace:
        line = self

        class Pace(StreamPace):
            async def wait(self, n_bytes: int, **_: object) -> None:
                line.n_waits += 1
                await line._loop.skip(2 * LIMIT_S)

        return Pace(TokenBucket(1.0, 1.0), None)


class Scene:
    """A caller with peers that let things trickle, on a loop whose time is put forward between two drops."""

    def __init__(self, loop: SkippingLoop, peers: GrpcPeers) -> None:
        self.loop, self.peers = loop, peers

    async def drip(self, context: Context, frames: Iterable[bytes], step_s: float = STEP_S) -> None:
        """Write frames, each a step after the one before has been read."""
        for frame in frames:
            before = self.peers.traffic.received
            await context.write(frame)
            await until(lambda before=before: self.peers.traffic.received > before)  # type: ignore[misc]
            await self.loop.skip(step_s)

    async def answer(self, context: Context) -> None:
        await context.read()
        await self.drip(context, [wire.encode(Part(b"x"))] * N_DROPS)

    async def thing(self, context: Context) -> None:
        await self.parts(context, [b"x"] * N_DROPS, STEP_S)

    async def parts(self, context: Context, parts: Sequence[bytes], step_s: float) -> None:
        asked = wire.decode(Fetch, await context.read())
        head = wire.encode_fetch_frame(FetchHead(asked.hashes[0], sum(map(len, parts))))
        await self.drip(context, (head, *(wire.encode_fetch_frame(Part(part)) for part in parts)), step_s)


def run(
    main: Callable[[Scene], Coroutine[Any, Any, None]], down: Callable[[SkippingLoop], Direction] | None = None
) -> None:
    async def scenario(loop: SkippingLoop) -> None:
        line = UNLIMITED if down is None else down(loop)
        peers = GrpcPeers(AUTHORITY.issue(new_peer()), no_progress_s=LIMIT_S, down=line)
        try:
            await main(Scene(loop, peers))
        finally:
            await peers.close()

    play(scenario)


@asynccontextmanager
async def serving(holder: FakeHolder, down: Direction = UNLIMITED) -> AsyncIterator[tuple[NodeServer, PeerId, str]]:
    peer = new_peer()
    server = NodeServer(AUTHORITY.issue(peer), holder, allowed=lambda _: "", no_progress_s=LIMIT_S, down=down)
    address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    try:
        yield server, peer, address
    finally:
        await server.stop()


@pytest.mark.parametrize("down", [None, Held], ids=["", "within limits of our own"])
def test_a_thing_that_trickles_is_given_up(down: Callable[[SkippingLoop], Direction] | None) -> None:
    async def main(scene: Scene) -> None:
        async with raw_server(Exchange__FetchThings=scene.thing) as (peer, address):
            with pytest.raises(PeerFailed, match=TRICKLED):
                await scene.peers.fetch(peer, [address], "state", [bytes(32)], 100, drop, exchange=False)
        assert scene.peers.fetching.n_bytes == 0

    run(main, down)


def test_padding_buys_nothing() -> None:
    """A field that nobody knows is skipped, however long it is."""
    padding = b"\xfa\x07" + b"\x80\x80\x08" + bytes(2**17)  # field 127 and its length

    async def main(scene: Scene) -> None:
        async def padded(context: Context) -> None:
            await context.read()
            await scene.drip(context, [wire.encode(Part(b"x")) + padding] * N_DROPS)

        async with raw_server(State__Commits=padded) as (peer, address):
            with pytest.raises(PeerFailed, match=TRICKLED):
                await scene.peers.commits_after(peer, [address], 0, 0, 10)

    run(main)


def test_lacks_that_trickle_are_given_up() -> None:
    async def main(scene: Scene) -> None:
        names = [bytes([i]) * 32 for i in range(N_DROPS)]

        async def lacks(context: Context) -> None:
            await context.read()
            await scene.drip(context, (wire.encode_fetch_frame(FetchHead(name, -1)) for name in names))

        async with raw_server(Exchange__FetchThings=lacks) as (peer, address):
            with pytest.raises(PeerFailed, match=TRICKLED):
                await scene.peers.fetch(peer, [address], "state", names, 100, drop, exchange=False)

    run(main)


@pytest.mark.parametrize("what", ["commits", "offer"])
def test_an_answer_that_trickles_is_given_up(what: str) -> None:
    async def main(scene: Scene) -> None:
        async with raw_server(State__Commits=scene.answer, State__Offer=scene.answer) as (peer, address):
            peers = scene.peers
            asking = (
                peers.commits_after(peer, [address], 0, 0, 10) if what == "commits" else peers.offer(peer, [address])
            )
            with pytest.raises(PeerFailed, match=TRICKLED):
                await asking

    run(main)


@pytest.mark.parametrize("down", [None, Held], ids=["", "within limits of our own"])
def test_who_is_slow_and_steady_is_not(down: Callable[[SkippingLoop], Direction] | None) -> None:
    """A part of the slowest line that may be set, each time just before the limit."""
    part = bytes(LEAST_PART_BYTES)
    whole: list[int] = []

    async def keep(_: bytes, data: bytes) -> None:
        whole.append(len(data))

    async def main(scene: Scene) -> None:
        async def slow(context: Context) -> None:
            await scene.parts(context, [part] * 5, 0.9 * LIMIT_S)

        async with raw_server(Exchange__FetchThings=slow) as (peer, address):
            most = 5 * len(part)
            assert await scene.peers.fetch(peer, [address], "state", [bytes(32)], most, keep, exchange=False) == []
        assert whole == [most]

    run(main, down)


def test_a_long_answer_of_a_slow_peer_is_taken() -> None:
    async def main(scene: Scene) -> None:
        async def slow(context: Context) -> None:
            await context.read()
            await scene.drip(context, [wire.encode(Part(bytes(limits.PART_BYTES)))] * 3, 0.9 * LIMIT_S)

        async with raw_server(State__Commits=slow) as (peer, address):
            with pytest.raises(PeerFailed, match="nonsense"):  # all of it came, and it is none
                await scene.peers.commits_after(peer, [address], 0, 0, 10)

    run(main)


def test_receipts_may_take_their_time() -> None:
    row = memoryview(bytes(10))

    async def main(scene: Scene) -> None:
        async def late(context: Context) -> None:
            await context.read()
            await context.send_initial_metadata((ACCEPTED,))
            await scene.drip(context, [wire.encode_receipt_frame(Signed(b"receipt"))] * 4, 0.9 * LIMIT_S)

        async with raw_server(Exchange__Send=late) as (peer, address):
            await scene.peers.send_rows(
                peer, [address], b"deal", range(4), lambda chunk: (ChunkHead(bytes(32), chunk, 10, ()), row), ignore
            )

    run(main)


def test_a_row_that_trickles_in_is_given_up_and_holds_no_room(tmp_path: Path) -> None:
    async def scenario(loop: SkippingLoop) -> None:
        holder, me = FakeHolder(tmp_path), new_peer()
        dialer = Dialer(AUTHORITY.issue(me))

        def n_there() -> int:
            return len(holder.rows.get((me, 4), b""))

        try:
            async with serving(holder, Held(loop)) as (server, peer, address):
                call = open_call(await dialer.channel(peer, [address]), services.EXCHANGE_SEND)
                await call.write(wire.encode_chunk_frame(Signed(b"deal")))
                await call.write(wire.encode_chunk_frame(ChunkHead(bytes(32), 4, N_DROPS, ())))
                with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # over during a write or before it
                    for n_bytes in range(1, N_DROPS + 1):
                        await call.write(wire.encode_part(memoryview(b"x"), None))
                        await until(lambda n=n_bytes: call.done() or n_there() == n)  # type: ignore[misc]
                        await loop.skip(STEP_S)
                await until(lambda: bool(holder.broken or holder.whole))
                assert holder.whole == []
                assert holder.broken == [(me, 4)]
                assert server.receiving.n_bytes == 0
        finally:
            await dialer.close()

    play(scenario)


# -- the next one ------------------------------------------------------------------------------------------------


def test_commits_come_from_the_next_donor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits, ledgers = rows(6)

    async def main(scene: Scene) -> None:
        bench, holder = Bench(tmp_path), FakeHolder(tmp_path)
        holder.commits = commits[2:]
        async with raw_server(State__Commits=scene.answer) as (slow, there), serving(holder) as (_, good, here):
            bench.whereabouts.know(slow, (there,))
            bench.whereabouts.know(good, (here,))
            monkeypatch.setattr(fetching, "spread", lambda _, found: sorted(found, key=lambda each: each[0] != slow))
            monkeypatch.setattr(bench.fetcher, "_peers", scene.peers)
            got = await bench.fetcher.commits(ask(ledgers, commits, 1))
        assert isinstance(got, CommitsFetched)
        assert [heard.commit for heard in got.commits] == commits[2:]
        assert scene.loop.skipped_s < 1.5 * LIMIT_S

    run(main)


def test_results_come_from_the_next_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(scene: Scene) -> None:
        bench, holder = Bench(tmp_path), FakeHolder(tmp_path)
        for chunk, hash_ in enumerate(HASHES):
            holder.put("result", hash_, FRAMES[chunk])
        async with raw_server(Exchange__FetchThings=scene.thing) as (slow, there), serving(holder) as (_, good, here):
            bench.whereabouts.know(slow, (there,))
            bench.whereabouts.know(good, (here,))
            for part in (bench.fetcher, bench.fetcher._gatherer):
                monkeypatch.setattr(part, "_peers", scene.peers)
            lines = ((slow,),) * GRID.n_chunks
            assert await bench.fetcher.results(Verify(genesis()[1], b"b" * 32, HASHES, lines, (good,))) == ""
        assert bench.whole()
        assert scene.loop.skipped_s < 1.5 * LIMIT_S

    run(main)


def test_an_offer_that_trickles_keeps_no_other_one_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donors, "OFFERS_AT_ONCE", 1)  # the slow one first, by our clock

    async def main(scene: Scene) -> None:
        holder: StateHolder = StateScene(tmp_path, 1).holders[0]
        async with raw_server(State__Offer=scene.answer) as (slow, there), serving(holder) as (_, good, here):
            asked: list[Donor] = [(slow, (there,)), (good, (here,))]
            said: dict[PeerId, str] = {}
            target = await donors.choose(scene.peers, asked, STATE_GRID, verify, Wish(), said)
            assert list(target.donors) == [good]
            assert "too slow" in said[slow]

    run(main)
