"""Codec `topk`: of each block the B/64 largest values, as 12-bit index, sign and one of two levels.

    body = for each block: high, low (each the upper half of an fp32) | indices | codes

SparseLoCo's format (Sarfi et al. 2025, arXiv 2508.15706: chunks of 4096, 64 values of 12 + 2 bits), for senders with
a residual. B is a multiple of 64 up to 4096, k = B/64, and ceil(n/64) for a last block of n values. Little-endian:
k indices of 12 bits, two to three bytes, ascending; k codes of two bits, four to a byte, bit 0 for the high level,
bit 1 for minus. A block that has fewer values to send fills up with zero indices and codes; bits left over are zero.
Everything not sent decodes to 0, the rest to ± its level.

What is sent, of a block with |x| as size:
1. The k largest sizes, of equal ones those with the lowest index, and none below 2^-100.
2. split = (largest + smallest of them) / 2 in fp32. high = the mean of the sizes from split on.
3. Of those below split, those of at least half their mean. low = the mean of these, at most twice the smallest.
Means are fp64 sums in the order of indices, divided once. A level is rounded to fp32, then its lower 16 bits are
dropped. If both levels come out equal, all use the high one, and low is zero, as where nobody uses it.

So every size sent is at least half of its level and at most 64 times it (a mean of 63 is at least a 63rd of the
largest), and a level has eight significant bits. The difference of the two, which is what the residual keeps, is
therefore exact in fp32: by Sterbenz where the size is at most twice its level, and above because the level is a
multiple of the size's last place.

One canonical form, anything else is refused: levels zero or within [2^-100, 127 · cap], low < high, each used by a code
unless it is zero. So other bytes are other values.
"""

from __future__ import annotations

import numpy as np

from aggregation.codec.fp32 import tiled_norm
from aggregation.codec.frame import Bytes, Floats
from aggregation.errors import CodecError
from aggregation.kernels import BYTES_IN, BYTES_OUT, F32, F32_IN, F32_OUT, I64, kernel

BLOCK_STEP = 64
"""Values of a block for each one sent."""
BLOCK_MAX = 4096
"""An index has twelve bits."""
LEVEL_MIN = 2.0**-100

_K_MAX = BLOCK_MAX // BLOCK_STEP
_LEVEL_MIN_BITS = np.int32(np.float32(LEVEL_MIN).view(np.int32))
_INF_BITS = np.int32(0x7F800000)
_SIGN_OFF = np.int32(0x7FFFFFFF)
_OCTAVE = 1 << 23
"""What the bits of a float grow by when it doubles."""

_FINE, _NOT_FINITE, _TOO_LARGE, _BAD_LEVELS, _BAD_INDICES, _BAD_CODES, _BAD_PADDING = -1, 0, 1, 2, 3, 4, 5
_REASONS = (
    "a value is not finite",
    "a value is beyond the codec's cap",
    "the levels are out of range or order",
    "the indices do not ascend within the block",
    "a level is used by no code, or used and zero",
    "the bits left over are not zero",
)


