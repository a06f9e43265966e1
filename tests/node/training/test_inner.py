from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from aggregation.errors import LayoutError
from aggregation.vector import flatten_into
from node.training.inner import InnerLoop, optimiser_of
from protos.runspec import InnerSpec
from tests.fakes.tiny import SEQUENCE_LENGTH, TinyTask

ADAMW = InnerSpec(lr=0.01, warmup_steps=0)
SGD = InnerSpec(optimiser="sgd", lr=0.1, weight_decay=0.0, clip_norm=0.0)


def batch(seed: int, n: int = 4) -> Tensor:
    return torch.randint(1, 256, (n, SEQUENCE_LENGTH), generator=torch.Generator().manual_seed(seed))


def started(inner: InnerSpec, *, task: TinyTask | None = None, micro_tokens: int = 2**14) -> InnerLoop:
    task = task or TinyTask(7, seed=1)
    layout = task.layout(64)
    theta_D = np.zeros(layout.n_values, np.float32)
    flatten_into(task.parameters(), layout, theta_D)
    loop = InnerLoop(task, inner, layout, micro_tokens=micro_tokens)
    loop.load(theta_D, fresh_moments=True)
    return loop


def delta(loop: InnerLoop) -> NDArray[np.float32]:
    out_D = np.empty(TinyTask(7, seed=1).layout(64).n_values, np.float32)
    loop.delta_into(out_D, 0)
    return out_D


class Poisoned(TinyTask):
    """A task that asks a hook what to make of its loss, step by step."""

    def __init__(self, hook: Callable[[int, Tensor], Tensor]) -> None:
        super().__init__(7, seed=1)
        self.hook = hook
        self.step = -1

    def loss(self, ids_BL: Tensor) -> Tensor:
        self.step += 1
        return self.hook(self.step, super().loss(ids_BL))


