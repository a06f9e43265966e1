"""Whole runs of real agents over real TLS sockets in one process: they commit, agree, and outlive each other."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from aggregation.rules.policy import effective
from coordinator.leading import service
from node.peers import transport
from protos import limits
from tests.e2e.soundness import committed, flat, off, sound, started
from tests.e2e.village import live, village
from tests.fakes.tiny import TinyTask
from tests.reference import diloco

pytestmark = pytest.mark.slow


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
                assert all(member["idle_s"] + member["worked_s"] > 0 for member in row["members"])
                assert all(0 <= member["idle_share"] <= 1 for member in row["members"])
                reducers = {reducer["peer"] for reducer in row["reducers"]}
                assert reducers & peers
                assert reducers <= peers | {here.observer}
                assert (row["rule"], row["f"]) == {1: ("mean", 0), 2: ("norm_clip", 0)}.get(n, ("default", 1))
                assert bool(row["degraded"]) == (n < 3)
            states = {member.theta_D.tobytes() for member in here.members}
            assert len(states) == 1
            assert here.spec.model.n_values % here.spec.codec.leaf_values

    live(scenario())


@pytest.mark.parametrize("n", [2, 3])
def test_the_observer_reduces_while_fewer_than_three_can_be_reached(tmp_path: Path, n: int) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(n, "rule.replicas=1")) as here:
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
        more = ("work.end_rounds=1", "work.h=1", f"codec.name={codec}", "rule.replicas=1")
        settings = started(3, *more, *sizes)
        async with village(tmp_path / codec, *settings, width=17477) as here:
            here.settle(3)
            await here.everyone_ends()
            assert here.spec.model.n_values > 4 * 65536
            members = [member for row in committed(await sound(here)) for member in row["members"]]
            assert len(members) == 3
            return sum(m["bytes_sent"] for m in members), sum(m["bytes_received"] for m in members)

    int8, fp32 = live(exchanged("int8")), live(exchanged("fp32"))
    # Three of each chunk's nine rows and copies of its result stay at home.
    assert fp32[0] > 4 * 4 * 4 * 65536
    assert int8[1] < 0.26 * fp32[1]
    for sent, received in (int8, fp32):  # the observer fetches one more, maybe when they have said what they sent
        assert sent < received + 1.05 * received / 4, "no row goes out for nothing"


@pytest.mark.parametrize("n", [1, 2])
def test_with_fp32_and_the_mean_a_run_is_plain_diloco(tmp_path: Path, n: int) -> None:
    async def scenario() -> None:
        async with village(tmp_path, *started(n, "work.end_rounds=2", "codec.name=fp32", "rule.name=mean")) as here:
            here.settle(n)
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
                alone = replace(round_, members=(member,), rule="mean", outer_lr=1.0, outer_momentum=0.0)
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
            wanted = effective("median", [1.0, 1.0], f_max=1)
            assert [row[key] for key in ("rule", "f", "fallback", "degraded")] == list(astuple(wanted))
            assert row["degraded"]

    live(scenario())
