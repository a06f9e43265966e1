"""The run's clock: the coordinator's word counts, a stand-in's only as long as there is none."""

from __future__ import annotations

import pytest

from node.clock import RunClock
from protos import limits, wire
from protos.messages import Welcome
from protos.wire import WireError
from tests.node.test_leaderline import welcome


def test_a_stand_in_is_heeded_only_before_the_coordinator() -> None:
    now = [100.0]
    clock = RunClock(lambda: now[0])
    assert clock() == 100.0
    clock.is_told_by_peer(7.0)
    assert clock() == 7.0
    clock.is_told_by_peer(9.0)
    assert clock() == 9.0
    clock.is_told(5000.0)
    clock.is_told_by_peer(1e8)
    now[0] += 2.5
    assert clock() == 5002.5


def test_admission_is_the_coordinators_word_too() -> None:
    clock = RunClock(lambda: 10.0)
    clock.is_off_by(-3.0)
    clock.is_told_by_peer(1e8)
    assert clock() == 7.0


@pytest.mark.parametrize("run_time_s", [limits.RUN_TIME_S * 1.01, 1e13, 1e308, -1.0])
def test_no_leader_can_say_a_time_that_no_run_has(run_time_s: float) -> None:
    said = welcome()
    with pytest.raises(WireError, match="run_time_s"):
        wire.encode(Welcome(said.leader, said.commit, said.ledger, (), run_time_s, 1.0))
