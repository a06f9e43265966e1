"""How fast one core encodes and decodes, as fp32 bytes a second, beside a memory copy and a hash in the same run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import blake3
import numpy as np
import torch
import typer

from aggregation import codec
from aggregation.codec import feedback
from aggregation.codec.device import encode_int8
from tests.bench import report, timing
from tests.bench.report import Figure

BLOCK = 1024
TOPK_BLOCK = 4096


def main(
    json: Annotated[bool, typer.Option(help="One JSON document instead of a table.")] = False,
    values: Annotated[int, typer.Option(help="Length of the vector.", min=1)] = 25_000_000,
    rounds: Annotated[int, typer.Option(help="Measurements of each, of which the median counts.", min=1)] = 7,
) -> None:
    """Encode, check, decode and the norm of every codec; all memory is touched before the clock runs."""
    torch.set_num_threads(1)
    values_D = np.random.default_rng(0).standard_normal(values, dtype=np.float32) * np.float32(1e-3)
    out_D = np.zeros_like(values_D)
    cases: dict[str, Callable[[], object]] = {"copy": lambda: np.copyto(out_D, values_D)}
    for name in codec.names():
        cases |= _cases(name, values_D, out_D)
    frame = codec.encode("int8", values_D, block=BLOCK)
    cases["blake3.int8"] = lambda: blake3.blake3(frame).digest()
    tensor_D = torch.from_numpy(values_D)
    cases["torch.int8.encode"] = lambda: encode_int8(tensor_D, block=BLOCK)
    report.say(f"{len(cases)} cases of {values} values, {rounds} times each")
    took_s = timing.seconds(cases, rounds=rounds)
    report.show("codec", [_figure(name, values, took_s) for name in cases], as_json=json)


def _cases(name: str, values_D: np.ndarray, out_D: np.ndarray) -> dict[str, Callable[[], object]]:
    block = TOPK_BLOCK if name == "topk" else BLOCK
    frame = np.zeros(codec.frame_bytes(name, values_D.size, block), np.uint8)
    codec.encode_into(name, values_D, frame, block=block)
    cases: dict[str, Callable[[], object]] = {
        f"{name}.encode": lambda: codec.encode_into(name, values_D, frame, block=block),
        f"{name}.check": lambda: codec.check(frame, codec=name, block=block, n_values=values_D.size),
        f"{name}.decode": lambda: codec.decode_into(frame, out_D),  # checks first, as whoever receives a frame must
        f"{name}.norm": lambda: codec.squared_norm(frame),
    }
    if codec.feedback_decay(name) is not None:
        residual_D, next_D = np.zeros_like(values_D), np.zeros_like(values_D)
        next_D[:] = residual_D[:] = 1e-4
        cases[f"{name}.feedback"] = lambda: feedback.encode(name, values_D, residual_D, frame, next_D, block=block)
    return cases


def _figure(name: str, n_values: int, took_s: dict[str, float]) -> Figure:
    ratios = {} if name == "copy" else {"copy": took_s["copy"] / took_s[name]}
    if name == "blake3.int8":
        ratios["int8.encode"] = took_s["int8.encode"] / took_s[name]
    if name == "int8.encode":
        ratios["torch.int8.encode"] = took_s["torch.int8.encode"] / took_s[name]
    return Figure(name, 4 * n_values / took_s[name] / 1e9, "GB/s of fp32", ratios)
