"""Whom a failed exchange is blamed on, by the words of how many."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds.blame import blame, least_words
from coordinator.rounds.moves import TURNS_MOST, Change, Moves, by_claims
from coordinator.rounds.redealing import REDEALS_MOST
from protos.messages import PeerId
from tests.coordinator.rounds.cases import PEERS

CLAIMS = st.dictionaries(st.sampled_from(PEERS[:6]), st.sets(st.sampled_from(PEERS[:6])), max_size=6)


def plainly(
    claims: Mapping[PeerId, Collection[PeerId]], suspects: Collection[PeerId]
) -> tuple[set[PeerId], set[PeerId]]:
    """The same, counted anew after each choice."""
    open_claims = {(reducer, sender) for reducer, senders in claims.items() for sender in senders}
    senders_out: set[PeerId] = set()
    reducers_out: set[PeerId] = set()
    while open_claims:
        by_reducer: dict[PeerId, int] = {}
        by_sender: dict[PeerId, int] = {}
        for reducer, sender in sorted(open_claims):
            by_reducer[reducer] = by_reducer.get(reducer, 0) + 1
            if sender in suspects:
                by_sender[sender] = by_sender.get(sender, 0) + 1
        reducer = max(sorted(by_reducer), key=by_reducer.__getitem__)
        sender = max(sorted(by_sender), key=by_sender.__getitem__, default=reducer)
        if by_sender.get(sender, 0) > by_reducer[reducer]:
            senders_out.add(sender)
            open_claims = {claim for claim in open_claims if claim[1] != sender}
        else:
            reducers_out.add(reducer)
            open_claims = {claim for claim in open_claims if claim[0] != reducer}
    return senders_out, reducers_out


def claimed(moves: Moves, claims: Mapping[PeerId, Collection[PeerId]], f: int, reducers: Collection[PeerId]) -> Change:
    """What follows where each reducer has two chunks and lacks rows of the first, which bears its number."""
    lacks = {peer: {sender: {PEERS.index(peer)} for sender in senders} for peer, senders in claims.items()}
    return by_claims(moves, lacks, dict.fromkeys(reducers, 2), f, reducers)


@given(CLAIMS, st.sets(st.sampled_from(PEERS[:6])))
def test_blame_explains_every_claim(claims: dict[PeerId, set[PeerId]], suspects: set[PeerId]) -> None:
    senders, reducers = blame(claims, suspects)
    assert all(reducer in reducers or sender in senders for reducer, named in claims.items() for sender in named)
    assert senders <= {sender for named in claims.values() for sender in named} & suspects
    assert reducers <= {reducer for reducer, named in claims.items() if named}


@given(
    st.dictionaries(st.sampled_from(PEERS[:12]), st.sets(st.sampled_from(PEERS[:12])), max_size=12),
    st.sets(st.sampled_from(PEERS[:12])),
)
def test_blame_chooses_as_counting_anew_does(claims: dict[PeerId, set[PeerId]], suspects: set[PeerId]) -> None:
    assert blame(claims, suspects) == plainly(claims, suspects)


def test_many_claims_take_no_longer_than_so_many_lines_of_text() -> None:
    """Counted anew for each choice they took 11 s, while the leader did nothing else."""
    senders = [PeerId(f"sender{number}") for number in range(1000)]
    claims = {PeerId(f"reducer{number:02}"): set(senders[number:]) for number in range(80)}
    began_at = time.process_time()
    assert blame(claims, senders) == (set(), set(claims))
    assert time.process_time() - began_at < 2.0


def test_a_sender_that_several_miss_is_at_fault() -> None:
    assert blame({peer: {PEERS[5]} for peer in PEERS[:3]}, PEERS) == ({PEERS[5]}, set())


def test_a_reducer_that_misses_everybody_is_at_fault() -> None:
    assert blame({PEERS[0]: set(PEERS[1:5])}, PEERS) == (set(), {PEERS[0]})


def test_one_word_against_another_is_the_reducers_fault() -> None:
    assert blame({PEERS[0]: {PEERS[1]}}, PEERS) == (set(), {PEERS[0]})


def test_no_claims_no_blame() -> None:
    assert blame({PEERS[0]: set()}, PEERS) == (set(), set())


# -- how many words it takes ------------------------------------------------------------------------------------------


def test_least_words() -> None:
    assert [least_words(f, 20) for f in (0, 1, 2, 4)] == [2, 2, 3, 5]
    assert [least_words(4, n_others) for n_others in (0, 1, 2, 3, 9)] == [2, 2, 2, 3, 5]


def test_two_liars_put_nobody_out_where_four_may_lie() -> None:
    honest = PEERS[9]
    change = claimed(Moves(), {PEERS[0]: {honest}, PEERS[1]: {honest}}, 4, PEERS[:20])
    assert change.excluded == {}
    assert change.moved == {(0, PEERS[0]), (1, PEERS[1])}


def test_as_many_liars_as_there_may_be_put_nobody_out_in_any_number_of_turns() -> None:
    honest, liars = PEERS[9], PEERS[:4]
    moves = Moves()
    for chunk in range(3):
        for liar in liars:
            change = by_claims(moves, {liar: {honest: {chunk}}}, {liar: 9}, 4, PEERS[:20])
            assert (change.excluded, change.moved) == ({}, {(chunk, liar)})
            moves.added(change)


def test_who_reaches_nobody_is_out_at_once() -> None:
    for n_reducers, f in ((3, 1), (3, 4), (5, 4), (20, 4), (20, 0)):
        change = claimed(Moves(), {peer: {PEERS[30]} for peer in PEERS[:n_reducers]}, f, PEERS[:n_reducers])
        assert list(change.excluded) == [PEERS[30]]
        assert (change.lost, change.moved) == (set(), set())


def test_who_reduces_itself_and_reaches_none_of_the_others_is_out_at_once() -> None:
    sender, *others = PEERS[:4]
    change = claimed(Moves(), {peer: {sender} for peer in others}, 9, PEERS[:4])
    assert list(change.excluded) == [sender]


def test_who_fails_a_few_at_a_time_is_out_once_enough_have_said_so() -> None:
    """Nobody knows yet which of two is broken, and chunks move; the fifth word is one too many for four liars."""
    moves, sender = Moves(), PEERS[30]
    for reducer in PEERS[:4]:
        change = by_claims(moves, {reducer: {sender: {7}}}, {reducer: 2}, 4, PEERS[:20])
        assert (change.excluded, change.moved) == ({}, {(7, reducer)})
        moves.added(change)
    assert list(by_claims(moves, {PEERS[4]: {sender: {7}}}, {PEERS[4]: 2}, 4, PEERS[:20]).excluded) == [sender]


def test_turns_end_before_the_redeals_do() -> None:
    moves, sender = Moves(), PEERS[30]
    for turn in range(TURNS_MOST):
        change = by_claims(moves, {PEERS[turn]: {sender: {0}}}, {PEERS[turn]: 2}, 20, PEERS)
        assert list(change.excluded) == ([sender] if turn == TURNS_MOST - 1 else [])
        moves.added(change)
    assert TURNS_MOST < REDEALS_MOST


def test_where_one_may_lie_the_second_in_turn_decides() -> None:
    moves, sender = Moves(), PEERS[30]
    for f in (0, 1):
        moves = Moves()
        moves.added(by_claims(moves, {PEERS[0]: {sender: {0}}}, {PEERS[0]: 2}, f, PEERS[:3]))
        assert list(by_claims(moves, {PEERS[1]: {sender: {0}}}, {PEERS[1]: 2}, f, PEERS[1:3]).excluded) == [sender]
