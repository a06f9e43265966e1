"""Hashes: distinct for distinct inputs, and verifiable in parts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregation import codec, digest
from aggregation.errors import CodecError

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "digests.json").read_text())


def leaves(n: int) -> list[bytes]:
    return [blake3(bytes([i])).digest() for i in range(n)]


def test_tagged_hash_tells_apart_what_concatenates_alike() -> None:
    inputs = [("t", b"ab", b"c"), ("t", b"a", b"bc"), ("t", b"abc"), ("ta", b"bc"), ("t", b"ab", b"c", b""), ("t",)]
    hashes = [digest.tagged_hash(tag, *parts) for tag, *parts in inputs]  # type: ignore[arg-type]
    assert len(set(hashes)) == len(inputs)
    assert {len(each) for each in hashes} == {32}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33])
def test_every_leaf_proves_itself_and_nothing_else(n: int) -> None:
    data = leaves(n)
    root = digest.merkle_root(data)
    assert digest.merkle_paths(data) == tuple(digest.merkle_path(data, index) for index in range(n))
    for index in range(n):
        path = digest.merkle_path(data, index)
        assert digest.root_from_path(data[index], index, n, path) == root
        assert digest.root_from_path(b"other", index, n, path) != root
        for wrong in range(n):
            if wrong != index:
                try:
                    assert digest.root_from_path(data[index], wrong, n, path) != root
                except ValueError:
                    pass
        for wrong_n in (n - 1, n + 1, 2 * n):
            try:
                assert digest.root_from_path(data[index], index, wrong_n, path) != root
            except ValueError:
                pass


def test_malformed_paths_raise() -> None:
    data = leaves(5)
    path = digest.merkle_path(data, 1)
    for index, n, bad in (
        (1, 5, path[:-1]),
        (1, 5, (*path, bytes(32))),
        (1, 5, (path[0][:31], *path[1:])),
        (1, 5, ()),
        (-1, 5, path),
        (5, 5, path),
        (0, 0, ()),
    ):
        with pytest.raises(ValueError, match=r"path|leaf"):
            digest.root_from_path(data[1], index, n, bad)
    for index in (-1, 5):
        with pytest.raises(ValueError, match="no leaf"):
            digest.merkle_path(data, index)


def test_roots_of_different_trees_differ() -> None:
    data = leaves(4)
    trees = [data[:n] for n in range(5)] + [data[::-1], [*data, data[3]], [b"".join(data[:2]), b"".join(data[2:])]]
    assert len({digest.merkle_root(tree) for tree in trees}) == len(trees)


@pytest.mark.parametrize("name", codec.names())
def test_a_chunk_root_depends_on_every_byte(name: str) -> None:
    frame = codec.encode(name, np.linspace(-1, 1, 150), block=64)
    root = digest.chunk_root(frame, 128)
    assert digest.chunk_root(memoryview(bytearray(frame)), 128) == root
    assert digest.chunk_root(frame, 64) != root
    for at in range(16, len(frame), 7):
        changed = bytearray(frame)
        changed[at] ^= 1
        assert digest.chunk_root(changed, 128) != root


def test_a_chunk_root_is_the_header_and_the_leaves() -> None:
    frame = codec.encode("int8", np.linspace(-1, 1, 150), block=16)
    segments = digest.leaf_segments(frame, 64)
    assert [len(segment) for segment in segments] == [80, 80, 22 + 4 * 2]
    assert b"".join(segments) == frame[16:]
    hashes = [digest.leaf_hash(segment) for segment in segments]
    assert digest.chunk_root_of(frame[:16], 64, hashes) == digest.chunk_root(frame, 64)
    other_header = codec.encode("fp32", np.ones(8), block=16)[:16]
    assert digest.chunk_root_of(other_header, 64, hashes) != digest.chunk_root(frame, 64)


def test_a_chunk_root_of_nonsense_is_a_codec_error() -> None:
    frame = codec.encode("int8", np.ones(40), block=16)
    for bad in (b"", frame[:-1], frame + b"\0", b"x" + frame[1:]):
        with pytest.raises(CodecError):
            digest.chunk_root(bad, 16)
    for leaf_values in (-16, 0, 8, 24):
        with pytest.raises(CodecError):
            digest.chunk_root(frame, leaf_values)


def test_the_kinds_of_roots_are_distinct() -> None:
    data = leaves(4)
    roots = {
        digest.contribution_root(data),
        digest.results_root(data),
        digest.state_digest(data[:2], data[2:]),
        digest.merkle_root(data),
    }
    assert len(roots) == 4


def test_a_chunk_proves_that_it_is_part_of_a_contribution() -> None:
    data = leaves(7)
    root = digest.contribution_root(data)
    assert digest.contribution_root_from_path(data[6], 6, 7, digest.merkle_path(data, 6)) == root


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(8)))
def test_the_state_digest_does_not_depend_on_the_order_of_arrival(order: list[int]) -> None:
    theta, momentum = leaves(8)[:4], leaves(8)[4:]
    digester = digest.StateDigester(4)
    for i in order:
        with pytest.raises(ValueError, match="missing"):
            digester.digest()
        digester.add_theta(i, theta[i]) if i < 4 else digester.add_momentum(i - 4, momentum[i - 4])
    assert digester.digest() == digest.state_digest(theta, momentum)
    assert digester.digest() != digest.state_digest(momentum, theta)


def test_a_state_digester_refuses_what_does_not_belong() -> None:
    digester = digest.StateDigester(2)
    one, two = leaves(2)
    digester.add_theta(0, one)
    digester.add_theta(0, one)
    with pytest.raises(ValueError, match="another"):
        digester.add_theta(0, two)
    for index in (-1, 2):
        with pytest.raises(ValueError, match="no chunk"):
            digester.add_momentum(index, one)
    with pytest.raises(ValueError, match="32 bytes"):
        digester.add_momentum(0, one[:31])
    with pytest.raises(ValueError, match="chunks of"):
        digest.state_digest([one], [])


def test_state_chunks_are_hashed_as_little_endian_fp32() -> None:
    values = np.linspace(-1, 1, 100, dtype=np.float32)
    expected = blake3(values.astype("<f4").tobytes()).digest()
    assert digest.state_chunk_hash(values) == digest.state_chunk_hash(values.astype("<f4").tobytes()) == expected
    assert digest.state_chunk_hash(np.repeat(values, 2)[::2]) == expected
    with pytest.raises(ValueError, match="fp32"):
        digest.state_chunk_hash(values.astype(np.float64))


def test_hashes_keep_their_values() -> None:
    data = leaves(5)
    frame = bytes.fromhex(GOLDEN["frame"])
    assert {
        "tagged_hash": digest.tagged_hash("tag", b"a", b"", b"bc").hex(),
        "merkle_roots": [digest.merkle_root(data[:n]).hex() for n in range(6)],
        "frame": frame.hex(),
        "chunk_root": digest.chunk_root(frame, 16).hex(),
        "contribution_root": digest.contribution_root(data).hex(),
        "results_root": digest.results_root(data).hex(),
        "state_digest": digest.state_digest(data[:2], data[2:4]).hex(),
    } == GOLDEN


def test_a_tree_is_built_as_documented_and_an_inner_node_is_no_leaf() -> None:
    data = leaves(4)
    bottom = [blake3(b"\0" + leaf).digest() for leaf in data]
    inner = [blake3(b"\1" + bottom[i] + bottom[i + 1]).digest() for i in (0, 2)]
    top = blake3(b"\1" + inner[0] + inner[1]).digest()
    assert digest.merkle_root(data) == blake3(b"\2" + (4).to_bytes(8, "little") + top).digest()
    assert digest.merkle_root(inner) != digest.merkle_root(data)
