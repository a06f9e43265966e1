"""What every codec makes of empty, constant, tiny, lopsided, odd-length, strided and foreign input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from aggregation import codec
from aggregation.errors import CodecError
from tests.aggregation import codec_twins
from tests.aggregation.twins import Floats

B = 128


def roundtrip(name: str, values: Any, block: int = B) -> Floats:
    frame = codec.encode(name, values, block=block)
    codec.check(frame, codec=name, block=block, n_values=len(values))
    assert len(frame) == codec.frame_bytes(name, len(values), block)
    assert codec.encode(name, values, block=block) == frame
    return codec.decode(frame, len(values))


@pytest.mark.parametrize("name", codec.names())
@pytest.mark.parametrize("n_values", [1, 2, B - 1, B, B + 1, 2 * B - 63, 2 * B + 64])
def test_every_length(name: str, n_values: int) -> None:
    values = np.random.default_rng(n_values).standard_normal(n_values).astype(np.float32)
    frame = codec.encode(name, values, block=B)
    assert frame == codec_twins.ENCODE[name](values, B)
    assert codec.decode(frame, n_values).tobytes() == codec_twins.DECODE[name](frame).tobytes()


@pytest.mark.parametrize("name", codec.names())
def test_no_values_are_no_frame(name: str) -> None:
    with pytest.raises(CodecError, match="0 values"):
        codec.encode(name, np.empty(0, np.float32))
    with pytest.raises(CodecError):
        codec.frame_bytes(name, 0, 1024)


@pytest.mark.parametrize("name", codec.names())
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_stay_zeros(name: str, zero: float) -> None:
    assert (roundtrip(name, np.full(2 * B + 5, zero, np.float32)) == 0).all()


@pytest.mark.parametrize("name", codec.names())
@pytest.mark.parametrize("constant", [1.0, -3.0, 1e-3, 7e-12, 65504.0])
def test_constants_keep_their_value_wherever_they_are_sent(name: str, constant: float) -> None:
    decoded = roundtrip(name, np.full(B + 65, constant, np.float32))
    exact = {"int8": 1e-7, "fp32": 0, "int4": 1e-7, "fp16": 2.0**-11, "topk": 2.0**-7}[name]
    if name == "topk":
        assert np.flatnonzero(decoded).tolist() == [0, 1, B, B + 1]
        decoded = decoded[decoded != 0]
    if name == "fp16" and abs(constant) < 2.0**-25:
        assert (decoded == 0).all()
    else:
        np.testing.assert_allclose(decoded, np.float32(constant), rtol=exact)


@pytest.mark.parametrize("name", codec.names())
def test_subnormal_values(name: str) -> None:
    values = np.array([1e-45, -1e-45, 1e-40, -1.1e-38, 0] * 30, np.float32)
    decoded = roundtrip(name, values)
    assert decoded.tobytes() == values.tobytes() if name == "fp32" else (decoded == 0).all()
    # Beside a value of ordinary size they are as good as zero.
    values[70] = 1.0
    decoded = roundtrip(name, values)
    assert decoded[70] == pytest.approx(1.0)
    if name != "fp32":
        assert (np.delete(decoded, 70) == 0).all()


@pytest.mark.parametrize("name", codec.names())
@pytest.mark.parametrize("outlier", [5e4, -5e4])
def test_one_outlier_hurts_its_own_block_alone(name: str, outlier: float) -> None:
    values = np.random.default_rng(2).standard_normal(3 * B).astype(np.float32)
    before = roundtrip(name, values)
    values[B + 7] = outlier
    decoded = roundtrip(name, values)
    assert decoded[B + 7] == pytest.approx(outlier, rel=2.0**-7)
    assert decoded[:B].tobytes() == before[:B].tobytes()
    assert decoded[2 * B :].tobytes() == before[2 * B :].tobytes()
    if name in ("int8", "int4"):  # what is far below a step of the block is lost, which is why the block is small
        assert (np.delete(decoded[B : 2 * B], 7) == 0).all()


@pytest.mark.parametrize("name", codec.names())
@pytest.mark.parametrize("kind", [np.float16, np.float64, np.int8, np.int64, ">f4", "bool", np.longdouble])
def test_other_numbers_are_taken_as_fp32(name: str, kind: Any) -> None:
    values = np.round(np.random.default_rng(3).standard_normal(B + 9) * 40).astype(kind)
    assert codec.encode(name, values, block=B) == codec.encode(name, values.astype(np.float32), block=B)
    assert codec.encode(name, values.tolist(), block=B) == codec.encode(name, values, block=B)


@pytest.mark.parametrize("name", codec.names())
def test_any_layout_of_the_memory_gives_the_same_bytes_and_is_left_alone(name: str) -> None:
    wide = np.random.default_rng(5).standard_normal((B + 9, 3)).astype(np.float32)
    values = wide[:, 1].copy()
    expected = codec.encode(name, values, block=B)
    values.setflags(write=False)
    shifted = np.frombuffer(b"x" + values.tobytes(), np.uint8)[1:].view("<f4")
    for same in (values, wide[:, 1], wide[::-1, 1][::-1], shifted, torch.from_numpy(wide)[:, 1]):
        assert codec.encode(name, same, block=B) == expected
    assert values.tobytes() == wide[:, 1].tobytes()


def test_bf16_tensors_are_for_the_device_encoder() -> None:
    with pytest.raises(CodecError, match=r"numpy knows.*BFloat16"):
        codec.encode("int8", torch.ones(16, dtype=torch.bfloat16))
    with pytest.raises(CodecError, match="grad"):
        codec.encode("int8", torch.ones(16, requires_grad=True))


def test_bf16_arrays_are_widened() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="numpy itself has no bf16")
    values = np.random.default_rng(6).standard_normal(B).astype(ml_dtypes.bfloat16)
    for name in codec.names():
        assert codec.encode(name, values, block=B) == codec.encode(name, values.astype(np.float32), block=B)


@pytest.mark.parametrize("name", codec.names())
def test_what_is_no_number_is_refused(name: str) -> None:
    strange: list[Any] = [
        ["1", "2"], [None], [1, [2, 3]], np.ones(3, complex), np.ones(3, "V4"), np.ones(3, "M8[s]"), object(), {1: 2},
    ]  # fmt: skip
    for values in strange:
        with pytest.raises(CodecError, match=r"numbers|flat"):
            codec.encode(name, values, block=B)
