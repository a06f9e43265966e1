"""How fast one core takes the outer step, as the bytes that it must move a second, beside a memory copy's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import numpy as np
import torch
import typer

from aggregation import codec
from aggregation.outer import nesterov, nesterov_from_frame
from tests.bench import report, timing
from tests.bench.report import Figure

BLOCK = 1024
CHUNK_VALUES = 1 << 20
LR, MOMENTUM, SCALE = 0.7, 0.9, 0.75

BYTES = {
    "copy": 8.0,  # read 4, write 4
    "nesterov": 20.0,  # read anchor, momentum, delta; write anchor, momentum
    "nesterov.int8": 17.0 + 4 / BLOCK,  # the delta as codes and scales
    "nesterov.fp32": 20.0,
    "torch.sgd": 20.0,
}
"""What must be moved for one value."""


def main(
    json: Annotated[bool, typer.Option(help="One JSON document instead of a table.")] = False,
    values: Annotated[int, typer.Option(help="Length of the vector.", min=1)] = 25_000_000,
    rounds: Annotated[int, typer.Option(help="Measurements of each, of which the median counts.", min=1)] = 7,
) -> None:
    """The step on whole vectors, chunk by chunk from encoded results, and torch's."""
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    anchor_D, momentum_D, delta_D = (
        random.standard_normal(values, dtype=np.float32) * np.float32(size) for size in (1, 1e-3, 1e-3)
    )
    out_D = np.zeros_like(anchor_D)
    cases: dict[str, Callable[[], object]] = {
        "copy": lambda: np.copyto(out_D, anchor_D),
        "nesterov": lambda: nesterov(anchor_D, momentum_D, delta_D, lr=LR, momentum=MOMENTUM),
        "torch.sgd": _torch_step(anchor_D, delta_D),
    }
    for name in ("int8", "fp32"):
        cases[f"nesterov.{name}"] = _from_frames(name, anchor_D, momentum_D, delta_D)
    report.say(f"{len(cases)} cases of {values} values, {rounds} times each")
    took_s = timing.seconds(cases, rounds=rounds)
    report.show("outer", [_figure(name, values, took_s) for name in cases], as_json=json)


def _from_frames(name: str, anchor_D: np.ndarray, momentum_D: np.ndarray, delta_D: np.ndarray) -> Callable[[], object]:
    chunks = [slice(start, start + CHUNK_VALUES) for start in range(0, anchor_D.size, CHUNK_VALUES)]
    frames = [codec.encode(name, delta_D[chunk], block=BLOCK) for chunk in chunks]

    def step() -> None:
        for chunk, frame in zip(chunks, frames, strict=True):
            nesterov_from_frame(anchor_D[chunk], momentum_D[chunk], frame, lr=LR, momentum=MOMENTUM, scale=SCALE)

    return step


def _torch_step(anchor_D: np.ndarray, delta_D: np.ndarray) -> Callable[[], object]:
    parameter = torch.nn.Parameter(torch.from_numpy(anchor_D.copy()))
    parameter.grad = torch.from_numpy(delta_D)
    optimizer = torch.optim.SGD([parameter], lr=LR, momentum=MOMENTUM, nesterov=True)
    return optimizer.step


def _figure(name: str, values: int, took_s: Mapping[str, float]) -> Figure:
    def rate(case: str) -> float:
        return BYTES[case] * values / took_s[case] / 1e9

    return Figure(name, rate(name), "GB/s moved", {} if name == "copy" else {"copy": rate(name) / rate("copy")})
