"""Whom a leader seats: cool-downs that grow and end, speeds, and the queue."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.rounds.events import Disconnected, Instant, Say
from coordinator.rounds.members import PLACE_KEPT_S, Member
from coordinator.rounds.seating import COOL_ROUNDS, Seating
from coordinator.rounds.work import Work
from protos.messages import AttemptFailed, Hello, MemberState, PeerId, Propose, Record
from protos.runspec import MembershipSpec, RunSpec, WorkSpec
from tests.coordinator.rounds.cases import NO_HASH, PEERS, SPEC, seated
from tests.coordinator.rounds.leader_script import OBSERVER, Script, training, voting
from tests.sim.options import sim_spec

NOW = Instant(0.0)


def member(peer: PeerId, speed: float = 0.0, **changes: Any) -> Member:
    hello = Hello(1, b"", 0, 0, NO_HASH, NO_HASH, True, False, "", 0, 0, speed)
    made = Member(peer, hello, Record(peer, 1, (), (), 0, 0, NO_HASH), b"", True, NOW, head=b"h")
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def choose(seating: Seating, members: list[Member], spec: RunSpec = SPEC, **more: Any) -> dict[PeerId, Work]:
    failures = more.pop("failures", {})
    return seating.choose(members, more.pop("ledger", seated(3)), failures, spec, NOW, empty=False).works


def test_a_cool_down_grows_is_capped_and_ends() -> None:
    """Who fails whenever it may sits out more and more rounds; afterwards it counts again without anybody's help."""
    seating, out, round_ = Seating(), list[int](), 1
    for _ in range(9):
        seating.round_over(round_, {PEERS[0]: "it was lost"}, [])
        n_out = 0
        while seating.cools_down(PEERS[0], round_ + 1 + n_out):
            n_out += 1
        out.append(n_out)
        round_ += 1 + n_out
    assert out == [*COOL_ROUNDS, 16, 16, 16]
    assert out[0] == 0  # one failure costs its round and no more
    for _ in range(5):
        seating.round_over(round_, {}, [PEERS[0]])
        round_ += 1
    seating.round_over(round_, {PEERS[0]: "it was lost"}, [])
    assert seating.cools_down(PEERS[0], round_ + 2) == ""


def test_it_is_said_for_how_long_and_why() -> None:
    seating = Seating()
    assert seating.round_over(5, {PEERS[0]: "it was lost"}, []) == []
    (told,) = seating.round_over(6, {PEERS[0]: "it was lost again"}, [])
    assert told == "peer11 has no seat before round 8: failed in 2 rounds, at last: it was lost again"
    assert seating.cools_down(PEERS[0], 7) == "until round 8, for failed in 2 rounds, at last: it was lost again"


def test_who_fails_in_the_round_that_ends_has_no_seat_in_the_next_one() -> None:
    seating = Seating()
    members = [member(peer) for peer in PEERS[:3]]
    assert list(choose(seating, members, failures={PEERS[0]: "lost"})) == PEERS[:3]
    seating.round_over(1, {PEERS[0]: "lost"}, [])
    assert list(choose(seating, members, failures={PEERS[0]: "lost"})) == PEERS[1:3]


def test_nobody_cools_down_where_there_would_be_no_round() -> None:
    seating = Seating()
    for round_ in (1, 2):
        seating.round_over(round_, {peer: "lost" for peer in PEERS[:2]}, [])
    assert list(choose(seating, [member(peer) for peer in PEERS[:2]])) == PEERS[:2]
    assert list(choose(seating, [member(peer) for peer in PEERS[:3]])) == [PEERS[2]]


def test_the_slow_are_told_and_the_fast_take_more() -> None:
    spec = sim_spec(n_chunks=3, work=WorkSpec(batch_tokens=8, h=10, steps_min=3, round_s=10.0))
    members = [member(PEERS[0], 1.0), member(PEERS[1], 4.0), member(PEERS[2], 100.0)]
    choice = Seating().choose(members, seated(3), {}, spec, NOW, empty=False)
    assert choice.works == {PEERS[1]: Work(5), PEERS[2]: Work(10, 4)}
    assert choice.why_not == {
        PEERS[0]: "this machine trains 1 tokens/s, and this run needs 2.4: 3 steps of 8 tokens in 10 s"
    }
    assert Seating().choose(members[:1], seated(1), {}, spec, NOW, empty=False).works == {PEERS[0]: Work(3)}


def test_the_speed_is_that_of_the_last_rounds() -> None:
    known = member(PEERS[0], 50.0)
    assert known.speed == 50.0
    for rate in (10.0, 12.0, 90.0, 11.0):
        known.rates.append(rate)
    assert known.speed == 12.0  # the median of three: one odd round decides nothing


def test_seats_are_taken_first_come_first_served() -> None:
    spec = sim_spec(n_chunks=3, membership=MembershipSpec(max_members=2))
    seating, ledger = Seating(), seated(2, spec)
    members = {peer: member(peer) for peer in PEERS[:5]}
    for at, peer in enumerate((PEERS[4], PEERS[2], PEERS[3])):
        seating.queue([members[PEERS[0]], members[PEERS[1]], members[peer]], PEERS[:2], Instant(float(at)))
        seating._waits_since.update(
            {p: Instant(float(i)) for i, p in enumerate((PEERS[4], PEERS[2], PEERS[3])[: at + 1])}
        )
    choice = seating.choose(list(members.values()), ledger, {}, spec, NOW, empty=False)
    assert list(choice.works) == PEERS[:2]
    assert [choice.why_not[peer] for peer in (PEERS[4], PEERS[2], PEERS[3])] == [
        f"all 2 seats are taken; place {place} in the queue" for place in (1, 2, 3)
    ]
    del members[PEERS[1]]
    choice = seating.choose(list(members.values()), ledger, {}, spec, NOW, empty=False)
    assert list(choice.works) == [PEERS[0], PEERS[4]]