@kernel(I64, F32_IN, I64, F32, BYTES_OUT)
def _encode(values_P, block, cap, body):  # type: ignore[no-untyped-def]
    """Fill the body; -1, or 8·block index + reason of the first block refused."""
    n_values = values_P.size
    bits_P = values_P.view(np.int32)
    n_blocks = (n_values + block - 1) // block
    cap_bits = np.float32(cap).view(np.int32)
    near = np.empty(block, np.int32)  # indices of the values that may be among the k largest
    near_sizes = np.empty(block, np.int32)
    indices = np.empty(_K_MAX, np.int64)
    sizes = np.empty(_K_MAX, np.float32)
    codes = np.empty(_K_MAX, np.int64)
    at = 0
    for b in range(n_blocks):
        start = b * block
        n = min(block, n_values - start)
        k = (n + 63) // 64
        bits = bits_P[start : start + n]
        n_index_bytes = (3 * k + 1) // 2
        n_bytes = 4 + n_index_bytes + (k + 3) // 4
        body[at : at + n_bytes] = np.uint8(0)
        peak = np.int32(0)
        for i in range(bits.size):
            size = np.int32(bits[i] & _SIGN_OFF)
            peak = size if size > peak else peak
        if peak >= _INF_BITS:
            return 8 * b + _NOT_FINITE
        if peak > cap_bits:
            return 8 * b + _TOO_LARGE
        if peak < _LEVEL_MIN_BITS:
            at += n_bytes
            continue

        # Down from the largest in growing steps, until k values are found or there are no more.
        step = np.int64(_OCTAVE)
        floor = np.int64(peak)
        n_near = np.int32(0)
        while n_near < k and floor > _LEVEL_MIN_BITS:
            floor = max(floor - step, np.int64(_LEVEL_MIN_BITS))
            step *= 2
            floor_bits = np.int32(floor)
            n_near = np.int32(0)
            for i in range(bits.size):
                n_near = np.int32(n_near + (np.int32(bits[i] & _SIGN_OFF) >= floor_bits))
        floor_bits = np.int32(floor)
        found = np.int64(0)
        for i in range(bits.size):
            size = np.int32(bits[i] & _SIGN_OFF)
            near[found] = np.int32(i)  # overwritten by the next, unless it counts
            near_sizes[found] = size
            found += np.int64(size >= floor_bits)
        # The k-th largest by bisection: at least k sizes reach `low`, fewer reach `high`.
        n_above = np.int64(0)
        low = np.int64(floor)
        if found > k:
            high = np.int64(peak) + 1
            while high - low > 1:
                middle = (low + high) // 2
                middle_bits = np.int32(middle)
                count = np.int32(0)
                for i in range(found):
                    count = np.int32(count + (near_sizes[i] >= middle_bits))
                if count >= k:
                    low = middle
                    if count == k:
                        break
                else:
                    high = middle
            low_bits = np.int32(low)
            for i in range(found):
                n_above += np.int64(near_sizes[i] > low_bits)
        low_bits = np.int32(low)
        n_equal = k - n_above
        n_sent = 0
        smallest = peak
        for i in range(found):
            size = near_sizes[i]
            if size > low_bits or (size == low_bits and n_equal > 0):
                if size == low_bits:
                    n_equal -= 1
                indices[n_sent] = near[i]
                sizes[n_sent] = np.int32(size).view(np.float32)
                smallest = min(smallest, size)
                n_sent += 1

        split = (np.int32(peak).view(np.float32) + np.int32(smallest).view(np.float32)) * np.float32(0.5)
        high_sum = 0.0
        n_high = 0
        rest_sum = 0.0
        for i in range(n_sent):
            if sizes[i] >= split:
                high_sum += np.float64(sizes[i])
                n_high += 1
            else:
                rest_sum += np.float64(sizes[i])
        high_bits = np.uint32(np.float32(high_sum / np.float64(n_high)).view(np.uint32) >> np.uint32(16))
        low_level_bits = np.uint32(0)
        least = 0.0
        if n_high < n_sent:
            least = rest_sum / np.float64(n_sent - n_high) * 0.5
            low_sum = 0.0
            n_low = 0
            low_smallest = np.float64(split)
            for i in range(n_sent):
                size_64 = np.float64(sizes[i])
                if sizes[i] < split and size_64 >= least:
                    low_sum += size_64
                    n_low += 1
                    low_smallest = min(low_smallest, size_64)
            level = min(low_sum / np.float64(n_low), 2.0 * low_smallest)
            low_level_bits = np.uint32(np.float32(level).view(np.uint32) >> np.uint32(16))
        both = low_level_bits < high_bits
        n_codes = 0
        for i in range(n_sent):
            is_high = sizes[i] >= split
            if is_high or np.float64(sizes[i]) >= least:
                code = np.int64(1) if is_high or not both else np.int64(0)
                if bits[indices[i]] < 0:
                    code |= np.int64(2)
                indices[n_codes] = indices[i]
                codes[n_codes] = code
                n_codes += 1
        if not both:
            low_level_bits = np.uint32(0)

        body[at] = np.uint8(high_bits & np.uint32(255))
        body[at + 1] = np.uint8(high_bits >> np.uint32(8))
        body[at + 2] = np.uint8(low_level_bits & np.uint32(255))
        body[at + 3] = np.uint8(low_level_bits >> np.uint32(8))
        at += 4
        for i in range(n_codes):
            index = indices[i]
            place = at + 3 * (i // 2)
            if i % 2 == 0:
                body[place] = np.uint8(index & 255)
                body[place + 1] = np.uint8(index >> 8)
            else:
                body[place + 1] |= np.uint8((index & 15) << 4)
                body[place + 2] = np.uint8(index >> 4)
            body[at + n_index_bytes + i // 4] |= np.uint8(codes[i] << (2 * (i % 4)))
        at += n_bytes - 4
    return _FINE


@kernel(I64, BYTES_IN, I64, I64, F32)
def _check(body, n_values, block, cap):  # type: ignore[no-untyped-def]
    """-1 for a canonical body, else 8·block index + reason of the first block refused."""
    n_blocks = (n_values + block - 1) // block
    cap_bits = np.int64(np.float32(cap).view(np.int32))
    at = 0
    for b in range(n_blocks):
        n = min(block, n_values - b * block)
        k = (n + 63) // 64
        n_index_bytes = (3 * k + 1) // 2
        n_bytes = 4 + n_index_bytes + (k + 3) // 4
        high = (np.int64(body[at]) | np.int64(body[at + 1]) << 8) << 16
        low = (np.int64(body[at + 2]) | np.int64(body[at + 3]) << 8) << 16
        if high != 0 and (high < _LEVEL_MIN_BITS or high > cap_bits):
            return 8 * b + _BAD_LEVELS
        if low != 0 and (low < _LEVEL_MIN_BITS or low >= high):
            return 8 * b + _BAD_LEVELS
        codes_at = at + 4 + n_index_bytes
        n_high = 0
        n_low = 0
        before = np.int64(-1)
        ended = high == 0
        for i in range(k):
            place = at + 4 + 3 * (i // 2)
            if i % 2 == 0:
                index = np.int64(body[place]) | np.int64(body[place + 1] & np.uint8(15)) << 8
            else:
                index = np.int64(body[place + 1] >> np.uint8(4)) | np.int64(body[place + 2]) << 4
            code = (np.int64(body[codes_at + i // 4]) >> (2 * (i % 4))) & 3
            if index == 0 and i > 0:
                ended = True
            if ended:
                if index != 0 or code != 0:
                    return 8 * b + _BAD_INDICES
            else:
                if index <= before or index >= n:
                    return 8 * b + _BAD_INDICES
                before = index
                if code & 1:
                    n_high += 1
                else:
                    n_low += 1
        if (n_high > 0) != (high != 0) or (n_low > 0) != (low != 0):
            return 8 * b + _BAD_CODES
        if k % 2 and body[codes_at - 1] >> np.uint8(4):
            return 8 * b + _BAD_PADDING
        if k % 4 and body[at + n_bytes - 1] >> np.uint8(2 * (k % 4)):
            return 8 * b + _BAD_PADDING
        at += n_bytes
    return _FINE


@kernel(I64, BYTES_IN, I64, F32_OUT)
def _decode(body, block, out_P):  # type: ignore[no-untyped-def]
    """Zeros, and ± a level at the indices; the body is canonical."""
    n_values = out_P.size
    n_blocks = (n_values + block - 1) // block
    at = 0
    for b in range(n_blocks):
        start = b * block
        n = min(block, n_values - start)
        k = (n + 63) // 64
        n_index_bytes = (3 * k + 1) // 2
        out = out_P[start : start + n]
        for i in range(n):
            out[i] = np.float32(0.0)
        high = np.uint32((np.uint32(body[at]) | np.uint32(body[at + 1]) << np.uint32(8)) << np.uint32(16))
        low = np.uint32((np.uint32(body[at + 2]) | np.uint32(body[at + 3]) << np.uint32(8)) << np.uint32(16))
        codes_at = at + 4 + n_index_bytes
        n_codes = k if high != 0 else 0
        for i in range(n_codes):
            place = at + 4 + 3 * (i // 2)
            if i % 2 == 0:
                index = np.int64(body[place]) | np.int64(body[place + 1] & np.uint8(15)) << 8
            else:
                index = np.int64(body[place + 1] >> np.uint8(4)) | np.int64(body[place + 2]) << 4
            if index == 0 and i > 0:
                break
            if index >= n:  # in no canonical body; but no byte may decide to write past the values
                break
            code = (np.int64(body[codes_at + i // 4]) >> (2 * (i % 4))) & 3
            level = np.uint32(high if code & 1 else low).view(np.float32)
            out[index] = -level if code & 2 else level
        at = codes_at + (k + 3) // 4
    return 0


class TopK:
    """Codec `topk`, id 5."""

    name = "topk"
    id = 5

    def body_bytes(self, n_values: int, block: int) -> int:
        """As for every codec; raises CodecError for a block that is no multiple of 64 up to 4096."""
        if block % BLOCK_STEP or block > BLOCK_MAX:
            raise CodecError(f"topk: block {block} is not a multiple of {BLOCK_STEP} up to {BLOCK_MAX}")
        n_whole, n_last = divmod(n_values, block)
        return n_whole * _block_bytes(block) + (_block_bytes(n_last) if n_last else 0)

    def encode(self, values_P: Floats, block: int, scale_cap: float, body: Bytes) -> None:
        _refuse(_encode(values_P, block, np.float32(127.0 * scale_cap), body))

    def check(self, body: Bytes, n_values: int, block: int, scale_cap: float) -> None:
        _refuse(_check(body, n_values, block, np.float32(127.0 * scale_cap)))

    def decode(self, body: Bytes, block: int, out_P: Floats) -> None:
        _decode(body, block, out_P)

    def squared_norm(self, body: Bytes, n_values: int, block: int) -> float:
        return tiled_norm(self, body, n_values, block)


def _block_bytes(n: int) -> int:
    """Bytes of a block of n values: two levels, k indices of 12 bits, k codes of 2."""
    k = -(-n // BLOCK_STEP)
    return 4 + -(-12 * k // 8) + -(-2 * k // 8)


def _refuse(verdict: int) -> None:
    if verdict != _FINE:
        raise CodecError(f"topk block {verdict // 8}: {_REASONS[verdict % 8]}")
