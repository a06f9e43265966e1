"""The .proto files, the dataclasses and the tables of bounds say the same."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from protos import bounds, calls, convert, frames, messages, runspec, services
from protos import limits as limits_module
from tests.protos import golden
from tests.protos.strategies import MESSAGES

NEGATIVE = {"Promise.voted_attempt", "Leave.attempt", "Leave.voted_attempt", "FetchHead.n_bytes"}


def proto_kind(message: str, name: str, hint: Any) -> tuple[str, bool, bool]:
    """Type, repeated, optional: what the .proto must say for a dataclass's field."""
    if typing.get_origin(hint) is tuple:
        return proto_kind(message, name, typing.get_args(hint)[0])[0], True, False
    if isinstance(hint, types.UnionType):
        (kind,) = (choice for choice in typing.get_args(hint) if choice is not types.NoneType)
        return proto_kind(message, name, kind)[0], False, True
    if hint in (str, messages.PeerId) or (isinstance(hint, type) and issubclass(hint, enum.Enum)):
        return "string", False, False
    if hint is int:
        return ("sint64" if f"{message}.{name}" in NEGATIVE else "uint64"), False, False
    kinds = {bytes: "bytes", float: "double", bool: "bool"}
    return kinds.get(hint, getattr(hint, "__name__", "")), False, False


KINDS = {
    value: name.removeprefix("TYPE_").lower()
    for name, value in vars(FieldDescriptor).items()
    if name.startswith("TYPE_") and isinstance(value, int)
}


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_proto_mirrors_the_dataclass(cls: type) -> None:
    hints = typing.get_type_hints(cls)
    descriptor: Any = convert.converter(cls).proto.DESCRIPTOR
    said = [
        (
            field.name,
            field.message_type.name if field.message_type is not None else KINDS[field.type],
            field.is_repeated,
            field.message_type is not None and field.has_presence and field.containing_oneof is not None,
        )
        for field in sorted(descriptor.fields, key=lambda field: field.number)
    ]
    meant = [
        (field.name, *proto_kind(cls.__name__, field.name, hints[field.name])) for field in dataclasses.fields(cls)
    ]
    assert said == meant


def test_every_proto_message_is_a_dataclass_or_a_frame() -> None:
    names = {name for module in convert.MODULES for name in module.DESCRIPTOR.message_types_by_name}
    frame_names = {"MemberFrame", "LeaderFrame", "ChunkFrame", "ReceiptFrame", "FetchFrame", "PartFrame"}
    assert names == {cls.__name__ for cls in MESSAGES} | frame_names


def test_all_messages_are_in_one_package() -> None:
    assert {module.DESCRIPTOR.package for module in convert.MODULES} == {"barnraise.v1"}


def test_bounds_speak_only_of_fields_that_are() -> None:
    classes = [*MESSAGES, messages.Signed, calls.Declined]
    names = {cls.__name__ for cls in classes}
    names |= {field.name for cls in classes for field in dataclasses.fields(cls)}
    names |= {f"{cls.__name__}.{field.name}" for cls in classes for field in dataclasses.fields(cls)}
    assert [entry for entry in bounds.entries() if entry not in names] == []


def test_a_field_without_a_bound_is_a_mistake_of_ours() -> None:
    for look_up in (
        lambda: bounds.item_bound("Vote", "new_bytes", bytes),
        lambda: bounds.item_bound("Vote", "new_text", str),
        lambda: bounds.count_bound("Vote", "new_list"),
    ):
        with pytest.raises(TypeError, match=r"doesn't say .* Vote\.new_"):
            look_up()


def test_what_is_no_message_has_no_converter() -> None:
    for cls in (int, messages.Signed, calls.Declined, bounds.Bytes):
        with pytest.raises(TypeError, match="no message"):
            convert.converter(cls)


def test_a_dataclass_named_like_a_message_is_not_one() -> None:
    impostor = dataclasses.make_dataclass("Vote", [("epoch", int)])
    with pytest.raises(TypeError, match="no message"):
        convert.converter(impostor)


def test_frames_carry_all_that_a_side_says() -> None:
    member = set(typing.get_args(messages.MemberMessage))
    leader = set(typing.get_args(messages.LeaderMessage))
    signed = set(typing.get_args(messages.SignedMessage))
    assert set(frames.MEMBER.classes) == member - signed | {messages.Signed}
    assert set(frames.LEADER.classes) == leader - signed | {messages.Signed}


def test_method_paths_are_those_of_the_services() -> None:
    paths = {
        f"/{service.full_name}/{method.name}"
        for module in convert.MODULES
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    said = {value for name, value in vars(services).items() if name.isupper() and value.startswith("/")}
    assert said == paths


def test_limits_agree_with_the_run_spec() -> None:
    assert limits_module.SPEC_BYTES == runspec.SPEC_BYTES_MAX
    most = [
        constraint.le
        for constraint in runspec.MembershipSpec.model_fields["max_members"].metadata
        if hasattr(constraint, "le")
    ]
    assert most == [limits_module.MEMBERS]


@pytest.mark.parametrize("name", golden.files())
def test_the_wire_has_not_drifted(name: str) -> None:
    assert golden.files()[name] == (golden.GOLDEN / name).read_text(), (
        f"tests/golden/{name} no longer holds: the protocol has changed. If that is meant, and no field has another "
        "number or kind than before, run 'python -m tests.protos.golden'"
    )
