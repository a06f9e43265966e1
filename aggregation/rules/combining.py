"""From contributions to an aggregate: whole vectors in one process, or one chunk's frames to one encoded frame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aggregation import codec as codecs
from aggregation.chunks import ChunkGrid
from aggregation.codec.frame import HEADER_BYTES, RESULT_SCALE_CAP, Bytes, as_bytes, pack_header, read_header
from aggregation.codec.int8 import Int8
from aggregation.codec.registry import by_name as codec_by_name
from aggregation.denormals import check_denormals
from aggregation.errors import CodecError, RuleError
from aggregation.finite import is_finite
from aggregation.rules.chain import Chain, Parameters, coordinate_chain, geometric_chain
from aggregation.rules.gram import GramOfValues, gram_of_codes
from aggregation.rules.inputs import (
    as_previous,
    as_scale,
    as_updates,
    as_weights,
    checked_f,
    checked_parameters,
    is_whole,
)
from aggregation.rules.mixing import mix, sum_of_codes, weights_sum, without_unused
from aggregation.rules.registry import Rule
from aggregation.rules.registry import by_name as rule_by_name
from aggregation.rules.rows import ArrayRows, CodecRows, Int8Rows, Rows, WithCentre, WithMedian, tiles

if TYPE_CHECKING:
    from aggregation.codec.frame import Buffer

Floats = NDArray[np.float32]

CHUNK_VALUES = 1 << 20
_SUM_TILE_VALUES = 1 << 14
"""Values of a sum that is taken from codes: between sum and encoding they stay in the second cache."""


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

    Without `weights_N` all weigh the same. A row of weight 0 is not there: it is in no median and not in N. Neither is
    a row that is not finite, but it uses up f: what is left is max(f - rejected, 1 if f ≥ 1 and N ≥ 3). `previous_D` is
    the aggregate of the round before, the centre of rules that have one; without it they start from the median.
    Parameters are multi_krum's m; tau and iterations of centered_clip and default; nu and tolerance of
    geometric_median; norm_clip's radius.

    Raises RuleError for an unknown rule or parameter, too few or too many rows for rule and f, weights that are all
    zero or neither zero nor within [2^-32, 2^63), a previous aggregate that is not finite, updates that are no (N, D)
    array of real numbers, and a result beyond fp32: rows far beyond what a codec sends can have one, and of such rows
    `mean` has one wherever Σ w_i·x_i is beyond it. The updates are not changed. Raises DenormalsError where this
    thread's floating point is not the IEEE's.
    """
    check_denormals()
    rule = rule_by_name(name)
    options = checked_parameters(rule, parameters)
    updates = as_updates(updates_ND)
    n, n_values = updates.shape
    if not is_whole(chunk_values) or chunk_values < 1:
        raise RuleError(f"chunks of {chunk_values!r} values")
    previous = None if previous_D is None else as_previous(previous_D, n_values)
    weights, there = as_weights([1.0] * n if weights_N is None else weights_N, n)
    f = checked_f(f)
    finite = [i for i in there if is_finite(updates[i])]
    rejected = len(there) - len(finite)
    if rejected:
        f = max(f - rejected, 1 if len(finite) >= 3 and f >= 1 else 0)
    weights, f = _for_rule(rule, weights[finite], f)
    if len(finite) < n:
        updates = updates[finite]
    out_D = np.empty(n_values, np.float32)
    if rule.is_geometric:
        for start, rows in _chunks(rule, updates, previous, ChunkGrid(n_values, chunk_values)):
            for at, values_W in _results(rule, rows, weights, f, options, codecs.BLOCK):
                out_D[start + at : start + at + values_W.size] = values_W
    else:
        _reduce(coordinate_chain(rule, f), updates, weights, out_D)
    if not is_finite(out_D):
        raise RuleError(f"{rule.name} of these rows is beyond what fp32 holds")
    return out_D


def combine(
    name: str,
    frames: Sequence[Buffer],
    *,
    weights_N: Sequence[int | float],
    f: int,
    codec: str,
    block: int,
    previous: Buffer | None = None,
    previous_scale: float = 1.0,
    checked: bool = False,
) -> tuple[bytes, float]:
    """One chunk's result: its encoded frame, and ‖·‖² in fp64 of the values that decode from it.

    Each row is decoded by one fp32 multiply, the rows are combined in the order given, and the outcome is encoded in
    `codec.result_codec(codec)`. All frames are checked first, so a non-finite value never reaches a rule; `checked`
    says that the caller has done that. A row of weight 0 is checked but not there. `previous` is the chunk's last
    result, a frame of the result's codec: a centred rule starts from `previous_scale` (the commit's clip factor, as
    fp32) times its values, without it from the coordinates' median; other rules do not look at it. Raises CodecError
    for a frame that is not canonical or unlike the others, RuleError for the rest, as `aggregate`, and DenormalsError.
    """
    check_denormals()
    rule = rule_by_name(name)
    result_coder = codec_by_name(codecs.result_codec(codec))
    weights, there = as_weights(weights_N, len(frames))
    weights, f = _for_rule(rule, weights[there], checked_f(f))
    factor = as_scale(previous_scale)
    n_values = read_header(as_bytes(frames[0])).n_values
    bodies = [_body(frame, codec, block, n_values, None if checked else codecs.SCALE_CAP) for frame in frames]
    rows: Rows = _rows(codec, [bodies[i] for i in there], n_values, block)
    if rule.is_centred and previous is None:
        rows = WithMedian(rows)
    elif rule.is_centred and previous is not None:
        centre = _body(previous, result_coder.name, block, n_values, RESULT_SCALE_CAP)
        if isinstance(rows, Int8Rows) and result_coder.name == "int8":
            rows = Int8Rows([*(bodies[i] for i in there), centre], n_values, block, [1.0] * len(there) + [factor])
        else:
            rows = WithCentre(rows, CodecRows(result_coder, [centre], n_values, block, factor))
    result = np.empty(codecs.frame_bytes(result_coder.name, n_values, block), np.uint8)
    result[:HEADER_BYTES] = np.frombuffer(pack_header(result_coder.id, block, n_values), np.uint8)
    body = result[HEADER_BYTES:]
    if rule.name == "mean" and isinstance(rows, Int8Rows) and isinstance(result_coder, Int8):
        divisor = weights_sum(weights)
        result_coder.weighted_mean(rows.span, rows.offsets_K, weights, divisor, n_values, block, RESULT_SCALE_CAP, body)
    else:
        for at, values_W in _results(rule, rows, weights, f, {}, block):
            first = result_coder.body_bytes(at, block)
            last = result_coder.body_bytes(at + values_W.size, block)
            result_coder.encode(values_W, block, RESULT_SCALE_CAP, body[first:last])
    return result.tobytes(), result_coder.squared_norm(body, n_values, block)


