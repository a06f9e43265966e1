"""A `Sealer` without cryptography: a message's bytes are its name in a registry, which also opens them again.

Deterministic and injective: equal messages have equal bytes, different ones different bytes, and a seal names its
signer. One `Registry` is shared by all processes of a test, so anyone can open what anyone has sealed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from protos.messages import PeerId, SignedMessage

M = TypeVar("M")


class Unknown(ValueError):
    """Bytes that nobody has made, or that hold something else."""


class Registry:
    """All messages that were ever encoded or sealed, by their bytes.

    Args:
        name: stands in the bytes, so that what one registry has made is not taken for what another one has.
    """

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._bytes: dict[object, bytes] = {}
        self._messages: dict[bytes, object] = {}
        self._sealed: dict[tuple[PeerId, bytes], bytes] = {}
        self._signed: dict[bytes, tuple[PeerId, SignedMessage]] = {}

    def encode(self, message: object) -> bytes:
        raw = self._bytes.get(message)
        if raw is None:
            raw = f"{type(message).__name__}#{self._name}{len(self._bytes)}".encode()
            self._bytes[message], self._messages[raw] = raw, message
        return raw

    def decode(self, kind: type[M], raw: bytes) -> M:
        """The message of these bytes. Raises Unknown."""
        message = self._messages.get(raw)
        if not isinstance(message, kind):
            raise Unknown(f"{raw[:60]!r} is no {kind.__name__}")
        return message

    def seal(self, signer: PeerId, message: SignedMessage) -> bytes:
        key = (signer, self.encode(message))
        envelope = self._sealed.get(key)
        if envelope is None:
            envelope = self._sealed[key] = b"%s|%s" % (signer.encode(), key[1])
            self._signed[envelope] = (signer, message)
        return envelope

    def open(self, envelope: bytes) -> tuple[PeerId, SignedMessage]:
        """Signer and message of an envelope. Raises Unknown."""
        try:
            return self._signed[envelope]
        except KeyError:
            raise Unknown(f"{envelope[:60]!r} was sealed by nobody") from None

    def opened(self, kind: type[M], envelope: bytes) -> tuple[PeerId, M]:
        """As `open`, for one kind of message."""
        signer, message = self.open(envelope)
        if not isinstance(message, kind):
            raise Unknown(f"{envelope[:60]!r} holds no {kind.__name__}")
        return signer, message


@dataclass(frozen=True, slots=True)
class FakeSealer:
    """One process's hand."""

    registry: Registry
    me: PeerId

    def encode(self, message: object) -> bytes:
        return self.registry.encode(message)

    def seal(self, message: SignedMessage) -> bytes:
        return self.registry.seal(self.me, message)
