"""A leader that goes on for long: who strays, who can't be reached, and what it must not keep for ever."""

from __future__ import annotations

from itertools import pairwise

import pytest

from coordinator.rounds import state
from coordinator.rounds.attempt import Phase
from coordinator.rounds.events import Probe, Reached, Woke
from protos.messages import AttemptFailed, MemberState, PeerId, Welcome
from tests.coordinator.rounds.cases import PEERS, seated
from tests.coordinator.rounds.leader_script import OBSERVER, Script, training


def test_who_keeps_another_head_hears_the_books_again_though_commits_come() -> None:
    """A commit alone leads nobody off a branch that was given up, and newer ones come faster than it could be told."""
    script = training(2)
    timeout_s, told = script.spec.deadlines.heartbeat_timeout_s, list[float]()
    elsewhere = bytes([9]) * 32
    script.connect(PEERS[7], holds=False)
    script.did.clear()
    for _ in range(int(3.5 * timeout_s)):
        script.at += 1.0
        script.keep_alive(OBSERVER)
        script.ready(*PEERS[:2])
        script.commit_to_plan(*PEERS[:2])
        script.reduce()
        script.vote(*PEERS[:2])
        assert script.phase() is Phase.TRAIN
        script.beat(PEERS[7], MemberState.WAITING, head=elsewhere, round=1)
        if welcomes := script.told(Welcome):
            ((peers, welcome),) = welcomes
            assert (peers, welcome.commit) == ((PEERS[7],), script.rounds.commit)
            assert welcome.ledger == script.rounds.ledger.to_bytes()
            assert welcome.records == ()
            told.append(script.at)
    assert len(told) == 3, "once a timeout"
    assert min(later - before for before, later in pairwise(told)) >= timeout_s
    script.beat(PEERS[7], MemberState.JOINING, head=elsewhere, round=1)
    script.at += timeout_s + 1
    script.beat(PEERS[7], MemberState.JOINING, head=elsewhere, round=1)
    assert not script.told(Welcome), "who is on its way is left alone"


def test_who_joins_with_another_head_for_long_hears_the_books_again() -> None:
    """What it fetches may be of a branch that nobody has any more."""
    script = training(2)
    timeout_s, told = script.spec.deadlines.heartbeat_timeout_s, list[tuple[PeerId, ...]]()
    stuck, new = PEERS[7], PEERS[8]
    script.connect(stuck, new, holds=False)
    for _ in range(int(9 * timeout_s)):
        script.at += 1.0
        script.keep_alive(*PEERS[:2], OBSERVER)
        script.beat(stuck, MemberState.JOINING, head=bytes([9]) * 32, round=1)
        told += [peers for peers, _ in script.told(Welcome)]
        script.beat(new, MemberState.JOINING, head=b"", round=0)
        told += [peers for peers, _ in script.told(Welcome)]
    assert told == [(stuck,)] * 2, "who has no head yet knows where it is to go"


def test_who_can_not_be_reached_is_tried_again_while_rounds_fail_for_want_of_it() -> None:
    script = Script(seated(1))
    script.connect(PEERS[0], grpc=())  # dials out only
    script.connect(OBSERVER)
    script.handle(Reached(OBSERVER, False))
    script.beat(OBSERVER, MemberState.WAITING)
    script.did.clear()
    script.ready(PEERS[0])
    assert script.told(AttemptFailed)[0][1].reason == "nobody who could reduce can be reached"
    assert script.effects(Probe) == [Probe(OBSERVER, ("here:1",))]
    probes, end = 1, script.at + 100.0
    while script.at < end:
        script.at += 0.5
        script.keep_alive(PEERS[0], OBSERVER)
        script.handle(Woke())
        probes += len(script.effects(Probe))
        if script.phase() is Phase.PREPARE:
            script.promise(PEERS[0])
            probes += len(script.effects(Probe))
    assert probes == 1 + 3, "so often that a try may end between two"
    script.handle(Reached(OBSERVER, True))
    script.wait(11.0)
    script.keep_alive(PEERS[0], OBSERVER)
    if script.phase() is Phase.PREPARE:
        script.promise(PEERS[0])
    assert script.phase() is Phase.COMMITMENT


def test_used_numbers_are_forgotten_but_for_the_last_rounds_and_the_newest_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "NUMBERS_KEPT", 8)
    script = training(1, numbers={(3, 1): 5, (2, 1): 7})
    for _ in range(40):
        script.at += 1.0
        script.keep_alive(OBSERVER)
        script.ready(PEERS[0])
        script.commit_to_plan(PEERS[0])
        script.reduce()
        script.vote(PEERS[0])
    rounds = script.rounds
    assert rounds.ledger.round == 41
    assert rounds._used[3, 1] == 5, "an epoch of a higher number follows on it"
    assert (2, 1) not in rounds._used
    assert {round_ for epoch, round_ in rounds._used if epoch == 0} >= set(range(38, 42))
    assert len(rounds._used) <= 9