def _chunks(rule: Rule, updates: Floats, previous: Floats | None, grid: ChunkGrid) -> Iterator[tuple[int, Rows]]:
    """Where each chunk starts, and its rows, with the centre behind them where the rule has one."""
    for chunk in range(grid.n_chunks):
        start, stop = grid.bounds(chunk)
        rows: Rows = ArrayRows(updates[:, start:stop])
        if rule.is_centred:
            centre = None if previous is None else ArrayRows(previous[None, start:stop])
            rows = WithMedian(rows) if centre is None else WithCentre(rows, centre)
        yield start, rows


def _results(
    rule: Rule, rows: Rows, weights_N: Floats, f: int, parameters: Parameters, block: int
) -> Iterator[tuple[int, Floats]]:
    """The chunk's values tile by tile: where a tile starts, and its values, which the next tile overwrites."""
    if rule.is_geometric:
        chain = geometric_chain(rule, _gram(rows, block), weights_N, f, parameters)
    else:
        chain = coordinate_chain(rule, f)
    if isinstance(rows, Int8Rows):
        if chain.reduce is None and len(chain.mixings) == 1:
            yield from _sums(rows, chain.mixings[0].numerators_MK[0], chain.mixings[0].divisors_M[0], block)
            return
    mixings = without_unused(chain.mixings)
    room_W = np.empty(0, np.float32)
    for start, tile_KW in tiles(rows, block):
        mixed_MW = mix(mixings, tile_KW)
        if room_W.size != tile_KW.shape[1]:
            room_W = np.empty(tile_KW.shape[1], np.float32)
        _reduce(chain, mixed_MW, weights_N, room_W)
        yield start, room_W


def _sums(rows: Int8Rows, numerators_K: Floats, divisor: np.float32, block: int) -> Iterator[tuple[int, Floats]]:
    width = block * max(1, _SUM_TILE_VALUES // block)
    room_W = np.empty(min(width, rows.n_values), np.float32)
    for start in range(0, rows.n_values, width):
        values_W = room_W[: min(width, rows.n_values - start)]
        sum_of_codes(rows, start, numerators_K, divisor, values_W)
        yield start, values_W


def _reduce(chain: Chain, rows_MW: Floats, weights_N: Floats, out_W: Floats) -> None:
    if chain.reduce is None:
        out_W[:] = rows_MW[0]
    else:
        chain.reduce(rows_MW, weights_N, chain.f, out_W)


def _gram(rows: Rows, block: int) -> NDArray[np.float64]:
    if isinstance(rows, Int8Rows):
        return gram_of_codes(rows)
    total = GramOfValues(rows.n_rows, block)
    for _, tile_KW in tiles(rows, block):
        total.add(tile_KW)
    return total.finish()


def _rows(codec: str, bodies: Sequence[Bytes], n_values: int, block: int) -> Rows:
    if codec == "int8":
        return Int8Rows(bodies, n_values, block)
    return CodecRows(codec_by_name(codec), bodies, n_values, block)


def _body(frame: Buffer, codec: str, block: int, n_values: int, scale_cap: float | None) -> Bytes:
    """A frame's body, after its length and header are compared and, with a cap, all of it is checked."""
    data = as_bytes(frame)
    if scale_cap is not None:
        codecs.check(data, codec=codec, block=block, n_values=n_values, scale_cap=scale_cap)
    # Kernels read by these sizes, so they are compared whoever has checked the frame before.
    head = read_header(data)
    expected = (codec_by_name(codec).id, block, n_values)
    if (head.codec_id, head.block, head.n_values) != expected or data.size != codecs.frame_bytes(
        codec, n_values, block
    ):
        raise CodecError(f"a frame is not of {n_values} values as {codec} with block {block}")
    return data[HEADER_BYTES:]


def _for_rule(rule: Rule, weights_N: Floats, f: int) -> tuple[Floats, int]:
    """Weights and f as the rule takes them: alike where it allows none, 0 where f means nothing; raises RuleError."""
    if not len(weights_N):
        raise RuleError("no contribution is finite")
    f = f if rule.needs_f else 0
    limit = rule.limits(len(weights_N), f)
    if limit is not None:
        raise RuleError(limit)
    return weights_N if rule.uses_weights else np.ones(len(weights_N), np.float32), f
