"""What the churn benchmark rests on: sizes as on the wire, accesses that take time, figures that add up."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from coordinator.rounds.attempt import Phase
from protos import wire
from protos.messages import Heartbeat, MemberState, Outcome, PeerId, Prepare, Records
from tests.bench import churn
from tests.bench._churn_world import MBIT, Mix, made, measured
from tests.sim.options import Options
from tests.sim.sizes import Sizes
from tests.sim.world import World

PEER = PeerId("12D3KooW" + "a" * 44)


@pytest.mark.parametrize("message", [
    Heartbeat(0, 7, b"h" * 32, b"d" * 32, MemberState.TRAINING, 12, 4096, 123.5, 2.25, 3.5, 10**9, 0),
    Prepare(1, 300, 2, PEER),
    Records((b"record" * 30, b"another" * 50)),
], ids=lambda message: type(message).__name__)  # fmt: skip
def test_sizes_are_those_of_the_wire(message: object) -> None:
    world = World(Options())
    reckoned = Sizes(world.registry, [PEER]).of(message)
    assert reckoned == pytest.approx(len(wire.encode(message)), abs=2)


def test_a_message_within_another_has_its_size_in_it() -> None:
    world = World(Options())
    sizes = Sizes(world.registry, [])
    inner = Records((b"x" * 1000,))
    outer = Records((world.registry.encode(inner),))
    assert 1000 < sizes.of(inner) < sizes.of(outer) < 1020


def test_rows_take_the_time_that_their_bytes_need() -> None:
    """Two members, each 4 rows of 1 MiB to the other and to itself, and 4 results, at 10 Mbit/s."""
    fast = measured(Mix(2, h=5, link_mbit=1000), 2).round_s
    slow = measured(Mix(2, h=5, link_mbit=10), 2).round_s
    row_s = made(Mix(2, link_mbit=10)).row_bytes[0] / (10 * MBIT)
    assert 4 * row_s <= slow - fast <= 12 * row_s


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_256_members_that_live_20_minutes_commit_in_every_first_attempt(seed: int) -> None:
    """One of them goes every 5 s, and an exchange takes one to two minutes."""
    world = made(replace(churn.EXCHANGES["n256.100mbit.churn"], seed=seed)).start()
    assert world.run_until(lambda: world.n_committed == 2, 900.0)
    committed = [body for _, body, _ in world.chain.commits if body.outcome is Outcome.COMMITTED]
    assert [body.attempt for body in committed] == [0, 0]
    for body in committed:
        n_counted = sum(entry.counted for entry in body.members)
        assert n_counted >= 0.9 * len(body.members)
    assert any(not entry.counted for body in committed for entry in body.members)  # somebody was lost in the middle


def test_rows_that_take_no_time_come_to_the_next_in_line_too() -> None:
    """Who reduces nothing at first has its part all the same, should a reducer die."""
    world = made(Mix(12, h=5)).start()
    assert world.run_until(lambda: world.leader.rounds.phase is Phase.EXCHANGE, 60.0)
    attempt = world.leader.rounds._attempt
    assert attempt is not None
    idle = [member.name for member in world.members.values() if member.name not in attempt.dealt]
    assert idle
    world.crash(world.members[attempt.reducers[0]], None)
    began_at, deals = world.now, world.spec.deadlines
    assert world.run_until(lambda: world.n_committed == 1, deals.exchange_s / 2)
    assert world.now - began_at < deals.gone_grace_s + deals.heartbeat_timeout_s


def test_the_quick_benchmark_shows_what_is_claimed() -> None:
    figures = {figure.name: figure for figure in churn.small()}
    assert figures["cost.one_10x_slower.round"].ratios["alike"] <= 1.15
    assert figures["cost.one_10x_slower.counted"].value == 100
    assert figures["cost.joiner.round"].ratios["alike"] < 1.05
    assert figures["deadline.mixed.adaptive"].ratios["best fixed"] >= 0.97
    assert 0 <= figures["deadline.mixed.adaptive.error"].value < 3
    assert 50 < figures["churn.n8.life5min.utilised"].value < 100
    assert 0 < figures["control.n8.leader_share"].value < figures["control.n32.leader_share"].value < 10


@pytest.mark.parametrize(("noise", "n_pairs"), [(0.0, 6), (0.016, 12), (0.2, 24)])
def test_deadlines_are_compared_until_noise_is_told_from_loss(
    noise: float, n_pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other seeds than those that chose the fixed one."""
    lived: dict[float, list[int]] = {}

    def rate(mix: Mix, n_rounds: int, seed: int) -> float:
        lived.setdefault(mix.train_limit_s if mix.deadline_k == 0 else math.inf, []).append(seed)
        return 1.0 + noise * (-1) ** seed if mix.deadline_k else 1.0 - abs(mix.train_limit_s - 78.0) / 1e3

    monkeypatch.setattr(churn, "rate", rate)
    figures = {figure.name: figure for figure in churn.deadlines("made up", Mix(4, round_s=60.0), churn.Trials())}
    assert figures["deadline.made up.best_fixed_at"].value == pytest.approx(78.0)
    assert figures["deadline.made up.adaptive"].ratios["best fixed"] == pytest.approx(1.0, abs=1e-9)
    assert lived[math.inf] == list(range(4, 4 + n_pairs))
    assert lived[78.0] == list(range(1, 4 + n_pairs))
    assert (figures["deadline.made up.adaptive.error"].value <= 0.5) == (n_pairs < 24)


def test_the_crossing_lies_between_the_measured_ones_or_beyond_them() -> None:
    assert churn.crossing([(10, 0.01), (100, 1.0)], 0.1) == pytest.approx(10**1.5)
    assert churn.crossing([(10, 0.001), (100, 0.01)], 0.1) == pytest.approx(1000)


def test_the_same_world_has_the_same_figures_again() -> None:
    mix = Mix(6, h=5, speeds="heavy", life_s=60.0, link_mbit=50, link_spread=0.5, seed=3)
    assert measured(mix, 2) == measured(mix, 2)
