"""Hashes that name plans, bodies and commits; light enough for the deciding code."""

from __future__ import annotations

import struct

from blake3 import blake3

_U64 = struct.Struct("<Q")


def tagged_hash(tag: str, *parts: bytes) -> bytes:
    """32 bytes of BLAKE3 over tag and parts, each after its length as u64 little-endian.

    The same construction as `aggregation.digest.tagged_hash`, which needs numpy.
    """
    hasher = blake3()
    for part in (tag.encode(), *parts):
        hasher.update(_U64.pack(len(part)))
        hasher.update(part)
    return hasher.digest()


def plan_hash(plan_body: bytes) -> bytes:
    """The hash of a plan's exact bytes (an envelope's body): every message of its attempt carries it."""
    return tagged_hash("plan", plan_body)


def body_hash(body: bytes) -> bytes:
    """The hash of a commit body's exact bytes: what a vote names."""
    return tagged_hash("body", body)


def commit_hash(body: bytes, digest: bytes) -> bytes:
    """The hash of a commit: its body's exact bytes and the digest of the state it leads to. The next body names it."""
    return tagged_hash("commit", body, digest)
