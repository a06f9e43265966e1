"""Whole runs of real agents over real TLS sockets in one process: they commit, agree, and outlive each other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aggregation.rules.policy import effective
from aggregation.vector import flatten_into
from coordinator.leading import service
from coordinator.rounds import leases
from node.errors import Refused
from node.peers import transport
from node.peers.grpc import Credentials, GrpcPeers
from node.ports import PeerFailed, RowSource
from protos import limits
from protos.messages import ChunkHead, Outcome, PeerId
from protos.signing import Identity
from tests.e2e.village import Member, Village, live, village
from tests.fakes.tiny import TinyTask
from tests.reference import diloco

pytestmark = pytest.mark.slow

BATCH_TOKENS = 44
LATE_S = 4.0
"""Longer than the grace for who has gone, shorter than any other limit that could end a wait."""


def started(n: int, *more: str) -> tuple[str, ...]:
    return (f"membership.start_contributors={n}", *more)


def committed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["outcome"] == "committed"]


async def sound(here: Village) -> list[dict[str, Any]]:
    """The ledger's rows, if they are sane: one chain, all digests equal, no batch twice, tokens and weights right."""
    rows, digests = await here.ledger(), await here.digests()
    peers = {member.peer for member in here.members}
    n_chunks = -(-here.spec.model.n_values // here.spec.codec.chunk_values)
    assert [row["round"] for row in rows] == list(range(1, len(rows) + 1))
    for before, after in pairwise(rows):
        assert after["previous_hash"] == before["commit_hash"]
        assert after["anchor_digest"] == before["state_digest"]
    for row in rows:
        assert set(digests.get(row["commit_hash"], {}).values()) <= {row["state_digest"]}, row["round"]
    for row in committed(rows):
        assert sum(reducer["chunks"] for reducer in row["reducers"]) == n_chunks
        accepted = [member for member in row["members"] if member["accepted"]]
        assert accepted
        for member in accepted:
            assert member["peer"] in peers
            assert member["tokens"] == BATCH_TOKENS * sum(count for _, count in member["batches"])
            assert 0 < member["steps"] <= here.spec.work.h
            assert member["weight"] == member["tokens"]
    used = [
        batch
        for row in committed(rows)
        for member in row["members"]
        for start, count in member["batches"]
        for batch in range(start, start + count)
    ]
    assert len(used) == len(set(used))
    return rows


def flat(here: Village, task: diloco.Learner) -> NDArray[np.float32]:
    theta_D = np.zeros(here.spec.model.n_values, np.float32)
    flatten_into(task.parameters(), TinyTask.of(here.spec).layout(here.spec.codec.block), theta_D)
    return theta_D


def off(found_D: NDArray[np.float32], wanted_D: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(found_D - wanted_D) / np.linalg.norm(wanted_D))


# -- all goes well -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_members_commit_together_and_hold_the_same_state(tmp_path: Path, n: int) -> None:
    async def scenario() -> None:
        n_rounds = 2 if n == 7 else 3
        async with village(tmp_path, *started(n, f"work.end_rounds={n_rounds}")) as here:
            here.settle(n)
            assert await here.everyone_ends() == [f"the run has reached its end of {n_rounds} rounds"] * n
            rows = await sound(here)
            assert [row["outcome"] for row in rows] == ["empty"] + ["committed"] * n_rounds
            digests = await here.digests()
            peers = {member.peer for member in here.members}
            for row in committed(rows):
                assert {member["peer"] for member in row["members"] if member["accepted"]} == peers
                assert peers <= set(digests[row["commit_hash"]])
                assert row["failed_attempts"] == []
                assert all(member["bytes_sent"] > 0 < member["bytes_received"] for member in row["members"])
                reducers = {reducer["peer"] for reducer in row["reducers"]}
                assert peers <= reducers <= peers | {here.observer}
                assert row["degraded"] == "no robustness"
            states = {member.theta_D.tobytes() for member in here.members}
            assert len(states) == 1
            assert here.spec.model.n_values % here.spec.codec.leaf_values

    live(scenario())


@pytest.mark.parametrize("n", [2, 3])
def test_the_observer_reduces_while_fewer_than_three_can_be_reached(tmp_path: Path, n: int) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(n)) as here:
            slow, *_ = here.settle(n)
            await here.rounds(1)
            await slow.halted("training")
            n_before, head = len(here.committed()), here.commits[-1].commit_hash.hex()
            await here.until(lambda: here.holds(here.observer, head), "the observer to hold the state")
            slow.go_on()
            await here.rounds(n_before + 1)
            reducers = {entry.peer for entry in here.committed()[n_before].body.reducers}
            assert reducers == {member.peer for member in here.members} | ({here.observer} if n < 3 else set())

    live(scenario())


