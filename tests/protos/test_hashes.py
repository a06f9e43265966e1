"""The hashes of plans, bodies and commits."""

from __future__ import annotations

import struct

from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from aggregation import digest
from protos.hashes import body_hash, commit_hash, plan_hash, tagged_hash


@given(st.text(max_size=10), st.lists(st.binary(max_size=40), max_size=4))
def test_the_same_construction_as_in_aggregation(tag: str, parts: list[bytes]) -> None:
    assert tagged_hash(tag, *parts) == digest.tagged_hash(tag, *parts)


def test_the_construction_written_out() -> None:
    length = struct.Struct("<Q").pack
    assert tagged_hash("a", b"bc", b"") == blake3(length(1) + b"a" + length(2) + b"bc" + length(0)).digest()


def test_each_thing_has_its_own_tag() -> None:
    body, state = b"the same bytes", bytes(32)
    hashes = [plan_hash(body), body_hash(body), commit_hash(body, state), commit_hash(body, b"\x01" * 32)]
    assert len(set(hashes)) == 4
    assert plan_hash(body) == tagged_hash("plan", body)
    assert body_hash(body) == tagged_hash("body", body)
    assert commit_hash(body, state) == tagged_hash("commit", body, state)


def test_where_a_part_ends_matters() -> None:
    assert commit_hash(b"ab", b"c") != commit_hash(b"a", b"bc")
