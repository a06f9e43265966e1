"""From contributions to an aggregate: whole vectors in one process, or one chunk's frames to one encoded frame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aggregation import codec as codecs
from aggregation.chunks import ChunkGrid
from aggregation.codec.frame import HEADER_BYTES, RESULT_SCALE_CAP, as_bytes, pack_header, read_header
from aggregation.codec.registry import by_name as codec_by_name
from aggregation.errors import RuleError
from aggregation.rules.registry import Rule
from aggregation.rules.registry import by_name as rule_by_name

if TYPE_CHECKING:
    from aggregation.codec.frame import Buffer

Floats = NDArray[np.float32]

CHUNK_VALUES = 1 << 20
_TILE_VALUES = 1 << 14
"""Rows are decoded and reduced so many values at a time, so that they stay in the second cache."""


def aggregate(
    name: str,
    updates_ND: ArrayLike,
    *,
    f: int = 0,
    weights_N: ArrayLike | None = None,
    previous_D: ArrayLike | None = None,
    chunk_values: int = CHUNK_VALUES,
    **parameters: object,
) -> Floats:
    """The (D,) fp32 values that reducers of N whole updates would encode, chunk by chunk.

    Without `weights_N` all weigh the same. A row of weight 0 is not there: it is in no median and not in N.
    `previous_D` is the aggregate of the round before, for rules that start from it. Raises RuleError for an unknown
    rule or parameter, too few rows for f, weights that are negative, not finite or all zero, and for updates that are
    no finite (N, D) array. The updates are not changed.
    """
    rule = rule_by_name(name)
    if parameters:
        raise RuleError(f"{name} has no parameter {', '.join(sorted(parameters))}")
    updates = _as_updates(updates_ND)
    n, n_values = updates.shape
    if chunk_values < 1:
        raise RuleError(f"chunks of {chunk_values} values")
    if previous_D is not None and np.shape(previous_D) != (n_values,):
        raise RuleError(f"previous aggregate of shape {np.shape(previous_D)} for {n_values} values")
    weights, counted = _counted(rule, [1.0] * n if weights_N is None else np.asarray(weights_N).tolist(), n, f)
    out_D = np.empty(n_values, np.float32)
    grid = ChunkGrid(n_values, chunk_values)
    for chunk in range(grid.n_chunks):
        start, stop = grid.bounds(chunk)
        for tile_start in range(start, stop, _TILE_VALUES):
            tile = slice(tile_start, min(tile_start + _TILE_VALUES, stop))
            rows_NP = np.ascontiguousarray(updates[counted, tile])  # a copy, for indexing by a list makes one
            rule.reduce(rows_NP, weights, f, out_D[tile])
    return out_D


def combine(
    name: str,
    frames: Sequence[Buffer],
    *,
    weights_N: Sequence[int | float],
    f: int,
    codec: str,
    block: int,
    previous: Floats | None = None,
) -> tuple[bytes, float]:
    """One chunk's result: its encoded frame, and ‖·‖² in fp64 of the values that decode from it.

    Each row is decoded by one fp32 multiply, the rows are reduced in the order given, and the outcome is encoded. All
    frames are checked first, so a non-finite value never reaches a rule. A row of weight 0 is checked but not there.
    `previous` is the chunk's last result, for rules that start from it. Raises CodecError for a frame that is not
    canonical or unlike the others, RuleError for the rest, as `aggregate`.
    """
    rule = rule_by_name(name)
    coder = codec_by_name(codec)
    weights, counted = _counted(rule, weights_N, len(frames), f)
    n_values = read_header(as_bytes(frames[0])).n_values
    for frame in frames:
        codecs.check(frame, codec=codec, block=block, n_values=n_values)
    if previous is not None and previous.shape != (n_values,):
        raise RuleError(f"previous result of shape {previous.shape} for {n_values} values")
    bodies = [as_bytes(frames[i])[HEADER_BYTES:] for i in counted]
    result = np.empty(codecs.frame_bytes(codec, n_values, block), np.uint8)
    result[:HEADER_BYTES] = np.frombuffer(pack_header(coder.id, block, n_values), np.uint8)
    step = block * max(1, _TILE_VALUES // block)
    rows = np.empty((len(bodies), min(step, n_values)), np.float32)
    for start in range(0, n_values, step):
        stop = min(start + step, n_values)
        first, last = coder.body_bytes(start, block), coder.body_bytes(stop, block)
        rows_NP = rows if stop - start == rows.shape[1] else np.empty((len(bodies), stop - start), np.float32)
        for row_P, body in zip(rows_NP, bodies, strict=True):
            coder.decode(body[first:last], block, row_P)
        out_P = np.empty(stop - start, np.float32)
        rule.reduce(rows_NP, weights, f, out_P)
        coder.encode(out_P, block, RESULT_SCALE_CAP, result[HEADER_BYTES + first : HEADER_BYTES + last])
    return result.tobytes(), coder.squared_norm(result[HEADER_BYTES:], n_values, block)


def _counted(rule: Rule, weights_N: Sequence[float], n: int, f: int) -> tuple[Floats, list[int]]:
    """The fp32 weights of the rows that count, and which rows those are; raises RuleError."""
    if len(weights_N) != n:
        raise RuleError(f"{len(weights_N)} weights for {n} contributions")
    if f < 0:
        raise RuleError(f"f is {f}, less than none")
    for weight in weights_N:
        if not (math.isfinite(weight) and 0 <= weight < 2**63):
            raise RuleError(f"a weight is {weight}")
    weights = np.array([np.float32(weight) for weight in weights_N], np.float32)
    counted = [i for i in range(n) if weights[i] > 0]
    if not counted:
        raise RuleError("no contribution has weight")
    needed = rule.minimum_contributions(f)
    if len(counted) < needed:
        raise RuleError(f"{rule.name} needs {needed} contributions for f = {f}, {len(counted)} count")
    return weights[counted], counted


def _as_updates(updates_ND: ArrayLike) -> Floats:
    with np.errstate(over="ignore"):  # an fp64 value beyond fp32 becomes infinite and is refused below
        updates = np.asarray(updates_ND, np.float32)
    if updates.ndim != 2 or 0 in updates.shape:
        raise RuleError(f"updates are (N, D), not of shape {updates.shape}")
    for i, row_D in enumerate(updates):
        if not np.isfinite(row_D).all():
            raise RuleError(f"update {i} is not finite")
    return updates