def test_members_find_each_other_without_the_leaders_relaying(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(3, "work.end_rounds=2"), relay=False) as here:
            here.settle(3)
            await here.everyone_ends()
            rows = await sound(here)
            assert len(committed(rows)) == 2
            assert {member.peer for member in here.members} <= set(here.table.asked)

    live(scenario())


def test_members_find_each_other_in_the_real_dht(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(3, "work.end_rounds=2"), relay=False, real_dht=True) as here:
            here.settle(3)
            await here.everyone_ends()
            rows = await sound(here)
            assert len(committed(rows)) == 2
            assert here.table.asked == []

    live(scenario())


def test_a_tensor_and_a_chunk_may_be_larger_than_any_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 2**15
    monkeypatch.setattr(limits, "PART_BYTES", 2**13)
    monkeypatch.setattr(limits, "FRAME_BYTES", most)
    for module, name in ((transport, "_OPTIONS"), (service, "OPTIONS")):
        options = [(key, most if key.endswith("message_length") else value) for key, value in getattr(module, name)]
        monkeypatch.setattr(module, name, type(getattr(module, name))(options))
    sizes = ("codec.block=1024", "codec.leaf_values=16384", "codec.chunk_values=65536")

    async def scenario() -> None:
        async with village(tmp_path, *started(2, "work.end_rounds=2", *sizes), width=9001) as here:
            here.settle(2)
            await here.everyone_ends()
            assert len(committed(await sound(here))) == 2
            largest = max(parameter.numel() for _, parameter in TinyTask.of(here.spec).parameters())
            assert 4 * largest > most
            assert here.spec.codec.chunk_values > most  # at a byte a value

    live(scenario())


def test_int8_takes_a_quarter_of_the_bytes_of_fp32(tmp_path: Path) -> None:
    sizes = ("codec.block=1024", "codec.leaf_values=65536", "codec.chunk_values=65536")

    async def exchanged(codec: str) -> tuple[int, int]:
        settings = started(3, "work.end_rounds=1", "work.h=1", f"codec.name={codec}", *sizes)
        async with village(tmp_path / codec, *settings, width=17477) as here:
            here.settle(3)
            await here.everyone_ends()
            assert here.spec.model.n_values > 4 * 65536
            members = [member for row in committed(await sound(here)) for member in row["members"]]
            assert len(members) == 3
            return sum(m["bytes_sent"] for m in members), sum(m["bytes_received"] for m in members)

    int8, fp32 = live(exchanged("int8")), live(exchanged("fp32"))
    # Three of each chunk's nine rows and copies of its result stay at home; the observer fetches one more.
    assert fp32[0] > 4 * 4 * 4 * 65536
    assert all(small < 0.27 * large for small, large in zip(int8, fp32, strict=True))


def test_with_fp32_and_the_mean_a_run_is_plain_diloco(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(2, "work.end_rounds=2", "codec.name=fp32")) as here:
            here.settle(2)
            await here.everyone_ends()
            rounds = list(diloco.rounds_of(await sound(here)))
            learner = TinyTask.of(here.spec)
            first_D = flat(here, learner)
            data = diloco.Sequences(here.spec, here.folder / "data")
            assert diloco.diloco(learner, here.spec.inner, rounds, data) == 2
            wanted_D = flat(here, learner)
            assert off(first_D, wanted_D) > 1e-2
            assert off(here.members[0].theta_D, wanted_D) < 1e-6

    live(scenario())


