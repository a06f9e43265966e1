"""Heads written and read by hand are those of protobuf, or none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import heads, limits
from protos.convert import converter
from protos.frames import CHUNK, FETCH, Begun
from protos.messages import ChunkHead, FetchHead, Part

HASHES = st.binary(min_size=32, max_size=32)
CHUNK_HEADS = st.builds(
    ChunkHead,
    HASHES,
    st.integers(0, limits.CHUNKS - 1),
    st.integers(0, limits.THING_BYTES),
    st.lists(HASHES, max_size=limits.PATH).map(tuple),
)
FETCH_HEADS = st.builds(FetchHead, HASHES, st.integers(-1, limits.THING_BYTES))
HEADS = st.one_of(CHUNK_HEADS, FETCH_HEADS)
PLAIN = ChunkHead(bytes(range(32)), 300, 70_000, (bytes(32), b"\x01" * 32))


@given(HEADS)
def test_the_bytes_are_those_of_protobuf_and_back(head: ChunkHead | FetchHead) -> None:
    cls = type(head)
    raw = converter(cls).encode(head)
    by_hand = heads.encode(head)
    assert by_hand is None or by_hand == raw
    read = heads.decode(cls, b"??" + raw + b"?", 2, 2 + len(raw))
    assert read is None or read == head
    plain = head.n_bytes > 0 and (isinstance(head, FetchHead) or head.chunk > 0)
    assert (by_hand is not None) is plain is (read is not None)


@given(HEADS, st.data())
def test_no_other_bytes_are_read_otherwise_than_by_protobuf(head: ChunkHead | FetchHead, data: st.DataObject) -> None:
    raw = bytearray(converter(type(head)).encode(head))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw))) :]
    read = heads.decode(type(head), bytes(raw), 0, len(raw))
    assert read is None or read == converter(type(head)).decode(bytes(raw))


@pytest.mark.parametrize(
    "head",
    [
        replace(PLAIN, plan=bytes(31)),
        replace(PLAIN, chunk=-1),
        replace(PLAIN, chunk=True),
        replace(PLAIN, chunk=limits.CHUNKS + 1),
        replace(PLAIN, n_bytes=limits.THING_BYTES + 1),
        replace(PLAIN, path=(bytes(33),)),
        replace(PLAIN, path=(bytes(32),) * (limits.PATH + 1)),
        replace(PLAIN, path=[bytes(32)]),  # type: ignore[arg-type]
        FetchHead(bytes(32), limits.THING_BYTES + 1),
        FetchHead(b"", 1),
        Part(b"no head"),
    ],
)
def test_what_is_out_of_bounds_is_left_to_those_who_say_why(head: object) -> None:
    assert heads.encode(head) is None


@given(HEADS, st.binary(max_size=100))
def test_a_frame_of_head_and_part_comes_back_with_a_view_of_its_bytes(head: ChunkHead | FetchHead, part: bytes) -> None:
    frames = CHUNK if isinstance(head, ChunkHead) else FETCH
    raw = frames.encode(Begun(head, Part(part)))
    found = frames.decode(raw)
    assert isinstance(found, Begun)
    assert found.head == head
    assert found.part.data == part
    assert isinstance(found.part.data, memoryview)
    assert found.part.data.obj is raw
