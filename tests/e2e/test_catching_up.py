"""Coming and coming back: over real TLS sockets, by results or by a state, whoever dies meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from coordinator.folder import RunFolder
from node import transfer
from node.state import StateStore
from protos.messages import Outcome
from tests.e2e.member import Member
from tests.e2e.soundness import committed, sound, started
from tests.e2e.village import Village, live, village

pytestmark = pytest.mark.slow

MILLION = 66_667
"""Width of the village's model for a million parameters."""
SIZES = ("codec.block=1024", "codec.leaf_values=65536", "codec.chunk_values=65536")
N_BEFORE = 8
"""Chunks that are here when a newcomer is killed."""
AWAY_MOST_BYTES = 5.3
"""A parameter, for five rounds."""


def round_of(member: Member) -> int:
    """Of the state that a member holds on disk."""
    return int((member.folder / "state" / "CURRENT").read_text().split("-")[0])


async def still(here: Village, *members: Member) -> str:
    """Have the run stand still, its members in the middle of training; the head's hash. For just after a commit."""
    await asyncio.gather(*(member.halted("training") for member in members))
    head = here.commits[-1].commit_hash.hex()
    for member in members:
        await here.until(lambda member=member: here.holds(member.peer, head), "who is here to hold the state")  # type: ignore[misc]
    return head


def test_five_rounds_away_cost_five_bytes_a_parameter_and_no_state(tmp_path: Path) -> None:
    async def scenario() -> None:
        limits = ("deadlines.train_limit_s=60", "evaluation.every_rounds=0")
        async with village(tmp_path, *started(3), *SIZES, *limits, width=MILLION) as here:
            away, *others = here.settle(3)
            await here.rounds(2)
            await away.halted("training")  # its state is on disk: a thread that switches it outlives a kill
            await away.kill()
            held = round_of(away)
            await here.until(lambda: here.commits[-1].body.round >= held + 5, "five rounds without it")
            head = await still(here, *others)
            missed = [commit.body for commit in here.commits if commit.body.round > held]
            n_results = sum(body.outcome is Outcome.COMMITTED for body in missed)
            assert n_results >= 5
            away.start()
            await here.until(lambda: here.holds(away.peer, head), "it to be up to date")
            assert away.peers is not None
            n_parameters = here.spec.model.n_parameters
            assert n_parameters >= 10**6
            assert away.peers.traffic.received <= AWAY_MOST_BYTES / 5 * n_results * n_parameters
            assert any(f"following rounds {held + 1} to" in said for said in away.said)
            assert away.theta_D.tobytes() == others[0].theta_D.tobytes()
            for member in others:
                member.go_on()
            n_before = len(here.committed())
            await here.counts(away, after=n_before)
            await sound(here)

    live(scenario(), limit_s=90.0)


def test_a_donor_that_dies_in_the_middle_is_made_up_for_by_the_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(3), *SIZES, "deadlines.train_limit_s=60", width=MILLION) as here:
            donor, *others = here.settle(3)
            await here.rounds(2)
            await still(here, donor, *others)
            newcomer = here.member("new")
            newcomer.start()
            await newcomer.halted("state")
            await donor.kill()
            newcomer.go_on()
            head = here.commits[-1].commit_hash.hex()
            await here.until(lambda: here.holds(newcomer.peer, head), "the newcomer to hold the state")
            assert newcomer.theta_D.tobytes() == others[0].theta_D.tobytes()
            for member in others:
                member.go_on()
            await here.counts(newcomer)
            await sound(here)

    live(scenario(), limit_s=90.0)


def test_a_newcomer_that_is_killed_in_the_middle_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(2), *SIZES, "deadlines.train_limit_s=60", width=MILLION) as here:
            others = here.settle(2)
            await here.rounds(2)
            head = await still(here, *others)
            newcomer, stands, write = here.member("new"), asyncio.Event(), transfer._write_chunk
            begun, whole = list[bytes](), list[bytes]()

            def counted(store: StateStore, places: transfer.Places, hash_: bytes, data: bytes) -> bool:
                begun.append(hash_)
                if len(begun) >= N_BEFORE and not stands.is_set():
                    newcomer.halts["state"] = stands
                written = write(store, places, hash_, data)
                whole.append(hash_)
                here.loop.call_soon_threadsafe(here.notice)
                return written

            monkeypatch.setattr(transfer, "_write_chunk", counted)
            newcomer.start()
            await here.until(lambda: stands.is_set() and len(whole) >= N_BEFORE, "a part of the state")
            await newcomer.kill()
            assert not (newcomer.folder / "state" / "CURRENT").exists()
            before, n_begun = set(whole), len(begun)  # a thread that writes outlives a kill
            newcomer.start()
            await here.until(lambda: here.holds(newcomer.peer, head), "the newcomer to hold the state")
            assert len(begun) > n_begun
            assert not before & set(begun[n_begun:])
            assert newcomer.theta_D.tobytes() == others[0].theta_D.tobytes()

    live(scenario(), limit_s=90.0)


def test_who_was_away_for_too_long_fetches_one_state(tmp_path: Path) -> None:
    keep = ("keep.results=2", "keep.snapshot_every=2")

    async def scenario() -> None:
        async with village(tmp_path, *started(3), *keep) as here:
            away, *others = here.settle(3)
            await here.rounds(1)
            await away.kill()
            n_before = len(here.committed())
            await here.rounds(n_before + 5)
            head = await still(here, *others)
            away.start()
            await here.until(lambda: here.holds(away.peer, head), "it to be up to date")
            assert any("fetching the state" in said for said in away.said)
            assert away.theta_D.tobytes() == others[0].theta_D.tobytes()
            for member in others:
                member.go_on()
            await here.counts(away, after=len(here.committed()))
            await sound(here)

    live(scenario())


def test_a_newcomer_finds_everybody_gone_but_the_observer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(1)) as here:
            (only,) = here.settle(1)
            await here.rounds(3)
            await only.kill()
            newcomer = here.member("new")
            newcomer.start()
            await here.until(lambda: _holds_any(here, newcomer), "the newcomer to hold the state")
            state = RunFolder(here.folder).observer / "state"
            theta = state / (state / "CURRENT").read_text().strip() / "theta.bin"
            assert newcomer.theta_D.tobytes() == np.fromfile(theta, "<f4").tobytes()

    live(scenario())


def _holds_any(here: Village, member: Member) -> bool:
    return any(observed.kind == "digest" and observed.peer == member.peer for observed in here.observations)


def test_everybody_goes_and_comes_back_and_one_has_lost_its_files(tmp_path: Path) -> None:
    """The newest state that is whole wins; who has none, or a damaged one, says so and takes it from there."""

    async def scenario() -> None:
        async with village(tmp_path, *started(3)) as here:
            members = here.settle(3)
            await here.rounds(2)
            # Their states are on disk: a thread that switches one outlives a kill.
            await asyncio.gather(*(member.halted("training") for member in members))
            for member in members:
                await member.kill()
            await here.stop_serving()
            damaged, *_ = members
            for theta in damaged.folder.glob("state/*/theta.bin"):
                with theta.open("r+b") as file:
                    file.seek(400)
                    file.write(b"\xff\xff\xff\x7f")
            n_before = len(here.committed())
            await here.serve()
            for member in members:
                member.start()
            await here.rounds(n_before + 2)
            await here.counts(damaged, after=n_before)
            assert any("damaged" in said for said in damaged.said)
            rows = await sound(here)
            assert len(committed(rows)) >= n_before + 2

    live(scenario())
