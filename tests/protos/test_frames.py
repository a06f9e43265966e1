"""Frames of the streams: each carries one message, and protobuf reads them as it would write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregation import codec
from protos import exchange_pb2, frames, limits, round_pb2, state_pb2, wire
from protos.calls import Declined
from protos.messages import (
    ChunkHead,
    FetchHead,
    Goodbye,
    Leave,
    Part,
    PeerId,
    Records,
    Signed,
    Vote,
)
from protos.wire import Begun, WireError
from tests.protos.strategies import PEERS, any_message

Codec = tuple[frames.Frames, type[Message], Callable[[Any], bytes], Callable[[bytes], Any]]

STREAMS: dict[str, Codec] = {
    "member": (frames.MEMBER, round_pb2.MemberFrame, wire.encode_member_frame, wire.decode_member_frame),
    "leader": (frames.LEADER, round_pb2.LeaderFrame, wire.encode_leader_frame, wire.decode_leader_frame),
    "chunk": (frames.CHUNK, exchange_pb2.ChunkFrame, wire.encode_chunk_frame, wire.decode_chunk_frame),
    "receipt": (frames.RECEIPT, exchange_pb2.ReceiptFrame, wire.encode_receipt_frame, wire.decode_receipt_frame),
    "fetch": (frames.FETCH, exchange_pb2.FetchFrame, wire.encode_fetch_frame, wire.decode_fetch_frame),
}

BARE: dict[type, st.SearchStrategy[Any]] = {
    Signed: st.binary(min_size=1, max_size=50).map(Signed),
    Part: st.binary(max_size=50).map(Part),
    Declined: st.text("abc θ\n", max_size=300).map(Declined),
}


def any_of(stream: frames.Frames) -> st.SearchStrategy[Any]:
    return st.one_of([BARE[cls] if cls in BARE else any_message(cls) for cls in stream.classes])


@pytest.mark.parametrize("stream", STREAMS.values(), ids=list(STREAMS))
@settings(max_examples=30)
@given(data=st.data())
def test_a_frame_comes_back_and_is_protobufs_own(stream: Codec, data: st.DataObject) -> None:
    kinds, proto, encode, decode = stream
    message = data.draw(any_of(kinds))
    raw = encode(message)
    assert decode(raw) == message
    parsed = proto.FromString(raw)
    assert len(parsed.ListFields()) == 1
    assert parsed.SerializeToString(deterministic=True) == raw


@pytest.mark.parametrize(("name", "head"), [("chunk", ChunkHead), ("fetch", FetchHead)])
@settings(max_examples=30)
@given(data=st.data())
def test_a_head_and_the_first_part_share_a_frame(name: str, head: type, data: st.DataObject) -> None:
    _, proto, encode, decode = STREAMS[name]
    begun = Begun(data.draw(any_message(head)), data.draw(BARE[Part]))
    raw = encode(begun)
    assert decode(raw) == begun
    assert raw == encode(begun.head) + encode(begun.part) == wire.encode_part(memoryview(begun.part.data), begun.head)
    parsed: Any = proto.FromString(raw)
    assert parsed.part == begun.part.data
    assert parsed.SerializeToString(deterministic=True) == raw


def test_nothing_else_shares_a_frame() -> None:
    head, part = wire.encode_chunk_frame(ChunkHead(bytes(32), 1, 3, ())), wire.encode_chunk_frame(Part(b"abc"))
    deal = wire.encode_chunk_frame(Signed(b"deal"))
    for raw, names in (
        (part + head, "part and head"),
        (head + head, "head and head"),
        (part + part, "part and part"),
        (head + part + part, "part and part"),
        (head + deal, "head and deal"),
        (deal + part, "deal and part"),
    ):
        with pytest.raises(WireError, match=f"ChunkFrame: holds {names}, where one message is a frame"):
            wire.decode_chunk_frame(raw)
    with pytest.raises(WireError, match=r"^ChunkFrame\.part: 1064961 bytes exceed"):
        wire.encode_part(memoryview(bytes(limits.PART_BYTES + 1)), ChunkHead(bytes(32), 1, 0, ()))


@pytest.mark.parametrize("stream", STREAMS.values(), ids=list(STREAMS))
@settings(max_examples=30)
@given(raw=st.binary(max_size=100))
def test_any_bytes_give_a_message_or_a_wire_error(stream: Codec, raw: bytes) -> None:
    _, _, encode, decode = stream
    try:
        message = decode(raw)
    except WireError:
        return
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "MemberFrame: is empty"),
        (b"\xc2\x3e\x01a", r"MemberFrame: holds an unknown message \(1000\)"),
        (b"\x4a\x01a\x4a\x01b", "MemberFrame: holds signed and signed, where one message is a frame"),
        (b"\x4a\x01a\x42\x00", "MemberFrame: holds signed and records"),
        (b"\x48\x01", r"MemberFrame\.signed: wire type 0"),
        (b"\x4a\x05a", "MemberFrame: ends within a field"),
        (b"\x4a\x00", r"MemberFrame\.signed: 0 bytes, at least 1"),
        (b"\x12\x00", r"MemberFrame\.heartbeat\.state: '' is none of"),
        (b"\x0a\x02\x08", r"MemberFrame: ends within a field"),
        (b"\x42\x02\x0a\x00", r"MemberFrame\.records\.records\[0\]: 0 bytes, at least 1"),
    ],
)
def test_what_is_no_frame_is_refused(raw: bytes, why: str) -> None:
    with pytest.raises(WireError, match=f"^{why}"):
        wire.decode_member_frame(raw)


def test_unknown_fields_beside_a_message_are_skipped() -> None:
    assert wire.decode_member_frame(b"\xc2\x3e\x01a" + b"\x4a\x01b" + b"\xc0\x3e\x05") == Signed(b"b")


def test_unknown_fields_beside_a_message_are_few() -> None:
    raw = b"\xc0\x3e\x05" * (limits.UNKNOWN_FIELDS + 1)
    with pytest.raises(WireError, match="too many unknown"):
        wire.decode_member_frame(raw)


@pytest.mark.parametrize(
    "message",
    [Vote(0, 1, 0, PEERS[0], bytes(32), bytes(32)), Leave(0, 1, -1, PeerId(""), b"", -1, None)],
    ids=lambda message: type(message).__name__,
)
def test_what_can_be_evidence_travels_signed_only(message: Any) -> None:
    with pytest.raises(WireError, match=f"^MemberFrame: {type(message).__name__} travels as its envelope: seal it"):
        wire.encode_member_frame(message)


def test_each_side_has_its_own_messages() -> None:
    goodbye: Any = Goodbye("ended", "")
    with pytest.raises(WireError, match=r"^MemberFrame: carries no Goodbye"):
        wire.encode_member_frame(goodbye)
    assert wire.decode_leader_frame(wire.encode_leader_frame(goodbye)) == goodbye
    assert isinstance(wire.decode_member_frame(wire.encode_member_frame(Records(()))), Records)


def test_the_unfit_field_is_named_on_writing() -> None:
    with pytest.raises(WireError, match=r"^ChunkFrame\.head\.chunk: -1 outside"):
        wire.encode_chunk_frame(ChunkHead(bytes(32), -1, 0, ()))
    with pytest.raises(WireError, match=r"^ChunkFrame\.part: 1064961 bytes exceed"):
        wire.encode_chunk_frame(Part(bytes(limits.PART_BYTES + 1)))
    with pytest.raises(WireError, match=r"^ReceiptFrame\.refusal: 1025 characters"):
        wire.encode_receipt_frame(Declined("x" * 1025))


def test_a_refusal_that_is_no_utf8_is_refused() -> None:
    with pytest.raises(WireError, match=r"^ReceiptFrame\.refusal: is no UTF-8"):
        wire.decode_receipt_frame(b"\x12\x01\xff")


def test_a_part_is_written_from_a_view_and_read_as_one() -> None:
    data = bytes(range(256)) * 8
    frame = wire.encode_part(memoryview(bytearray(data))[512:1024])
    assert frame == wire.encode_chunk_frame(Part(data[:512])) == wire.encode_fetch_frame(Part(data[:512]))
    for decode in (wire.decode_chunk_frame, wire.decode_fetch_frame):
        part: Any = decode(frame)
        assert isinstance(part.data, memoryview)
        assert part.data.obj is frame
        assert part.data == data[:512]


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (memoryview(bytes(limits.PART_BYTES + 1)), "exceed"),
        (memoryview(bytes(64))[::2], "in a row"),
        (memoryview(bytes(64)).cast("I"), "in a row"),
    ],
)
def test_a_view_that_is_no_part_is_refused(view: memoryview, why: str) -> None:
    with pytest.raises(WireError, match=why):
        wire.encode_part(view)


def test_a_usual_chunk_of_int8_is_one_part() -> None:
    assert codec.frame_bytes("int8", 2**20, 512) <= limits.PART_BYTES < codec.frame_bytes("int8", 2**21, 1024)


def test_a_whole_part_passes() -> None:
    part = Part(bytes(range(256)) * (limits.PART_BYTES // 256))
    assert wire.decode_fetch_frame(wire.encode_fetch_frame(part)) == part


def test_a_frame_has_a_largest_size() -> None:
    with pytest.raises(WireError, match=r"^LeaderFrame: 67108929 bytes exceed"):
        wire.decode_leader_frame(bytes(limits.FRAME_BYTES + 1))


def test_an_encoded_part_is_a_part_frame() -> None:
    assert state_pb2.PartFrame.FromString(wire.encode(Part(b"abc"))).data == b"abc"