# -- another rule --------------------------------------------------------------------------------------------------


def test_the_median_of_three_is_what_is_applied(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = started(3, "work.end_rounds=1", "codec.name=fp32", "rule.name=median", "rule.f_max=1")
        async with village(tmp_path, *settings) as here:
            here.settle(3)
            await here.everyone_ends()
            (row,) = committed(await sound(here))
            assert (row["rule"], row["f"], row["fallback"]) == ("median", 1, "")
            (round_,) = diloco.rounds_of([row])
            data = diloco.Sequences(here.spec, here.folder / "data")
            first_D = flat(here, TinyTask.of(here.spec))
            deltas: list[NDArray[np.float32]] = []
            for member in round_.members:
                alone = replace(round_, members=(member,), outer_lr=1.0, outer_momentum=0.0)
                learner = TinyTask.of(here.spec)
                diloco.diloco(learner, here.spec.inner, [alone], data)
                deltas.append(first_D - flat(here, learner))
            step = round_.outer_lr * (1 + round_.outer_momentum)  # Nesterov's first
            wanted_D = first_D - step * np.median(np.stack(deltas), axis=0)
            assert off(here.members[0].theta_D, wanted_D) < 1e-6
            assert off(first_D - step * np.mean(np.stack(deltas), axis=0), wanted_D) > 1e-6

    live(scenario())


def test_the_median_of_two_falls_back_as_the_ledger_says(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(2, "work.end_rounds=1", "rule.name=median", "rule.f_max=1")) as here:
            here.settle(2)
            await here.everyone_ends()
            (row,) = committed(await sound(here))
            wanted = [word or "" for word in effective("median", 2, 1)]
            assert [row[key] or "" for key in ("rule", "f", "fallback", "degraded")] == wanted
            assert row["degraded"]

    live(scenario())


# -- someone goes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["training", "after commitment", "receipt", "before vote"])
def test_a_killed_member_costs_its_round_at_most_and_comes_back(tmp_path: Path, at: str) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(3)) as here:
            victim, *others = here.settle(3)
            await here.rounds(1)
            await victim.halted(at)
            n_before = len(here.committed())
            killed_at = here.loop.time()
            await victim.kill()
            await here.rounds(n_before + 1)
            assert here.loop.time() - killed_at < LATE_S
            await here.rounds(n_before + 2)
            without = here.committed()[n_before + 1]
            assert {entry.peer for entry in without.body.members if entry.counted} == {m.peer for m in others}
            victim.start()
            n_then = len(here.committed())
            n_counted = await here.counts(victim, after=n_then)
            await here.rounds(n_counted + 1)
            rows = await sound(here)
            again = committed(rows)[n_counted - 1]
            assert {m["peer"] for m in again["members"] if m["accepted"]} == {m.peer for m in here.members}
            assert victim.peer in (await here.digests())[again["commit_hash"]]

    live(scenario())


def test_a_line_that_breaks_and_comes_back_costs_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(2, "deadlines.gone_grace_s=5")) as here:
            member, _ = here.settle(2)
            await here.rounds(1)
            await member.halted("after commitment")
            n_before, n_lines = len(here.committed()), member.n_lines
            member.break_line()
            await here.until(lambda: member.n_lines > n_lines, "another line")
            member.go_on()
            await here.rounds(n_before + 1)
            commit = here.committed()[n_before]
            assert commit.commit.attempt == 0
            assert {entry.peer for entry in commit.body.members if entry.counted} == {m.peer for m in here.members}

    live(scenario())


