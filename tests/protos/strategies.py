"""Hypothesis strategies for any message, from its dataclass's type hints and the bounds of its fields."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from functools import cache
from typing import Any

from hypothesis import strategies as st

from protos import bounds, calls, limits, messages
from protos.signing import Identity

MESSAGES: list[type] = [
    found
    for module in (messages, calls)
    for found in vars(module).values()
    if dataclasses.is_dataclass(found)
    and isinstance(found, type)
    and found.__module__ == module.__name__
    and found not in (messages.Signed, calls.Declined)  # these stand for one bare field of a frame
]

PEERS = [Identity.from_private_bytes(bytes([i]) * 32).peer for i in range(4)]

_SHORT = 40  # bytes and characters: lengths at their limits have tests of their own
_FEW = 3


@cache
def any_message(cls: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{f.name: _value(cls.__name__, f.name, hints[f.name]) for f in dataclasses.fields(cls)})


def _value(message: str, name: str, hint: Any) -> st.SearchStrategy[Any]:
    if typing.get_origin(hint) is tuple:
        most = min(_FEW, bounds.count_bound(message, name))
        return st.lists(_value(message, name, typing.get_args(hint)[0]), max_size=most).map(tuple)
    if isinstance(hint, types.UnionType):
        (kind,) = (choice for choice in typing.get_args(hint) if choice is not types.NoneType)
        return st.none() | _value(message, name, kind)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return any_message(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(list(hint))
    if hint is messages.PeerId:
        peers: st.SearchStrategy[str] = st.sampled_from(PEERS)
        return peers | st.just("") if bounds.peer_bound(message, name).or_empty else peers
    return _scalar(bounds.item_bound(message, name, hint))


def _scalar(bound: bounds.Bound) -> st.SearchStrategy[Any]:
    match bound:
        case bounds.Bytes(most, least, or_empty):
            full = st.binary(min_size=least, max_size=max(least, min(most, _SHORT)))
            return full | st.just(b"") if or_empty else full
        case bounds.Integer(least, most):
            return st.integers(least, most)
        case bounds.Figure(least, most):
            return st.floats(max(least, -1e300), min(most, 1e300), allow_nan=False)
        case bounds.Flag():
            return st.booleans()
        case bounds.Text(most, least, one_line):
            alphabet = st.characters(exclude_categories=("C", "Z"), include_characters=" ")
            if not one_line:
                alphabet |= st.sampled_from("\n\t")
            return st.text(alphabet, min_size=least, max_size=min(most, _SHORT))
        case bounds.Peer():
            return st.text("123ABCxyz", min_size=1, max_size=limits.PEER_ID)
