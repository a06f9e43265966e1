"""One dataclass <-> its protobuf message, worked out once for each class from the dataclass's type hints."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from protos import bounds, calls, exchange_pb2, identity_pb2, messages, round_pb2, run_pb2, state_pb2, telemetry_pb2
from protos.bounds import Unfit
from protos.survey import FIXED64, VARINT, FieldShape, MessageShape, survey

MODULES = (identity_pb2, run_pb2, round_pb2, exchange_pb2, state_pb2, telemetry_pb2)
_PACKED = {FieldDescriptor.TYPE_DOUBLE: FIXED64, FieldDescriptor.TYPE_UINT64: VARINT}

_Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Field:
    """`write` gives what protobuf's constructor takes, `read` a value from protobuf's; both check, and raise Unfit."""

    name: str
    write: _Convert
    read: _Convert
    single: bool  # a submessage, of which protobuf knows whether it is there
    optional: bool
    most: int
    inner: Converter | None


@dataclass(frozen=True, slots=True)
class Converter:
    """Both ways between one dataclass and its protobuf message. All methods raise Unfit."""

    cls: type
    proto: type[Message]
    fields: tuple[_Field, ...]
    shape: MessageShape
    most_bytes: int

    def encode(self, message: object) -> bytes:
        raw = self.to_proto(message).SerializeToString(deterministic=True)
        self._check_size(raw)
        return raw

    def decode(self, raw: bytes) -> Any:
        self._check_size(raw)
        survey(raw, self.shape)
        try:
            parsed = self.proto.FromString(raw)
        except DecodeError as error:
            raise Unfit(f"is no protobuf of this kind: {error}") from None
        return self.from_proto(parsed)

    def to_proto(self, message: object) -> Message:
        if type(message) is not self.cls:
            raise Unfit(f"{type(message).__name__} instead of {self.cls.__name__}")
        values: dict[str, Any] = {}
        for field in self.fields:
            try:
                value = getattr(message, field.name)
                if value is None and field.optional:
                    continue
                values[field.name] = field.write(value)
            except Unfit as unfit:
                raise unfit.within(f".{field.name}") from None
        return self.proto(**values)

    def from_proto(self, parsed: Message) -> Any:
        values: list[Any] = []
        for field in self.fields:
            try:
                if field.single and not parsed.HasField(field.name):
                    if not field.optional:
                        raise Unfit("is missing")
                    values.append(None)
                else:
                    values.append(field.read(getattr(parsed, field.name)))
            except Unfit as unfit:
                raise unfit.within(f".{field.name}") from None
        return self.cls(*values)

    def _check_size(self, raw: bytes) -> None:
        if len(raw) > self.most_bytes:
            raise Unfit(f"{len(raw)} bytes exceed the limit of {self.most_bytes}")


_converters: dict[type, Converter] = {}


def converter(cls: type) -> Converter:
    """The converter of a dataclass of `protos.messages` or `protos.calls`. Raises TypeError for any other class."""
    found = _converters.get(cls)
    if found is None:
        found = _converters[cls] = _new_converter(cls)
    return found


def _new_converter(cls: type) -> Converter:
    name = cls.__name__
    proto = next((found for module in MODULES if (found := getattr(module, name, None)) is not None), None)
    if proto is None or cls.__module__ not in (messages.__name__, calls.__name__):
        raise TypeError(f"{cls.__qualname__} is no message with a protobuf form")
    hints = typing.get_type_hints(cls)
    fields = tuple(_field(name, field.name, hints[field.name]) for field in dataclasses.fields(cls))
    return Converter(cls, proto, fields, _shape(proto, fields), bounds.size_bound(name))


def _field(message: str, name: str, hint: Any) -> _Field:
    if typing.get_origin(hint) is tuple:
        kind, ellipsis = typing.get_args(hint)
        if ellipsis is not Ellipsis:
            raise TypeError(f"{message}.{name}: only tuple[X, ...] has a protobuf form")
        item = _field(message, name, kind)
        write, read = _each(item.write), _each(item.read)
        return _Field(
            name,
            _list(write, most := bounds.count_bound(message, name)),
            lambda values: tuple(read(values)),
            single=False,
            optional=False,
            most=most,
            inner=item.inner,
        )
    if isinstance(hint, types.UnionType):
        (kind,) = (choice for choice in typing.get_args(hint) if choice is not types.NoneType)
        return dataclasses.replace(_field(message, name, kind), optional=True)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        inner = converter(hint)
        return _Field(name, inner.to_proto, inner.from_proto, single=True, optional=False, most=1, inner=inner)
    write, read = _scalar(message, name, hint)
    return _Field(name, write, read, single=False, optional=False, most=1, inner=None)


def _scalar(message: str, name: str, hint: Any) -> tuple[_Convert, _Convert]:
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _enum(hint)
    if hint is messages.PeerId:
        bound: bounds.Bound = bounds.peer_bound(message, name)
    else:
        bound = bounds.item_bound(message, name, hint)
    check = bound.check

    def checked(value: Any) -> Any:
        check(value)
        return value

    return checked, checked


def _enum(kind: type[StrEnum]) -> tuple[_Convert, _Convert]:
    known = {member.value: member for member in kind}

    def write(value: Any) -> str:
        if type(value) is not kind:
            raise Unfit(f"{type(value).__name__} instead of {kind.__name__}")
        return str(value.value)

    def read(value: str) -> StrEnum:
        member = known.get(value)
        if member is None:
            raise Unfit(f"{value[:60]!a} is none of {', '.join(known)}")
        return member

    return write, read


def _each(convert: _Convert) -> _Convert:
    def converted(values: Any) -> list[Any]:
        done: list[Any] = []
        try:
            for value in values:
                done.append(convert(value))  # one by one: its length says which value was unfit
        except Unfit as unfit:
            raise unfit.within(f"[{len(done)}]") from None
        return done

    return converted


def _list(write: _Convert, most: int) -> _Convert:
    def written(values: Any) -> list[Any]:
        if type(values) is not tuple:
            raise Unfit(f"{type(values).__name__} instead of a tuple")
        if len(values) > most:
            raise Unfit(f"{len(values)} values exceed the limit of {most}")
        return typing.cast(list[Any], write(values))

    return written


def _shape(proto: type[Message], fields: tuple[_Field, ...]) -> MessageShape:
    shapes: dict[int, FieldShape] = {}
    for field in fields:
        descriptor = proto.DESCRIPTOR.fields_by_name[field.name]
        inner = field.inner.shape if field.inner is not None and field.inner.shape.holds_lists else None
        packed = _PACKED.get(descriptor.type) if descriptor.is_packed else None
        shapes[descriptor.number] = FieldShape(field.name, field.most, packed, inner)
    return MessageShape(shapes)
