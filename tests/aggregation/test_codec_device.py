"""The torch encoder gives the kernel's bytes; here on CPU tensors, and on a CUDA device where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aggregation import codec
from aggregation.codec.device import encode_int8
from aggregation.errors import CodecError
from tests.aggregation import codec_twins

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=NO_GPU)]


def same(values: np.ndarray, block: int, device: str) -> None:
    frame = encode_int8(torch.from_numpy(values.copy()).to(device), block=block)
    assert frame.device.type == device
    assert frame.cpu().numpy().tobytes() == codec.encode("int8", values, block=block)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=40, deadline=None)
@given(
    arrays(np.float32, st.integers(1, 70), elements=st.floats(width=32, min_value=-(2.0**32), max_value=2.0**32)),
    st.sampled_from([16, 32]),
)
def test_any_values(device: str, values: np.ndarray, block: int) -> None:
    same(values, block, device)


@pytest.mark.parametrize("device", DEVICES)
def test_denormals_ties_zero_blocks_and_a_partial_last_block(device: str) -> None:
    ties = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5] + [0] * 8)
    edges = np.array([2.0**-100, 2.0**-101, 1e-45, -1e-40] + [0] * 12)
    small = np.array([2.0**-101, 1e-45, -0.0] + [0] * 13)
    values = np.concatenate([ties, edges, small, np.zeros(16), [1.0, 1e-45, -3.0]]).astype(np.float32)
    same(values, 16, device)
    same(values[:5], 16, device)
    same(values[:64], 16, device)


@pytest.mark.parametrize("device", DEVICES)
def test_values_around_ties(device: str) -> None:
    """A device that divides by multiplying with the inverse shows here."""
    same(codec_twins.around_ties(127, 3000), 16, device)


@pytest.mark.parametrize("device", DEVICES)
def test_many_blocks_of_all_magnitudes(device: str) -> None:
    rng = np.random.default_rng(5)
    scales = np.repeat(2.0 ** rng.uniform(-130, 30, 41), 1024)[:41_500]
    same((rng.uniform(-1, 1, 41_500) * scales).astype(np.float32), 1024, device)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e38])
@pytest.mark.parametrize("at", [0, 39])
def test_it_refuses_what_the_kernel_refuses(bad: float, at: int) -> None:
    values = torch.ones(40)
    values[at] = bad
    with pytest.raises(CodecError, match=r"finite|cap"):
        encode_int8(values, block=16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_widened_exactly(device: str, dtype: torch.dtype) -> None:
    values = torch.randn(1500, generator=torch.Generator().manual_seed(1)).to(dtype)
    values[3] = torch.finfo(dtype).smallest_normal / 4  # a subnormal half
    frame = encode_int8(values.to(device), block=64)
    assert frame.cpu().numpy().tobytes() == codec.encode("int8", values.to(torch.float32), block=64)


@pytest.mark.parametrize("device", DEVICES)
def test_a_strided_tensor_with_a_gradient_is_encoded_as_its_values(device: str) -> None:
    wide = torch.randn(400, 3, generator=torch.Generator().manual_seed(2))
    frame = encode_int8(wide.to(device).detach().clone().requires_grad_()[:, 1], block=64)
    assert not frame.requires_grad
    assert frame.cpu().numpy().tobytes() == codec.encode("int8", wide[:, 1], block=64)


def test_only_flat_floats() -> None:
    for values in (torch.ones(16, dtype=torch.float64), torch.ones(16).int(), torch.ones(2, 16), torch.ones(0)):
        with pytest.raises(CodecError):
            encode_int8(values, block=16)
