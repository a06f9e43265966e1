"""What a leader knows of members: presence, progress, and when either changes by itself."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.rounds.events import Instant
from coordinator.rounds.members import NAMED_MOST, Members, listed, named
from protos.messages import Heartbeat, Hello, MemberState, PeerId, Record
from protos.runspec import DeadlineSpec
from tests.coordinator.rounds.cases import NO_HASH, PEERS, seated

DEADLINES = DeadlineSpec(heartbeat_s=1.0, heartbeat_timeout_s=15.0, gone_grace_s=3.0)
LEDGER = seated(3)
A, B = PEERS[:2]


def hello(head: bytes = LEDGER.head, *, holds: bool = True, observer: bool = False) -> Hello:
    return Hello(1, b"record", 0, 1, head, NO_HASH, holds, observer, "", 0)


def record(peer: PeerId, *grpc: str) -> Record:
    return Record(peer, 1, grpc, (), 0, 0, NO_HASH)


def beat(**changes: Any) -> Heartbeat:
    values: dict[str, Any] = {
        "epoch": 0, "round": 2, "head": LEDGER.head, "digest": NO_HASH, "state": MemberState.TRAINING, "step": 1,
        "tokens": 8, "tokens_per_s": 1.0, "inner_loss": 1.0, "time_left_s": 1.0, "bytes_sent": 0, "bytes_received": 0,
    }  # fmt: skip
    return Heartbeat(**(values | changes))


def at(seconds: float) -> Instant:
    return Instant(seconds)


def present(*peers: PeerId, started: float = 0.0) -> Members:
    members = Members(DEADLINES, at(started))
    for peer in peers:
        members.connected(peer, hello(), record(peer, "here:1"), at(started))
    return members


def test_a_member_is_there_while_it_is_heard_of() -> None:
    members = present(A)
    assert members.fresh(A, at(15.0))
    assert not members.fresh(A, at(15.1))
    members.heard(A, beat(), 2, at(10.0))
    assert members.fresh(A, at(25.0))
    assert not members.fresh(A, at(25.1))
    assert not members.may_return(A, at(25.1))  # its line is open: it is silent, not on its way back
    assert not members.fresh(B, at(0.0))


def test_who_reconnects_is_waited_for_a_moment() -> None:
    members = present(A)
    members.disconnected(A, at(100.0))
    assert not members.fresh(A, at(100.0))
    assert members.may_return(A, at(102.9))
    assert members.expected(A, at(102.9))
    assert not members.may_return(A, at(103.0))
    members.connected(A, hello(), record(A, "here:1"), at(104.0))
    assert members.fresh(A, at(104.0))


def test_a_new_leader_waits_for_everybody_to_find_it() -> None:
    members = Members(DEADLINES, at(50.0))
    assert members.may_return(B, at(64.9))
    assert not members.may_return(B, at(65.0))


def test_progress_that_falls_is_lost() -> None:
    members = present(A)
    members.heard(A, beat(step=5), 2, at(1.0))
    member = members.heard(A, beat(step=5), 2, at(2.0))
    assert member is not None
    assert not member.behind
    members.connected(A, hello(), record(A, "here:1"), at(3.0))  # came back, as it says later
    assert not member.behind
    members.heard(A, beat(step=0), 2, at(3.1))
    assert member.behind
    members.heard(A, beat(step=2), 2, at(4.0))
    assert (member.step, member.n_lost) == (2, 1)
    members.next_round(at(5.0))
    assert (member.step, member.n_lost) == (0, 0)
    members.heard(A, beat(step=9), 3, at(6.0))  # of the round before
    assert member.step == 0


def test_the_stage_is_all_that_matters() -> None:
    members = present(A)
    member = members.heard(A, beat(step=1), 2, at(1.0))
    assert member is not None
    stage = member.stage(4)
    members.heard(A, beat(step=3, tokens_per_s=7.0, inner_loss=0.5), 2, at(2.0))
    assert member.stage(4) == stage
    for changed in (beat(step=4), beat(step=2), beat(head=NO_HASH), beat(state=MemberState.READY)):
        before = member.stage(4)
        members.heard(A, changed, 2, at(3.0))
        assert member.stage(4) != before


@pytest.mark.parametrize(
    ("state", "head", "holds"),
    [
        (MemberState.WAITING, LEDGER.head, True),
        (MemberState.TRAINING, LEDGER.head, True),
        (MemberState.APPLYING, LEDGER.head, True),
        (MemberState.JOINING, LEDGER.head, False),
        (MemberState.PAUSED, LEDGER.head, False),
        (MemberState.TRAINING, NO_HASH, False),
    ],
)
def test_who_holds_the_state(state: MemberState, head: bytes, holds: bool) -> None:
    members = present(A)
    members.heard(A, beat(state=state, head=head), 2, at(1.0))
    assert members.holds(A, LEDGER, at(2.0)) is holds
    assert bool(members.holders(LEDGER, at(2.0))) is holds
    assert not members.holds(A, LEDGER, at(99.0))


def test_observers_hold_the_state_and_get_no_seat() -> None:
    members = present(A)
    members.connected(B, hello(observer=True), record(B), at(0.0))
    assert members.holds(B, LEDGER, at(0.0))
    assert [member.peer for member in members.holders(LEDGER, at(0.0))] == [A]


def test_a_newcomer_holds_nothing() -> None:
    members = Members(DEADLINES, at(0.0))
    member = members.connected(A, hello(holds=False), record(A), at(0.0))
    assert (member.head, member.state) == (b"", MemberState.JOINING)


def test_who_is_gone_for_good_is_dropped_at_the_next_round() -> None:
    members = present(A, B)
    members.disconnected(A, at(1.0))
    members.next_round(at(2.0))
    assert members.get(A) is not None  # it may come back any moment
    members.next_round(at(30.0))
    assert members.get(A) is None
    assert [member.peer for member in members] == [B]
    assert len(members) == 1


def test_a_new_address_has_to_be_reached_anew() -> None:
    members = present(A)
    member = members.get(A)
    assert member is not None
    member.reachable = True
    members.connected(A, hello(), record(A, "here:1"), at(1.0))
    assert member.reachable is True
    members.connected(A, hello(), record(A, "there:1"), at(2.0))
    assert member.reachable is None


def test_heartbeats_count_only_on_an_open_line() -> None:
    members = present(A)
    members.disconnected(A, at(1.0))
    assert members.heard(A, beat(), 2, at(2.0)) is None
    assert members.heard(B, beat(), 2, at(2.0)) is None
    assert members.disconnected(A, at(3.0)) is not None
    assert members.may_return(A, at(3.5))  # counted from when it went, not from when that was said again


def test_no_presence_changes_before_the_instant_that_is_named() -> None:
    """Walk from one named instant to the next: between them nothing may change by itself."""
    members = present(A, B, started=100.0)
    members.heard(B, beat(), 2, at(104.0))
    members.disconnected(A, at(106.0))
    now, changes = at(106.0), []
    peers = [A, B, PEERS[2]]
    seen = [(members.fresh(peer, now), members.may_return(peer, now)) for peer in peers]
    for _ in range(20):
        wake = members.next_change(now)
        if wake is None:
            break
        assert wake > now
        before = at(wake - 2e-6)
        assert [(members.fresh(peer, before), members.may_return(peer, before)) for peer in peers] == seen
        now = wake
        present_now = [(members.fresh(peer, now), members.may_return(peer, now)) for peer in peers]
        if present_now != seen:
            changes.append(round(now, 3))
        seen = present_now
    assert changes == [109.0, 115.0, 119.0]
    assert members.next_change(at(1000.0)) is None


def test_hearing_of_a_member_only_puts_its_silence_off() -> None:
    members = present(A)
    first = members.next_change(at(0.0))
    members.heard(A, beat(), 2, at(10.0))
    assert members.next_change(at(10.0)) == first  # too early, and harmless
    assert first is not None
    assert members.next_change(first) == pytest.approx(25.0, abs=1e-3)


def test_names_for_people() -> None:
    assert named([PeerId("12D3KooWabcdef")]) == "abcdef"
    assert named([]) == "nobody"
    assert named([PeerId(f"{number:06d}") for number in range(NAMED_MOST + 3)]).endswith(", 000007, and 3 more")
    assert listed(["a", "b"], "; ") == "a; b"


def test_the_view() -> None:
    members = present(A)
    members.heard(A, beat(step=3, tokens_per_s=9.0), 2, at(1.0))
    (view,) = members.view(LEDGER)
    assert (view.peer, view.state, view.standing, view.step, view.tokens_per_s) == (A, "training", "newcomer", 3, 9.0)
    members.disconnected(A, at(2.0))
    assert members.view(LEDGER)[0].state == "gone"


def test_the_share_of_time_idle_is_told_by_heartbeats() -> None:
    members = present(A)
    member = members.get(A)
    assert member is not None
    assert member.idle_share is None
    states = [MemberState.TRAINING] * 3 + [MemberState.READY] * 2 + [MemberState.PAUSED] * 4
    for second, state in enumerate(states, 1):
        members.heard(A, beat(state=state), 2, at(second))
    # Six seconds are known of: it waited, trained for three, had done its steps for two; its pause counts for nothing.
    assert member.idle_share == pytest.approx(0.5)
