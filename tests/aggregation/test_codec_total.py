"""Whatever bytes come in, every codec gives finite values of a canonical frame or a CodecError, in bounded memory."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregation import codec
from aggregation.codec.registry import by_id, by_name
from aggregation.errors import CodecError
from tests.aggregation import codec_twins
from tests.aggregation.twins import Floats

IDS = {by_name(name).id: name for name in codec.names()}
ONE_FORM = ["fp32", "fp16", "topk"]
"""Codecs of which other bytes are other values. The scale of the others may differ in its last bit."""


def head(codec_id: int, block: int, n_values: int) -> bytes:
    return struct.pack("<4sB3sII", b"BRF1", codec_id, bytes(3), block, n_values)


def samples(name: str) -> list[bytes]:
    rng = np.random.default_rng(4)
    mixed = np.concatenate([rng.standard_normal(128), np.zeros(64), [6e4, *rng.standard_normal(63)], [1, -1, 0.5]])
    return [codec.encode(name, values, block=64) for values in (mixed, np.zeros(70), np.ones(1))]


def read(received: bytes) -> Floats | None:
    """The values, after everything that must hold of them; None if all that read frames refuse these bytes."""
    out = np.full(1000, 7, np.float32)
    try:
        values = codec.decode(received, 1000)
    except CodecError:
        with pytest.raises(CodecError):
            codec.squared_norm(received)
        with pytest.raises(CodecError):
            codec.decode_into(received, out)
        assert (out == 7).all()
        return None
    name, found = codec.header(received)
    assert np.isfinite(values).all()
    assert np.isfinite(codec.squared_norm(received))
    codec.check(
        received, codec=name, block=found.block, n_values=len(values), scale_cap=codec.RESULT_SCALE_CAP
    )  # what decodes is canonical
    assert values.tobytes() == codec_twins.DECODE[name](received).tobytes()
    codec.decode_into(received, out[: len(values)])
    assert out[: len(values)].tobytes() == values.tobytes()
    if name in ONE_FORM:
        if np.abs(values).max() <= 127 * codec.SCALE_CAP:
            assert codec.encode(name, values, block=found.block) == received
    elif 2.0**-99 < np.abs(values).max() <= codec.SCALE_CAP:  # a scale may be a little below the least that is written
        again = codec.decode(codec.encode(name, values, block=found.block), 1000)
        np.testing.assert_allclose(again, values, rtol=1e-6, atol=2.0**-99)
    return values


@pytest.mark.parametrize("name", codec.names())
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_mutated_frames_give_values_or_a_codec_error(name: str, data: st.DataObject) -> None:
    frame = bytearray(data.draw(st.sampled_from(samples(name))))
    for at, byte in data.draw(st.lists(st.tuples(st.integers(0, len(frame) - 1), st.integers(0, 255)), max_size=4)):
        frame[at] = byte
    cut = data.draw(st.integers(0, 6) | st.integers(0, len(frame)))
    read(bytes(frame + bytes(3))[: max(0, len(frame) + 3 - cut)])


@pytest.mark.parametrize("name", codec.names())
@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    block=st.sampled_from([16, 64, 96, 128, 4096, 8192]),
    n_values=st.integers(1, 70) | st.integers(1, 400),
)
def test_any_body_of_the_right_length_gives_values_or_a_codec_error(
    name: str, data: st.DataObject, block: int, n_values: int
) -> None:
    try:
        n_bytes = codec.frame_bytes(name, n_values, block) - 16
    except CodecError:
        n_bytes = n_values
    body = data.draw(st.binary(min_size=n_bytes, max_size=n_bytes) | st.just(bytes(n_bytes)))
    read(head(by_name(name).id, block, n_values) + body)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 255), st.integers(0, 1 << 17), st.integers(0, 2**32 - 1))
def test_random_bytes_give_values_or_a_codec_error(received: bytes, codec_id: int, block: int, n_values: int) -> None:
    read(received)
    read(head(codec_id, block, n_values) + received)
    read(head(codec_id % 6, 64, len(received)) + received)


@pytest.mark.parametrize("name", codec.names())
def test_no_flipped_bit_goes_unnoticed(name: str) -> None:
    for frame in samples(name):
        before = codec.decode(frame, 1000)
        for bit in range(8 * 16, 8 * len(frame)):
            flipped = bytearray(frame)
            flipped[bit // 8] ^= 1 << bit % 8
            try:
                after = codec.decode(flipped, 1000)
            except CodecError:
                continue
            assert after.tobytes() != before.tobytes()


@pytest.mark.parametrize("codec_id", IDS, ids=IDS.get)
def test_no_claim_costs_memory(codec_id: int) -> None:
    """A frame may say that it holds four thousand million values; only its length and the reader's limit count."""
    fits = codec.encode(IDS[codec_id], np.ones(1 << 16), block=4096)
    claims = [head(codec_id, block, n) + bytes(40) for block in (64, 4096) for n in (1 << 31, 2**32 - 1)]
    by_id(codec_id).body_bytes(2**32 - 1, 4096)
    tracemalloc.start()
    try:
        for claim in claims:
            for reader in (codec.header, codec.squared_norm, lambda frame: codec.decode(frame, 2**32)):
                with pytest.raises(CodecError):
                    reader(claim)
        with pytest.raises(CodecError, match="at most 65535"):
            codec.decode(fits, 65535)
        codec.check(fits, codec=IDS[codec_id], block=4096, n_values=1 << 16)
        codec.squared_norm(fits)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 200_000  # a tile of 2^15 values at most, whatever the frame


@pytest.mark.parametrize("name", codec.names())
@settings(max_examples=40, deadline=None)
@given(data=st.data(), n_values=st.integers(1, 200))
def test_no_body_makes_a_kernel_write_past_its_values(name: str, data: st.DataObject, n_values: int) -> None:
    """Not even one that nobody has checked: where a value goes is in the bytes of topk."""
    coder = by_name(name)
    body = data.draw(st.binary(min_size=coder.body_bytes(n_values, 128), max_size=coder.body_bytes(n_values, 128)))
    room = np.full(n_values + 4096, 7, np.float32)
    coder.decode(np.frombuffer(body, np.uint8), 128, room[:n_values])
    assert (room[n_values:] == 7).all()
