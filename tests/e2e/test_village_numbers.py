"""Villages of every codec, and what a round needs of the one before it: centres and residuals."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aggregation import codec
from node.peers.pacing import Rates
from node.training.shared import map_residual
from protos.messages import MemberMessage, Results, Signed
from protos.sealer import KeySealer, open_signed
from tests.e2e.member import Member
from tests.e2e.soundness import committed, sound, started
from tests.e2e.village import live, village
from tests.e2e.watched import WatchedLine

pytestmark = pytest.mark.slow


def residual(member: Member) -> bytes | None:
    """What encoding has left over in a member's folder."""
    path = member.folder / "work" / "residual.bin"
    return path.read_bytes() if path.exists() else None


@pytest.mark.parametrize("name", ["fp32", "fp16", "int4", "topk"])
def test_every_codec_carries_a_run(tmp_path: Path, name: str) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(3, "work.end_rounds=3", f"codec.name={name}")) as here:
            here.settle(3)
            await here.everyone_ends()
            rows = committed(await sound(here))
            assert [row["codec"] for row in rows] == [name] * 3
            assert all(row["failed_attempts"] == [] for row in rows)
            assert all(member["accepted"] for row in rows for member in row["members"])
            assert len({member.theta_D.tobytes() for member in here.members}) == 1
            for member in here.members:
                left = residual(member)
                assert (left is not None) == (codec.feedback_decay(name) is not None)
                assert not (member.folder / "work" / "residual.next").exists()
                if left is not None:
                    path = member.folder / "work" / "residual.bin"
                    assert np.any(map_residual(path, here.spec.model.n_values))

    live(scenario())


def test_what_is_left_over_outlives_a_crash_of_the_node_and_one_of_its_trainer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(3, "codec.name=int4")) as here:
            victim, *_ = here.settle(3)
            await here.rounds(1)
            await victim.halted("training")
            left = residual(victim)
            assert left is not None
            victim.gate.set()
            await victim.kill()
            assert residual(victim) == left
            n_before = len(here.committed())
            await here.rounds(n_before + 1)  # without it
            victim.start()
            n_counted = await here.counts(victim, after=n_before)
            await victim.halted("training")
            assert residual(victim) not in (None, left)  # the same one went along, and what that left over replaced it
            left = residual(victim)
            assert victim.trainer is not None
            victim.trainer.crash()
            victim.go_on()
            await here.counts(victim, after=n_counted)
            assert not any("fault" in text for text in victim.said)
            await sound(here)

    live(scenario())


def test_a_newcomer_starts_the_rule_where_the_others_do(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(3, "rule.replicas=1")) as here:
            here.settle(3)
            await here.rounds(2)
            newcomer = here.member("late")
            newcomer.start()
            n_first = await here.counts(newcomer)
            row = committed(await sound(here))[n_first - 1]
            assert (row["rule"], row["fallback"]) == ("default", "")
            assert newcomer.peer in {reducer["peer"] for reducer in row["reducers"]}
            assert row["failed_attempts"] == []

    live(scenario())


def test_who_has_lost_the_last_results_fetches_them_before_it_combines_again(tmp_path: Path) -> None:
    """With one reducer a chunk the round needs all of them, and no commit comes between that would bring results."""

    async def scenario() -> None:
        async with village(tmp_path, *started(3, "rule.replicas=1", "deadlines.gone_grace_s=10")) as here:
            members = here.settle(3)
            await here.rounds(2)
            await asyncio.gather(*(member.halted("training") for member in members))
            n_before = len(here.commits)
            for member in members:
                await member.kill()
            for member in members[1:]:
                shutil.rmtree(member.folder / "results")
            for member in members:
                member.start()
            await here.until(lambda: len(here.commits) > n_before, "a commit of those who came back")
            row = (await sound(here))[n_before]
            assert (row["outcome"], row["rule"], row["fallback"]) == ("committed", "default", "")
            # One that a busy machine is slow to find reachable again does not reduce in that round.
            assert {m.peer for m in members[1:]} & {reducer["peer"] for reducer in row["reducers"]}
            assert not any("without them" in text for member in members for text in member.said)

    live(scenario())


def test_a_reducer_that_says_another_norm_than_its_results_have_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reduces its chunks alone, and the hashes are right: only who looks at what it has fetched can see it."""

    async def scenario() -> None:
        async with village(tmp_path, *started(3, "rule.replicas=1")) as here:
            liar, *_ = here.settle(3)
            honestly = WatchedLine.send

            async def send(line: WatchedLine, message: MemberMessage | Signed) -> None:
                if line._member is liar and isinstance(message, Signed):
                    said = open_signed(message.envelope, here.run).message
                    if isinstance(said, Results):
                        less = tuple(replace(each, norm_sq=each.norm_sq / 100) for each in said.results)
                        sealer = KeySealer(liar.identity, here.run)
                        message = Signed(sealer.seal(replace(said, results=less)))
                await honestly(line, message)

            monkeypatch.setattr(WatchedLine, "send", send)
            await here.rounds(2)
            for row in committed(await sound(here)):
                assert liar.peer not in {reducer["peer"] for reducer in row["reducers"]}
                assert [member["accepted"] for member in row["members"]] == [True] * 3
                (failed,) = row["failed_attempts"]
                assert failed["reason"].startswith("no quorum of votes; ")
                assert f"by {liar.peer} has another n" in failed["reason"]

    live(scenario())


def test_a_member_with_a_slow_line_takes_part_and_says_what_its_data_path_costs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(2)) as here:
            slow, other = here.member("slow"), here.member("other")
            slow.start(max_up=100_000, max_down=200_000)
            other.start()
            await here.rounds(2)
            assert slow.peers is not None
            inner = slow.peers.inner
            assert (inner._up._rates, inner._down._rates) == (Rates(100_000), Rates(200_000))
            stages = (await slow.status())["stages"]
            for name in ("encode", "hash", "send", "receive", "check", "combine", "fetch"):
                assert stages[name]["bytes"] > 0, name
            await sound(here)

    live(scenario())
