"""Whose turn it is: in one order for all, after silence, put off by numbers, and given up to who comes before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds.events import Instant
from node.session import effects as fx
from node.session.standing_in import Succession, order
from protos.messages import PeerId
from protos.runspec import DeadlineSpec
from tests.coordinator.rounds.cases import COORDINATOR, PEERS, at_head, seated

STAND_IN_S = 10.0
DEADLINES = DeadlineSpec(stand_in_s=STAND_IN_S)
LEDGER = seated(4)
RANKS = order(LEDGER, COORDINATOR)


def view_of(me: PeerId, at: float = 0.0) -> Succession:
    return Succession(me, COORDINATOR, DEADLINES, Instant(at))


def advance(view: Succession, at: float, *, can_lead: bool = True, number: int = -1) -> list[fx.Effect]:
    return view.advance(LEDGER, can_lead, number, Instant(at))


def leads(effects: list[fx.Effect]) -> bool:
    return any(isinstance(effect, fx.Lead) for effect in effects)


def followed(effects: list[fx.Effect]) -> tuple[PeerId, ...]:
    return next((effect.leaders for effect in effects if isinstance(effect, fx.Follow)), ())


def test_the_order_is_the_heads_and_who_reduced_comes_first() -> None:
    assert set(RANKS) == set(PEERS[:4])
    assert order(replace(LEDGER), COORDINATOR) == RANKS
    heads = {order(at_head(LEDGER, str(number)), COORDINATOR) for number in range(20)}
    assert len(heads) > 5
    reduced = replace(LEDGER, bandwidths={RANKS[-1]: 1.0})
    assert order(reduced, COORDINATOR)[0] == RANKS[-1]


@pytest.mark.parametrize("rank", range(4))
def test_each_leads_after_its_turn_and_no_earlier(rank: int) -> None:
    view = view_of(RANKS[rank])
    turn_s = (rank + 1) * STAND_IN_S
    assert not leads(advance(view, turn_s - 0.1))
    assert view.next_at(LEDGER, -1, Instant(turn_s - 0.1)) == turn_s
    assert leads(advance(view, turn_s))
    assert not leads(advance(view, turn_s + 1)), "it is asked once"


def test_lines_go_to_those_whose_turn_has_come() -> None:
    view = view_of(RANKS[3])
    assert followed(advance(view, STAND_IN_S - 1)) == ()
    assert followed(advance(view, STAND_IN_S)) == RANKS[:1]
    assert set(followed(advance(view, 2 * STAND_IN_S))) == set(RANKS[:2])


def test_who_hears_the_coordinator_neither_leads_nor_promises() -> None:
    view = view_of(RANKS[0])
    view.line_up(COORDINATOR, Instant(0.0))
    for at in range(0, 100, 5):
        view.heard(COORDINATOR, Instant(float(at)))
        assert advance(view, at + 4.0) == []
        assert "coordinator" in view.why_not(RANKS[1], LEDGER, Instant(at + 4.0))
    assert view.why_not(RANKS[1], LEDGER, Instant(95.0 + STAND_IN_S)) == ""
    assert view.leader(Instant(99.0)) == COORDINATOR


def test_a_line_that_is_up_and_silent_counts_for_nothing() -> None:
    view = view_of(RANKS[0])
    view.line_up(COORDINATOR, Instant(0.0))
    assert leads(advance(view, STAND_IN_S)), "it is half open, or its leader stands still"


def test_a_number_puts_the_turns_off() -> None:
    view = view_of(RANKS[0])
    assert not leads(advance(view, 1.9 * STAND_IN_S, number=1))
    assert leads(advance(view, 2 * STAND_IN_S, number=1))


def test_who_can_not_lead_follows_the_others() -> None:
    view = view_of(RANKS[0])
    assert not leads(advance(view, STAND_IN_S, can_lead=False))
    assert followed(advance(view, 2 * STAND_IN_S, can_lead=False)) == (RANKS[1],)


def test_a_stand_in_steps_down_for_the_coordinator_and_for_who_comes_before() -> None:
    for better in (COORDINATOR, RANKS[0]):
        view = view_of(RANKS[1])
        assert leads(advance(view, 2 * STAND_IN_S))
        view.led(True, Instant(20.0))
        effects = advance(view, 2 * STAND_IN_S)
        assert RANKS[1] in followed(effects), "it has a line to itself"
        view.line_up(RANKS[1], Instant(21.0))
        view.line_up(RANKS[2], Instant(21.0))
        assert not any(isinstance(effect, fx.StepDown) for effect in advance(view, 21.0)), "its own turn came before"
        view.line_up(better, Instant(22.0))
        assert any(isinstance(effect, fx.StepDown) for effect in advance(view, 22.0))
        assert not any(isinstance(effect, fx.StepDown) for effect in advance(view, 22.5)), "it is told once"
        view.led(False, Instant(22.5))
        assert not view.leads


def test_one_that_leads_no_more_lets_some_time_pass_before_it_leads_again() -> None:
    view = view_of(RANKS[0])
    assert leads(advance(view, STAND_IN_S))
    view.led(True, Instant(STAND_IN_S))
    view.led(False, Instant(15.0))
    assert not leads(advance(view, 15.0))
    assert view.next_at(LEDGER, -1, Instant(15.0)) == 20.0, "another one's turn"
    assert view.next_at(LEDGER, -1, Instant(24.0)) == 15.0 + STAND_IN_S
    assert leads(advance(view, 15.0 + STAND_IN_S))


def test_who_said_goodbye_is_not_waited_for() -> None:
    view = view_of(RANKS[3])
    advance(view, STAND_IN_S)
    view.line_up(RANKS[0], Instant(11.0))
    assert view.leader(Instant(12.0)) == RANKS[0]
    assert view.why_not(RANKS[1], LEDGER, Instant(12.0)) != ""
    view.said_goodbye(RANKS[0])
    assert view.leader(Instant(12.0)) is None
    assert view.why_not(RANKS[1], LEDGER, Instant(12.0)) == ""
    assert not leads(advance(view, 12.0)), "the silence begins with its last word"


@given(
    st.lists(
        st.tuples(st.sampled_from(["heard", "up", "down", "goodbye"]), st.integers(0, 4), st.floats(0.0, 15.0)),
        max_size=40,
    ),
    st.integers(0, 3),
)
def test_it_never_leads_while_the_coordinator_is_heard_and_never_looks_back(
    happened: list[tuple[str, int, float]], rank: int
) -> None:
    me, now = RANKS[rank], 0.0
    view, last_word = view_of(me), -STAND_IN_S
    others = (COORDINATOR, *RANKS)
    for what, who, after_s in happened:
        now += after_s
        peer = others[who]
        match what:
            case "heard":
                view.heard(peer, Instant(now))
            case "up":
                view.line_up(peer, Instant(now))
            case "down":
                view.line_down(peer)
            case "goodbye":
                view.said_goodbye(peer)
        if what in ("heard", "up") and peer == COORDINATOR:
            last_word = now
        effects = advance(view, now)
        assert not leads(effects) or now >= last_word + STAND_IN_S
        assert me not in followed(effects)
        next_at = view.next_at(LEDGER, -1, Instant(now))
        assert next_at is None or next_at > now
