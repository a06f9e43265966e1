"""The codecs narrower than a byte a value or without a scale: fp16, int4, topk against their twins and their bounds."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aggregation import codec
from aggregation.errors import CodecError
from tests.aggregation import codec_twins, twins
from tests.aggregation.twins import Floats

NARROW = ["fp16", "int4", "topk"]
WIDE = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**34), max_value=2.0**34)
HALF = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-65504, max_value=65504)
FEW = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.5, 2.0, -3.0, 1e-45, 2.0**-100, 1e9])
BLOCKS = st.sampled_from([64, 128, 192])


def vectors(elements: st.SearchStrategy[float]) -> st.SearchStrategy[Floats]:
    return arrays(np.float32, st.integers(1, 400), elements=elements)


VALUES = {"fp16": vectors(HALF), "int4": vectors(WIDE | FEW), "topk": vectors(WIDE | FEW)}


def same_as_twin(name: str, values: Floats, block: int) -> None:
    frame = codec.encode(name, values, block=block)
    assert frame == codec_twins.ENCODE[name](values, block)
    codec.check(frame, codec=name, block=block, n_values=len(values))
    decoded = codec.decode(frame, len(values))
    assert decoded.tobytes() == codec_twins.DECODE[name](frame).tobytes()
    assert codec.squared_norm(frame) == twins.squared_norm(decoded, block)


@pytest.mark.parametrize("name", NARROW)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_narrow_codec_equals_its_numpy_twin(name: str, data: st.DataObject) -> None:
    same_as_twin(name, data.draw(VALUES[name]), data.draw(BLOCKS))


@pytest.mark.parametrize("name", NARROW)
def test_a_narrow_codec_equals_its_twin_on_a_long_vector_of_all_magnitudes(name: str) -> None:
    rng = np.random.default_rng(8)
    exponents = rng.uniform(-30, 10, 20_013) if name == "fp16" else rng.uniform(-130, 30, 20_013)
    values = (rng.uniform(-1, 1, 20_013) * 2.0**exponents).astype(np.float32)
    same_as_twin(name, values, 1024)
    same_as_twin(name, rng.standard_normal(20_013).astype(np.float32), 4096)
    same_as_twin(name, np.round(rng.standard_normal(20_013) * 2).astype(np.float32), 4096)  # ties by the hundred


def test_every_half_is_kept_and_every_middle_goes_to_the_even_one() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = halves[np.isfinite(halves)]
    values = finite.astype(np.float32)
    frame = codec.encode("fp16", values)
    assert frame[16:] == finite.astype("<f2").tobytes()
    assert codec.decode(frame, len(values)).tobytes() == values.tobytes()
    up = np.sort(values[values >= 0])
    middles = (up[1:] + up[:-1]) / np.float32(2)
    edges = np.concatenate([middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(1e9))])
    for sign in (np.float32(1), np.float32(-1)):
        assert codec.encode("fp16", sign * edges)[16:] == (sign * edges).astype("<f2").tobytes()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_value_that_half_precision_cannot_hold_is_refused_where_it_stands(sign: int) -> None:
    values = np.zeros(10_000, np.float32)
    values[7_000] = sign * np.nextafter(np.float32(65520), np.float32(0))
    assert codec.decode(codec.encode("fp16", values), 10_000)[7_000] == sign * 65504
    values[7_000] = sign * 65520
    with pytest.raises(CodecError, match="value 7000 is not finite in half"):
        codec.encode("fp16", values)


@settings(max_examples=60, deadline=None)
@given(VALUES["int4"], BLOCKS)
def test_int4_error_is_at_most_half_a_step(values: Floats, block: int) -> None:
    decoded = codec.decode(codec.encode("int4", values, block=block), len(values))
    for start in range(0, len(values), block):
        part = values[start : start + block].astype(np.float64)
        peak = np.abs(part).max()
        bound = 2.0**-100 if peak < 2.0**-100 else peak / 14 * (1 + 2.0**-20)
        assert np.abs(decoded[start : start + block] - part).max() <= bound


@settings(max_examples=60, deadline=None)
@given(VALUES["fp16"])
def test_fp16_error_is_at_most_half_a_last_place(values: Floats) -> None:
    decoded = codec.decode(codec.encode("fp16", values), len(values)).astype(np.float64)
    wide = values.astype(np.float64)
    bound = np.maximum(np.abs(wide) * 2.0**-11, 2.0**-25)
    assert (np.abs(decoded - wide) <= bound).all()


@settings(max_examples=80, deadline=None)
@given(VALUES["topk"], BLOCKS)
def test_topk_sends_the_largest_within_a_factor_of_their_level(values: Floats, block: int) -> None:
    decoded = codec.decode(codec.encode("topk", values, block=block), len(values))
    for start in range(0, len(values), block):
        sizes = np.abs(values[start : start + block].astype(np.float64))
        levels = decoded[start : start + block].astype(np.float64)
        sent = levels != 0
        assert sent.sum() <= -(-len(sizes) // 64)
        assert len(set(np.abs(levels[sent]))) <= 2
        assert sent.any() == (sizes.max() >= 2.0**-100)
        if sent.any():
            assert sent[sizes.argmax()]
            assert sizes[~sent].max(initial=0.0) <= sizes[sent].min()
            assert (np.sign(levels[sent]) == np.sign(values[start : start + block][sent])).all()
            assert (sizes[sent] >= np.abs(levels[sent]) / 2).all()
            assert (sizes[sent] <= 64 * np.abs(levels[sent])).all()


def test_topk_takes_ties_by_the_lowest_index() -> None:
    values = np.full(256, -2.0, np.float32)
    values[200] = 3.0
    decoded = codec.decode(codec.encode("topk", values, block=256), 256)
    assert np.flatnonzero(decoded).tolist() == [0, 1, 2, 200]
    assert decoded[[0, 1, 2, 200]].tolist() == [-2, -2, -2, 3]


def test_topk_levels_are_means_and_leave_the_far_smaller_ones_at_home() -> None:
    values = np.zeros(256, np.float32)
    values[[3, 70, 71, 255]] = [100.0, -2.0, 4.0, -0.5]
    decoded = codec.decode(codec.encode("topk", values, block=256), 256)
    # The rest 2, 4, 0.5 has the mean 2.17: 0.5 is below half of it, 2 and 4 share their mean.
    assert {int(i): float(decoded[i]) for i in np.flatnonzero(decoded)} == {3: 100.0, 70: -3.0, 71: 3.0}


def test_a_topk_frame_is_as_long_as_it_says() -> None:
    assert codec.frame_bytes("topk", 4096, 4096) == 16 + 4 + 96 + 16
    assert codec.frame_bytes("topk", 8192 + 1, 4096) == 16 + 2 * 116 + 4 + 2 + 1
    assert codec.frame_bytes("topk", 3 * 64, 192) == 16 + 4 + 5 + 1
    for block in (16, 96, 4096 + 64, 1 << 16):
        with pytest.raises(CodecError, match=f"topk: block {block}"):
            codec.encode("topk", np.ones(100), block=block)
    fits = struct.pack("<4sB3sII", b"BRF1", 5, bytes(3), 96, 64) + bytes(7)
    with pytest.raises(CodecError, match="topk: block 96"):
        codec.decode(fits, 100)


def put(frame: bytes, at: int, new: bytes) -> bytes:
    return frame[:at] + new + frame[at + len(new) :]


INT4 = codec.encode("int4", np.linspace(-1, 1, 37), block=32)
INT4_REFUSED = {
    "scale too small": put(INT4, 16, struct.pack("<f", 2.0**-103 * (1 - 2.0**-24))),
    "scale above the cap": put(INT4, 16, struct.pack("<f", 2.0**33 * (1 + 2.0**-23))),
    "scale nan": put(INT4, 16, struct.pack("<f", np.nan)),
    "scale minus zero": put(codec.encode("int4", np.zeros(37), block=32), 16, struct.pack("<f", -0.0)),
    "scale zero with codes": put(INT4, 16, bytes(4)),
    "scale without codes": put(codec.encode("int4", np.zeros(37), block=32), 16, struct.pack("<f", 1.0)),
    "code -8": put(INT4, 20 + 5, b"\x08"),
    "code -8 in the high half": put(INT4, 20 + 5, b"\x80"),
    "peak 6": put(INT4, 20, b"\xaa"),
    "half byte left over": put(INT4, len(INT4) - 1, bytes([INT4[-1] | 0x10])),
}
TOPK = codec.encode("topk", np.array([9, *[0] * 99, -4, *[0] * 98, 0], np.float32), block=192)
"""200 values: a block with three places of which two are used, and one of eight zeros."""
THREE = codec.encode("topk", np.array([9, *[0] * 99, -4, *[0] * 90, 5], np.float32), block=192)
TOPK_REFUSED = {
    "high infinite": put(TOPK, 16, b"\x80\x7f"),
    "high negative": put(TOPK, 16, b"\x10\xc1"),
    "high above the cap": put(TOPK, 16, struct.pack("<H", (int(np.float32(2.0**40).view(np.uint32)) >> 16) + 1)),
    "high too small": put(TOPK, 16, struct.pack("<H", 0x0D7F)),
    "low above high": put(TOPK, 18, b"\x20\x41"),
    "low equal to high": put(TOPK, 18, TOPK[16:18]),
    "low too small": put(TOPK, 18, b"\x01\x00"),
    "low zero and used": put(TOPK, 18, bytes(2)),
    "low unused": put(TOPK, 25, b"\x0d"),
    "high unused": put(TOPK, 25, b"\x08"),
    "high zero and used": put(TOPK, 16, bytes(4)),
    "levels of a zero block": put(TOPK, 26, b"\x80\x3f"),
    "an index in a zero block": put(TOPK, 30, b"\x01"),
    "a code in a zero block": put(TOPK, 32, b"\x01"),
    "index beyond the block": put(THREE, 23, b"\xc0"),
    "index twice": put(THREE, 23, b"\x64"),
    "index descending": put(THREE, 23, b"\x63"),
    "a code after the end": put(TOPK, 25, bytes([TOPK[25] | 0x10])),
    "an index after the end": put(put(THREE, 21, b"\x00"), 22, b"\x00"),
    "bits left over after the indices": put(TOPK, 24, bytes([TOPK[24] | 0x10])),
    "bits left over after the codes": put(TOPK, 25, bytes([TOPK[25] | 0x40])),
}


def test_what_is_mutated_was_fine_before() -> None:
    codec.check(INT4, codec="int4", block=32, n_values=37)
    codec.check(TOPK, codec="topk", block=192, n_values=200)
    codec.check(THREE, codec="topk", block=192, n_values=192)
    assert INT4[20] == 0x99  # the first two codes are -7, the others are not
    assert TOPK[16:26] == b"\x10\x41\x80\x40" + b"\x00\x40\x06\x00\x00" + b"\x09"
    assert THREE[20:26] == b"\x00\x40\x06\xbf\x00" + b"\x09"


@pytest.mark.parametrize("kind", INT4_REFUSED)
def test_every_other_form_of_int4_is_refused(kind: str) -> None:
    with pytest.raises(CodecError, match="int4 block"):
        codec.decode(INT4_REFUSED[kind], 1000)


@pytest.mark.parametrize("kind", TOPK_REFUSED)
def test_every_other_form_of_topk_is_refused(kind: str) -> None:
    with pytest.raises(CodecError, match="topk block"):
        codec.decode(TOPK_REFUSED[kind], 1000)


@pytest.mark.parametrize("half", [0x7C00, 0xFC00, 0x7E01, 0xFFFF])
@pytest.mark.parametrize("at", [0, 5000])
def test_fp16_frames_are_finite(half: int, at: int) -> None:
    frame = put(codec.encode("fp16", np.ones(5001)), 16 + 2 * at, struct.pack("<H", half))
    with pytest.raises(CodecError, match=f"fp16 value {at} is not finite"):
        codec.check(frame, codec="fp16", block=1024, n_values=5001)
    with pytest.raises(CodecError):
        codec.decode(frame, 5001)


@pytest.mark.parametrize(("name", "largest"), [("int4", 7 * 2.0**32), ("topk", 127 * 2.0**32)])
def test_a_contribution_ends_at_the_cap(name: str, largest: float) -> None:
    values = np.full(64, largest)
    frame = codec.encode(name, values, block=64)
    codec.check(frame, codec=name, block=64, n_values=64)
    assert np.abs(codec.decode(frame, 64)).max() == np.float32(largest)
    with pytest.raises(CodecError, match="cap"):
        codec.encode(name, values * (1 + 2.0**-20), block=64)


def test_what_results_are_encoded_in_and_which_codecs_leave_a_residual() -> None:
    kept = {name: (codec.result_codec(name), codec.feedback_decay(name)) for name in codec.names()}
    assert kept == {
        "int8": ("int8", None),
        "fp32": ("fp32", None),
        "fp16": ("fp16", None),
        "int4": ("int8", 1.0),
        "topk": ("int8", 0.95),
    }
    for ask in (codec.result_codec, codec.feedback_decay):
        with pytest.raises(CodecError, match="no codec"):
            ask("int7")
