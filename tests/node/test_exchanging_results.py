"""One attempt's results: each chunk is combined of the rows of the set, and anew when the set or a reducer changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from aggregation import codec
from aggregation.digest import chunk_root
from aggregation.exchange import Expired, Redealt
from aggregation.rules import combine
from coordinator.rounds import policy
from node.rows import ROWS_IN_MEMORY_BYTES
from protos.messages import Lack, Missing, Results
from tests.fakes import peers as fake_peers
from tests.fakes.peers import Fault
from tests.node.attempt import BOTH, GRID, PLAN_HASH, SIZES, SPEC, A, B, Member, World, play, send


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
