"""BLAKE3 hashes and Merkle trees over leaves, chunks and the state.

Each use has its own tag or prefix, so no hash of one kind can pass for one of another kind, and each tree's root
binds the number of its leaves. blake3 releases the GIL for long inputs and reads buffers where they lie.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from aggregation import codec
from aggregation.codec.frame import HEADER_BYTES, as_bytes

if TYPE_CHECKING:
    from aggregation.codec.frame import Buffer

HASH_BYTES = 32

_LEAF, _NODE, _ROOT = b"\x00", b"\x01", b"\x02"
_U64 = struct.Struct("<Q")
_CHUNK_TAG = "barnraise.chunk"
_CONTRIBUTION_TAG = "barnraise.contribution"
_RESULTS_TAG = "barnraise.results"
_STATE_TAG = "barnraise.state"


def tagged_hash(tag: str, *parts: bytes) -> bytes:
    """32 bytes of BLAKE3 over tag and parts, each after its length as u64: no two inputs share an encoding."""
    hasher = blake3()
    for part in (tag.encode(), *parts):
        hasher.update(_U64.pack(len(part)))
        hasher.update(part)
    return hasher.digest()


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """Root of the tree over byte strings, in order; that of no leaves is defined too.

    leaf = H(00 ‖ bytes), node = H(01 ‖ left ‖ right), an odd last node moves up as it is,
    root = H(02 ‖ count u64 ‖ top).
    """
    level = [blake3(_LEAF + leaf).digest() for leaf in leaves]
    while len(level) > 1:
        level = _parents(level)
    return _root(len(leaves), level[0] if level else b"")


def merkle_path(leaves: Sequence[bytes], index: int) -> tuple[bytes, ...]:
    """The siblings from the leaf up that `root_from_path` needs; raises ValueError for an index without a leaf."""
    if not 0 <= index < len(leaves):
        raise ValueError(f"no leaf {index} among {len(leaves)}")
    level = [_leaf(leaf) for leaf in leaves]
    path: list[bytes] = []
    while len(level) > 1:
        sibling = index ^ 1
        if sibling < len(level):
            path.append(level[sibling])
        level = _parents(level)
        index //= 2
    return tuple(path)


def merkle_paths(leaves: Sequence[bytes]) -> tuple[tuple[bytes, ...], ...]:
    """Every leaf's `merkle_path`, for one walk up the tree: each alone costs as many hashes as all of them."""
    level = [_leaf(leaf) for leaf in leaves]
    paths: list[list[bytes]] = [[] for _ in leaves]
    height = 0
    while len(level) > 1:
        for index, path in enumerate(paths):
            sibling = index >> height ^ 1
            if sibling < len(level):
                path.append(level[sibling])
        level = _parents(level)
        height += 1
    return tuple(tuple(path) for path in paths)


def root_from_path(leaf: bytes, index: int, n_leaves: int, path: Sequence[bytes]) -> bytes:
    """The root of the tree in which this leaf has this place and path; raises ValueError for a malformed path."""
    if not 0 <= index < n_leaves:
        raise ValueError(f"no leaf {index} among {n_leaves}")
    siblings = iter(path)
    node, width, n_used = _leaf(leaf), n_leaves, 0
    while width > 1:
        if index ^ 1 < width:
            sibling = next(siblings, b"")
            if len(sibling) != HASH_BYTES:
                raise ValueError(f"sibling {n_used} of a Merkle path is missing or not of {HASH_BYTES} bytes")
            n_used += 1
            node = _node(sibling, node) if index & 1 else _node(node, sibling)
        index //= 2
        width = (width + 1) // 2
    if n_used != len(path):
        raise ValueError(f"Merkle path has {len(path)} siblings instead of {n_used}")
    return _root(n_leaves, node)


def leaf_segments(frame: Buffer, leaf_values: int) -> list[memoryview]:
    """The frame's body cut into its leaves, as views; raises CodecError for a malformed frame or leaf length.

    The last leaf is shorter where the chunk is no multiple of it.
    """
    name, head = codec.header(frame)
    view = as_bytes(frame).data
    ranges = _leaf_ranges(name, head.block, head.n_values, leaf_values)
    return [view[first:last] for first, last in ranges]


@lru_cache(maxsize=64)  # a vector's chunks are of two sizes, and a leaf takes longer to find than to hash
def _leaf_ranges(name: str, block: int, n_values: int, leaf_values: int) -> tuple[tuple[int, int], ...]:
    """Where a frame's leaves lie, as bytes [first, last)."""
    return tuple(
        codec.body_range(
            name, block=block, n_values=n_values, value_start=start, value_stop=min(start + leaf_values, n_values)
        )
        for start in range(0, n_values, max(1, leaf_values))
    )


def leaf_hash(segment: Buffer) -> bytes:
    """Plain BLAKE3 of one leaf's bytes: the unit in which a chunk may be hashed in parallel or fetched in part."""
    return blake3(as_bytes(segment).data).digest()


