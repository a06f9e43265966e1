"""One attempt's rows between two members in memory: sent, checked, receipted, combined; and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from aggregation import codec
from aggregation.digest import chunk_root
from aggregation.exchange import Exchange, ExchangeEvent, Expired, Redealt
from aggregation.rules import combine
from coordinator.rounds import policy
from node.encoding import Contribution, make_area, read_contribution
from node.exchanging import STALLED_TIMES, Exchanging
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
    Lack,
    Missing,
    PeerId,
    Plan,
    PlanMember,
    Range,
    Receipt,
    Results,
    Signed,
)
from protos.sealer import KeySealer, open_signed
from protos.signing import Identity
from tests.coordinator.made import COORDINATOR, RUN, spec
from tests.fakes import peers as fake_peers
from tests.fakes.peers import FakeNetwork, Fault

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


@pytest.mark.parametrize("memory_bytes", [0, ROWS_IN_MEMORY_BYTES], ids=["file", "memory"])
@pytest.mark.parametrize("part_bytes", [1000, 4096, 2**20], ids=["leaf cut", "two parts", "one part"])
def test_rows_become_results_and_each_chunk_is_combined_by_whom_it_was_dealt_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int, memory_bytes: int
) -> None:
    monkeypatch.setattr(fake_peers, "PART_BYTES", part_bytes)

    async def scenario() -> None:
        world = World(tmp_path)
        world.memory_bytes = memory_bytes
        async with world.living(A, B) as members:
            for member in members:
                results = await member.told.get()
                assert isinstance(results, Results)
                assert [result.chunk for result in results.results] == world.dealt_to(member.me) != []
                area = member.results.area(PLAN_HASH)
                for result in results.results:
                    wanted = world.combined(result.chunk)
                    assert bytes(area.frame(result.chunk)) == wanted
                    assert result.hash == chunk_root(wanted, SPEC.codec.leaf_values)
                    assert result.norm_sq == codec.squared_norm(wanted)
                while member.exchange.unreceipted():  # noqa: ASYNC110 - the other one may be behind; nothing tells
                    await asyncio.sleep(0)
                assert member.faults == []
                assert member.peers.traffic.exchange_sent > 0
            assert all(member.work.exists() == (not memory_bytes) for member in members)
            for member in members:
                assert member.exchanging is not None
                other = B.peer if member.me == A.peer else A.peer
                assert {peer for peer, _ in member.exchanging._slots} == {other}  # own rows stay where they lie
                sums = member.exchanging._reducing.stages.sums()
                n_bytes = sum(SIZES[chunk] for chunk in world.dealt_to(member.me))
                assert sums["receive"].n_bytes == n_bytes
                stays = memory_bytes and part_bytes >= max(SIZES)  # in the message that it came in
                assert sums["receive"].copied_bytes == (0 if stays else n_bytes)
                assert len(member.exchanging._rows) == 2 * len(world.dealt_to(member.me))  # kept: the set may shrink
                assert member.exchanging._memory.n_bytes == (n_bytes if memory_bytes else 0)
                assert sums["check"].n_bytes == sums["combine"].n_bytes == 2 * n_bytes
        assert not any(member.work.exists() for member in members)

    play(scenario)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda head, row: (head, row[:-1] + bytes([row[-1] ^ 1])), "not what its commitment names"),
        (lambda head, row: (replace(head, path=tuple(bytes(32) for _ in head.path)), row), "not what its commitment"),
        (lambda head, row: (replace(head, path=()), row), "chunk"),
        (lambda head, row: (head, bytes(len(row))), "chunk"),
        (lambda head, row: (replace(head, plan=bytes(32)), row), "not of the current attempt"),
        (lambda head, row: (replace(head, n_bytes=len(row) - 1), row[:-1]), "bytes, not"),
        (lambda head, row: (head, row[:-1]), "too short"),
    ],
    ids=["flipped", "another path", "no path", "not canonical", "another plan", "shorter", "cut off"],
)
def test_a_wrong_row_is_refused_and_the_right_one_still_taken(tmp_path: Path, change: Any, why: str) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        async with world.living(A) as (a,):
            by = cast(Member, Sender(world, B.peer))
            chunk = world.dealt_to(A.peer)[0]
            said = await send(by, a, world, Member.rows(by, change), chunk)
            assert isinstance(said, str)
            assert why in said
            await asyncio.sleep(0)
            right = await send(by, a, world, Member.rows(by, lambda head, row: (head, row)), chunk)
            assert len(right) == 1
            assert a.faults == []

    play(scenario)


class Sender:
    """A member without an exchange of its own: what `send` needs of one."""

    def __init__(self, world: World, peer: PeerId) -> None:
        self.me, self.contribution = peer, world.contributions.get(peer, world.contributions[B.peer])
        self.peers = world.network.join(peer, world.network.holders[A.peer])


def test_whoever_is_not_in_the_set_or_has_another_deal_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        async with world.living(A) as (a,):
            chunk = world.dealt_to(A.peer)[0]
            stranger = cast(Member, Sender(world, STRANGER.peer))
            rows = Member.rows(stranger, lambda head, row: (head, row))
            assert await send(stranger, a, world, rows, chunk) == "refused: not in the included set"
            by = cast(Member, Sender(world, B.peer))
            world.deal += b"\0"
            said = await send(by, a, world, Member.rows(by, lambda head, row: (head, row)), chunk)
            assert said == "refused: not the deal of the current attempt"

    play(scenario)


def test_a_norm_that_was_not_committed_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path, lambda commitment: replace(commitment, norms=tuple(n * 2 for n in commitment.norms)))
        async with world.living(A) as (a,):
            by = cast(Member, Sender(world, B.peer))
            chunk = world.dealt_to(A.peer)[0]
            said = await send(by, a, world, Member.rows(by, lambda head, row: (head, row)), chunk)
            assert f"chunk {chunk} has another norm than committed" in said

    play(scenario)


def test_a_lost_receipt_is_given_again_for_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        async with world.living(A, B) as (a, b):
            await asyncio.gather(a.told.get(), b.told.get())
            chunk = world.dealt_to(A.peer)[0]
            nonsense = Member.rows(b, lambda head, row: (head, bytes(len(row))))
            first = await send(b, a, world, nonsense, chunk)
            again = await send(b, a, world, nonsense, chunk)
            assert first == again
            assert isinstance(first, list)
            (envelope,) = first
            receipt = open_signed(envelope, RUN.peer, signer=A.peer, kind=Receipt).message
            assert receipt == Receipt(PLAN_HASH, B.peer, (chunk,))

    play(scenario)


@pytest.mark.parametrize("fault", [Fault(drop=True), Fault(break_at_byte=3000)], ids=["unreachable", "breaks"])
def test_rows_are_sent_again_until_they_are_receipted(tmp_path: Path, fault: Fault) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        world.network.faults[A.peer] = fault
        async with world.living(A, B) as (a, b):
            await b.told.get()  # a reached it all along
            assert world.network.faults
            del world.network.faults[A.peer]
            assert isinstance(await a.told.get(), Results)
            assert b.exchange.unreceipted() == {}

    play(scenario)


def test_the_end_settles_who_still_waits_and_takes_no_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        async with world.living(A) as (a,):
            chunk = world.dealt_to(A.peer)[0]
            head, row = Member.rows(cast(Member, Sender(world, B.peer)), lambda head, row: (head, row))(chunk)
            running = a.exchanging
            assert running is not None
            assert running.admit_row(B.peer, head) == ""
            await running.put(B.peer, chunk, 0, row)
            waiting = asyncio.create_task(_checked(running, chunk))
            await asyncio.sleep(0)
            await running.close()
            assert (await waiting).startswith("the attempt is over")
            assert running.receipt(B.peer, (chunk,)) == b""
            assert running.admit_row(B.peer, head) == "not of the current attempt"
            assert running.admit_deal(world.deal) == "not the deal of the current attempt"
            a.exchanging = None
            holder = world.network.holders[A.peer]
            assert holder.admit_deal(B.peer, world.deal) == "no exchange runs here now"
            assert holder.admit_row(B.peer, head) == "no exchange runs here now"
            assert await holder.row_done(B.peer, head) == "the attempt is over"

    play(scenario)


async def _checked(running: Exchanging, chunk: int) -> str:
    return await running.row_done(B.peer, chunk)


def test_a_fault_of_ours_is_said_aloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> str:
        raise ZeroDivisionError("ours")

    async def scenario() -> None:
        world = World(tmp_path)
        async with world.living(A) as (a,):
            monkeypatch.setattr(a.exchanging._reducing, "fault_of", broken)
            by = cast(Member, Sender(world, B.peer))
            chunk = world.dealt_to(A.peer)[0]
            sending = asyncio.create_task(send(by, a, world, Member.rows(by, lambda head, row: (head, row)), chunk))
            await a.failed.wait()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            assert all(isinstance(fault, ZeroDivisionError) for fault in a.faults)

    play(scenario)


@pytest.mark.parametrize("centre", ["none", "here", "not here"])
def test_a_centred_rule_starts_from_the_last_results(tmp_path: Path, centre: str) -> None:
    last = [codec.encode(SPEC.codec.name, np.full(GRID.size(chunk), 0.5), block=SPEC.codec.block) for chunk in range(3)]

    async def scenario() -> None:
        world = World(tmp_path)
        async with world.living(A, B) as members:
            for member in members:
                running = member.exchanging
                assert running is not None
                running._reducing.rule = policy.Applied("default", 0, "", "")
                running._reducing.previous = {
                    "none": None,
                    "here": lambda chunk: memoryview(last[chunk]),
                    "not here": _nothing,
                }[centre]
                running._reducing.previous_scale = 0.25
            for member in members:
                said = await member.told.get()
                if centre == "not here":
                    assert said == Missing(PLAN_HASH, (), unable=True)  # no sender is to blame
                    continue
                for chunk in world.dealt_to(member.me):
                    frames = [bytes(world.contributions[peer].area.frame(chunk)) for peer in BOTH]
                    weights = policy.weights(world.commitments, SPEC)
                    wanted, _ = combine(
                        "default", frames, weights_N=[weights[peer] for peer in BOTH], f=0, codec=SPEC.codec.name,
                        block=SPEC.codec.block, previous=last[chunk] if centre == "here" else None,
                        previous_scale=0.25,
                    )  # fmt: skip
                    assert bytes(member.results.area(PLAN_HASH).frame(chunk)) == wanted

    play(scenario)


def _nothing(_: int) -> memoryview | None:
    return None


def test_a_receipt_names_rows_that_are_held_and_no_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        async with world.living(A, B) as (a, b):
            await asyncio.gather(a.told.get(), b.told.get())
            running = a.exchanging
            assert running is not None
            mine = tuple(world.dealt_to(A.peer))
            envelope = running.receipt(B.peer, (*mine, *world.dealt_to(B.peer)))
            receipt = open_signed(envelope, RUN.peer, signer=A.peer, kind=Receipt).message
            assert receipt == Receipt(PLAN_HASH, B.peer, mine)
            assert running.receipt(STRANGER.peer, mine) == b""

    play(scenario)


def test_what_is_missing_names_chunk_and_sender(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        async with world.living(A) as (a,):
            a._events.put_nowait(Expired())
            missing = await a.told.get()
            assert isinstance(missing, Missing)
            assert missing.plan == PLAN_HASH
            assert Lack(world.dealt_to(A.peer)[0], B.peer) in missing.lacks

    play(scenario)


def test_a_smaller_set_is_combined_anew_of_the_rows_that_are_here(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        async with world.living(A, B) as (a, b):
            await asyncio.gather(a.told.get(), b.told.get())
            running = a.exchanging
            assert running is not None
            weight = policy.weights({A.peer: world.commitments[A.peer]}, SPEC)[A.peer]
            reducers = tuple((peer,) for peer, *_ in world.lines)
            a._events.put_nowait(Redealt(1, 1, {str(A.peer): weight}, reducers))
            results = await a.told.get()
            assert isinstance(results, Results)
            applied = policy.applied_rule(SPEC, {A.peer: world.commitments[A.peer]}, ())
            assert applied is not None
            area = a.results.area(PLAN_HASH)
            for result in results.results:
                frames = [bytes(world.contributions[A.peer].area.frame(result.chunk))]
                wanted, norm_sq = combine(
                    applied.rule, frames, weights_N=[weight], f=applied.f, codec=SPEC.codec.name,
                    block=SPEC.codec.block,
                )  # fmt: skip
                assert bytes(area.frame(result.chunk)) == bytes(wanted) != world.combined(result.chunk)
                assert result.norm_sq == norm_sq
            assert running._memory.n_bytes == 0
            assert {peer for peer, _ in running._rows} == {A.peer}
            chunk = world.dealt_to(A.peer)[0]
            said = await send(b, a, world, Member.rows(b, lambda head, row: (head, row)), chunk)
            assert said == "refused: not in the included set"

    play(scenario)


def test_a_chunk_that_moves_is_sent_to_who_reduces_it_now(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        world.network.faults[B.peer] = Fault(drop=True)  # nobody reaches it
        async with world.living(A, B) as (a, b):
            weights = {str(peer): weight for peer, weight in policy.weights(world.commitments, SPEC).items()}
            everything = Redealt(1, 0, weights, ((str(A.peer),),) * GRID.n_chunks)
            for member in (a, b):
                member._events.put_nowait(everything)
            while True:
                results = await a.told.get()
                assert isinstance(results, Results)
                if len(results.results) == GRID.n_chunks:
                    break
            for result in results.results:
                assert bytes(a.results.area(PLAN_HASH).frame(result.chunk)) == world.combined(result.chunk)
            assert a.exchange.unreceipted() == b.exchange.unreceipted() == {}
            assert b.exchanging is not None
            assert b.exchanging._pending == {}

    play(scenario)


def test_whom_nothing_is_heard_of_for_long_has_stalled(tmp_path: Path) -> None:
    async def scenario() -> None:
        world = World(tmp_path)
        async with world.living(A) as (a,):
            running, now_s = a.exchanging, [0.0]
            assert running is not None
            running._seconds = lambda: now_s[0]
            limit_s = STALLED_TIMES * SPEC.deadlines.no_progress_s
            assert running.stalled() == ()
            now_s[0] = limit_s - 1.0
            assert running.admit_deal(world.deal, B.peer) == ""
            now_s[0] = 2 * limit_s - 2.0
            assert running.stalled() == ()
            now_s[0] = 2 * limit_s
            assert running.stalled() == (str(B.peer),)

    play(scenario)
