"""This process's hand: encodes messages and signs those that can be evidence, each with its own purpose."""

from __future__ import annotations

from dataclasses import dataclass

from protos import messages as m
from protos import signing, wire
from protos.signing import Purpose

PURPOSES: dict[type, Purpose] = {
    m.Plan: Purpose.PLAN,
    m.Commitment: Purpose.COMMITMENT,
    m.Deal: Purpose.DEAL,
    m.Redeal: Purpose.REDEAL,
    m.Receipt: Purpose.RECEIPT,
    m.Results: Purpose.RESULTS,
    m.Propose: Purpose.PROPOSE,
    m.Vote: Purpose.VOTE,
    m.Prepare: Purpose.PREPARE,
    m.Promise: Purpose.PROMISE,
    m.Leave: Purpose.LEAVE,
    m.Head: Purpose.HEAD,
    m.Order: Purpose.ORDER,
}
KINDS: dict[Purpose, type] = {purpose: kind for kind, purpose in PURPOSES.items()}


class KeySealer:
    """Signs with one identity for one run. Ed25519 is deterministic: the same message has the same envelope."""

    def __init__(self, identity: signing.Identity, run: m.PeerId) -> None:
        self._identity, self._run = identity, run

    def encode(self, message: object) -> bytes:
        return wire.encode(message)

    def seal(self, message: m.SignedMessage) -> bytes:
        plan = getattr(message, "plan", b"")
        return signing.seal(self._identity, PURPOSES[type(message)], self._run, wire.encode(message), plan)


@dataclass(frozen=True, slots=True)
class Opened:
    """A signed message, verified: who signed it, what it says, and the exact bytes that were signed."""

    signer: m.PeerId
    message: m.SignedMessage
    body: bytes


def open_signed(raw: bytes, run: m.PeerId, *, signer: m.PeerId | None = None, kind: type | None = None) -> Opened:
    """An envelope of one of the signed kinds, opened.

    Raises signing.SignatureError or wire.WireError; also where much of it is unknown here, and where the envelope's
    plan is not the message's.
    """
    purpose = signing.purpose_of(raw)
    if purpose not in KINDS or (kind is not None and KINDS[purpose] is not kind):
        raise signing.SignatureError(f"an envelope for {purpose} where another kind is due")
    envelope = signing.unseal(raw, purpose=purpose, run=run, signer=signer)
    message: m.SignedMessage = wire.decode_terse(KINDS[purpose], envelope.body)
    if envelope.plan != getattr(message, "plan", b""):
        raise signing.SignatureError("the envelope is of another plan than its message")
    return Opened(envelope.signer, message, envelope.body)
