"""The outer step: pinned values, torch's arithmetic, every bit as plain numpy has it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aggregation import codec
from aggregation.errors import CodecError
from aggregation.outer import nesterov, nesterov_from_frame
from tests.aggregation import twins


def fp32(n: int, seed: int, size: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n) * size).astype(np.float32)


def test_a_constant_pseudo_gradient_gives_the_pinned_values() -> None:
    anchor, momentum, delta = np.zeros(1, np.float32), np.zeros(1, np.float32), np.ones(1, np.float32)
    for pinned in (-1.33, -3.227, -5.6343):
        nesterov(anchor, momentum, delta, lr=0.7, momentum=0.9)
        assert anchor[0] == pytest.approx(pinned, rel=1e-6)


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.7, 0.6), (1.0, 0.0), (0.4, 0.9)])
def test_it_steps_as_torch_does(lr: float, momentum: float) -> None:
    anchor, buffer = fp32(1000, 0), np.zeros(1000, np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(anchor.copy()))
    optimizer = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=momentum > 0)
    for step in range(5):
        delta = fp32(1000, 10 + step, 1e-2)
        parameter.grad = torch.from_numpy(delta)
        optimizer.step()
        nesterov(anchor, buffer, delta, lr=lr, momentum=momentum)
    np.testing.assert_allclose(anchor, parameter.detach().numpy(), rtol=1e-6, atol=1e-7)


def test_every_product_and_sum_is_rounded_by_itself() -> None:
    """Equal to numpy, which never fuses, on 100,000 values of all magnitudes, denormals included."""
    anchor, momentum, delta = (
        fp32(100_003, seed) * np.float32(2) ** (np.arange(100_003) % 150 - 130) for seed in (1, 2, 3)
    )
    anchor, momentum, delta = (each.astype(np.float32) for each in (anchor, momentum, delta))
    expected = twins.nesterov(anchor, momentum, delta, 0.7, 0.9)
    nesterov(anchor, momentum, delta, lr=0.7, momentum=0.9)
    assert (anchor.tobytes(), momentum.tobytes()) == (expected[0].tobytes(), expected[1].tobytes())
    fused = (np.float64(np.float32(0.9)) * momentum.astype(np.float64) + delta).astype(np.float32)
    unfused = np.float32(0.9) * momentum + delta
    assert (fused != unfused).any()  # the values do tell the two apart


def test_outer_lr_0_changes_no_parameter() -> None:
    anchor, momentum = fp32(100, 0), np.zeros(100, np.float32)
    before = anchor.copy()
    nesterov(anchor, momentum, fp32(100, 1), lr=0.0, momentum=0.9)
    assert (anchor == before).all()
    assert momentum.any()


def test_lr_1_without_momentum_goes_where_the_nodes_went() -> None:
    anchor, trained = fp32(100, 0), fp32(100, 1)
    momentum = np.zeros(100, np.float32)
    nesterov(anchor, momentum, anchor - trained, lr=1.0, momentum=0.0)
    np.testing.assert_allclose(anchor, trained, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", codec.names())
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_a_step_from_a_frame_is_a_step_with_scaled_decoded_values(name: str, scale: float) -> None:
    frame = codec.encode(name, fp32(150, 5, 1e-3), block=64)
    anchor, momentum = fp32(150, 0), fp32(150, 1)
    other, other_momentum = anchor.copy(), momentum.copy()
    nesterov_from_frame(anchor, momentum, frame, lr=0.7, momentum=0.9, scale=scale)
    delta = np.float32(scale) * codec.decode(frame, 150)
    nesterov(other, other_momentum, delta, lr=0.7, momentum=0.9)
    assert anchor.tobytes() == other.tobytes()
    assert momentum.tobytes() == other_momentum.tobytes()


def test_it_writes_through_a_mapped_file(tmp_path: object) -> None:
    mapped = np.memmap(f"{tmp_path}/theta", np.float32, "w+", shape=(8,))
    nesterov(mapped, np.zeros(8, np.float32), np.ones(8, np.float32), lr=1.0, momentum=0.0)
    assert (np.fromfile(f"{tmp_path}/theta", np.float32) == -1).all()


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    anchor, momentum, delta = fp32(32, 0), fp32(32, 1), fp32(32, 2)
    before = anchor.tobytes() + momentum.tobytes()
    locked = anchor.copy()
    locked.setflags(write=False)
    for bad in (
        (anchor, momentum, delta[:31]),
        (anchor, momentum[:31], delta),
        (anchor.astype(np.float64), momentum, delta),
        (locked, momentum, delta),
        (np.repeat(anchor, 2)[::2], momentum, delta),
    ):
        with pytest.raises(ValueError, match=r"differ|writable"):
            nesterov(*bad, lr=0.7, momentum=0.9)
    for lr, mu in ((np.nan, 0.9), (0.7, np.inf), (1e39, 0.9)):
        with pytest.raises(ValueError, match="fp32"):
            nesterov(anchor, momentum, delta, lr=lr, momentum=mu)
    frame = codec.encode("int8", delta, block=16)
    for wrong in (frame[:-1], codec.encode("int8", delta[:31], block=16)):
        with pytest.raises(CodecError):
            nesterov_from_frame(anchor, momentum, wrong, lr=0.7, momentum=0.9)
    with pytest.raises(ValueError, match="scale"):
        nesterov_from_frame(anchor, momentum, frame, lr=0.7, momentum=0.9, scale=np.nan)
    assert anchor.tobytes() + momentum.tobytes() == before
