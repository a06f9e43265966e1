"""A village in which someone dies, leaves, comes, or lies: the others commit, and all hold one state."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.rounds import leases
from node.errors import DiskFull, Refused
from node.peers.grpc import Credentials, GrpcPeers
from node.ports import PeerFailed, RowSource
from protos import limits
from protos.messages import ChunkHead, Outcome, PeerId
from protos.signing import Identity
from tests.e2e.member import Member
from tests.e2e.soundness import LATE_S, UNHURRIED, committed, sound, started
from tests.e2e.village import live, village

pytestmark = pytest.mark.slow

# -- someone goes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["training", "after commitment", "receipt", "before vote"])
def test_a_killed_member_costs_its_round_at_most_and_comes_back(tmp_path: Path, at: str) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(3, *UNHURRIED)) as here:
            victim, *others = here.settle(3)
            await here.rounds(1)
            await victim.halted(at)
            n_before = len(here.committed())
            await victim.kill()
            await here.rounds(n_before + 1, LATE_S)
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

    live(scenario(), limit_s=90.0)


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
            await victim.halted("training")  # its state is on disk: a thread that switches it outlives a kill
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
        async with village(tmp_path, *started(3, *UNHURRIED, "deadlines.exchange_s=60")) as here:
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
                peers = GrpcPeers(credentials_of(by), no_progress_s=20.0)
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

    live(scenario(), limit_s=90.0)


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


def test_a_run_that_is_too_large_for_the_disk_is_refused_before_anything_travels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with village(tmp_path) as here:
            monkeypatch.setattr("node.room.least_bytes", lambda _: 2**60)
            crowded = here.member("crowded")
            crowded.start()
            assert crowded.task is not None
            with pytest.raises(DiskFull, match=rf"needs 1048576\.0 TiB in {crowded.folder}"):
                await crowded.task
            assert crowded.peers is None

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