def test_steps_are_those_of_torchs_adamw() -> None:
    loop, plain = started(ADAMW), TinyTask(7, seed=1)
    optimiser = torch.optim.AdamW(
        [
            {"params": [value for _, value in plain.parameters() if value.ndim == 2], "weight_decay": 0.1},
            {"params": [value for _, value in plain.parameters() if value.ndim == 1], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.99),
    )
    for seed in range(10):
        loss = plain.loss(batch(seed))
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_([value for _, value in plain.parameters()], 1.0)
        optimiser.step()
        assert loop.step(batch(seed), 0.01) == pytest.approx(float(loss.detach()), rel=1e-5)
    layout = plain.layout(64)
    trained_D = np.zeros(layout.n_values, np.float32)
    flatten_into(plain.parameters(), layout, trained_D)
    start_D = np.zeros_like(trained_D)
    flatten_into(TinyTask(7, seed=1).parameters(), layout, start_D)
    np.testing.assert_allclose(delta(loop), start_D - trained_D, rtol=1e-4, atol=1e-6)
    assert (loop.tally.steps, loop.cold_step) == (10, 10)
    assert loop.tally.sum_lr == pytest.approx(0.1)


@pytest.mark.parametrize("inner", [ADAMW, SGD])
def test_accumulation_changes_no_step(inner: InnerSpec) -> None:
    whole, parts = started(inner), started(inner, micro_tokens=SEQUENCE_LENGTH * 3)
    for seed in range(3):
        assert parts.step(batch(seed, 8), 0.01) == pytest.approx(whole.step(batch(seed, 8), 0.01), rel=1e-5)
    np.testing.assert_allclose(delta(parts), delta(whole), rtol=1e-3, atol=1e-5)
    assert (parts.tally.steps, parts.cold_step) == (3, 3)


def test_clipping_is_by_the_norm_of_all_gradients_together() -> None:
    clipped, free = started(SGD.model_copy(update={"clip_norm": 0.01})), started(SGD)
    for loop in (clipped, free):
        loop.step(batch(0), 1.0)
    assert float(np.linalg.norm(delta(free))) > 0.1
    assert float(np.linalg.norm(delta(clipped))) == pytest.approx(0.01, rel=1e-4)
    np.testing.assert_allclose(delta(clipped) / 0.01, delta(free) / np.linalg.norm(delta(free)), rtol=1e-3, atol=1e-5)


def test_a_gradient_whose_square_overflows_fp32_is_clipped_and_not_skipped() -> None:
    loop = started(SGD.model_copy(update={"clip_norm": 1.0}), task=Poisoned(lambda step, loss: loss * 1e25))
    assert loop.step(batch(0), 1.0) is not None
    assert float(np.linalg.norm(delta(loop))) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize(
    "poison",
    [
        lambda loss: loss * float("nan"),
        lambda loss: loss * float("inf"),
        lambda loss: loss.detach() + (loss - loss.detach()) * 1e39,  # a finite loss whose gradient is infinite
    ],
)
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(
    poison: Callable[[Tensor], Tensor], clip_norm: float
) -> None:
    inner = ADAMW.model_copy(update={"clip_norm": clip_norm})
    loop = started(inner, task=Poisoned(lambda step, loss: poison(loss) if step == 2 else loss))
    without = started(inner)
    found = [loop.step(batch(seed), 0.01) for seed in range(5)]
    wanted = [without.step(batch(seed), 0.01) for seed in (0, 1, 3, 4)]
    assert found == [*wanted[:2], None, *wanted[2:]]
    np.testing.assert_array_equal(delta(loop), delta(without))
    assert (loop.tally.steps, loop.tally.skipped, loop.cold_step) == (4, 1, 4)
    assert loop.tally.sum_lr == pytest.approx(0.04)


@pytest.mark.parametrize("clip_norm", [0.0, 1e30])
def test_a_gradient_whose_square_would_stay_in_the_moments_for_ever_is_skipped(clip_norm: float) -> None:
    inner = ADAMW.model_copy(update={"clip_norm": clip_norm})
    loop = started(inner, task=Poisoned(lambda step, loss: loss * (1e22 if step == 2 else 1.0)))
    without = started(inner)
    found = [loop.step(batch(seed), 0.01) for seed in range(5)]
    assert found == [without.step(batch(seed), 0.01) if seed != 2 else None for seed in range(5)]
    np.testing.assert_array_equal(delta(loop), delta(without))
    assert loop.tally.skipped == 1


def test_parameters_that_ran_away_go_back_to_the_anchor() -> None:
    loop = started(SGD)
    loop.step(batch(0), 0.1)
    loop.step(batch(1), 1e38)  # still finite, and never of any use again
    assert [loop.step(batch(seed), 0.1) for seed in range(2, 7)] == [None] * 5
    assert not delta(loop).any()
    assert (loop.tally.steps, loop.tally.skipped, loop.tally.sum_lr, loop.cold_step) == (0, 7, 0.0, 0)
    assert loop.step(batch(7), 0.1) is not None
    assert np.isfinite(delta(loop)).all()
    assert loop.tally.steps == 1


def test_parameters_that_are_not_finite_are_not_encoded() -> None:
    task = TinyTask(7, seed=1)
    loop = started(ADAMW, task=task)
    loop.step(batch(0), 0.1)
    loop.restore_if_broken()
    assert (loop.tally.steps, loop.tally.skipped) == (1, 0)
    task.parameters()[0][1].data[3, :] = torch.finfo(torch.float32).max  # finite, though their sum is not
    loop.restore_if_broken()
    assert (loop.tally.steps, loop.tally.skipped) == (1, 0)
    task.parameters()[0][1].data[3, 3] = float("inf")
    loop.restore_if_broken()
    assert (loop.tally.steps, loop.tally.skipped) == (0, 1)
    assert not delta(loop).any()


def test_a_load_starts_over_and_keeps_the_moments_unless_asked() -> None:
    loop = started(ADAMW)
    theta_D = np.zeros(TinyTask(7, seed=1).layout(64).n_values, np.float32)
    found = []
    for fresh in (True, False, True):
        loop.load(theta_D, fresh_moments=fresh)
        assert (loop.tally.steps, loop.tally.sum_lr) == (0, 0.0)
        for seed in range(3):
            loop.step(batch(seed), 0.01)
        found.append((delta(loop), loop.cold_step))
    np.testing.assert_array_equal(found[0][0], found[2][0])
    assert (found[0][0] != found[1][0]).any()
    assert [cold for _, cold in found] == [3, 6, 3]


def test_no_step_without_an_anchor_and_no_anchor_of_another_length() -> None:
    task = TinyTask(7, seed=1)
    loop = InnerLoop(task, ADAMW, task.layout(64))
    with pytest.raises(RuntimeError, match="no anchor"):
        loop.step(batch(0), 0.1)
    with pytest.raises(LayoutError):
        loop.load(np.zeros(3, np.float32), fresh_moments=True)


@pytest.mark.parametrize(("exempt", "n_groups"), [("one_dimensional", 2), ("none", 1)])
def test_weight_decay_leaves_out_what_the_run_says(exempt: str, n_groups: int) -> None:
    inner = InnerSpec.model_validate({"decay_exempt": exempt})
    groups = optimiser_of([value for _, value in TinyTask(7, seed=1).parameters()], inner).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0][:n_groups]