def test_a_place_is_kept_for_who_is_away_shortly() -> None:
    seating = Seating()
    waiting = member(PEERS[0])
    seating.queue([waiting], [], Instant(1.0))
    waiting.connected, waiting.seen_at = False, Instant(5.0)
    seating.queue([waiting], [], Instant(10.0))
    assert seating._waits_since == {PEERS[0]: 1.0}
    seating.queue([waiting], [], Instant(25.0))
    assert seating._waits_since == {}


# -- in rounds --------------------------------------------------------------------------------------------------------


def fail_round(script: Script, peer: PeerId) -> None:
    """A round that counts the others; the peer's line breaks in it, and it is back at the end."""
    rounds = script.rounds
    others = [seat.peer for seat in rounds.ledger.seats if seat.peer != peer]
    for other in others:
        script.beat(other, MemberState.TRAINING, 1)
    script.handle(Disconnected(peer, "gone"))
    script.ready(*others)
    script.wait(script.spec.deadlines.gone_grace_s + 1.0)
    script.commit_to_plan(*others)
    script.connect(peer)
    script.beat(peer, MemberState.WAITING)
    script.reduce()
    script.vote(*others)


def test_who_fails_again_and_again_is_told_that_it_has_no_seat_and_until_when() -> None:
    script = training(4, observer=False)
    fail_round(script, PEERS[0])
    assert script.rounds.ledger.seat_of(PEERS[0]) is not None
    script.connect(PEERS[0])
    for peer in PEERS[:4]:
        script.beat(peer, MemberState.TRAINING, 1)
    fail_round(script, PEERS[0])
    round_ = script.rounds.ledger.round + 1
    assert script.rounds.ledger.seat_of(PEERS[0]) is None
    assert any(f"no seat before round {round_ + 1}" in say.text for say in script.effects(Say, script.did))
    told = [failed for peers, failed in script.told(AttemptFailed, script.did) if peers == (PEERS[0],)]
    assert told[-1].reason.startswith(f"no seat: until round {round_ + 1}")
    assert told[-1].round == round_
    assert any("no seat" in line for line in script.rounds.explain(PEERS[0]))


def test_who_was_merely_slow_has_not_failed() -> None:
    script = voting(3, observer=False)
    script.rounds.members.get(PEERS[0]).n_gone = 0  # type: ignore[union-attr]
    assert script.rounds._failures(Instant(script.at), PEERS[1:3]) == {}
    assert script.last(Propose)


@pytest.mark.parametrize("scale", [1, 4])
def test_a_leader_asks_for_what_speeds_allow(scale: int) -> None:
    spec = sim_spec(n_chunks=3, work=WorkSpec(batch_tokens=8, h=4, round_s=4.0))
    script = Script(seated(2, spec), spec)
    script.connect(*PEERS[:2])
    for peer in PEERS[:2]:
        script.beat(peer, MemberState.TRAINING, 1, tokens_per_s=8.0 * scale)
    script.ready(*PEERS[:2])
    for peer in PEERS[:2]:
        script.rounds.members.get(peer).rates.append(8.0 * scale)  # type: ignore[union-attr]
    script.commit_to_plan(*PEERS[:2])
    script.reduce()
    script.vote(*PEERS[:2])
    assert [(seat.batch_scale, seat.peer) for seat in script.rounds.ledger.seats] == [(scale, p) for p in PEERS[:2]]


def test_a_place_in_the_queue_is_kept_while_its_holder_can_not_be_heard() -> None:
    """For longer than a round waits for it."""
    one_seat = SPEC.model_copy(update={"membership": SPEC.membership.model_copy(update={"max_members": 1})})
    script = training(1, one_seat)
    seat, first, second = PEERS[:3]

    def a_round(*waiting: PeerId) -> None:
        script.ready(seat)
        script.commit_to_plan(seat)
        script.reduce()
        script.vote(seat)
        script.beat(seat, MemberState.TRAINING, 1)
        for peer in waiting:
            script.beat(peer, MemberState.WAITING)

    def passes(seconds: float, *here: PeerId) -> None:
        for _ in range(int(2 * seconds)):
            script.at += 0.5
            script.keep_alive(seat, OBSERVER, *here)

    script.connect(first)
    script.beat(first, MemberState.WAITING)
    a_round(first)
    passes(1.0, first)
    script.connect(second)
    a_round(first, second)
    script.handle(Disconnected(first, "reset"))
    passes(script.spec.deadlines.gone_grace_s + 1.0, second)
    a_round(second)
    passes(1.0, second)
    script.connect(first)
    script.beat(first, MemberState.WAITING)
    a_round(first, second)
    assert script.rounds._why_not[first].endswith("place 1 in the queue")
    script.handle(Disconnected(first, "reset"))
    passes(PLACE_KEPT_S + 1.0, second)
    a_round(second)
    script.connect(first)
    script.beat(first, MemberState.WAITING)
    a_round(first, second)
    a_round(first, second)
    assert script.rounds._why_not[first].endswith("place 2 in the queue"), "not for ever"
