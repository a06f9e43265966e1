"""How many bytes a simulated message has on the wire, where bytes of the simulation are only names.

Sizes follow protobuf's encoding of the same fields, with peer ids of 52 characters and envelopes around what is signed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from protos.messages import PeerId
from tests.fakes.sealer import Registry, Unknown

PEER_BYTES = 52
ENVELOPE_BYTES = 180
"""Purpose, signer, plan hash and signature, with their tags."""


class Sizes:
    """The sizes of what a registry's processes say."""

    def __init__(self, registry: Registry, peers: Collection[PeerId]) -> None:
        self._registry, self._peers = registry, frozenset(peers)
        self._known: dict[bytes, int] = {}
        self._last: tuple[object, int] = (None, 0)

    def of(self, message: object) -> int:
        """Bytes of a message as it travels, without what TLS and HTTP/2 add."""
        last, n_bytes = self._last
        if message is not last:
            n_bytes = self._fields(message)
            self._last = (message, n_bytes)
        return n_bytes

    def _fields(self, message: object) -> int:
        kind: type = type(message)
        return sum(self._value(getattr(message, name)) for name in _names(kind))

    def _value(self, value: Any) -> int:
        """Bytes of one field with its tag; nothing where it has its default."""
        match value:
            case None | False | 0 | 0.0 | "" | b"" | ():
                return 0
            case bool():
                return 2
            case Enum():
                return _framed(len(value.value)) if isinstance(value, str) else 2
            case int():
                return 1 + _varint(value)
            case float():
                return 9
            case str():
                return _framed(PEER_BYTES if value in self._peers else len(value.encode()))
            case bytes():
                return _framed(self._bytes(value))
            case tuple():
                first = value[0]
                if isinstance(first, float):
                    return _framed(8 * len(value))
                if isinstance(first, int):
                    return _framed(sum(_varint(item) for item in value))
                return sum(self._value(item) if _is_plain(item) else _framed(self._fields(item)) for item in value)
            case _:
                return _framed(self._fields(value))

    def _bytes(self, value: bytes) -> int:
        """What stands for an encoded or a signed message has the size of that."""
        n_bytes = self._known.get(value)
        if n_bytes is None:
            n_bytes = self._known[value] = self._named(value)
        return n_bytes

    def _named(self, value: bytes) -> int:
        try:
            return ENVELOPE_BYTES + self._fields(self._registry.open(value)[1])
        except Unknown:
            pass
        try:
            message = self._registry.decode(object, value)
        except Unknown:
            return len(value)
        return self._fields(message) if is_dataclass(message) else len(value)


class Meter:
    """What leaders have sent and heard, in bytes."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.sent: Counter[str] = Counter()
        self.heard: Counter[str] = Counter()

    def note(self, to_leader: bool, message: object) -> None:
        by_kind = self.heard if to_leader else self.sent
        by_kind[type(message).__name__] += self.sizes.of(message)

    def clear(self) -> None:
        self.sent.clear()
        self.heard.clear()


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _is_plain(value: object) -> bool:
    return isinstance(value, str | bytes)


def _framed(n_bytes: int) -> int:
    return 1 + _varint(n_bytes) + n_bytes


def _varint(value: int) -> int:
    return max(1, (value.bit_length() + 6) // 7) if value >= 0 else 10