def chunk_root(frame: Buffer, leaf_values: int) -> bytes:
    """The hash of one encoded chunk, contribution and result alike; raises CodecError for a malformed frame.

    It binds the header, the leaf length and the Merkle root of the leaf hashes.
    """
    hashes = [blake3(segment).digest() for segment in leaf_segments(frame, leaf_values)]
    return chunk_root_of(bytes(as_bytes(frame)[:HEADER_BYTES]), leaf_values, hashes)


def chunk_root_of(header: bytes, leaf_values: int, leaf_hashes: Sequence[bytes]) -> bytes:
    """`chunk_root` from its 16 header bytes and the hashes of all leaves, in order."""
    return tagged_hash(_CHUNK_TAG, header, _U64.pack(leaf_values), merkle_root(leaf_hashes))


def contribution_root(chunk_roots: Sequence[bytes]) -> bytes:
    """What a sender commits to: the Merkle root over its chunks' roots."""
    return tagged_hash(_CONTRIBUTION_TAG, merkle_root(chunk_roots))


def contribution_root_from_path(chunk_root: bytes, index: int, n_chunks: int, path: Sequence[bytes]) -> bytes:
    """`contribution_root` from one chunk's root and its `merkle_path`; raises ValueError for a malformed path."""
    return tagged_hash(_CONTRIBUTION_TAG, root_from_path(chunk_root, index, n_chunks, path))


def results_root(chunk_roots: Sequence[bytes]) -> bytes:
    """What a commit says of its results: the Merkle root over the results' chunk roots."""
    return tagged_hash(_RESULTS_TAG, merkle_root(chunk_roots))


def state_chunk_hash(values_P: Buffer) -> bytes:
    """Plain BLAKE3 of one chunk of θ or of the momentum, an fp32 array or its little-endian bytes."""
    if isinstance(values_P, np.ndarray):
        if values_P.dtype != np.float32:
            raise ValueError(f"state is fp32, not {values_P.dtype}")
        return blake3(np.ascontiguousarray(values_P, "<f4").view(np.uint8).data).digest()
    return blake3(as_bytes(values_P).data).digest()


def state_digest(theta_chunk_hashes: Sequence[bytes], momentum_chunk_hashes: Sequence[bytes]) -> bytes:
    """The digest of the state: one Merkle tree over θ's chunk hashes, then the momentum's; equally many of each."""
    if len(theta_chunk_hashes) != len(momentum_chunk_hashes):
        raise ValueError(f"{len(theta_chunk_hashes)} chunks of θ but {len(momentum_chunk_hashes)} of the momentum")
    return tagged_hash(_STATE_TAG, merkle_root([*theta_chunk_hashes, *momentum_chunk_hashes]))


class StateDigester:
    """Collects chunk hashes in any order and gives the state's digest once all are there."""

    __slots__ = ("_momentum", "_theta")

    def __init__(self, n_chunks: int) -> None:
        self._theta: list[bytes | None] = [None] * n_chunks
        self._momentum: list[bytes | None] = [None] * n_chunks

    def add_theta(self, index: int, chunk_hash: bytes) -> None:
        """Take θ's chunk `index`; raises ValueError out of range or for a second, different hash."""
        _put(self._theta, index, chunk_hash)

    def add_momentum(self, index: int, chunk_hash: bytes) -> None:
        """Take the momentum's chunk `index`; raises ValueError out of range or for a second, different hash."""
        _put(self._momentum, index, chunk_hash)

    def digest(self) -> bytes:
        """The state's digest; raises ValueError while a chunk is missing."""
        theta = [chunk_hash for chunk_hash in self._theta if chunk_hash is not None]
        momentum = [chunk_hash for chunk_hash in self._momentum if chunk_hash is not None]
        n_missing = len(self._theta) + len(self._momentum) - len(theta) - len(momentum)
        if n_missing:
            raise ValueError(f"{n_missing} chunk hashes are missing from the state's digest")
        return state_digest(theta, momentum)


def _put(hashes: list[bytes | None], index: int, chunk_hash: bytes) -> None:
    if not 0 <= index < len(hashes):
        raise ValueError(f"no chunk {index} among {len(hashes)}")
    if len(chunk_hash) != HASH_BYTES:
        raise ValueError(f"a chunk hash has {HASH_BYTES} bytes, not {len(chunk_hash)}")
    if hashes[index] not in (None, chunk_hash):
        raise ValueError(f"chunk {index} already has another hash")
    hashes[index] = chunk_hash


def _leaf(data: bytes) -> bytes:
    return blake3(_LEAF + data).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return blake3(_NODE + left + right).digest()


def _parents(level: list[bytes]) -> list[bytes]:
    above = [blake3(_NODE + level[i] + level[i + 1]).digest() for i in range(0, len(level) - 1, 2)]
    if len(level) % 2:
        above.append(level[-1])
    return above


def _root(count: int, top: bytes) -> bytes:
    return blake3(_ROOT + _U64.pack(count) + top).digest()
