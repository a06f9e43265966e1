"""Counts the fields of raw protobuf before it is parsed, since two bytes can ask the parser for a hundred.

An empty submessage in a list takes 2 bytes on the wire and 60 to 100 in memory, so a bound on the raw length alone
bounds nothing. The walk stops at the first list that is too long; it goes into submessages that hold lists themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from protos import limits
from protos.bounds import Unfit

VARINT, FIXED64, DELIMITED, FIXED32 = 0, 1, 2, 5

_NOT_LAST_OF_VARINT = bytes(range(128, 256))


@dataclass(frozen=True, slots=True)
class FieldShape:
    name: str
    most: int = 1
    packed: int | None = None  # wire type of the packed values, None where they can't be packed
    inner: MessageShape | None = None  # of submessages that hold lists


@dataclass(frozen=True, slots=True)
class MessageShape:
    fields: Mapping[int, FieldShape]
    holds_lists: bool = field(init=False)

    def __post_init__(self) -> None:
        lists = any(shape.most > 1 or shape.inner is not None for shape in self.fields.values())
        object.__setattr__(self, "holds_lists", lists)


def walk(raw: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Field number, wire type, and where its value lies. Raises Unfit for what is no protobuf, and for groups."""
    at = start
    while at < end:
        tag, at = _varint(raw, at, end)
        number, wire_type = tag >> 3, tag & 7
        if number == 0 or number >= 2**29:
            raise Unfit("is no protobuf: a field number out of range")
        if wire_type == DELIMITED:
            size, at = _varint(raw, at, end)
        elif wire_type == VARINT:
            _, after = _varint(raw, at, end)
            size = after - at
        elif wire_type == FIXED64:
            size = 8
        elif wire_type == FIXED32:
            size = 4
        else:
            raise Unfit(f"is no protobuf that is spoken here: wire type {wire_type}")
        if size > end - at:
            raise Unfit("ends within a field")
        yield number, wire_type, at, at + size
        at += size


def survey(
    raw: bytes, shape: MessageShape, *, most_items: int = limits.ITEMS, most_unknown: int = limits.UNKNOWN_FIELDS
) -> None:
    """Raises Unfit if a list is longer than it may be, all together are, or a single field is given twice."""
    _survey(raw, 0, len(raw), shape, _Left(most_items, most_unknown))


@dataclass(slots=True)
class _Left:
    """What the whole message may still hold: lists in lists multiply."""

    items: int
    unknown: int


def _survey(raw: bytes, start: int, end: int, shape: MessageShape, left: _Left) -> None:
    counts: dict[int, int] = {}
    fields = shape.fields
    for number, wire_type, at, to in walk(raw, start, end):
        known = fields.get(number)
        if known is None:
            left.unknown -= 1
            if left.unknown < 0:
                raise Unfit("holds too many unknown fields")
            continue
        before = counts.get(number, 0)
        now = before + 1
        if wire_type == DELIMITED and known.packed is not None:
            now = before + _n_packed(raw, at, to, known.packed)
        if now > known.most:
            raise Unfit(f"more than {known.most}" if known.most > 1 else "given twice").within(f".{known.name}")
        counts[number] = now
        left.items -= now - before
        if left.items < 0:
            raise Unfit("one value too many in all lists together").within(f".{known.name}")
        if known.inner is not None:
            try:
                _survey(raw, at, to, known.inner, left)
            except Unfit as unfit:
                raise unfit.within(f".{known.name}[{before}]" if known.most > 1 else f".{known.name}") from None


def _n_packed(raw: bytes, start: int, end: int, wire_type: int) -> int:
    if wire_type == FIXED64:
        return (end - start) // 8
    return len(raw[start:end].translate(None, _NOT_LAST_OF_VARINT))


def _varint(raw: bytes, at: int, end: int) -> tuple[int, int]:
    """The value and the index after it. Raises Unfit where it is cut off or longer than ten bytes."""
    if at < end and raw[at] < 128:  # the usual case
        return raw[at], at + 1
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            raise Unfit("ends within a field")
        byte = raw[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise Unfit("is no protobuf: a number of more than ten bytes")
