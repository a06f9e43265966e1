"""The walk over raw protobuf that bounds what parsing it may cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.bounds import Unfit
from protos.convert import converter
from protos.messages import Body, Commitment, Promise, Receipt, Results, Vote
from protos.survey import survey, walk
from protos.wire import encode
from tests.protos import golden
from tests.protos.strategies import PEERS, any_message

RECEIPT = converter(Receipt).shape


def seen(raw: bytes) -> list[tuple[int, int, bytes]]:
    return [(number, wire_type, raw[start:end]) for number, wire_type, start, end in walk(raw, 0, len(raw))]


def test_walk_gives_each_field() -> None:
    raw = b"\x08\x96\x01" + b"\x12\x02hi" + b"\x19" + bytes(8) + b"\x25" + bytes(4)
    assert seen(raw) == [(1, 0, b"\x96\x01"), (2, 2, b"hi"), (3, 1, bytes(8)), (4, 5, bytes(4))]


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"\x08", "ends within"),
        (b"\x08\x80", "ends within"),
        (b"\x80", "ends within"),
        (b"\x12\x03hi", "ends within"),
        (b"\x19" + bytes(7), "ends within"),
        (b"\x25" + bytes(3), "ends within"),
        (b"\x00\x00", "field number"),
        (b"\xf8\xff\xff\xff\xff\x01\x00", "field number"),
        (b"\x0b\x0c", "wire type 3"),
        (b"\x0f", "wire type 7"),
        (b"\x08" + b"\x80" * 10 + b"\x00", "ten bytes"),
    ],
)
def test_what_is_no_protobuf_is_refused(raw: bytes, why: str) -> None:
    with pytest.raises(Unfit, match=why):
        seen(raw)


@given(st.binary(max_size=60))
def test_walk_is_total(raw: bytes) -> None:
    try:
        fields = seen(raw)
    except Unfit:
        return
    assert sum(len(value) for _, _, value in fields) <= len(raw)


@pytest.mark.parametrize("cls", [Body, Commitment, Receipt, Results, Promise], ids=lambda cls: cls.__name__)
@given(data=st.data())
def test_what_is_written_here_passes(cls: type, data: st.DataObject) -> None:
    survey(encode(data.draw(any_message(cls))), converter(cls).shape)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x1a\x05" + b"\x01\x02\x03\x04\x05",  # packed
        b"\x18\x01" * 5,  # one by one
        b"\x1a\x03\x01\x80\x01" + b"\x18\x01" * 3,  # both
    ],
    ids=["packed", "single", "both"],
)
def test_values_are_counted_however_they_are_packed(raw: bytes) -> None:
    survey(raw, RECEIPT, most_items=5)
    with pytest.raises(Unfit, match="one value too many"):
        survey(raw, RECEIPT, most_items=4)


def test_packed_doubles_are_counted() -> None:
    raw = encode(Commitment(bytes(32), bytes(32), (1.0, 2.0, 3.0), 0, 0, (), 0.0, 0.0))
    shape = converter(Commitment).shape
    n_single = 2  # plan and root; zeros are not written
    survey(raw, shape, most_items=n_single + 3)
    with pytest.raises(Unfit, match="one value too many"):
        survey(raw, shape, most_items=n_single + 2)


def test_lists_in_lists_count_together() -> None:
    seat = b"\x12\x00" * 10  # ten empty ranges
    raw = (b"\xfa\x01" + bytes([len(seat)]) + seat) * 10  # in ten seats
    shape = converter(Body).shape
    assert shape.fields[31].name == "seats"
    survey(raw, shape, most_items=110)
    with pytest.raises(Unfit, match="one value too many") as caught:
        survey(raw, shape, most_items=109)
    assert caught.value.path == ".seats[9].ranges"


def test_a_single_field_comes_once() -> None:
    vote = Vote(1, 3, 1, PEERS[0], b"\x01" * 32, b"\x02" * 32)
    with pytest.raises(Unfit, match="given twice") as caught:
        survey(encode(vote) + b"\x08\x02", converter(Vote).shape)
    assert caught.value.path == ".epoch"


def test_unknown_fields_are_few() -> None:
    raw = encode(golden.body())
    shape = converter(Body).shape
    survey(raw + b"\xc0\x3e\x01" * 3, shape, most_unknown=3)
    with pytest.raises(Unfit, match="too many unknown"):
        survey(raw + b"\xc0\x3e\x01" * 4, shape, most_unknown=3)


def test_a_field_that_was_cut_off_is_named() -> None:
    raw = b"\xfa\x01\x02\x12\x05"
    with pytest.raises(Unfit, match="ends within") as caught:
        survey(raw, converter(Body).shape)
    assert caught.value.path == ".seats[0]"
