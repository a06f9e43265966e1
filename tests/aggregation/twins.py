"""The same arithmetic once more, in plain numpy and as the texts define it; slow, and independent of the kernels."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def encode_int8(values: Floats, block: int) -> bytes:
    frame = bytearray(struct.pack("<4sB3sII", b"BRF1", 1, b"\0\0\0", block, len(values)))
    for start in range(0, len(values), block):
        part = values[start : start + block]
        peak = np.abs(part).max()
        if peak < np.float32(2.0**-100):
            frame += bytes(4 + len(part))
            continue
        scale = np.float32(peak / np.float32(127))
        codes = np.rint(part / scale).astype(np.int8)
        frame += scale.astype("<f4").tobytes() + codes.tobytes()
    return bytes(frame)


def decode_int8(frame: bytes) -> Floats:
    block, n_values = struct.unpack_from("<II", frame, 8)
    out, at = [], 16
    for start in range(0, n_values, block):
        n = min(block, n_values - start)
        scale = np.frombuffer(frame, "<f4", 1, at)[0]
        out.append(np.frombuffer(frame, np.int8, n, at + 4).astype(np.float32) * scale)
        at += 4 + n
    return np.concatenate(out)


def squared_norm_int8(frame: bytes) -> float:
    block, n_values = struct.unpack_from("<II", frame, 8)
    total, at = 0.0, 16
    for start in range(0, n_values, block):
        n = min(block, n_values - start)
        scale = float(np.frombuffer(frame, "<f4", 1, at)[0])
        total += (scale * scale) * float(sum(code * code for code in np.frombuffer(frame, np.int8, n, at + 4).tolist()))
        at += 4 + n
    return total


def squared_norm(values: Floats, block: int) -> float:
    """Of the values of every codec but int8."""
    total = 0.0
    for start in range(0, len(values), block):
        lanes = [0.0] * 16
        for i, value in enumerate(values[start : start + block].astype(np.float64).tolist()):
            lanes[i % 16] += value * value
        block_sum = 0.0
        for lane in lanes:
            block_sum += lane
        total += block_sum
    return total


def mean(rows: Floats, weights: Sequence[float]) -> Floats:
    w = [np.float32(weight) for weight in weights]
    total, acc = w[0], w[0] * rows[0]
    for weight, row in zip(w[1:], rows[1:], strict=True):
        total = np.float32(total + weight)
        acc = acc + weight * row
    out: Floats = acc / total
    return out


def median(rows: Floats) -> Floats:
    return trimmed_mean(rows, (len(rows) - 1) // 2)


def trimmed_mean(rows: Floats, f: int) -> Floats:
    ordered = np.sort(rows, axis=0)
    return _clamped_mean(ordered[f : len(rows) - f])


def meamed(rows: Floats, f: int) -> Floats:
    """Column by column: throw out the value farther from the median, f times, of two as far the larger one."""
    n = len(rows)
    kept = []
    for column in np.sort(rows, axis=0).T.astype(np.float64).tolist():
        twice_the_median = column[(n - 1) // 2] + column[n // 2]
        for _ in range(f):
            column.pop(0 if column[0] + column[-1] < twice_the_median else -1)
        kept.append(column)
    return _clamped_mean(np.array(kept, np.float32).T)


def _clamped_mean(ordered: Floats) -> Floats:
    total, wide = ordered[0], ordered[0].astype(np.float64)
    with np.errstate(over="ignore"):
        for row in ordered[1:]:
            total, wide = total + row, wide + row
    n = np.float32(len(ordered))
    mean = np.where(np.isfinite(total), total / n, (wide / n).astype(np.float32))
    clamped: Floats = np.clip(mean, ordered[0], ordered[-1])
    return clamped


def nesterov(anchor: Floats, momentum: Floats, delta: Floats, lr: float, mu: float) -> tuple[Floats, Floats]:
    buf: Floats = np.float32(mu) * momentum + delta
    step: Floats = delta + np.float32(mu) * buf
    after: Floats = anchor - np.float32(lr) * step
    return after, buf
