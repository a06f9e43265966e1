"""Plain DiLoCo in one process: the paper's algorithm (arXiv 2311.08105) as a page of torch, and the replay of a ledger.

It shares no arithmetic with the packages that it checks: torch's own AdamW and SGD, lists of tensors in place of a flat
vector, no encoding, no chunks. What it takes from them is the model, and which stored batch a batch number means.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from node.training.schedule import locate
from protos.runspec import InnerSpec, RunSpec

MOMENTS_KEPT_ROUNDS = 8


class Learner(Protocol):
    def parameters(self) -> list[tuple[str, nn.Parameter]]: ...

    def loss(self, ids_BL: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Member:
    """One contribution: whose, trained on which batches in which order, and how much it weighs."""

    peer: str
    batches: tuple[int, ...]
    weight: float


@dataclass(frozen=True)
class Round:
    members: tuple[Member, ...]
    h: int
    outer_lr: float
    outer_momentum: float


@dataclass(frozen=True)
class ReplayResult:
    parameters: dict[str, Tensor]
    n_rounds: int
    val_loss: float


class Sequences:
    """The packed data of a run."""

    def __init__(self, spec: RunSpec, data_dir: Path) -> None:
        self.spec = spec
        shape = (-1, spec.data.sequence_length)
        width = f"<u{spec.data.token_bytes}"
        self.train = np.memmap(data_dir / "train.bin", width, "r").reshape(shape)
        self.val = np.memmap(data_dir / "val.bin", width, "r").reshape(shape)

    def batch(self, index: int) -> Tensor:
        _, stored = locate(index, self.spec.n_batches, self.spec.data.seed)
        size = self.spec.batch_sequences
        return torch.from_numpy(self.train[stored * size : (stored + 1) * size].astype(np.int64))

    def val_loss(self, learner: Learner) -> float:
        n = max(1, min(len(self.val), self.spec.evaluation.max_tokens // self.spec.data.sequence_length))
        with torch.no_grad():
            losses = [float(learner.loss(torch.from_numpy(row[None].astype(np.int64)))) for row in self.val[:n]]
        return sum(losses) / n


def diloco(learner: Learner, inner: InnerSpec, rounds: Iterable[Round], data: Sequences) -> int:
    """Train the learner's parameters in place; the number of rounds."""
    parameters = [parameter for _, parameter in learner.parameters()]
    anchor = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    outer = torch.optim.SGD(anchor, lr=0.0)
    optimisers: dict[str, torch.optim.Optimizer] = {}
    last_round: dict[str, int] = {}
    warm_steps: dict[str, int] = {}
    nominal_step = n_rounds = 0
    for n_rounds, round_ in enumerate(rounds, start=1):
        total_weight = sum(member.weight for member in round_.members)
        pseudo_gradient = [torch.zeros_like(tensor) for tensor in anchor]
        for member in round_.members:
            if n_rounds - last_round.get(member.peer, -MOMENTS_KEPT_ROUNDS - 1) > MOMENTS_KEPT_ROUNDS:
                optimisers[member.peer], warm_steps[member.peer] = _inner_optimiser(parameters, inner), 0
            last_round[member.peer] = n_rounds
            _copy(anchor, parameters)
            for k, index in enumerate(member.batches):
                lr = _lr(inner, nominal_step + min(k, round_.h), round_.h, warm_steps[member.peer])
                _step(learner, parameters, optimisers[member.peer], inner, data.batch(index), lr)
                warm_steps[member.peer] += 1
            for mean, tensor, parameter in zip(pseudo_gradient, anchor, parameters, strict=True):
                mean += (tensor.detach() - parameter.detach()) * (member.weight / total_weight)
        for tensor, mean in zip(anchor, pseudo_gradient, strict=True):
            tensor.grad = mean
        _set_outer(outer, round_)
        outer.step()
        nominal_step += round_.h
    _copy(anchor, parameters)
    return n_rounds


def replay(run_dir: Path, spec: RunSpec, learner: Learner, *, ledger: Path | None = None) -> ReplayResult:
    """Train again what a run's ledger says that it trained, from the learner's first parameters on.

    `run_dir` holds `data/` and, unless `ledger` names another file, `ledger.jsonl`: a line a commit, as
    `coordinator ledger --json` prints it, with the used `batches` of each member. A member's moments are taken to be
    its own from its last counted round on, unless that is more than 8 rounds ago; what a node trained and could not
    contribute leaves no trace in a ledger, so only runs in which that did not happen can be replayed exactly.
    """
    data = Sequences(spec, run_dir / "data")
    lines = (ledger or run_dir / "ledger.jsonl").read_text().splitlines()
    n_rounds = diloco(learner, spec.inner, rounds_of(json.loads(line) for line in lines if line.strip()), data)
    parameters = {name: parameter.detach().clone() for name, parameter in learner.parameters()}
    return ReplayResult(parameters, n_rounds, data.val_loss(learner))


def rounds_of(rows: Iterable[dict[str, Any]]) -> Iterator[Round]:
    """The committed rounds of a ledger's lines; empty and orphaned ones changed nothing."""
    for row in rows:
        if row["outcome"] != "committed" or row.get("orphaned"):
            continue
        members = tuple(
            Member(
                member["peer"],
                tuple(start + i for start, count in member["batches"] for i in range(count)),
                float(member["weight"]),
            )
            for member in row["members"]
            if member["accepted"] and member["weight"] > 0
        )
        yield Round(members, row["h"], row["outer_lr"], row["outer_momentum"])


def _inner_optimiser(parameters: Sequence[nn.Parameter], inner: InnerSpec) -> torch.optim.Optimizer:
    matrices = [p for p in parameters if p.ndim >= 2 or inner.decay_exempt == "none"]
    others = [p for p in parameters if p.ndim < 2 and inner.decay_exempt != "none"]
    groups = [
        {"params": matrices, "weight_decay": inner.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if inner.optimiser == "sgd":
        return torch.optim.SGD(groups, lr=1.0)
    return torch.optim.AdamW(groups, lr=1.0, betas=(inner.beta1, inner.beta2), eps=inner.eps)


def _lr(inner: InnerSpec, step: int, h: int, warm_step: int) -> float:
    warm_up = (step + 1) / inner.warmup_steps if inner.warmup_steps else 1.0
    ramp = 1.0
    if inner.optimiser == "adamw":
        ramp = (warm_step + 1) / max(10, min(round(1 / (1 - inner.beta2)), h))
    return inner.lr * min(1.0, warm_up, ramp)


def _step(
    learner: Learner,
    parameters: Sequence[nn.Parameter],
    optimiser: torch.optim.Optimizer,
    inner: InnerSpec,
    ids_BL: Tensor,
    lr: float,
) -> None:
    optimiser.zero_grad()
    learner.loss(ids_BL).backward()  # type: ignore[no-untyped-call]
    if inner.clip_norm:
        nn.utils.clip_grad_norm_(parameters, inner.clip_norm)
    for group in optimiser.param_groups:
        group["lr"] = lr
    optimiser.step()
    optimiser.zero_grad()


def _set_outer(outer: torch.optim.Optimizer, round_: Round) -> None:
    for group in outer.param_groups:
        group.update(lr=round_.outer_lr, momentum=round_.outer_momentum, nesterov=round_.outer_momentum > 0)


@torch.no_grad()
def _copy(source: Iterable[Tensor], target: Iterable[Tensor]) -> None:
    for value, place in zip(source, target, strict=True):
        place.copy_(value)
