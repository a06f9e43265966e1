"""The folded ledger: what a body does to the books, and bytes that are none."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregation.rules.gate import normalised
from coordinator.rounds.ledger import LEDGER_BYTES_MAX, NORMS_KEPT, Ledger, LedgerError, fold
from protos.messages import Outcome, PeerId, Range, Seat, Standing, StandingChange
from tests.coordinator.rounds.cases import (
    COORDINATOR,
    NO_HASH,
    PEERS,
    after,
    at_head,
    beginning,
    body_of,
    empty_body,
    evidence_of,
    seated,
)


def test_round_one_seats_and_gives_votes_to_who_holds_the_state() -> None:
    ledger = seated(3)
    assert [seat.peer for seat in ledger.seats] == PEERS[:3]
    assert ledger.voters == (*PEERS[:3], COORDINATOR)
    assert (ledger.round, ledger.cursor, ledger.pool, ledger.n_committed) == (1, 12, (), 0)
    assert ledger.since == dict.fromkeys(PEERS[:3], 1)


def test_a_round_counts_tokens_credit_and_the_schedule() -> None:
    ledger = seated(3)
    folded = after(ledger, body_of(ledger, evidence_of(ledger, 3)))
    assert folded.tokens == 3 * 4 * 8
    assert folded.credit == dict.fromkeys(PEERS[:3], 4 * 8)
    assert (folded.nominal_step, folded.n_committed, len(folded.norms)) == (4, 1, 1)
    assert folded.cursor == 24
    assert folded.bandwidths == dict.fromkeys(folded.bandwidths, 100.0)


def test_an_empty_round_changes_only_seats() -> None:
    ledger = seated(2)
    folded = after(ledger, empty_body(ledger, PEERS[:2]))
    assert (folded.tokens, folded.nominal_step, folded.n_committed, folded.norms) == (0, 0, 0, ())
    assert [seat.ranges for seat in folded.seats] == [seat.ranges for seat in ledger.seats]  # returned and given again
    assert folded.cursor == ledger.cursor


def test_who_lost_its_seat_begins_anew() -> None:
    ledger = seated(2)
    gone = after(ledger, empty_body(ledger, PEERS[1:2]))
    back = after(gone, empty_body(gone, PEERS[:2]))
    assert back.since == {PEERS[0]: 3, PEERS[1]: 1}


def test_norms_are_kept_for_a_while_by_the_learning_rates_of_their_round() -> None:
    ledger = seated(1)
    for _ in range(NORMS_KEPT + 3):
        body = body_of(ledger, evidence_of(ledger, 1))
        ledger = after(ledger, body)
    assert ledger.norms == (normalised(body.aggregate_norm, 0.04),) * NORMS_KEPT
    assert ledger.centre_norm == body.aggregate_norm


def test_what_is_kept_of_an_aggregate_is_what_was_applied_of_it() -> None:
    ledger = seated(3)
    body = body_of(ledger, evidence_of(ledger, 3))
    clipped = after(ledger, replace(body, clip_factor=0.5))
    assert clipped.centre_norm == 0.5 * body.aggregate_norm
    assert clipped.norms == (normalised(0.5 * body.aggregate_norm, 0.04),)


def test_an_aggregate_without_learning_rates_is_compared_with_nothing() -> None:
    ledger = seated(1)
    body = body_of(ledger, evidence_of(ledger, 1))
    silent = replace(body, members=tuple(replace(entry, sum_lr=0.0) for entry in body.members))
    assert after(ledger, silent).norms == ()
    assert after(ledger, replace(silent, aggregate_norm=0.0)).norms == (0.0,)


def test_an_aggregate_that_is_no_number_is_no_book() -> None:
    ledger = seated(1)
    body = body_of(ledger, evidence_of(ledger, 1))
    with pytest.raises(LedgerError, match="is none"):
        fold(ledger, replace(body, clip_factor=1e300, aggregate_norm=1e300))


def test_standing_changes_stay() -> None:
    ledger = seated(1)
    change = StandingChange(PEERS[0], Standing.QUARANTINED, "sent zeros")
    folded = fold(ledger, replace(empty_body(ledger, PEERS[:1]), standing=(change,)))
    assert folded.standing == {PEERS[0]: Standing.QUARANTINED}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"run": PeerId("another")}, "another run"),
        ({"previous": NO_HASH}, "doesn't extend"),
        ({"round": 3}, "can't follow"),
        ({"round": 1}, "can't follow"),
        ({"epoch": -1}, "can't follow"),
        ({"voters": ()}, "nobody to vote"),
        ({"returned": (Range(0, 4), Range(2, 4))}, "leased twice"),
        ({"seats": (Seat(PEERS[0], (Range(0, 4),), 1), Seat(PEERS[2], (Range(3, 4),), 1))}, "not free"),
        ({"returned": (), "seats": (Seat(PEERS[2], (Range(0, 4),), 1),)}, "not free"),
        ({"returned": (Range(0, 4),)}, "leased twice"),
        ({"seats": (Seat(PEERS[0], (Range(8, 4),), 1),)}, "does not go on"),
        ({"seats": (Seat(PEERS[0], (Range(0, 3),), 1),)}, "does not go on"),
    ],
)
def test_a_body_that_does_not_extend_the_books(changes: dict[str, Any], why: str) -> None:
    ledger = seated(2)
    with pytest.raises(LedgerError, match=why):
        fold(ledger, replace(empty_body(ledger, PEERS[:2]), **changes))


def test_the_hash_is_of_the_books_and_not_of_where_they_stand() -> None:
    ledger = seated(2)
    assert ledger.hash() == at_head(ledger, "elsewhere").hash()
    assert ledger.hash() != replace(ledger, tokens=1).hash()
    body = empty_body(ledger, PEERS[:2])
    assert fold(ledger, body).hash() == body.ledger_hash


@pytest.mark.parametrize("n", [0, 1, 5])
def test_bytes_and_back(n: int) -> None:
    ledger = seated(n) if n else beginning()
    if n:
        ledger = after(ledger, body_of(ledger, evidence_of(ledger, n)))
    read = Ledger.from_bytes(ledger.to_bytes())
    assert read.at(ledger.head, ledger.digest) == ledger
    assert read.hash() == ledger.hash()
    assert read.to_bytes() == ledger.to_bytes()


def test_seat_of() -> None:
    ledger = seated(2)
    assert ledger.seat_of(PEERS[1]) == ledger.seats[1]
    assert ledger.seat_of(PEERS[5]) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_garbage_is_a_ledger_error(raw: bytes) -> None:
    with pytest.raises(LedgerError, match="not a ledger"):
        Ledger.from_bytes(raw)


@given(st.sampled_from(sorted(json.loads(seated(2).to_bytes()))), JSON)
def test_a_field_of_another_kind_is_a_ledger_error_or_a_ledger(name: str, value: Any) -> None:
    content = json.loads(seated(2).to_bytes())
    content[name] = value
    try:
        ledger = Ledger.from_bytes(json.dumps(content).encode())
    except LedgerError:
        return
    ledger.hash()  # whatever was let in can be written again


@pytest.mark.parametrize("text", ["1e999", "NaN", '"nan"', "-Infinity", "[]", "null"])
@pytest.mark.parametrize("name", ["epoch", "cursor", "tokens"])
def test_numbers_that_are_none(name: str, text: str) -> None:
    content = json.loads(seated(1).to_bytes())
    content[name] = "here"
    raw = json.dumps(content).replace('"here"', text)
    with pytest.raises(LedgerError):
        Ledger.from_bytes(raw.encode())


@pytest.mark.parametrize("text", ["1e999", "NaN", '"inf"', "-1.0", "-5e-324"])
@pytest.mark.parametrize("field", ["norms", "centre_norm", "bandwidths"])
def test_figures_are_finite_and_not_negative(text: str, field: str) -> None:
    content = json.loads(seated(1).to_bytes())
    absurd = {"norms": ["here"], "centre_norm": "here", "bandwidths": {"peer": "here"}}[field]
    raw = json.dumps(content | {field: absurd}).replace('"here"', text)
    with pytest.raises(LedgerError, match="no figure"):
        Ledger.from_bytes(raw.encode())


def test_no_more_norms_are_kept_than_are_compared_with() -> None:
    ledger = replace(seated(1), norms=(1.0,) * NORMS_KEPT, centre_norm=0.1 + 0.2)
    again = Ledger.from_bytes(ledger.to_bytes())
    assert (again, again.hash()) == (replace(ledger, head=again.head, digest=again.digest), ledger.hash())
    with pytest.raises(LedgerError, match="17 norms"):
        Ledger.from_bytes(replace(ledger, norms=(*ledger.norms, 1.0)).to_bytes())


def test_too_many_bytes_are_not_even_read() -> None:
    with pytest.raises(LedgerError, match="exceeds the limit"):
        Ledger.from_bytes(b" " * (LEDGER_BYTES_MAX + 1))


def test_deep_nesting_is_a_ledger_error() -> None:
    with pytest.raises(LedgerError, match="not a ledger"):
        Ledger.from_bytes(b"[" * 100_000)


def test_outcomes_have_the_words_of_the_protocol() -> None:
    ledger = seated(1)
    assert empty_body(ledger, PEERS[:1]).outcome is Outcome.EMPTY
    assert body_of(ledger, evidence_of(ledger, 1)).outcome is Outcome.COMMITTED
