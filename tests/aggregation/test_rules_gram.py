"""Gram matrices to the bit: what geometry decides by is the same fp64 number on every machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregation import codec
from aggregation.codec import HEADER_BYTES
from aggregation.rules.gram import GramOfValues, gram_of_codes
from aggregation.rules.rows import Int8Rows
from tests.aggregation import rule_twins, twins

SIZES = st.sampled_from([0.0, 1.0, 2.0**-90, 2.0**30, 3e-5])


def rows(n: int, n_values: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, n_values)).astype(np.float32)


def of_values(rows_KP: np.ndarray, block: int, tile: int) -> np.ndarray:
    gram = GramOfValues(len(rows_KP), block)
    for start in range(0, rows_KP.shape[1], tile):
        gram.add(np.ascontiguousarray(rows_KP[:, start : start + tile]))
    return gram.finish()


def of_codes(frames: list[bytes], n_values: int, block: int, factors: list[float]) -> np.ndarray:
    bodies = [np.frombuffer(frame, np.uint8)[HEADER_BYTES:] for frame in frames]
    return gram_of_codes(Int8Rows(bodies, n_values, block, factors))


def same(result: np.ndarray, expected: rule_twins.Gram) -> None:
    assert result.tobytes() == np.array(expected).tobytes()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 150), st.sampled_from([16, 32, 64]), st.integers(1, 3), st.data())
def test_of_values_it_is_lanes_then_blocks_in_order(
    n: int, n_values: int, block: int, blocks_a_tile: int, data: st.DataObject
) -> None:
    values = rows(n, n_values, data.draw(st.integers(0, 2**32 - 1)))
    values *= np.array([data.draw(SIZES) for _ in range(n)], np.float32)[:, None]
    same(of_values(values, block, block * blocks_a_tile), rule_twins.gram_of_values(values, block))


def test_its_diagonal_is_the_norm_that_a_sender_commits_to() -> None:
    values = rows(3, 5000)
    for name in ("fp32", "fp16", "int4", "topk"):
        frames = [codec.encode(name, row, block=1024) for row in values]
        decoded = np.stack([codec.decode(frame, 5000) for frame in frames])
        gram = of_values(decoded, 1024, 1024)
        assert np.diagonal(gram).tolist() == [codec.squared_norm(frame) for frame in frames]
    frames = [codec.encode("int8", row, block=1024) for row in values]
    norms = [codec.squared_norm(frame) for frame in frames]
    assert np.diagonal(of_codes(frames, 5000, 1024, [1.0] * 3)).tolist() == norms


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 150), st.sampled_from([16, 32, 64]), st.data())
def test_of_codes_it_is_integer_dots_times_both_scales(n: int, n_values: int, block: int, data: st.DataObject) -> None:
    values = rows(n, n_values, data.draw(st.integers(0, 2**32 - 1)))
    values *= np.array([data.draw(SIZES) for _ in range(n)], np.float32)[:, None]
    frames = [codec.encode("int8", row, block=block) for row in values]
    factors = [1.0] * (n - 1) + [data.draw(st.sampled_from([1.0, 0.37, 0.0]))]
    same(of_codes(frames, n_values, block, factors), rule_twins.gram_of_frames(frames, factors))


@pytest.mark.parametrize("block", [1024, 1 << 16])
def test_the_largest_codes_of_the_largest_block_overflow_nothing(block: int) -> None:
    """127² · 65536 is half of what an int32 holds; 128², of frames that nobody checked, would just fit too."""
    ends = [np.full(2 * block + 5, sign * 127 * 2.0**32, np.float32) for sign in (1, -1)]
    frames = [codec.encode("int8", end, block=block) for end in ends]
    gram = of_codes(frames, 2 * block + 5, block, [1.0, 1.0])
    assert codec.squared_norm(frames[0]) == gram[0, 0]
    same(gram, rule_twins.gram_of_frames(frames, [1.0, 1.0]))
    assert gram[0, 1] == -gram[0, 0] == -(127.0**2) * 2.0**64 * (2 * block + 5)
    lowest = bytearray(frames[0])
    for at in range(HEADER_BYTES, len(lowest), block + 4):
        lowest[at + 4 : at + 4 + block] = b"\x80" * len(lowest[at + 4 : at + 4 + block])
    assert of_codes([bytes(lowest)], 2 * block + 5, block, [1.0])[0, 0] == 2.0**14 * 2.0**64 * (2 * block + 5)


def test_both_are_near_the_true_inner_products() -> None:
    values = rows(4, 3000)
    frames = [codec.encode("int8", row, block=64) for row in values]
    decoded = np.stack([twins.decode_int8(frame) for frame in frames]).astype(np.float64)
    exact: Any = decoded @ decoded.T
    np.testing.assert_allclose(of_codes(frames, 3000, 64, [1.0] * 4), exact, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(of_values(decoded.astype(np.float32), 64, 640), exact, rtol=1e-12, atol=1e-12)
