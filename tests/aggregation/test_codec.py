"""The codecs: error bound, one canonical form, totality, pinned bytes."""

from __future__ import annotations

import json
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aggregation import codec
from aggregation.errors import CodecError
from tests.aggregation import codec_twins, twins

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "codec_frames.json").read_text())
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**32), max_value=2.0**32)
VALUES = arrays(np.float32, st.integers(1, 70), elements=FINITE)
SCALE_AT = 16
CODES_AT = 20


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


@settings(max_examples=60, deadline=None)
@given(VALUES, st.sampled_from([16, 32, 64]))
def test_int8_equals_its_numpy_twin(values: np.ndarray, block: int) -> None:
    frame = codec.encode("int8", values, block=block)
    assert frame == twins.encode_int8(values, block)
    decoded = codec.decode(frame, len(values))
    assert decoded.tobytes() == twins.decode_int8(frame).tobytes()
    assert codec.squared_norm(frame) == twins.squared_norm_int8(frame)


def test_int8_equals_its_twin_on_a_long_vector_of_all_magnitudes() -> None:
    rng = np.random.default_rng(7)
    values = (rng.standard_normal(40_013) * 2.0 ** rng.uniform(-120, 20, 40_013)).astype(np.float32)
    values *= np.repeat(2.0 ** rng.uniform(-120, 0, 41), 1000)[:40_013].astype(np.float32)
    frame = codec.encode("int8", values)
    assert frame == twins.encode_int8(values, 1024)
    codec.check(frame, codec="int8", block=1024, n_values=40_013)
    assert codec.squared_norm(frame) == twins.squared_norm_int8(frame)


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_int8_error_is_at_most_half_a_step(values: np.ndarray) -> None:
    decoded = codec.decode(codec.encode("int8", values, block=16), len(values))
    for start in range(0, len(values), 16):
        part = values[start : start + 16].astype(np.float64)
        peak = np.abs(part).max()
        bound = 2.0**-100 if peak < 2.0**-100 else peak / 254 * (1 + 2.0**-14)
        assert np.abs(decoded[start : start + 16] - part).max() <= bound


@pytest.mark.parametrize(("block", "worst"), [(16, 1.0077), (1024, 1.0649), (4096, 1.1326), (1 << 16, 1.5849)])
def test_encoding_lengthens_a_vector_most_where_all_but_the_largest_value_round_up(block: int, worst: float) -> None:
    """By max_k √((127² + (B - 1)·(k + 1)²) / (127² + (B - 1)·(k + ½)²)); who bounds a result's norm reckons with it."""

    def lengthened(values: np.ndarray) -> float:
        frames = [codec.encode(name, values, block=block) for name in ("int8", "fp32")]
        return float(np.sqrt(codec.squared_norm(frames[0]) / codec.squared_norm(frames[1])))

    found = []
    for k in range(127):
        values = np.full(block, np.nextafter(np.float32(k + 0.5), np.float32(128)))
        values[0] = 127
        found.append(lengthened(values))
    assert max(found) == pytest.approx(worst, abs=1e-4)
    rng = np.random.default_rng(block)
    for size in (0.3, 1.0, 3.0, 20.0):
        for drawn in (rng.uniform(0, size, block), rng.standard_normal(block) * size, rng.laplace(size=block)):
            assert lengthened(drawn) <= worst + 1e-4


@settings(max_examples=30, deadline=None)
@given(VALUES)
def test_fp32_keeps_every_bit(values: np.ndarray) -> None:
    frame = codec.encode("fp32", values, block=16)
    assert codec.decode(frame, len(values)).tobytes() == values.tobytes()
    assert frame[16:] == values.astype("<f4").tobytes()
    assert codec.squared_norm(frame) == twins.squared_norm(values, 16)


def test_fp32_norm_of_many_tiles_equals_its_twin() -> None:
    values = np.random.default_rng(1).standard_normal(40_013).astype(np.float32)
    frame = codec.encode("fp32", values, block=96)
    assert codec.squared_norm(frame) == twins.squared_norm(values, 96)


@pytest.mark.parametrize("name", codec.names())
def test_the_norm_of_a_block_that_ends_within_the_lanes_equals_its_twin(name: str) -> None:
    for seed in range(8):
        values = np.random.default_rng(seed).standard_normal(77).astype(np.float32)
        frame = codec.encode(name, values, block=1024)
        values = codec.decode(frame, 77)
        wanted = twins.squared_norm_int8(frame) if name == "int8" else twins.squared_norm(values, 1024)
        assert codec.squared_norm(frame) == wanted


def test_the_largest_code_is_always_127() -> None:
    """absmax / (absmax / 127), both rounded, comes back to 127 for mantissas all over the range."""
    rng = np.random.default_rng(3)
    peaks = rng.integers(0x3F800000, 0x40000000, 20_000, dtype=np.int32).view(np.float32)
    values = np.zeros((20_000, 16), np.float32)
    values[:, 5] = -peaks
    frame = codec.encode("int8", values.reshape(-1), block=16)
    codec.check(frame, codec="int8", block=16, n_values=values.size)


