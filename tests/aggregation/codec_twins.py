"""The codecs once more, in plain numpy and Python and as their texts define them; slow, independent of the kernels."""

from __future__ import annotations

import struct
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from tests.aggregation.twins import Floats, decode_int8, encode_int8

Encode = Callable[[Floats, int], bytes]
Decode = Callable[[bytes], Floats]


def head(codec_id: int, block: int, n_values: int) -> bytes:
    return struct.pack("<4sB3sII", b"BRF1", codec_id, b"\0\0\0", block, n_values)


def encode_fp32(values: Floats, block: int) -> bytes:
    return head(2, block, len(values)) + values.astype("<f4").tobytes()


def decode_fp32(frame: bytes) -> Floats:
    return np.frombuffer(frame, "<f4", offset=16).astype(np.float32)


def encode_fp16(values: Floats, block: int) -> bytes:
    return head(3, block, len(values)) + values.astype("<f2").tobytes()


def decode_fp16(frame: bytes) -> Floats:
    return np.frombuffer(frame, "<f2", offset=16).astype(np.float32)


def encode_int4(values: Floats, block: int) -> bytes:
    frame = bytearray(head(4, block, len(values)))
    for start in range(0, len(values), block):
        part = values[start : start + block]
        peak = np.abs(part).max()
        if peak < np.float32(2.0**-100):
            frame += bytes(4 + (len(part) + 1) // 2)
            continue
        scale = np.float32(peak / np.float32(7))
        codes = [int(code) % 16 for code in np.rint(part / scale)] + [0] * (len(part) % 2)
        frame += scale.astype("<f4").tobytes()
        frame += bytes(low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True))
    return bytes(frame)


def decode_int4(frame: bytes) -> Floats:
    block, n_values = struct.unpack_from("<II", frame, 8)
    out: list[np.float32] = []
    at = 16
    for start in range(0, n_values, block):
        n = min(block, n_values - start)
        scale = np.frombuffer(frame, "<f4", 1, at)[0]
        packed = frame[at + 4 : at + 4 + (n + 1) // 2]
        codes = [code for byte in packed for code in (byte & 15, byte >> 4)][:n]
        out += [np.float32(code - 16 if code > 7 else code) * scale for code in codes]
        at += 4 + len(packed)
    return np.array(out, np.float32)


def encode_topk(values: Floats, block: int) -> bytes:
    frame = bytearray(head(5, block, len(values)))
    for start in range(0, len(values), block):
        frame += _topk_block(values[start : start + block])
    return bytes(frame)


def _topk_block(part: Floats) -> bytes:
    k = -(-len(part) // 64)
    sizes = np.abs(part)
    largest = sorted(range(len(part)), key=lambda i: (-sizes[i], i))[:k]
    sent = sorted(i for i in largest if sizes[i] >= np.float32(2.0**-100))
    high = low = 0
    entries: list[tuple[int, int]] = []
    if sent:
        split = (max(sizes[sent]) + min(sizes[sent])) * np.float32(0.5)
        top = [i for i in sent if sizes[i] >= split]
        rest = [i for i in sent if sizes[i] < split]
        high = _level(_mean(sizes, top))
        if rest:
            half = _mean(sizes, rest) * 0.5
            rest = [i for i in rest if float(sizes[i]) >= half]
            low = _level(min(_mean(sizes, rest), 2.0 * float(min(sizes[rest]))))
        if low == high:
            top, rest, low = top + rest, [], 0
        entries = sorted([(i, 1) for i in top] + [(i, 0) for i in rest])
    indices = sum(i << (12 * place) for place, (i, _) in enumerate(entries))
    codes = sum((is_high + 2 * int(part[i] < 0)) << (2 * place) for place, (i, is_high) in enumerate(entries))
    n_index_bytes, n_code_bytes = -(-12 * k // 8), -(-2 * k // 8)
    return (
        struct.pack("<HH", high, low)
        + int(indices).to_bytes(n_index_bytes, "little")
        + int(codes).to_bytes(n_code_bytes, "little")
    )


def _mean(sizes: Floats, chosen: list[int]) -> float:
    total = 0.0
    for i in chosen:
        total += float(sizes[i])
    return total / len(chosen)


def _level(mean: float) -> int:
    return int(np.float32(mean).view(np.uint32)) >> 16


def decode_topk(frame: bytes) -> Floats:
    block, n_values = struct.unpack_from("<II", frame, 8)
    out = np.zeros(n_values, np.float32)
    at = 16
    for start in range(0, n_values, block):
        k = -(-min(block, n_values - start) // 64)
        n_index_bytes, n_code_bytes = -(-12 * k // 8), -(-2 * k // 8)
        low, high = (np.frombuffer(b"\0\0" + frame[p : p + 2], "<f4")[0] for p in (at + 2, at))
        indices = int.from_bytes(frame[at + 4 : at + 4 + n_index_bytes], "little")
        codes = int.from_bytes(frame[at + 4 + n_index_bytes : at + 4 + n_index_bytes + n_code_bytes], "little")
        for place in range(k if high else 0):
            index, code = indices >> (12 * place) & 4095, codes >> (2 * place) & 3
            if place and not index:
                break
            out[start + index] = (-1 if code & 2 else 1) * (high if code & 1 else low)
        at += 4 + n_index_bytes + n_code_bytes
    return out


def exact(values: Floats) -> list[Fraction]:
    """The values as fractions, in which sums and differences are not rounded."""
    return [Fraction(float(value)) for value in values]


def around_ties(largest_code: int, n_blocks: int, block: int = 16) -> Floats:
    """Blocks of values at, just below and just above the middle between two codes, for scales of all mantissas.

    Where a division by the scale is a product with its inverse, some of them go the other way.
    """
    rng = np.random.default_rng(largest_code)
    peaks = rng.integers(0x3F800000, 0x40000000, n_blocks, dtype=np.int32).view(np.float32)
    scales = peaks / np.float32(largest_code)
    middles = rng.integers(-largest_code, largest_code, (n_blocks, block)).astype(np.float32) + np.float32(0.5)
    values = middles * scales[:, None]
    values[:, 1::3] = np.nextafter(values[:, 1::3], np.float32(-3))
    values[:, 2::3] = np.nextafter(values[:, 2::3], np.float32(3))
    values[:, 0] = peaks
    flat: Floats = values.reshape(-1)
    return flat


ENCODE: dict[str, Encode] = {
    "int8": encode_int8,
    "fp32": encode_fp32,
    "fp16": encode_fp16,
    "int4": encode_int4,
    "topk": encode_topk,
}
DECODE: dict[str, Decode] = {
    "int8": decode_int8,
    "fp32": decode_fp32,
    "fp16": decode_fp16,
    "int4": decode_int4,
    "topk": decode_topk,
}
