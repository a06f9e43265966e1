"""Frames: what travels on a stream is one of several messages, read by slicing.

A frame's field carries a message's own bytes, so what is in it obeys its own limits before anything is parsed, and
what is signed passes as the exact bytes of its envelope.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, fields
from typing import Any, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from protos import exchange_pb2, heads, limits, round_pb2
from protos.bounds import Bound, Unfit, item_bound
from protos.calls import Declined
from protos.convert import Converter, converter
from protos.heads import varint
from protos.messages import (
    AttemptFailed,
    ChunkHead,
    Commit,
    Evaluation,
    ExchangeReport,
    FetchHead,
    Goodbye,
    Heartbeat,
    Hello,
    Inquiry,
    Missing,
    Part,
    Records,
    Refusal,
    Signed,
    SignedMessage,
    StateDigest,
    Welcome,
)
from protos.survey import DELIMITED, walk


@dataclass(frozen=True, slots=True)
class Begun:
    """A head and the first part of what it announces, which share a frame: each message on a stream has its price."""

    head: ChunkHead | FetchHead
    part: Part


_MUST_BE_SIGNED = typing.get_args(SignedMessage)


@dataclass(frozen=True, slots=True)
class _Kind:
    """One field of a frame: a message (`convert`), or the single bytes or text that a small class holds (`bound`)."""

    name: str
    tag: bytes
    cls: type
    convert: Converter | None = None
    attribute: str = ""
    is_text: bool = False
    bound: Bound | None = None


class Frames:
    """The frames of one direction of a stream. `encode` and `decode` raise Unfit.

    Where there are heads and parts, a head and the first part may share a frame: `Begun`.
    """

    def __init__(self, proto: type[Message], kinds: dict[str, type]) -> None:
        self.name = proto.DESCRIPTOR.name
        self._by_class: dict[type, _Kind] = {}
        self._by_number: dict[int, _Kind] = {}
        for descriptor in proto.DESCRIPTOR.fields:
            cls = kinds[descriptor.name]
            kind = _kind(descriptor, cls)
            self._by_class[cls] = self._by_number[descriptor.number] = kind
        head, part = self._by_number.get(1), self._by_class.get(Part)
        self._begun = (head, part) if head is not None and part is not None else None

    @property
    def classes(self) -> tuple[type, ...]:
        return tuple(self._by_class)

    def encode(self, message: object) -> bytes:
        if isinstance(message, Begun):
            return b"".join((*self._pieces(message.head), *self._pieces(message.part)))
        return b"".join(self._pieces(message))

    def _pieces(self, message: object) -> tuple[bytes | memoryview, ...]:
        cls = type(message)
        kind = self._by_class.get(cls)
        if kind is None:
            must = cls in _MUST_BE_SIGNED
            raise Unfit(f"{cls.__name__} travels as its envelope: seal it" if must else f"carries no {cls.__name__}")
        try:
            payload = _payload(kind, message)
        except Unfit as unfit:
            raise unfit.within(f".{kind.name}") from None
        return kind.tag, varint(len(payload)), payload

    def decode(self, raw: bytes) -> object:
        """The message in a frame. The data of a Part is no copy but a view of the frame, and keeps it in memory."""
        if len(raw) > limits.FRAME_BYTES:
            raise Unfit(f"{len(raw)} bytes exceed the limit of {limits.FRAME_BYTES}")
        if self._begun is not None and (begun := _plainly_begun(*self._begun, raw)) is not None:
            return begun
        found: list[tuple[_Kind, int, int]] = []
        unknown: list[int] = []
        for number, wire_type, start, end in walk(raw, 0, len(raw)):
            kind = self._by_number.get(number)
            if kind is None:
                unknown.append(number)
                if len(unknown) > limits.UNKNOWN_FIELDS:
                    raise Unfit("holds too many unknown fields")
                continue
            if wire_type != DELIMITED:
                raise Unfit(f"wire type {wire_type}").within(f".{kind.name}")
            if found and not (len(found) == 1 and found[0][0].name == "head" and kind.cls is Part):
                raise Unfit(f"holds {found[-1][0].name} and {kind.name}, where one message is a frame")
            found.append((kind, start, end))
        if not found:
            raise Unfit(f"holds an unknown message ({unknown[0]})" if unknown else "is empty")
        messages: list[Any] = []
        for kind, start, end in found:
            try:
                messages.append(_message(kind, raw, start, end))
            except Unfit as unfit:
                raise unfit.within(f".{kind.name}") from None
        return messages[0] if len(messages) == 1 else Begun(*messages)


def _plainly_begun(head: _Kind, part: _Kind, raw: bytes) -> Begun | None:
    """A head and a part as they mostly come, without a look at each field; None for whatever else it may be."""
    found = heads.field(raw, 0, head.tag)
    if found is None:
        return None
    start, end = found
    data = heads.field(raw, end, part.tag)
    if data is None or data[1] != len(raw) or data[1] - data[0] > limits.PART_BYTES:
        return None
    message = heads.decode(head.cls, raw, start, end)
    return None if message is None else Begun(message, Part(cast(bytes, memoryview(raw)[data[0] :])))


def _kind(descriptor: Any, cls: type) -> _Kind:
    tag = varint(descriptor.number << 3 | DELIMITED)
    if descriptor.message_type is not None:
        return _Kind(descriptor.name, tag, cls, convert=converter(cls))
    (field,) = fields(cls)
    is_text = descriptor.type == FieldDescriptor.TYPE_STRING
    bound = item_bound(cls.__name__, field.name, str if is_text else bytes)
    return _Kind(descriptor.name, tag, cls, attribute=field.name, is_text=is_text, bound=bound)


def _payload(kind: _Kind, message: object) -> bytes | memoryview:
    if kind.convert is not None:
        plain = heads.encode(message)
        return kind.convert.encode(message) if plain is None else plain
    value = getattr(message, kind.attribute)
    if isinstance(message, Part) and isinstance(value, memoryview):
        _check_part(value)
        return value
    if kind.bound is not None:
        kind.bound.check(value)
    return value.encode() if isinstance(value, str) else bytes(value)


def _message(kind: _Kind, raw: bytes, start: int, end: int) -> object:
    if kind.cls is Part:
        view = memoryview(raw)[start:end]
        _check_part(view)
        return Part(cast(bytes, view))
    payload = raw[start:end]
    if kind.convert is not None:
        return kind.convert.decode(payload)
    value: bytes | str = payload
    if kind.is_text:
        try:
            value = payload.decode()
        except UnicodeDecodeError:
            raise Unfit("is no UTF-8") from None
    if kind.bound is not None:
        kind.bound.check(value)
    return kind.cls(value)


def _check_part(data: memoryview) -> None:
    """As the bound of Part's data, which knows bytes only."""
    if not (data.contiguous and data.itemsize == 1):
        raise Unfit("a view that is not of bytes in a row")
    if len(data) > limits.PART_BYTES:
        raise Unfit(f"{len(data)} bytes exceed the limit of {limits.PART_BYTES}")


MEMBER = Frames(
    round_pb2.MemberFrame,
    {
        "hello": Hello,
        "heartbeat": Heartbeat,
        "missing": Missing,
        "refusal": Refusal,
        "exchange_report": ExchangeReport,
        "evaluation": Evaluation,
        "state_digest": StateDigest,
        "records": Records,
        "signed": Signed,
    },
)
LEADER = Frames(
    round_pb2.LeaderFrame,
    {
        "welcome": Welcome,
        "commit": Commit,
        "attempt_failed": AttemptFailed,
        "records": Records,
        "goodbye": Goodbye,
        "signed": Signed,
        "inquiry": Inquiry,
    },
)
CHUNK = Frames(exchange_pb2.ChunkFrame, {"head": ChunkHead, "part": Part, "deal": Signed})
RECEIPT = Frames(exchange_pb2.ReceiptFrame, {"envelope": Signed, "refusal": Declined})
FETCH = Frames(exchange_pb2.FetchFrame, {"head": FetchHead, "part": Part})
