"""A village whose coordinator is gone: its members go on under one of them, and it learns of that when it is back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from coordinator.folder import RunFolder
from tests.e2e.member import Member
from tests.e2e.soundness import sound, started
from tests.e2e.village import Village, live, village

pytestmark = pytest.mark.slow

HASTY = ("deadlines.stand_in_s=1", "deadlines.heartbeat_timeout_s=2")


async def round_of(member: Member) -> int:
    return int((await member.status())["round"])


async def on_to(here: Village, members: list[Member], round_: int, limit_s: float = 25.0) -> None:
    """Wait until these members are in this round."""
    rounds: dict[Any, int] = {}

    async def look() -> None:
        for member in members:
            rounds[member.peer] = await round_of(member)

    loop = here.loop
    until = loop.time() + limit_s
    while not rounds or min(rounds.values()) < round_:
        assert loop.time() < until, f"rounds {rounds}, wanted {round_}\n{here.story()}"
        await asyncio.sleep(0.2)  # a status is asked for, nobody tells when it changes
        await look()


def test_three_go_on_without_the_coordinator_which_learns_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(3, *HASTY)) as here:
            members = here.settle(3)
            await here.rounds(2)
            await here.drop_leader()
            before = max([await round_of(member) for member in members])
            await on_to(here, members, before + 4)
            led = {(await member.status())["leader"] for member in members}
            assert led <= {member.peer for member in members}
            n_before = len(here.committed())
            await here.serve()
            await here.until(lambda: len(here.committed()) >= n_before + 4, "what was committed meanwhile")
            await here.rounds(len(here.committed()) + 2)
            rows = await sound(here)
            assert {row["leader"] for row in rows} & {member.peer for member in members}
            assert RunFolder(here.folder).ports.exists()

    live(scenario(), limit_s=80.0)


def test_who_is_left_alone_names_whom_it_waits_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(2, *HASTY)) as here:
            last, gone = here.settle(2)
            await here.rounds(1)
            await here.drop_leader()
            await gone.kill()
            said = ""
            until = here.loop.time() + 20.0
            while not (said.startswith("voters for a quorum: ") and gone.peer[-6:] in said):
                assert here.loop.time() < until, f"{said}\n{here.story()}"
                await asyncio.sleep(0.1)  # a status is asked for, nobody tells when it changes
                said = (await last.status())["waiting_for"]

    live(scenario())


def test_training_data_outlive_the_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are so small here that every round needs new ones, which nobody has been leased yet."""
    monkeypatch.setattr("node.training.packing.PIECE_BYTES_MAX", 256)

    async def scenario() -> None:
        async with village(tmp_path, *started(3, *HASTY)) as here:
            members = here.settle(3)
            await here.rounds(1)

            async def missing() -> dict[Any, int]:
                data = {member.peer: (await member.status())["training_data"] for member in members}
                return {peer: its["pieces"] - its["pieces_here"] for peer, its in data.items()}

            until = here.loop.time() + 20.0
            while any((await missing()).values()):
                assert here.loop.time() < until, f"{await missing()}\n{here.story()}"
                await asyncio.sleep(0.2)  # a status is asked for, nobody tells when it changes
            await here.drop_leader()
            assert here.observer_task is not None
            here.observer_task.cancel()
            before = max([await round_of(member) for member in members])
            await on_to(here, members, before + 4)
            said = [text for member in members for text in member.said]
            assert not [text for text in said if text.startswith("waiting for training data")]

    live(scenario(), limit_s=80.0)
