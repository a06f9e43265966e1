"""How long a stand-in's turn lasts: bounded, whatever it says, and as long as an honest round takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.voting import LEADER_SLACK
from node.session import effects as fx
from node.session.standing_in import Succession, order
from node.session.turns import FRUITLESS_MOST, TRIES, Turns
from protos.runspec import DeadlineSpec
from tests.coordinator.rounds.cases import COORDINATOR, at_head, seated

LIMITS = DeadlineSpec(
    stand_in_s=10.0, heartbeat_timeout_s=5.0, train_limit_s=400.0, commitment_s=10.0, exchange_s=30.0, vote_s=20.0
)
GRACE_S = 10.0 + 2 * 5.0
ATTEMPT_S = LEADER_SLACK * (10.0 + 30.0 + 2 * 20.0)
LEDGER = seated(4)
RANKS = order(LEDGER, COORDINATOR)
FIRST, SECOND, THIRD, LAST = RANKS


def at(seconds: float) -> Instant:
    return Instant(seconds)


def head(number: int, tokens: int = 0) -> Ledger:
    return at_head(replace(LEDGER, tokens=tokens), f"{number}")


# -- one turn --------------------------------------------------------------------------------------------------------


def test_before_an_attempt_it_has_as_long_again_as_this_member_trained() -> None:
    turns = Turns(LIMITS, at(0.0))
    turns.watch(None, LEDGER, False, at(100.0))  # the head came
    turns.watch(FIRST, LEDGER, False, at(120.0))
    assert turns.ends_at(FIRST, LEDGER) == 120 + 400 + GRACE_S, "it trains still, maybe all others too"
    turns.watch(FIRST, LEDGER, True, at(150.0))
    assert turns.ends_at(FIRST, LEDGER) == 200 + GRACE_S
    turns.watch(FIRST, LEDGER, True, at(190.0))
    assert turns.ends_at(FIRST, LEDGER) == 200 + GRACE_S
    turns.watch(SECOND, LEDGER, True, at(300.0))
    assert turns.ends_at(SECOND, LEDGER) == 300 + GRACE_S, "who comes later is given its own time"


def test_where_the_limit_alone_ends_training_it_is_waited_for_by_all() -> None:
    turns = Turns(LIMITS.model_copy(update={"deadline_k": 0.0}), at(0.0))
    turns.watch(FIRST, LEDGER, True, at(10.0))
    assert turns.ends_at(FIRST, LEDGER) == 10 + 400 + GRACE_S


def test_from_the_first_attempt_on_it_has_two_that_take_all_their_time() -> None:
    turns = Turns(LIMITS, at(0.0))
    turns.watch(FIRST, LEDGER, True, at(0.0))
    for seconds in (5.0, 30.0, 200.0):
        turns.attempted(FIRST, at(seconds))
        assert turns.ends_at(FIRST, LEDGER) == 5.0 + TRIES * ATTEMPT_S + GRACE_S


def test_a_commit_begins_it_anew_and_empty_ones_do_not_for_ever() -> None:
    turns = Turns(LIMITS, at(0.0))
    turns.watch(FIRST, head(0), True, at(0.0))
    for number in range(1, 20):
        turns.attempted(FIRST, at(10.0 * number))
        turns.watch(FIRST, head(number, tokens=number), True, at(10.0 * number))
        assert turns.ends_at(FIRST, head(number)) == 10.0 * number + GRACE_S
    for number in range(20, 20 + FRUITLESS_MOST):
        ends_at = turns.ends_at(FIRST, head(number))
        assert ends_at is not None
        assert ends_at > 10.0 * (number - 1)
        turns.watch(FIRST, head(number, tokens=19), True, at(10.0 * number))
    assert turns.ends_at(FIRST, head(99)) == 10.0 * (19 + FRUITLESS_MOST)


def test_falling_silent_in_between_begins_nothing_anew() -> None:
    turns = Turns(LIMITS, at(0.0))
    turns.watch(FIRST, LEDGER, True, at(0.0))
    ends_at = turns.ends_at(FIRST, LEDGER)
    turns.watch(None, LEDGER, True, at(15.0))
    turns.watch(SECOND, LEDGER, True, at(16.0))
    turns.watch(FIRST, LEDGER, True, at(18.0))
    assert turns.ends_at(FIRST, LEDGER) == ends_at


def test_while_the_run_is_paused_nobodys_turn_ends() -> None:
    turns = Turns(LIMITS, at(0.0))
    paused = replace(LEDGER, paused=True)
    turns.watch(FIRST, paused, True, at(0.0))
    assert turns.ends_at(FIRST, paused) is None


# -- who comes after -------------------------------------------------------------------------------------------------


def advance(view: Succession, seconds: float, *, can_lead: bool = True, ledger: Ledger = LEDGER) -> list[fx.Effect]:
    return view.advance(ledger, can_lead, -1, at(seconds), ready=True)


def leads(effects: list[fx.Effect]) -> bool:
    return any(isinstance(effect, fx.Lead) for effect in effects)


def test_who_is_heard_and_commits_nothing_is_put_at_the_end() -> None:
    """At its voters and at the next in line, by the same clockwork: nobody refuses the next for its sake."""
    voter, following = (Succession(me, COORDINATOR, LIMITS, at(0.0)) for me in (LAST, SECOND))
    led_at, free_at = 0.0, 0.0
    for second in range(1, 400):
        for view in (voter, following):
            if second >= 10:
                view.line_up(FIRST, at(second)) if second == 10 else view.heard(FIRST, at(second))
            if second in (12, 60):
                view.attempted(FIRST, at(second))
        assert not leads(advance(voter, second, can_lead=False))
        if leads(advance(following, second)):
            led_at = led_at or second
        if not voter.why_not(SECOND, LEDGER, at(second)):
            free_at = second if second > 10 and not free_at else free_at
    end_s = 12 + TRIES * ATTEMPT_S + GRACE_S
    assert free_at == end_s
    assert led_at == end_s + LIMITS.stand_in_s


def test_who_was_put_at_the_end_gives_way_and_is_refused_while_another_leads() -> None:
    view = Succession(LAST, COORDINATOR, LIMITS, at(0.0))
    view.line_up(FIRST, at(1.0))
    said: list[fx.Effect] = []
    for second in range(1, 60):
        view.heard(FIRST, at(second))
        said += advance(view, second)
    assert sum(isinstance(effect, fx.Say) for effect in said) == 1
    assert view.why_not(FIRST, LEDGER, at(60.0)) == "", "it may go on while nobody else leads"
    view.line_up(THIRD, at(60.0))
    advance(view, 60.0)
    assert THIRD[-6:] in view.why_not(FIRST, LEDGER, at(60.0))
    assert view.why_not(THIRD, LEDGER, at(60.0)) == ""
    view.heard(FIRST, at(61.0))
    assert view.leader(at(61.0)) == THIRD, "though the other was heard last"


def test_it_keeps_its_place_at_the_end_after_others_commits() -> None:
    view = Succession(LAST, COORDINATOR, LIMITS, at(0.0))
    view.line_up(FIRST, at(1.0))
    for second in range(1, 60):
        view.heard(FIRST, at(second))
        advance(view, second)
    for number in range(20):
        now = 60.0 + number
        ledger = head(number, tokens=number + 1)
        view.heard(FIRST, at(now))
        view.line_up(THIRD, at(now))
        advance(view, now, ledger=ledger)
        assert view.why_not(THIRD, ledger, at(now)) == ""


def test_a_stand_in_whose_turn_is_over_leads_on_until_another_does() -> None:
    view = Succession(FIRST, COORDINATOR, LIMITS, at(0.0))
    assert leads(advance(view, 10.0))
    view.led(True, at(10.0))
    view.line_up(FIRST, at(10.0))
    effects: list[fx.Effect] = []
    for second in range(10, 35):
        view.heard(FIRST, at(second))
        effects += advance(view, second)
    assert any(isinstance(effect, fx.Say) for effect in effects), "its turn is over"
    assert not any(isinstance(effect, fx.StepDown | fx.Lead) for effect in effects)
    view.line_up(LAST, at(35.0))
    assert any(isinstance(effect, fx.StepDown) for effect in advance(view, 35.0))
    view.led(False, at(35.0))
    assert not leads(advance(view, 36.0))


def test_its_turn_comes_again_after_all_others_that_nobody_took() -> None:
    view = Succession(LAST, COORDINATOR, LIMITS, at(0.0))
    view.line_up(FIRST, at(1.0))
    refused = []
    for second in range(1, 120):
        view.heard(FIRST, at(second))
        advance(view, second, can_lead=False)
        refused.append(view.why_not(SECOND, LEDGER, at(second)) != "")
    changes = [second for second in range(1, 119) if refused[second] != refused[second - 1]]
    over = 1 + GRACE_S
    again = over + LIMITS.stand_in_s + 3 * LIMITS.stand_in_s  # the fourth in the order, where nobody else leads
    assert [second + 1 for second in changes[:2]] == [over, again]


@pytest.mark.parametrize("n_liars", [1, 2, 3])
def test_however_many_speak_without_end_each_other_one_comes_to_its_turn(n_liars: int) -> None:
    me = RANKS[n_liars]
    view = Succession(me, COORDINATOR, LIMITS, at(0.0))
    for second in range(1, 1500):
        for liar in RANKS[:n_liars]:
            view.line_up(liar, at(second))
            view.attempted(liar, at(second))
        if leads(advance(view, second)):
            assert second < n_liars * (TRIES * ATTEMPT_S + GRACE_S) + 5 * LIMITS.stand_in_s
            return
    pytest.fail("they hold it off")


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["heard", "attempt", "goodbye"]), st.integers(0, 2), st.floats(0.01, 12.0)),
        min_size=200,
        max_size=300,
    )
)
def test_whatever_stand_ins_say_who_commits_nothing_leaves_the_last_its_turn(
    said: list[tuple[str, int, float]],
) -> None:
    view = Succession(LAST, COORDINATOR, LIMITS, at(0.0))
    now, limit_s = 0.0, 3 * (TRIES * ATTEMPT_S + GRACE_S) + 8 * LIMITS.stand_in_s
    for what, who, after_s in said:
        now += after_s
        match what:
            case "heard":
                view.line_up(RANKS[who], at(now))
            case "attempt":
                view.attempted(RANKS[who], at(now))
            case _:
                view.said_goodbye(RANKS[who])
        if leads(advance(view, now)):
            return
        assert now < limit_s
        next_at = view.next_at(LEDGER, -1, at(now))
        assert next_at is None or next_at > now
