"""The end of training: its bounds, who moves it, and what the slow and the new cost the others in a virtual clock."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds import deadline, work
from coordinator.rounds.attempt import Phase
from protos.messages import Heartbeat, MemberState, PeerId, Plan
from protos.runspec import DeadlineSpec, MembershipSpec, RunSpec, WorkSpec
from tests.coordinator.rounds.cases import NO_HASH, PEERS
from tests.coordinator.rounds.leader_script import Script, training
from tests.sim.options import sim_spec

FINISHES = st.lists(st.floats(0.01, 1e4), min_size=1, max_size=12)
K = st.floats(0.1, 100)

# -- the formula -----------------------------------------------------------------------------------------------------


@given(FINISHES, K)
def test_the_end_is_at_most_15_percent_or_half_a_second_after_the_median(finishes_s: list[float], k: float) -> None:
    ends_s = deadline.ends_after_s(finishes_s, k)
    median_s = sorted(finishes_s)[(len(finishes_s) - 1) // 2]
    assert median_s + max(0.05 * median_s, 0.5) * (1 - 1e-9) <= ends_s or ends_s >= 1.15 * median_s * (1 - 1e-9)
    assert ends_s <= max(1.15 * median_s, median_s + 0.5) * (1 + 1e-9)


@given(FINISHES, K, K, st.floats(1, 100))
def test_the_end_grows_with_k_and_with_everybodys_time(
    finishes_s: list[float], k: float, other: float, factor: float
) -> None:
    low, high = sorted((k, other))
    assert deadline.ends_after_s(finishes_s, low) <= deadline.ends_after_s(finishes_s, high)
    slower_s = [factor * finish_s for finish_s in finishes_s]
    assert deadline.ends_after_s(finishes_s, k) <= deadline.ends_after_s(slower_s, k) * (1 + 1e-9)


@given(FINISHES, K, st.integers(1, 12))
def test_a_minority_that_never_finishes_moves_the_end_no_further_than_the_rest_goes(
    finishes_s: list[float], k: float, n_hanging: int
) -> None:
    n_hanging = min(n_hanging, len(finishes_s) // 2)
    hanging_s = [*sorted(finishes_s)[: len(finishes_s) - n_hanging], *([math.inf] * n_hanging)]
    assert deadline.ends_after_s(hanging_s, k) <= 1.15 * max(finishes_s) + 0.5


def test_while_half_have_said_nothing_there_is_no_end() -> None:
    assert deadline.ends_after_s([1.0, math.inf, math.inf], 3.0) == math.inf
    assert deadline.ends_after_s([], 3.0) == math.inf
    assert deadline.ends_after_s([10.0, 10.0], 0.0) == math.inf  # the fixed limit alone


def test_the_spread_counts_between_its_bounds() -> None:
    assert deadline.ends_after_s([10.0, 10.2, 10.4], 2.0) == pytest.approx(10.2 + 0.51)  # 5 %
    assert deadline.ends_after_s([10.0, 10.0, 10.4, 10.4, 99.0], 2.0) == pytest.approx(10.4 + 0.8)
    assert deadline.ends_after_s([10.0, 20.0, 90.0], 3.0) == pytest.approx(20.0 + 3.0)  # 15 %
    assert deadline.ends_after_s([1.0, 1.0, 9.0], 3.0) == pytest.approx(1.5)


def beat(step: int, left_s: float, rate: float = 8.0) -> Heartbeat:
    return Heartbeat(0, 2, NO_HASH, NO_HASH, MemberState.TRAINING, step, 0, rate, 1.0, left_s, 0, 0)


def test_announcements_that_can_not_be_are_none() -> None:
    assert deadline.time_left_s(beat(5, 1.0), 4, 8, 0.0) is None  # beyond the lease
    assert deadline.time_left_s(beat(2, 0.0), 4, 8, 0.0) is None  # it doesn't know
    assert deadline.time_left_s(beat(2, -3.0), 4, 8, 0.0) is None
    assert deadline.time_left_s(beat(2, 1e-9), 4, 8, 8.0) is None  # ten billion tokens a second
    assert deadline.time_left_s(beat(2, 2.0), 4, 8, 8.0) == 2.0
    assert deadline.time_left_s(beat(4, 0.0), 4, 8, 8.0) == 0.0


# -- a leader in a virtual clock -------------------------------------------------------------------------------------


def spec_of(h: int = 100, **changes: object) -> RunSpec:
    made = sim_spec(n_chunks=3, work=WorkSpec(batch_tokens=8, h=h), deadlines=DeadlineSpec(), **changes)  # type: ignore[arg-type]
    return made


class Clock:
    """Members that make a step every so often and say so each second; until the leader ends training."""

    def __init__(self, script: Script, step_s: dict[PeerId, float]) -> None:
        self.script, self.step_s = script, step_s
        self.began_at = script.at
        self.hangs_at: dict[PeerId, int] = {}

    def step(self, peer: PeerId) -> int:
        steps = work.asked(self.script.rounds.ledger.seat_of(peer))
        made = int((self.script.at - self.began_at) / self.step_s[peer] + 1e-9)
        return min(made, steps, self.hangs_at.get(peer, steps))

    def run(self, most_s: float) -> float:
        """Seconds until training ended."""
        script = self.script
        while script.at < self.began_at + most_s:
            for peer, step_s in self.step_s.items():
                steps, step = work.asked(script.rounds.ledger.seat_of(peer)), self.step(peer)
                done = step == steps
                rate = script.spec.work.batch_tokens / step_s
                state = MemberState.READY if done else MemberState.TRAINING
                left_s = (steps - step) * step_s if step else 0.0
                script.beat(peer, state, step, tokens_per_s=rate, time_left_s=left_s)
                if script.phase() is not Phase.TRAIN:
                    return script.at - self.began_at
            before = script.at
            for _ in range(10):  # a tenth of a second is a heartbeat's accuracy here
                script.wait(0.1)
                if script.phase() is not Phase.TRAIN:
                    planned = [a for a in script.told(Plan, script.did)]
                    assert planned
                    return script.at - self.began_at
                if any(self._finishes(peer, before) for peer in self.step_s):
                    break  # who finishes says so at once
        raise AssertionError(script.waiting_for)

    def _finishes(self, peer: PeerId, before: float) -> bool:
        done_at = self.began_at + work.asked(self.script.rounds.ledger.seat_of(peer)) * self.step_s[peer]
        return before < done_at <= self.script.at + 1e-9


def began(n: int, spec: RunSpec) -> Script:
    script = training(n, spec)
    for peer in PEERS[:n]:
        script.beat(peer, MemberState.TRAINING, 0)
    member_steps = [script.rounds.members.get(peer) for peer in PEERS[:n]]
    for member in member_steps:
        assert member is not None
        member.n_lost, member.finish_at, member.began, member.tokens_per_s = 0, None, None, 0.0
    return script


@pytest.mark.parametrize("n", [2, 3, 5, 16])
@pytest.mark.parametrize("round_s", [10.0, 40.0])
def test_one_member_10_times_slower_costs_the_others_15_percent_at_most_and_counts(n: int, round_s: float) -> None:
    spec = spec_of()
    script = began(n, spec)
    step_s = dict.fromkeys(PEERS[:n], round_s / 100)
    step_s[PEERS[0]] *= 10
    took_s = Clock(script, step_s).run(200.0)
    assert round_s <= took_s <= 1.15 * round_s + 0.1
    assert [member.peer for member in script.last(Plan).members if member.sender] == PEERS[:n]


def test_without_it_nobody_waits() -> None:
    script = began(4, spec_of())
    assert Clock(script, dict.fromkeys(PEERS[:4], 0.1)).run(100.0) == pytest.approx(10.0, abs=0.11)


def test_who_stops_stepping_while_it_is_heard_of_does_not_put_the_end_off() -> None:
    script = began(3, spec_of())
    clock = Clock(script, dict.fromkeys(PEERS[:3], 0.1))
    clock.hangs_at[PEERS[1]] = 40
    assert clock.run(100.0) <= 11.6
    script = began(2, spec_of())
    clock = Clock(script, {PEERS[0]: 0.1, PEERS[1]: 1.0})
    clock.hangs_at[PEERS[0]] = 99  # the faster one of two: its word stands, the slower one's is no reason to wait
    assert clock.run(100.0) <= 11.6


def test_the_end_waits_for_enough_contributors() -> None:
    spec = spec_of(membership=MembershipSpec(min_contributors=3))
    spec = spec.model_copy(update={"work": spec.work.model_copy(update={"steps_min": 20})})
    script = began(3, spec)
    took_s = Clock(script, {PEERS[0]: 0.1, PEERS[1]: 0.1, PEERS[2]: 1.0}).run(100.0)
    assert took_s == pytest.approx(20.0, abs=1.1)  # when the third has made 20 steps, and not before


def test_a_joiner_costs_less_than_5_percent() -> None:
    """It says hello in the middle of training, and then nothing more."""
    script = began(3, spec_of())
    clock = Clock(script, dict.fromkeys(PEERS[:3], 0.1))
    script.wait(4.0)
    for peer in PEERS[:3]:
        script.beat(peer, MemberState.TRAINING, 40, tokens_per_s=80.0, time_left_s=6.0)
    script.connect(PEERS[5], holds=False)
    took_s = clock.run(100.0)
    assert took_s <= 1.05 * 10.0
    assert PEERS[5][-6:] not in script.waiting_for


def test_a_seated_newcomer_that_hangs_after_its_hello_costs_15_percent_at_most() -> None:
    script = training(4, spec_of())
    for peer in PEERS[:4]:
        member = script.rounds.members.get(peer)
        assert member is not None
        member.n_lost, member.step, member.finish_at, member.began = 0, 0, None, None
    took_s = Clock(script, dict.fromkeys(PEERS[:3], 0.1)).run(100.0)  # of the fourth nothing is heard any more
    assert took_s <= 11.6


def test_the_view_says_until_when() -> None:
    script = began(2, spec_of())
    script.wait(1.0)
    assert script.rounds.view(script.rounds.members.get(PEERS[0]).seen_at).deadline_at == 600.0  # type: ignore[union-attr]
    script.beat(PEERS[0], MemberState.TRAINING, 10, tokens_per_s=80.0, time_left_s=9.0)
    script.wait(0.6)
    assert script.rounds.view(script.rounds.members.get(PEERS[0]).seen_at).deadline_at == pytest.approx(10.5)  # type: ignore[union-attr]
    assert "peer11, peer12" in script.waiting_for


def test_a_billion_samples_a_second_end_nothing() -> None:
    script = began(3, spec_of())
    for peer in PEERS[:2]:
        script.beat(peer, MemberState.TRAINING, 1, tokens_per_s=8.0, time_left_s=99.0)
    script.wait(1.0)
    for step, left_s in ((2, 1e-6), (101, 0.0), (90, -5.0), (6, 1e-9)):
        script.beat(PEERS[2], MemberState.TRAINING, step, tokens_per_s=1e9, time_left_s=left_s)
        script.wait(0.6)
    assert script.phase() is Phase.TRAIN
    deadline_at = script.rounds.view(script.rounds._round_began_at).deadline_at
    assert deadline_at is not None
    assert deadline_at > 99.0


def test_a_speed_that_is_known_stands_for_a_word_that_has_not_come_until_it_has_passed() -> None:
    script = began(3, spec_of())
    for peer in PEERS[:3]:
        member = script.rounds.members.get(peer)
        assert member is not None
        member.hello = replace(member.hello, speed=80.0)  # ten seconds
    roll = script.rounds._roll(script.rounds._round_began_at)
    assert roll.ends_after_s(script.spec) == pytest.approx(10.5)
    script.at = 10.1
    assert script.rounds._roll(replace(roll, now=script.at).now).ends_after_s(script.spec) == math.inf  # type: ignore[arg-type]