def test_ties_go_to_even() -> None:
    frame = codec.encode("int8", floats(127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5), block=16)
    assert np.frombuffer(frame, np.int8)[CODES_AT:].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


@pytest.mark.parametrize(("name", "largest_code"), [("int8", 127), ("int4", 7)])
def test_a_value_around_a_tie_goes_where_true_division_says(name: str, largest_code: int) -> None:
    values = codec_twins.around_ties(largest_code, 3000)
    assert codec.encode(name, values, block=16) == codec_twins.ENCODE[name](values, 16)


def test_a_tiny_block_is_zero_and_the_next_larger_one_is_not() -> None:
    tiny = np.nextafter(np.float32(2.0**-100), np.float32(0))
    assert codec.encode("int8", floats(tiny, -tiny, 1e-45), block=16)[16:] == bytes(7)
    assert codec.decode(codec.encode("int8", floats(2.0**-100), block=16), 1)[0] > 0
    assert codec.encode("int8", floats(-0.0, 0.0), block=16)[16:] == bytes(6)


@pytest.mark.parametrize("name", codec.names())
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38, 1e300])
def test_a_value_that_is_not_finite_or_absurd_is_refused_by_the_sender(name: str, bad: float) -> None:
    for at in (0, 17, 39):
        values = np.ones(40)
        values[at] = bad
        with pytest.raises(CodecError, match=r"finite|cap"):
            codec.encode(name, values, block=64)


@pytest.mark.parametrize("name", codec.names())
def test_only_flat_vectors_with_values_are_encoded(name: str) -> None:
    shapes: list[Any] = [np.ones((2, 16)), np.float32(1), []]
    for values in shapes:
        with pytest.raises(CodecError):
            codec.encode(name, values)
    for block in (0, 8, 24, 1 << 17, -16):
        with pytest.raises(CodecError, match="block"):
            codec.encode(name, np.ones(32), block=block)
    with pytest.raises(CodecError, match="no codec"):
        codec.encode("int7", np.ones(32))


def mutate(frame: bytes, at: int, new: bytes) -> bytes:
    return frame[:at] + new + frame[at + len(new) :]


def scale_bytes(value: float) -> bytes:
    return struct.pack("<f", value)


FRAME = codec.encode("int8", np.linspace(-1, 1, 40), block=16)
ZEROS = codec.encode("int8", np.zeros(40), block=16)
REFUSED = {
    "empty": b"",
    "header only": FRAME[:16],
    "cut header": FRAME[:15],
    "one byte short": FRAME[:-1],
    "one byte long": FRAME + b"\0",
    "magic": mutate(FRAME, 0, b"BRF2"),
    "codec id": mutate(FRAME, 4, b"\x63"),
    "codec id of the other": mutate(FRAME, 4, b"\x02"),
    "reserved 1": mutate(FRAME, 5, b"\1"),
    "reserved 3": mutate(FRAME, 7, b"\1"),
    "block 0": mutate(FRAME, 8, bytes(4)),
    "block 17": mutate(FRAME, 8, struct.pack("<I", 17)),
    "block huge": mutate(FRAME, 8, b"\xf0\xff\xff\xff"),
    "no values": mutate(FRAME, 12, bytes(4)),
    "more values": mutate(FRAME, 12, struct.pack("<I", 41)),
    "all values": mutate(FRAME, 12, b"\xff\xff\xff\xff"),
    "scale nan": mutate(FRAME, SCALE_AT, scale_bytes(np.nan)),
    "scale inf": mutate(FRAME, SCALE_AT, scale_bytes(np.inf)),
    "scale negative": mutate(FRAME, SCALE_AT, scale_bytes(-0.5)),
    "scale minus zero": mutate(ZEROS, SCALE_AT, scale_bytes(-0.0)),
    "scale denormal": mutate(FRAME, SCALE_AT, scale_bytes(1e-42)),
    "scale too small": mutate(FRAME, SCALE_AT, scale_bytes(2.0**-107 * (1 - 2.0**-24))),
    "scale above the cap": mutate(FRAME, SCALE_AT, scale_bytes(2.0**32 * (1 + 2.0**-23))),
    "scale zero with codes": mutate(FRAME, SCALE_AT, scale_bytes(0.0)),
    "scale without codes": mutate(ZEROS, SCALE_AT, scale_bytes(1.0)),
    "scale of the last block": mutate(FRAME, 16 + 2 * 20, scale_bytes(np.nan)),
    "code in a zero block": mutate(ZEROS, CODES_AT + 3, b"\1"),
    "code -128": mutate(FRAME, CODES_AT + 3, b"\x80"),
    "peak 126": mutate(FRAME, CODES_AT, b"\x82"),
}


def test_what_is_mutated_was_fine_before() -> None:
    for frame in (FRAME, ZEROS):
        codec.check(frame, codec="int8", block=16, n_values=40)
    assert FRAME[CODES_AT : CODES_AT + 1] == b"\x81"


@pytest.mark.parametrize("kind", REFUSED)
def test_every_other_form_is_refused(kind: str) -> None:
    with pytest.raises(CodecError):
        codec.check(REFUSED[kind], codec="int8", block=16, n_values=40)


