"""Plain DiLoCo in one process: the paper's algorithm (arXiv 2311.08105) as a page of torch, and the replay of a ledger.

It shares no arithmetic with the packages that it checks: torch's own AdamW and SGD, no encoding, and its own few lines
for the default rule. What it takes from them is the model, which stored batch a batch number means, and where in the
flat vector a parameter lies, for that decides what shares a chunk.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from aggregation.vector import layout_of
from node.training.schedule import locate
from protos.runspec import InnerSpec, RunSpec

MOMENTS_KEPT_ROUNDS = 8
CLIP_ITERATIONS = 3


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
    rule: str = "mean"
    clip_factor: float = 1.0
    after_empty: bool = False
    """Whether the round before it was empty, so that a centred rule has no last result to start from."""


@dataclass(frozen=True)
class Chunks:
    """Where in the flat vector each parameter begins, by name, and how many values a chunk has."""

    offsets: Mapping[str, int]
    n_values: int
    chunk_values: int

    @staticmethod
    def of(learner: Learner, block: int, chunk_values: int) -> Chunks:
        layout = layout_of([(name, value.shape) for name, value in learner.parameters()], block=block)
        return Chunks({entry.name: entry.offset for entry in layout.entries}, layout.n_values, chunk_values)

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        vector_D = torch.zeros(self.n_values)
        for name, tensor in tensors.items():
            vector_D[self.offsets[name] :][: tensor.numel()] = tensor.reshape(-1)
        return vector_D

    def tensors(self, vector_D: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: vector_D[self.offsets[name] :][: tensor.numel()].view(tensor.shape) for name, tensor in like.items()
        }


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


def diloco(
    learner: Learner, inner: InnerSpec, rounds: Iterable[Round], data: Sequences, chunks: Chunks | None = None
) -> int:
    """Train the learner's parameters in place; the number of rounds. Without `chunks` the vector is one chunk."""
    chunks = chunks or Chunks.of(learner, 1, sum(value.numel() for _, value in learner.parameters()))
    parameters = dict(learner.parameters())
    anchor = {name: nn.Parameter(value.detach().clone()) for name, value in parameters.items()}
    outer = torch.optim.SGD(anchor.values(), lr=0.0)
    optimisers: dict[str, torch.optim.Optimizer] = {}
    last_round: dict[str, int] = {}
    warm_steps: dict[str, int] = {}
    centre_D: Tensor | None = None
    nominal_step = n_rounds = 0
    for n_rounds, round_ in enumerate(rounds, start=1):
        deltas: list[Tensor] = []
        for member in round_.members:
            if n_rounds - last_round.get(member.peer, -MOMENTS_KEPT_ROUNDS - 1) > MOMENTS_KEPT_ROUNDS:
                optimisers[member.peer], warm_steps[member.peer] = _inner_optimiser(parameters.values(), inner), 0
            last_round[member.peer] = n_rounds
            _copy(anchor.values(), parameters.values())
            for k, index in enumerate(member.batches):
                lr = _lr(inner, nominal_step + min(k, round_.h), round_.h, warm_steps[member.peer])
                _step(learner, parameters.values(), optimisers[member.peer], inner, data.batch(index), lr)
                warm_steps[member.peer] += 1
            deltas.append(chunks.flat({name: anchor[name].detach() - parameters[name].detach() for name in anchor}))
        weights_N = torch.tensor([member.weight for member in round_.members], dtype=torch.float64)
        result_D = _combined(
            round_.rule, torch.stack(deltas), weights_N, None if round_.after_empty else centre_D, chunks.chunk_values
        )
        centre_D = round_.clip_factor * result_D
        for name, gradient in chunks.tensors(centre_D, anchor).items():
            anchor[name].grad = gradient.clone()
        _set_outer(outer, round_)
        outer.step()
        nominal_step += round_.h
    _copy(anchor.values(), parameters.values())
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
    rounds = rounds_of(json.loads(line) for line in lines if line.strip())
    chunks = Chunks.of(learner, spec.codec.block, spec.codec.chunk_values)
    n_rounds = diloco(learner, spec.inner, rounds, data, chunks)
    parameters = {name: parameter.detach().clone() for name, parameter in learner.parameters()}
    return ReplayResult(parameters, n_rounds, data.val_loss(learner))


def rounds_of(rows: Iterable[dict[str, Any]]) -> Iterator[Round]:
    """The committed rounds of a ledger's lines; empty and orphaned ones changed nothing."""
    after_empty = True
    for row in rows:
        if row.get("orphaned"):
            continue
        if row["outcome"] != "committed":
            after_empty = True
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
        yield Round(
            members,
            row["h"],
            row["outer_lr"],
            row["outer_momentum"],
            row["rule"],
            row["clip_factor"],
            after_empty,
        )
        after_empty = False


def _combined(rule: str, deltas_ND: Tensor, weights_N: Tensor, centre_D: Tensor | None, chunk_values: int) -> Tensor:
    """The rule, chunk by chunk, in fp64: (N, D) to (D,) fp32."""
    chunks = [slice(start, start + chunk_values) for start in range(0, deltas_ND.shape[1], chunk_values)]
    rows_ND = deltas_ND.to(torch.float64)
    match rule:
        case "mean":
            combined = weights_N @ rows_ND / weights_N.sum()
        case "default" | "centered_clip":
            start_D = _median(rows_ND) if centre_D is None else centre_D.to(torch.float64)
            combined = torch.cat([_centred_clip(rows_ND[:, chunk], weights_N, start_D[chunk]) for chunk in chunks])
        case _:
            raise ValueError(f"no replay of the rule {rule}")
    return combined.to(torch.float32)


def _median(rows_ND: Tensor) -> Tensor:
    ordered, n = rows_ND.sort(dim=0).values, len(rows_ND)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def _centred_clip(rows_NP: Tensor, weights_N: Tensor, centre_P: Tensor) -> Tensor:
    """v += Σ w·clip(x - v, τ) / Σ w, three times; τ: the least distance within which half of the weight lies."""
    distances, order = (rows_NP - centre_P).norm(dim=1).sort(stable=True)
    radius = distances[2 * weights_N[order].cumsum(0) >= weights_N.sum()][0]
    for _ in range(CLIP_ITERATIONS):
        away_NP = rows_NP - centre_P
        lengths_N = away_NP.norm(dim=1)
        factors_N = torch.where(lengths_N > radius, radius / lengths_N, 1.0)
        centre_P = centre_P + (weights_N * factors_N) @ away_NP / weights_N.sum()
    return centre_P


def _inner_optimiser(parameters: Iterable[nn.Parameter], inner: InnerSpec) -> torch.optim.Optimizer:
    parameters = list(parameters)
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
    parameters: Iterable[nn.Parameter],
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
