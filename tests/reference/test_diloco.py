"""Values that every DiLoCo must show, shown by the plain reference and by the project's own pieces alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from aggregation import outer
from node.training.inner import optimiser_of
from node.training.schedule import inner_lr
from node.training.task import Task
from protos.runspec import InnerSpec
from tests.fakes.tiny import TinyRun, TinyTask, tiny_run
from tests.reference import diloco, pieces
from tests.reference.diloco import Chunks, Member, Round, Sequences, replay, rounds_of

Train = Callable[[Task, InnerSpec, Iterable[Round], Sequences], int]

ADAMW = InnerSpec(lr=0.01, warmup_steps=5)
SGD = InnerSpec(optimiser="sgd", lr=0.1, warmup_steps=0, weight_decay=0.0, clip_norm=0.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return tiny_run(tmp_path_factory.mktemp("run"), width=13)


@pytest.fixture
def data(run: TinyRun) -> Sequences:
    return Sequences(run.spec, run.data_dir)


@pytest.fixture(params=["reference", "pieces"])
def train(request: pytest.FixtureRequest) -> Train:
    found: dict[str, Train] = {"reference": diloco.diloco, "pieces": pieces.diloco}
    return found[request.param]


def task(seed: int = 1) -> TinyTask:
    return TinyTask(13, seed)


def flat(learner: Task) -> Tensor:
    return torch.cat([value.detach().reshape(-1) for _, value in learner.parameters()])


def rounds(n: int, members: int, h: int, lr: float, momentum: float, *, same_batches: bool = False) -> list[Round]:
    """Rounds in which each member takes h batches that no other one has, or all the same ones."""
    made = []
    for number in range(n):
        firsts = [(number * members + i * (not same_batches)) * h for i in range(members)]
        planned = tuple(Member(f"p{i}", tuple(range(first, first + h)), 1.0) for i, first in enumerate(firsts))
        made.append(Round(planned, h, lr, momentum))
    return made


class Slope:
    """One number that is its own loss: SGD at rate 1 gives the pseudo-gradient 1."""

    def __init__(self) -> None:
        self.value = nn.Parameter(torch.zeros(()))

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [("value", self.value)]

    def loss(self, ids_BL: Tensor) -> Tensor:
        return 1.0 * self.value


def test_nesterov_of_a_constant_pseudo_gradient_has_the_known_values(train: Train, data: Sequences) -> None:
    inner = InnerSpec(optimiser="sgd", lr=1.0, warmup_steps=0, weight_decay=0.0, clip_norm=0.0)
    found = []
    for n in (1, 2, 3):
        learner = Slope()
        train(learner, inner, rounds(n, 1, 1, 0.7, 0.9), data)
        found.append(float(learner.value.detach()))
    assert found == pytest.approx([-1.33, -3.227, -5.6343], abs=1e-6)


def test_our_nesterov_is_torchs_over_random_pseudo_gradients() -> None:
    generator = np.random.default_rng(3)
    theta_D, momentum_D = generator.standard_normal(1000).astype(np.float32), np.zeros(1000, np.float32)
    parameter = nn.Parameter(torch.from_numpy(theta_D.copy()))
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(20):
        delta_D = generator.standard_normal(1000).astype(np.float32)
        outer.nesterov(theta_D, momentum_D, delta_D, lr=0.7, momentum=0.9)
        parameter.grad = torch.from_numpy(delta_D)
        sgd.step()
    np.testing.assert_allclose(theta_D, parameter.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_identical_nodes_move_towards_where_they_went(train: Train, data: Sequences) -> None:
    start, alone, together = flat(task()), task(), task()
    train(alone, ADAMW, rounds(1, 1, 10, 1.0, 0.0), data)
    train(together, ADAMW, rounds(1, 3, 10, 0.5, 0.0, same_batches=True), data)
    torch.testing.assert_close(flat(together), start + 0.5 * (flat(alone) - start), rtol=0, atol=1e-6)
    assert float((flat(alone) - start).norm()) > 0.1


def test_an_outer_learning_rate_of_zero_changes_nothing(train: Train, data: Sequences) -> None:
    learner = task()
    train(learner, ADAMW, rounds(3, 2, 5, 0.0, 0.9), data)
    assert torch.equal(flat(learner), flat(task()))


def test_one_node_with_outer_rate_1_and_no_momentum_is_plain_training(train: Train, data: Sequences) -> None:
    learner, plain = task(), task()
    train(learner, ADAMW, rounds(4, 1, 10, 1.0, 0.0), data)
    optimiser = optimiser_of([value for _, value in plain.parameters()], ADAMW)
    for step in range(40):
        optimiser.zero_grad()
        plain.loss(data.batch(step)).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_([value for _, value in plain.parameters()], ADAMW.clip_norm)
        for group in optimiser.param_groups:
            group["lr"] = inner_lr(ADAMW, step, 0, 10, cold_step=step)
        optimiser.step()
    torch.testing.assert_close(flat(learner), flat(plain), rtol=1e-4, atol=1e-5)


def test_h_1_with_sgd_and_outer_rate_1_is_large_batch_data_parallel(train: Train, data: Sequences) -> None:
    learner, plain = task(), task()
    train(learner, SGD, rounds(6, 4, 1, 1.0, 0.0), data)
    for step in range(6):
        loss = plain.loss(torch.cat([data.batch(step * 4 + i) for i in range(4)]))
        loss.backward()  # type: ignore[no-untyped-call]
        for _, value in plain.parameters():
            assert value.grad is not None
            value.data -= SGD.lr * value.grad
            value.grad = None
    torch.testing.assert_close(flat(learner), flat(plain), rtol=1e-4, atol=1e-6)


def test_weights_decide_how_much_a_member_moves_the_mean(train: Train, data: Sequences) -> None:
    def after(weights: tuple[float, float]) -> Tensor:
        learner = task()
        members = tuple(Member(f"p{i}", tuple(range(i * 9, i * 9 + 9)), weight) for i, weight in enumerate(weights))
        train(learner, ADAMW, [Round(members, 9, 1.0, 0.0)], data)
        return flat(learner)

    first, second, mixed = after((1.0, 1e-9)), after((1e-9, 1.0)), after((3000.0, 1000.0))
    torch.testing.assert_close(mixed, 0.75 * first + 0.25 * second, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rule", ["mean", "default"])
def test_reference_and_pieces_agree_on_a_run_of_unequal_members(data: Sequences, rule: str) -> None:
    chunk_values = 64  # tensors lie at 0, 192 and 256: neither cut alike nor without gaps would chunks be the same
    plan = [
        Round(
            (
                Member("a", tuple(range(number * 100, number * 100 + 12)), 12.0),
                Member("b", tuple(range(number * 100 + 50, number * 100 + 55)), 5.0),
                Member("c", tuple(range(number * 100 + 60, number * 100 + 68)), 8.0),
            ),
            10,
            0.7,
            0.6,
            rule,
            1.0 if rule == "mean" or number != 4 else 0.5,
            after_empty=number in (0, 3),
        )
        for number in range(6)
    ]
    ours, plain = task(), task()
    pieces.diloco(ours, ADAMW, plan, data, chunk_values=chunk_values)
    diloco.diloco(plain, ADAMW, plan, data, Chunks.of(plain, pieces.BLOCK, chunk_values))
    assert float((flat(ours) - flat(plain)).norm()) <= 1e-5 * float(flat(plain).norm())


def test_a_ledger_is_replayed_and_empty_orphaned_and_rejected_rows_leave_no_trace(run: TinyRun, tmp_path: Path) -> None:
    def row(outcome: str, start: int, **extra: object) -> str:
        members = [
            {"peer": "a", "batches": [[start, 3], [start + 10, 2]], "weight": 5.0, "accepted": True},
            {"peer": "b", "batches": [[start + 20, 5]], "weight": 5.0, "accepted": start != 0},
        ]
        fields = {
            "outcome": outcome,
            "members": members,
            "h": 5,
            "outer_lr": 0.7,
            "outer_momentum": 0.6,
            "rule": "mean",
            "clip_factor": 0.5,
        }
        return json.dumps(fields | extra)

    ledger = tmp_path / "ledger.jsonl"
    rows = [row("empty", 7), row("committed", 0), row("committed", 40, orphaned=True), row("committed", 80)]
    ledger.write_text("\n".join(rows))
    result = replay(run.folder, run.spec, task(), ledger=ledger)
    plan = [
        Round((Member("a", (0, 1, 2, 10, 11), 5.0),), 5, 0.7, 0.6, "mean", 0.5, after_empty=True),
        Round(
            (Member("a", (80, 81, 82, 90, 91), 5.0), Member("b", (100, 101, 102, 103, 104), 5.0)),
            5,
            0.7,
            0.6,
            "mean",
            0.5,
        ),
    ]
    assert list(rounds_of(map(json.loads, ledger.read_text().splitlines()))) == plan
    again = task()
    diloco.diloco(again, run.spec.inner, plan, Sequences(run.spec, run.data_dir))
    assert result.n_rounds == 2
    assert torch.equal(torch.cat([value.reshape(-1) for value in result.parameters.values()]), flat(again))


def test_learning_lowers_the_validation_loss(train: Train, run: TinyRun, data: Sequences) -> None:
    learner = task()
    before = data.val_loss(learner)
    train(learner, run.spec.inner, rounds(6, 3, 10, 0.7, 0.6), data)
    assert data.val_loss(learner) < 0.2 * before