@pytest.mark.parametrize("kind", [kind for kind in REFUSED if kind != "scale above the cap"])
def test_every_other_form_is_refused_by_all_that_read_frames(kind: str) -> None:
    out = np.full(40, 7, np.float32)
    with pytest.raises(CodecError):
        codec.decode(REFUSED[kind], 1 << 20)
    with pytest.raises(CodecError):
        codec.decode_into(REFUSED[kind], out)
    with pytest.raises(CodecError):
        codec.squared_norm(REFUSED[kind])
    assert (out == 7).all()


def test_results_have_room_above_the_cap_of_contributions() -> None:
    frame = REFUSED["scale above the cap"]
    codec.check(frame, codec="int8", block=16, n_values=40, scale_cap=codec.RESULT_SCALE_CAP)
    above = mutate(FRAME, SCALE_AT, scale_bytes(2.0**33 * (1 + 2.0**-23)))
    with pytest.raises(CodecError, match="scale"):
        codec.check(above, codec="int8", block=16, n_values=40, scale_cap=codec.RESULT_SCALE_CAP)
    with pytest.raises(CodecError, match="scale"):
        codec.decode(above, 40)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38, -1e38])
@pytest.mark.parametrize("at", [0, 39])
def test_fp32_frames_are_finite_and_bounded(bad: float, at: int) -> None:
    frame = mutate(codec.encode("fp32", np.ones(40), block=16), 16 + 4 * at, scale_bytes(bad))
    with pytest.raises(CodecError, match=f"value {at}"):
        codec.check(frame, codec="fp32", block=16, n_values=40)
    with pytest.raises(CodecError):
        codec.decode(frame, 40)


def test_a_frame_must_be_the_one_expected() -> None:
    for wanted in (("fp32", 16, 40), ("int8", 32, 40), ("int8", 16, 39)):
        with pytest.raises(CodecError, match="frame holds"):
            codec.check(FRAME, codec=wanted[0], block=wanted[1], n_values=wanted[2])


def test_sizes_are_checked_before_memory() -> None:
    with pytest.raises(CodecError, match="at most 39"):
        codec.decode(FRAME, 39)
    with pytest.raises(CodecError, match="contiguous"):
        codec.decode(memoryview(FRAME)[::2], 40)
    with pytest.raises(CodecError, match="buffer has 10"):
        codec.encode_into("int8", np.ones(40), bytearray(10), block=16)
    with pytest.raises(CodecError, match="read-only"):
        codec.encode_into("int8", np.ones(40), bytes(100), block=16)
    unfit: list[Any] = [
        np.empty(39, np.float32),
        np.empty(40),
        np.empty(80, np.float32)[::2],
        np.empty((1, 40), np.float32),
    ]
    for out in unfit:
        with pytest.raises(CodecError):
            codec.decode_into(FRAME, out)


def test_frames_are_read_and_written_at_any_address() -> None:
    padded = bytearray(3 + codec.frame_bytes("int8", 40, 16))
    n_bytes = codec.encode_into("int8", np.linspace(-1, 1, 40), memoryview(padded)[3:], block=16)
    assert padded[3 : 3 + n_bytes] == FRAME
    assert codec.squared_norm(memoryview(padded)[3:]) == codec.squared_norm(FRAME)
    fp32 = codec.encode("fp32", np.linspace(-1, 1, 40), block=16)
    assert codec.squared_norm(memoryview(b"123" + fp32)[3:]) == codec.squared_norm(fp32)
    strided = np.linspace(-1, 1, 80, dtype=np.float32)[::2]
    assert codec.encode("int8", strided, block=16) == codec.encode("int8", strided.copy(), block=16)


@pytest.mark.parametrize("name", codec.names())
def test_a_range_of_blocks_lies_in_one_piece(name: str) -> None:
    values = np.random.default_rng(0).standard_normal(300).astype(np.float32)
    frame = codec.encode(name, values, block=64)
    whole = [
        codec.body_range(name, block=64, n_values=300, value_start=a, value_stop=b)
        for a, b in ((0, 128), (128, 192), (192, 300))
    ]
    assert whole[0][0] == 16
    assert whole[-1][1] == len(frame) == codec.frame_bytes(name, 300, 64)
    assert all(a[1] == b[0] for a, b in pairwise(whole))
    alone = codec.encode(name, values[128:192], block=64)
    assert frame[whole[1][0] : whole[1][1]] == alone[16:]
    for start, stop in ((1, 64), (0, 65), (64, 64), (128, 64), (0, 320), (-64, 64)):
        with pytest.raises(CodecError):
            codec.body_range(name, block=64, n_values=300, value_start=start, value_stop=stop)


@pytest.mark.parametrize("case", GOLDEN["frames"], ids=lambda case: f"{case['codec']}-{case['about']}")
def test_frames_keep_their_bytes(case: dict[str, object]) -> None:
    values = np.frombuffer(bytes.fromhex(str(case["values_f32le"])), "<f4")
    frame = codec.encode(str(case["codec"]), values, block=int(str(case["block"])))
    assert frame.hex() == case["frame"]
    assert codec.squared_norm(frame).hex() == case["squared_norm"]