class Shell(nn.Module):
    """What `torch.compile` puts around a module, as far as names go; compiling takes seconds."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, inputs_BL: Tensor) -> Tensor:
        return self._orig_mod(inputs_BL)  # type: ignore[no-any-return]


class Wrapped(TinyTask):
    """A task whose module, and one within it, are wrapped."""

    def __init__(self) -> None:
        super().__init__(7, seed=1)
        self.model[0] = Shell(self.model[0])
        self.wrapped = Shell(self.model)

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.wrapped.named_parameters())


def test_what_wraps_a_model_is_in_no_checkpoint_and_hinders_nobody_from_going_on() -> None:
    """Plain, wrapped, plain, wrapped: each goes on from the one before to the same bits as without a change."""
    undisturbed = started(ADAMW)
    names = undisturbed.tensors().keys()
    assert Wrapped().parameters()[0][0] == "_orig_mod.0._orig_mod.weight"
    before: InnerLoop | None = None
    for part in range(4):
        loop = started(ADAMW, task=Wrapped() if part % 2 else TinyTask(7, seed=1))
        if before is not None:
            saved = {name: np.array(values) for name, values in before.tensors().items()}
            assert {name.partition("/")[2] for name in saved} == {name.partition("/")[2] for name in names}
            loop.warm(saved, before.cold_step)
            loop.go_on(saved, before.tally)
        for seed in range(3 * part, 3 * part + 3):
            loop.step(batch(seed), 0.01)
            undisturbed.step(batch(seed), 0.01)
        before = loop
    assert before is not None
    assert before.tally == undisturbed.tally
    assert np.array_equal(delta(before), delta(undisturbed))
    for name, values in undisturbed.tensors().items():
        assert np.array_equal(before.tensors()[name], values)


def test_what_one_number_of_threads_has_saved_another_goes_on_from() -> None:
    """Parameters, moments and step counts are those that were saved, to the bit; the next step differs by rounding."""
    n_threads = torch.get_num_threads()
    one, other = started(ADAMW), started(ADAMW)
    for seed in range(5):
        one.step(batch(seed), 0.01)
    saved = {name: np.array(values) for name, values in one.tensors().items()}
    try:
        torch.set_num_threads(n_threads + 1)
        other.warm(saved, one.cold_step)
        other.go_on(saved, replace(one.tally))
        assert all(np.array_equal(other.tensors()[name], values) for name, values in saved.items())
        assert {float(other.tensors()[name]) for name in saved if name.startswith("step/")} == {5.0}
        theirs = other.step(batch(5), 0.01)
    finally:
        torch.set_num_threads(n_threads)
    assert theirs == pytest.approx(one.step(batch(5), 0.01), rel=1e-5)
    assert other.cold_step == one.cold_step == 6
    np.testing.assert_allclose(delta(other), delta(one), rtol=1e-3, atol=1e-6)
