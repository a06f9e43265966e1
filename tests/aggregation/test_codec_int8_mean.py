"""The weighted mean of int8 rows in one walk, and frames checked once: the numbers and refusals of the long way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregation import codec
from aggregation.codec.frame import HEADER_BYTES, RESULT_SCALE_CAP
from aggregation.codec.int8 import Int8
from aggregation.errors import CodecError
from aggregation.rules.mixing import weights_sum
from aggregation.rules.rows import Int8Rows
from tests.aggregation import twins

INT8 = Int8()


def frames_of(seed: int, n_rows: int, n_values: int, block: int) -> list[bytes]:
    rng = np.random.default_rng(seed)
    sizes = np.float32(10.0) ** rng.integers(-20, 5, (n_rows, 1))
    values = (rng.standard_normal((n_rows, n_values), np.float32) * sizes).astype(np.float32)
    return [codec.encode("int8", row, block=block) for row in values]


def mean_of(frames: list[bytes], weights_N: np.ndarray, block: int, scale_cap: float = RESULT_SCALE_CAP) -> bytes:
    n_values = codec.header(frames[0])[1].n_values
    rows = Int8Rows([np.frombuffer(frame, np.uint8)[HEADER_BYTES:] for frame in frames], n_values, block)
    body = np.full(INT8.body_bytes(n_values, block), 0xAA, np.uint8)
    INT8.weighted_mean(rows.span, rows.offsets_K, weights_N, weights_sum(weights_N), n_values, block, scale_cap, body)
    return body.tobytes()


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 6),
    st.integers(1, 200),
    st.sampled_from([16, 48, 64]),
    st.lists(st.floats(2.0**-10, 2.0**20, width=32), min_size=6, max_size=6),
)
def test_it_equals_the_twin(seed: int, n_rows: int, n_values: int, block: int, weights: list[float]) -> None:
    frames = frames_of(seed, n_rows, n_values, block)
    weights_N = np.array(weights[:n_rows], np.float32)
    total = twins.decode_int8(frames[0]) * weights_N[0]
    for frame, weight in zip(frames[1:], weights_N[1:], strict=True):
        total = total + twins.decode_int8(frame) * weight
    wanted = twins.encode_int8(total / weights_sum(weights_N), block)
    assert mean_of(frames, weights_N, block) == wanted[HEADER_BYTES:]


def test_a_mean_beyond_the_cap_is_refused_with_its_block() -> None:
    values = np.ones(40, np.float32)
    values[20] = 127 * 8.0
    frames = [codec.encode("int8", values, block=16)] * 2
    with pytest.raises(CodecError, match="int8 block 1: a value is beyond the codec's cap"):
        mean_of(frames, np.ones(2, np.float32), 16, scale_cap=4.0)


@pytest.mark.parametrize("name", codec.names())
def test_a_frame_is_checked_and_measured_at_once(name: str) -> None:
    block = 128
    values = np.random.default_rng(5).standard_normal(1000, np.float32)
    frame = codec.encode(name, values, block=block)
    assert codec.measure(frame, codec=name, block=block, n_values=1000) == codec.squared_norm(frame)
    for wrong in (
        {"codec": name, "block": block, "n_values": 999},
        {"codec": name, "block": 64, "n_values": 1000},
        {"codec": "fp32" if name == "int8" else "int8", "block": block, "n_values": 1000},
    ):
        with pytest.raises(CodecError, match="frame holds 1000 values"):
            codec.measure(frame, **wrong)
    with pytest.raises(CodecError):
        codec.measure(frame[:-1], codec=name, block=block, n_values=1000)


def test_a_frame_that_is_not_canonical_has_no_measure() -> None:
    frame = bytearray(codec.encode("int8", np.ones(32, np.float32), block=32))
    frame[HEADER_BYTES + 4 :] = bytes([126]) * 32
    with pytest.raises(CodecError, match="the largest code is not 127"):
        codec.measure(frame, codec="int8", block=32, n_values=32)
    decoded = np.empty(32, np.float32)
    with pytest.raises(CodecError, match="the largest code is not 127"):
        codec.decode_into(frame, decoded)
    codec.decode_into(frame, decoded, checked=True)  # the caller's word counts
    assert decoded.tobytes() == twins.decode_int8(bytes(frame)).tobytes()
    with pytest.raises(CodecError, match="31"):
        codec.decode_into(frame, decoded[:31], checked=True)