def test_who_leaves_returns_its_range_and_the_other_goes_on_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(2)) as here:
            leaver, stayer = here.settle(2)
            await here.rounds(1)
            await leaver.halted("training")
            seat = next(seat for seat in here.commits[-1].body.seats if seat.peer == leaver.peer)
            leaving = asyncio.create_task(leaver.leave())
            n_before = len(here.committed())
            await here.rounds(n_before + 1)
            leaver.go_on()
            assert await leaving == "left on request"
            without = here.committed()[n_before]
            assert [entry.peer for entry in without.body.members] == [stayer.peer]
            returned = without.body.returned
            assert leases.subtract(returned, leases.normalise(seat.ranges)) != returned  # raises unless all is there
            assert [held.peer for held in without.body.seats] == [stayer.peer]
            await here.rounds(n_before + 3)
            rows = await sound(here)
            assert {reducer["peer"] for reducer in committed(rows)[-1]["reducers"]} >= {stayer.peer}

    live(scenario())


def test_the_coordinator_stops_and_starts_between_rounds(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(2)) as here:
            here.settle(2)
            await here.rounds(2)
            await here.stop_serving()
            n_before = len(here.committed())
            await here.serve()
            await here.rounds(n_before + 2)
            rows = await sound(here)
            for row in committed(rows)[-2:]:
                assert {m["peer"] for m in row["members"] if m["accepted"]} == {m.peer for m in here.members}

    live(scenario())


def test_a_coordinator_killed_between_votes_and_commit_proposes_the_same_bytes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(2)) as here:
            here.settle(2)
            await here.rounds(1)
            await here.leader_halted("before commit")
            n_before, proposed = len(here.commits), here.proposals[-1]
            await here.drop_leader()
            await here.serve()
            await here.until(lambda: len(here.commits) > n_before, "the round to be committed")
            commit = here.commits[n_before]
            assert commit.commit.body == proposed.body
            assert commit.body.outcome is Outcome.COMMITTED
            assert commit.commit.attempt > commit.body.attempt == 0
            assert sum(proposal.body == proposed.body for proposal in here.proposals) == 1
            await here.rounds(len(here.committed()) + 2)
            await sound(here)

    live(scenario())


def test_a_coordinator_killed_before_anyone_saw_its_proposal_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(2)) as here:
            here.settle(2)
            await here.rounds(1)
            await here.leader_halted("after proposal")
            n_before = len(here.committed())
            await here.drop_leader()
            await here.serve()
            await here.rounds(n_before + 2)
            assert here.committed()[n_before].commit.attempt > 0
            await sound(here)

    live(scenario())


# -- someone comes -------------------------------------------------------------------------------------------------


def test_a_newcomer_counts_within_two_rounds(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(2)) as here:
            slow, _ = here.settle(2)
            await here.rounds(1)
            await slow.halted("training")
            n_before, head = len(here.committed()), here.commits[-1].commit_hash.hex()
            newcomer = here.member("new")
            newcomer.start()
            await here.until(lambda: here.holds(newcomer.peer, head), "the newcomer to hold the state")
            slow.go_on()
            assert await here.counts(newcomer, after=n_before) == n_before + 2
            counted = here.committed()[n_before + 1].commit_hash.hex()
            await here.until(lambda: here.holds(newcomer.peer, counted), "the newcomer to hold what it counted in")
            await sound(here)
            assert (newcomer.folder / "data" / "train.bin").exists()

    live(scenario())


def test_a_state_that_was_tampered_with_is_fetched_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(2)) as here:
            victim, _ = here.settle(2)
            await here.rounds(2)
            await victim.kill()
            path = victim.state_folder / "theta.bin"
            raw = bytearray(path.read_bytes())
            raw[4321] ^= 1
            path.write_bytes(raw)
            n_before = len(here.committed())
            victim.start()
            await here.counts(victim, after=n_before)
            assert any("damaged and was dropped" in text for text in victim.said)
            await sound(here)

    live(scenario())


# -- someone lies --------------------------------------------------------------------------------------------------


