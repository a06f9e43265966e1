"""The heads of rows and things written and read by hand, the bytes of protobuf: each message of the exchange has one.

Only what is plain is done here: every field within its bounds, in the order and form in which protobuf writes it. For
all else the answer is None, and `protos.convert` does it, or says what is wrong.
"""

from __future__ import annotations

from protos import bounds
from protos.messages import ChunkHead, FetchHead

HASH_BYTES = 32

_PLAN = _HASH = b"\x0a\x20"  # field 1 of 32 bytes
_CHUNK, _ROW_BYTES = 0x10, 0x18  # fields 2 and 3, varints
_SIBLING = b"\x22\x20"  # field 4 of 32 bytes
_THING_BYTES = 0x10  # field 2, a zigzag varint
_STEP = len(_SIBLING) + HASH_BYTES


def _most(message: str, field: str) -> int:
    bound = bounds.item_bound(message, field, int)
    return bound.most if isinstance(bound, bounds.Integer) else -1


_CHUNK_MOST, _ROW_BYTES_MOST = _most("ChunkHead", "chunk"), _most("ChunkHead", "n_bytes")
_THING_BYTES_MOST = _most("FetchHead", "n_bytes")
_PATH_MOST = bounds.count_bound("ChunkHead", "path")


def varint(value: int) -> bytes:
    """A non-negative integer as protobuf writes it."""
    done = bytearray()
    while value > 127:
        done.append(value & 127 | 128)
        value >>= 7
    done.append(value)
    return bytes(done)


def encode(head: object) -> bytes | None:
    """The bytes of a plain head; None for one that isn't, and for other messages."""
    if type(head) is ChunkHead:
        return _encode_chunk_head(head)
    return _encode_fetch_head(head) if type(head) is FetchHead else None


def decode(cls: type, raw: bytes, start: int, end: int) -> ChunkHead | FetchHead | None:
    """The plain head in these bytes; None for one that isn't, and for other messages."""
    if cls is ChunkHead:
        return _decode_chunk_head(raw, start, end)
    return _decode_fetch_head(raw, start, end) if cls is FetchHead else None


def field(raw: bytes, at: int, tag: bytes) -> tuple[int, int] | None:
    """Where the value of a field lies, if the field of this one-byte tag is here, with a length, and whole."""
    if raw[at : at + 1] != tag:
        return None
    size, start = _varint(raw, at + 1, len(raw))
    return (start, start + size) if 0 <= size <= len(raw) - start else None


def _encode_chunk_head(head: ChunkHead) -> bytes | None:
    plan, chunk, n_bytes, path = head.plan, head.chunk, head.n_bytes, head.path
    if not (_is_hash(plan) and type(chunk) is type(n_bytes) is int and type(path) is tuple):
        return None
    if not (0 < chunk <= _CHUNK_MOST and 0 < n_bytes <= _ROW_BYTES_MOST and len(path) <= _PATH_MOST):
        return None
    pieces = [_PLAN, plan, b"\x10", varint(chunk), b"\x18", varint(n_bytes)]
    for sibling in path:
        if not _is_hash(sibling):
            return None
        pieces += (_SIBLING, sibling)
    return b"".join(pieces)


def _decode_chunk_head(raw: bytes, start: int, end: int) -> ChunkHead | None:
    at = start + 2 + HASH_BYTES
    if end > len(raw) or at >= end or raw[start : start + 2] != _PLAN or raw[at] != _CHUNK:
        return None
    chunk, chunk_end = _varint(raw, at + 1, end)
    if not 0 < chunk <= _CHUNK_MOST or chunk_end >= end or raw[chunk_end] != _ROW_BYTES:
        return None
    n_bytes, path_start = _varint(raw, chunk_end + 1, end)
    n_siblings, rest = divmod(end - path_start, _STEP)
    if not 0 < n_bytes <= _ROW_BYTES_MOST or rest or n_siblings > _PATH_MOST:
        return None
    path: list[bytes] = []
    for sibling in range(path_start, end, _STEP):
        if raw[sibling : sibling + 2] != _SIBLING:
            return None
        path.append(raw[sibling + 2 : sibling + _STEP])
    return ChunkHead(raw[start + 2 : at], chunk, n_bytes, tuple(path))


def _encode_fetch_head(head: FetchHead) -> bytes | None:
    n_bytes = head.n_bytes
    if not (_is_hash(head.hash) and type(n_bytes) is int and 0 < n_bytes <= _THING_BYTES_MOST):
        return None
    return b"".join((_HASH, head.hash, b"\x10", varint(2 * n_bytes)))


def _decode_fetch_head(raw: bytes, start: int, end: int) -> FetchHead | None:
    at = start + 2 + HASH_BYTES
    if end > len(raw) or at >= end or raw[start : start + 2] != _HASH or raw[at] != _THING_BYTES:
        return None
    zigzag, after = _varint(raw, at + 1, end)
    if after != end or zigzag % 2 or not 0 < zigzag // 2 <= _THING_BYTES_MOST:
        return None
    return FetchHead(raw[start + 2 : at], zigzag // 2)


def _is_hash(value: object) -> bool:
    return type(value) is bytes and len(value) == HASH_BYTES


def _varint(raw: bytes, at: int, end: int) -> tuple[int, int]:
    """The value and the index after it; -1 for one that is cut off, long, or longer than it need be."""
    value = shift = 0
    while at < end and shift < 35:
        byte = raw[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return (value if byte or not shift else -1), at
        shift += 7
    return -1, at
