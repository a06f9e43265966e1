"""Error feedback: nothing is lost, nothing is counted twice, and over rounds the small values come through."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aggregation import codec
from aggregation.codec import feedback
from aggregation.errors import CodecError
from tests.aggregation import codec_twins
from tests.aggregation.twins import Floats

NAMES = [name for name in codec.names() if codec.feedback_decay(name) is not None]
ANY = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**33), max_value=2.0**33)
FEW = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1 + 2.0**-23, 2 - 2.0**-23, 1e-45, -3e-39, 2.0**-100, 2.0**-101, 2.0**33])
CLOSE = st.floats(width=32, min_value=1.0, max_value=8.0)
PAIRS = st.integers(1, 300).flatmap(
    lambda n: st.tuples(*[arrays(np.float32, n, elements=ANY | FEW | CLOSE) for _ in range(2)])
)


def decay(name: str) -> np.float32:
    return np.float32(codec.feedback_decay(name))


def encoded(name: str, delta: Floats, residual: Floats, block: int) -> tuple[bytes, Floats, Floats]:
    """Frame, decoded values, next residual."""
    out = bytearray(codec.frame_bytes(name, len(delta), block) + 3)
    following = np.full(len(delta), np.nan, np.float32)
    n_bytes = feedback.encode(name, delta, residual, out, following, block=block)
    assert n_bytes == len(out) - 3
    assert out[n_bytes:] == bytes(3)
    frame = bytes(out[:n_bytes])
    return frame, codec.decode(frame, len(delta)), following


def conserves(name: str, delta: Floats, residual: Floats, block: int) -> None:
    before = delta.tobytes() + residual.tobytes()
    frame, decoded, following = encoded(name, delta, residual, block)
    total = decay(name) * residual + delta
    assert frame == codec.encode(name, total, block=block) == codec_twins.ENCODE[name](total, block)
    assert (decoded + following == total).all()
    # Not only after rounding: the two add up to it exactly.
    at = slice(None, None, max(1, len(total) // 500))
    pieces = zip(*(codec_twins.exact(array[at]) for array in (decoded, following, total)), strict=True)
    assert all(sent + kept == whole for sent, kept, whole in pieces)
    assert delta.tobytes() + residual.tobytes() == before


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(PAIRS, st.sampled_from([64, 128, 256]))
def test_what_is_sent_and_what_is_kept_add_up_exactly(name: str, pair: tuple[Floats, Floats], block: int) -> None:
    conserves(name, *pair, block)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spread", [0, 1, 3, 8, 20, 60])
def test_they_add_up_over_many_blocks_of_every_spread(name: str, spread: int) -> None:
    rng = np.random.default_rng(spread)
    delta, residual = (
        (rng.uniform(-2, 2, 20_013) * 2.0 ** rng.uniform(-spread, spread / 4, 20_013)).astype(np.float32)
        for _ in range(2)
    )
    conserves(name, delta, residual, 4096)
    conserves(name, delta, np.zeros_like(delta), 64)


@pytest.mark.parametrize("name", NAMES)
def test_they_add_up_for_heavy_tails_and_full_mantissas(name: str) -> None:
    rng = np.random.default_rng(9)
    delta = rng.standard_cauchy(8192).astype(np.float32)
    delta[::5] = np.nextafter(delta[::5], np.float32(0))
    conserves(name, delta, rng.standard_normal(8192).astype(np.float32) * np.float32(1e-3), 4096)


@pytest.mark.parametrize("name", NAMES)
def test_a_round_that_does_not_commit_counts_nothing_and_loses_nothing(name: str) -> None:
    """Every step taken is, in the end, committed once, kept, still to come, or in the roundings of a; nothing else."""
    rng = np.random.default_rng(1)
    n_values, block = 640, 64
    residual = np.zeros(n_values, np.float32)
    committed = np.zeros(n_values)
    trained = np.zeros(n_values)
    rounded = np.zeros(n_values)  # what the decay and the rounding of a to fp32 took
    delta = np.zeros(n_values, np.float32)  # against the anchor, so it grows until a commit
    for round_ in range(40):
        step = rng.integers(-8, 9, n_values).astype(np.float32)
        delta += step
        trained += step
        _, decoded, following = encoded(name, delta, residual, block)
        if round_ % 3 != 1:
            total = decay(name) * residual + delta
            rounded += residual.astype(np.float64) + delta - total
            committed += decoded
            residual = following
            delta = np.zeros(n_values, np.float32)
    assert np.abs(residual).max() > 0.01
    assert np.abs(trained - committed - rounded - residual - delta).max() < 1e-11
    if name == "int4":
        assert np.abs(rounded).max() < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_over_rounds_what_is_decoded_follows_what_was_put_in(name: str) -> None:
    """Of a constant delta only what is large arrives by itself; with feedback the rest does too."""
    rng = np.random.default_rng(2)
    goal = (rng.standard_normal(512) * 0.01).astype(np.float32)
    large = np.arange(0, 512, 128)  # four, where topk has places for eight
    goal[large] = 1.0
    residual, with_feedback, without = np.zeros_like(goal), np.zeros(512), np.zeros(512)
    n_rounds = 400
    for _ in range(n_rounds):
        _, decoded, residual = encoded(name, goal, residual, 512)
        with_feedback += decoded
        without += codec.decode(codec.encode(name, goal, block=512), 512)
    small = np.delete(np.arange(512), large)
    arrived, arrived_without = (
        float(sums[small] @ goal[small] / (goal[small] @ goal[small])) / n_rounds for sums in (with_feedback, without)
    )
    assert arrived_without < 0.1
    if name == "int4":
        assert arrived == pytest.approx(1.0, abs=1e-2)
        assert np.abs(with_feedback + residual - n_rounds * goal.astype(np.float64)).max() < 1e-3  # roundings of a
        assert np.abs(residual).max() <= 1.1 / 14
    else:
        # 508 values share four places: each waits, and what has waited for longer than 1/(1-β) rounds fades.
        assert arrived > 2 * arrived_without
        assert np.count_nonzero(with_feedback[small]) > 20 * np.count_nonzero(without[small]) > 0


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_sent_is_refused_and_the_residual_survives(name: str) -> None:
    block = 64
    out, following = bytearray(40_000), np.empty(40_000, np.float32)
    for bad in (np.nan, np.inf, 1e38):
        for at in (0, 39_999):
            delta, residual = np.ones(40_000, np.float32), np.ones(40_000, np.float32)
            for array in (delta, residual):
                array[at] = bad
                kept = residual.tobytes()
                with pytest.raises(CodecError, match=r"values from (0|32768) on: .*(finite|cap)"):
                    feedback.encode(name, delta, residual, out, following, block=block)
                assert residual.tobytes() == kept


def test_what_does_not_fit_together_is_refused() -> None:
    ones, out, other = np.ones(128, np.float32), bytearray(200), np.empty(128, np.float32)
    locked, mapped = other.copy(), np.zeros(256, np.float32)
    locked.setflags(write=False)
    unfit: list[tuple[Any, ...]] = [
        ("int4", ones, ones[:-1], out, other),
        ("int4", ones, ones, out, other[:-1]),
        ("int4", ones, ones, out, locked),
        ("int4", ones, ones, out, ones),  # the residual must outlive a round that does not commit
        ("int4", ones, mapped[:128], out, mapped[127:255]),
        ("int4", ones, other, out, ones),  # as must the delta, which the next attempt sends again
        ("int4", mapped[:128], ones, out, mapped[1:129]),
        ("int4", ones, ones, other, other),  # a frame over the next residual, the delta or the residual
        ("int4", other, ones, other[5:], mapped[:128]),
        ("int4", ones, other, other.view(np.uint8)[1:], mapped[:128]),
        ("int4", ones, ones, bytearray(20), other),
        ("int4", ones, ones, bytes(200), other),
        ("int4", ones.astype(np.float64), ones, out, other),
        ("int4", ones, mapped[::2], out, other),
        ("int4", ones.reshape(2, 64), ones, out, other),
        ("int4", ones[:0], ones[:0], out, other[:0]),
    ]
    for name, delta, residual, frame, following in unfit:
        with pytest.raises(CodecError):
            feedback.encode(name, delta, residual, frame, following, block=64)
    with pytest.raises(CodecError, match="topk: block 16"):
        feedback.encode("topk", ones, ones, out, other, block=16)
    for name in ("int8", "fp16", "fp32"):
        with pytest.raises(CodecError, match="no error feedback"):
            feedback.encode(name, ones, ones, out, other, block=64)
    with pytest.raises(CodecError, match="no codec"):
        feedback.encode("int5", ones, ones, out, other, block=64)
    assert feedback.encode("int4", ones, mapped[:128], out, mapped[128:], block=64) == 16 + 2 * (4 + 32)


def test_residuals_may_be_mapped_files(tmp_path: object) -> None:
    files = [np.memmap(f"{tmp_path}/{i}", np.float32, "w+", shape=(700,)) for i in range(3)]
    rng = np.random.default_rng(3)
    for array in files[:2]:
        array[:] = rng.standard_normal(700)
    out = bytearray(codec.frame_bytes("topk", 700, 128))
    feedback.encode("topk", files[0], files[1], out, files[2], block=128)
    frame, _, following = encoded("topk", np.array(files[0]), np.array(files[1]), 128)
    assert bytes(out) == frame
    assert np.fromfile(f"{tmp_path}/2", np.float32).tobytes() == following.tobytes()
