"""Bytes <-> messages: bounded and total, a value or a WireError, and the same bytes for the same message."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import TypeVar, cast

from protos import limits
from protos.bounds import Unfit, as_reason
from protos.calls import Declined
from protos.convert import converter
from protos.frames import CHUNK, FETCH, LEADER, MEMBER, RECEIPT, Begun, Frames
from protos.messages import ChunkHead, Commit, FetchHead, LeaderMessage, MemberMessage, Part, Signed

__all__ = [
    "Begun",
    "Signed",
    "WireError",
    "as_reason",
    "decode",
    "decode_chunk_frame",
    "decode_commits",
    "decode_fetch_frame",
    "decode_leader_frame",
    "decode_member_frame",
    "decode_receipt_frame",
    "encode",
    "encode_chunk_frame",
    "encode_commits",
    "encode_fetch_frame",
    "encode_leader_frame",
    "encode_member_frame",
    "encode_part",
    "encode_receipt_frame",
    "split",
]

M = TypeVar("M")

_U32 = struct.Struct("<I")
_ANSWER_BYTES = limits.MESSAGE_BYTES + limits.COMMITS * _U32.size


class WireError(ValueError):
    """Bytes that are no such message, or a message that no bytes may hold: names message and field."""


def encode(message: object) -> bytes:
    """The bytes of a message of `protos.messages` or `protos.calls`; the same message gives the same bytes.

    Raises WireError where a reader would refuse it, TypeError for what is no message.
    """
    cls = type(message)
    convert = converter(cls)
    try:
        return convert.encode(message)
    except Unfit as unfit:
        raise _wire_error(cls.__name__, unfit) from None


def decode(cls: type[M], raw: bytes) -> M:
    """The message in the bytes; fields that this version doesn't know are skipped.

    Raises WireError for bytes that are no `cls` within `protos.limits`. What it costs is bounded by them, whatever
    the bytes are.
    """
    convert = converter(cls)
    try:
        return cast(M, convert.decode(raw))
    except Unfit as unfit:
        raise _wire_error(cls.__name__, unfit) from None


def decode_terse(cls: type[M], raw: bytes) -> M:
    """As `decode`, of bytes that are kept and passed on as they came: little in them may be unknown here.

    Else anybody could pad a message until what carries it fits no message any more. Raises WireError.
    """
    message = decode(cls, raw)
    if len(raw) > limits.UNKNOWN_BYTES and len(raw) - len(encode(message)) > limits.UNKNOWN_BYTES:
        raise WireError(f"{cls.__name__}: more than {limits.UNKNOWN_BYTES} bytes of it say nothing here")
    return message


# -- frames of streams ---------------------------------------------------------------------------------------------


def encode_member_frame(message: MemberMessage | Signed) -> bytes:
    """A frame of the leader's line, from a member. Raises WireError, also for a message that must be signed first."""
    return _encode_frame(MEMBER, message)


def decode_member_frame(raw: bytes) -> MemberMessage | Signed:
    """Raises WireError. What is Signed is not verified: `signing.purpose_of`, then `signing.unseal`."""
    return cast(MemberMessage | Signed, _decode_frame(MEMBER, raw))


def encode_leader_frame(message: LeaderMessage | Signed) -> bytes:
    """A frame of the leader's line, from the leader. Raises WireError, also for a message that must be signed first."""
    return _encode_frame(LEADER, message)


def decode_leader_frame(raw: bytes) -> LeaderMessage | Signed:
    """Raises WireError. What is Signed is not verified: `signing.purpose_of`, then `signing.unseal`."""
    return cast(LeaderMessage | Signed, _decode_frame(LEADER, raw))


def encode_chunk_frame(message: ChunkHead | Part | Begun | Signed) -> bytes:
    """A frame from sender to reducer; Signed is the deal. Copies a part's data once. Raises WireError."""
    return _encode_frame(CHUNK, message)


def decode_chunk_frame(raw: bytes) -> ChunkHead | Part | Begun | Signed:
    """Raises WireError. A part's data is a view of the frame."""
    return cast(ChunkHead | Part | Begun | Signed, _decode_frame(CHUNK, raw))


def encode_receipt_frame(message: Signed | Declined) -> bytes:
    """A frame from reducer to sender. Raises WireError."""
    return _encode_frame(RECEIPT, message)


def decode_receipt_frame(raw: bytes) -> Signed | Declined:
    """Raises WireError."""
    return cast(Signed | Declined, _decode_frame(RECEIPT, raw))


def encode_fetch_frame(message: FetchHead | Part | Begun) -> bytes:
    """A frame from holder to asker. Copies a part's data once. Raises WireError."""
    return _encode_frame(FETCH, message)


def decode_fetch_frame(raw: bytes) -> FetchHead | Part | Begun:
    """Raises WireError. A part's data is a view of the frame."""
    return cast(FetchHead | Part | Begun, _decode_frame(FETCH, raw))


def encode_part(data: memoryview, head: ChunkHead | FetchHead | None = None) -> bytes:
    """The frame of a part, behind a head if there is one; copies the data once. Raises WireError.

    The same on a stream of chunks and of things.
    """
    part = Part(cast(bytes, data))
    return _encode_frame(CHUNK if isinstance(head, ChunkHead) else FETCH, part if head is None else Begun(head, part))


def _encode_frame(frames: Frames, message: object) -> bytes:
    try:
        return frames.encode(message)
    except Unfit as unfit:
        raise _wire_error(frames.name, unfit) from None


def _decode_frame(frames: Frames, raw: bytes) -> object:
    try:
        return frames.decode(raw)
    except Unfit as unfit:
        raise _wire_error(frames.name, unfit) from None


# -- things in parts -----------------------------------------------------------------------------------------------


def split(data: bytes) -> Iterator[Part]:
    """The parts of something long, in order; none for nothing. An encoded Part is a PartFrame too."""
    for start in range(0, len(data), limits.PART_BYTES):
        yield Part(data[start : start + limits.PART_BYTES])


def encode_commits(commits: Iterable[Commit]) -> bytes:
    """The answer to `CommitsAfter`, each commit behind its length: as many of the first as one answer may hold.

    Raises WireError for a commit that can't be encoded.
    """
    pieces: list[bytes] = []
    size = 0
    for commit in commits:
        raw = encode(commit)
        size += _U32.size + len(raw)
        if size > _ANSWER_BYTES or len(pieces) == 2 * limits.COMMITS:
            break
        pieces += (_U32.pack(len(raw)), raw)
    return b"".join(pieces)


def decode_commits(raw: bytes) -> tuple[Commit, ...]:
    """The commits of an answer, in order. Raises WireError."""
    if len(raw) > _ANSWER_BYTES:
        raise WireError(f"commits: {len(raw)} bytes exceed the limit of {_ANSWER_BYTES}")
    commits: list[Commit] = []
    at = 0
    while at < len(raw):
        if len(commits) == limits.COMMITS:
            raise WireError(f"commits: more than {limits.COMMITS}")
        start = at + _U32.size
        if start > len(raw):
            raise WireError(f"commits[{len(commits)}]: ends within a length")
        end = start + _U32.unpack_from(raw, at)[0]
        if end > len(raw):
            raise WireError(f"commits[{len(commits)}]: ends after {len(raw) - start} of {end - start} bytes")
        commits.append(decode(Commit, raw[start:end]))
        at = end
    return tuple(commits)


def _wire_error(message: str, unfit: Unfit) -> WireError:
    return WireError(f"{message}{unfit.path}: {unfit.why}")
