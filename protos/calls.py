"""What the calls between nodes carry beside the messages: questions without content, pings, a receipt declined."""

from __future__ import annotations

from dataclasses import dataclass

from protos.messages import PeerId


@dataclass(frozen=True, slots=True)
class OfferRequest:
    """What state do you hold? `frozen`: the snapshot that stays while commits come, not the current state."""

    frozen: bool = False


@dataclass(frozen=True, slots=True)
class PingRequest:
    """Are you there?"""

    nonce: bytes


@dataclass(frozen=True, slots=True)
class PingReply:
    """I am, and this is who I am."""

    nonce: bytes
    peer: PeerId


@dataclass(frozen=True, slots=True)
class Declined:
    """A reducer's answer in place of a receipt: why it won't take the chunks."""

    reason: str
