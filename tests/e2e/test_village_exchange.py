"""A village in whose exchange someone dies, stands still or is cut off: the round commits in its first attempt."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.rounds.events import Committed
from protos import wire
from protos.messages import Envelope, PeerId, Redeal
from tests.e2e.soundness import LATE_S, UNHURRIED, sound, started
from tests.e2e.village import Village, live, village

pytestmark = pytest.mark.slow

ONCE = "rule.replicas=1"
"""Each chunk has one reducer, so that every reducer is missed."""
SOON = ("deadlines.heartbeat_timeout_s=3", "deadlines.no_progress_s=1.5")
"""Soon, and yet longer than a busy machine keeps the village from running: all would be found frozen at once."""


def counted(commit: Committed) -> set[PeerId]:
    return {entry.peer for entry in commit.body.members if entry.counted}


def reducers(commit: Committed) -> set[PeerId]:
    return {entry.peer for entry in commit.body.reducers}


def redeal_of(here: Village, commit: Committed) -> Redeal | None:
    """The redeal that a commit's proposal carries."""
    (proposal,) = [proposal for proposal in here.proposals if proposal.body == commit.commit.body]
    return wire.decode(Redeal, wire.decode(Envelope, proposal.redeal).body) if proposal.redeal else None


def first_attempt(commit: Committed) -> bool:
    return (commit.body.attempt, commit.commit.attempt, commit.failed) == (0, 0, ())


@pytest.mark.parametrize("at", ["after commitment", "rows", "receipt", "before results", "after results"])
def test_a_death_in_the_exchange_costs_no_attempt(tmp_path: Path, at: str) -> None:
    """The victim sends, reduces, or is done with both. Its chunks move; its own rows of them, which it alone had, go.

    Where all is proposed already, what it had reduced may be lost with it, and then only another attempt helps.
    """

    async def scenario() -> None:
        async with village(tmp_path, *started(4, ONCE, *UNHURRIED)) as here:
            victim, *others = here.settle(4)
            await here.rounds(1)
            # A receipt is read when all may be reduced: without its results nothing is proposed before it dies.
            await victim.halted(at, *(["before results"] if at == "receipt" else []))
            n_before = len(here.committed())
            await victim.kill()
            await here.rounds(n_before + 1, LATE_S)
            commit = here.committed()[n_before]
            if at == "after results" and commit.failed:
                (failed,) = commit.failed
                assert "is not to be" in failed.reason
            else:
                assert first_attempt(commit)
            redeal = redeal_of(here, commit)
            if redeal is not None:  # it may have died when all was done, or before it was dealt in
                assert victim.peer in redeal.lost
                assert counted(commit) == {member.peer for member in others}
                assert reducers(commit) <= {member.peer for member in others}
            elif at in ("rows", "receipt", "before results"):
                raise AssertionError("its chunks did not move")
            await here.rounds(n_before + 2)
            await sound(here)

    live(scenario(), limit_s=90.0)


@pytest.mark.parametrize("at", ["after commitment", "before results"])
def test_a_frozen_member_is_found_by_its_heartbeat_and_comes_back(tmp_path: Path, at: str) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(4, ONCE, *SOON)) as here:
            victim, *others = here.settle(4)
            await here.rounds(1)
            await victim.halted(at)
            n_before = len(here.committed())
            await here.rounds(n_before + 1)
            commit = here.committed()[n_before]
            assert first_attempt(commit)
            assert counted(commit) == {member.peer for member in others}
            victim.go_on()
            await here.counts(victim, after=n_before + 1)
            await here.rounds(len(here.committed()) + 1)
            await sound(here)

    live(scenario())


def test_whose_rows_reach_everyone_but_one_stays_in_and_that_one_reduces_no_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(4, ONCE, *SOON)) as here:
            sender, reducer, *_ = here.settle(4)
            await here.rounds(1)
            sender.cut_off_from.add(reducer.peer)
            n_before = len(here.committed())
            await here.until(
                lambda: any(redeal_of(here, commit) for commit in here.committed()[n_before:]), "a redeal", 30.0
            )
            commit = next(commit for commit in here.committed()[n_before:] if redeal_of(here, commit))
            redeal = redeal_of(here, commit)
            assert redeal is not None
            assert first_attempt(commit)
            assert redeal.excluded == ()
            assert {*redeal.lost, *(item.reducer for item in redeal.moved)} == {reducer.peer}
            assert counted(commit) == {member.peer for member in here.members}
            sender.cut_off_from.clear()
            await sound(here)

    live(scenario())


def test_whose_rows_reach_nobody_is_left_out_and_told_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(4, ONCE, *SOON)) as here:
            sender, *others = here.settle(4)
            await here.rounds(1)
            sender.cut_off_from.update(member.peer for member in others)
            n_before = len(here.committed())
            await here.until(lambda: any(sender.peer not in counted(c) for c in here.committed()[n_before:]), "it out")
            commit = next(commit for commit in here.committed()[n_before:] if sender.peer not in counted(commit))
            assert first_attempt(commit)
            assert counted(commit) == {member.peer for member in others}
            await here.until(lambda: any("lost in the exchange: its rows" in text for text in sender.said), "its word")
            sender.cut_off_from.clear()
            await sound(here)

    live(scenario())