async def refused(peers: GrpcPeers, to: PeerId, addresses: Sequence[str], deal: bytes, source: RowSource) -> str:
    """Why a reducer takes no row from here."""

    async def receipted(envelope: bytes) -> None:
        raise AssertionError("it gave a receipt for nonsense")

    with pytest.raises(PeerFailed) as caught:
        await peers.send_rows(to, addresses, deal, (0,), source, receipted)
    return caught.value.why


def credentials_of(member: Member) -> Credentials:
    read = [(member.folder / name).read_bytes() for name in ("certificate.pem", "certificate.key", "ca.pem")]
    return Credentials(*read)


def test_nonsense_rows_are_refused_with_a_reason_and_the_round_commits(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(3)) as here:
            sender, *others = here.settle(3)
            await here.rounds(1)
            await sender.halted("rows")
            n_before = len(here.committed())
            assert sender.peers is not None
            reducer = others[0].peer
            await here.until(lambda: reducer in sender.rows, "rows for the reducer")
            rows = sender.rows[reducer]
            chunk = rows.chunks[0]
            head, frame = rows.source(chunk)
            row = bytes(frame)

            def lie(with_head: ChunkHead = head, data: bytes = row) -> RowSource:
                return lambda _: (with_head, memoryview(data))

            async def say(source: RowSource, deal: bytes = rows.deal, by: Member = sender) -> str:
                peers = GrpcPeers(credentials_of(by), no_progress_s=5.0)
                try:
                    return await refused(peers, reducer, rows.addresses, deal, source)
                finally:
                    await peers.close()

            wrong_path = replace(head, path=tuple(bytes(32) for _ in head.path))
            scale_lies = row[:-1] + bytes([row[-1] ^ 0x80])
            assert "not what its commitment names" in await say(lie(wrong_path))
            assert f"chunk {chunk}" in await say(lie(data=scale_lies))
            assert f"chunk {chunk}" in await say(lie(data=bytes(len(row))))
            assert "bytes, not" in await say(lie(replace(head, n_bytes=len(row) + 1), row + b"\0"))
            assert "too long" in await say(lie(data=row + bytes(50)))
            assert "not of the current attempt" in await say(lie(replace(head, plan=bytes(32))))
            assert "not dealt" in await say(lie(replace(head, chunk=limits.CHUNKS - 1)))
            assert "not the deal of the current attempt" in await say(
                lie(), deal=rows.deal[:-1] + bytes([rows.deal[-1] ^ 1])
            )
            stranger = here.member("stranger")
            await here.admit(stranger)
            assert "not in the included set" in await say(lie(), by=stranger)

            sender.go_on()
            await here.rounds(n_before + 1)
            entries = here.committed()[n_before].body.members
            assert {entry.peer for entry in entries if entry.counted} == {sender.peer, *(m.peer for m in others)}
            assert here.committed()[n_before].body.attempt == 0
            await sound(here)

    live(scenario())


def test_another_runs_id_in_the_invite_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with village(tmp_path) as here:
            stranger = here.member("stranger")
            stranger.start(invite=replace(here.invite, run=Identity.generate().peer))
            assert stranger.task is not None
            with pytest.raises(Refused, match="what answers is not run") as caught:
                await stranger.task
            assert caught.value.exit_code == 5

    live(scenario())


def test_a_run_by_invitation_takes_those_with_a_token_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with village(tmp_path, "membership.admission=invite", "work.end_rounds=1") as here:
            stranger, guest, late = (here.member(name) for name in ("stranger", "guest", "late"))
            stranger.start()
            assert stranger.task is not None
            with pytest.raises(Refused, match="by invitation"):
                await stranger.task
            invite = await here.invite_with_token()
            guest.start(invite=invite)
            assert guest.task is not None
            assert await guest.task == "the run has reached its end of 1 rounds"
            late.start(invite=invite)
            assert late.task is not None
            with pytest.raises(Refused, match="used up"):
                await late.task

    live(scenario())
