"""Opens what comes on a member's line: a frame becomes a checked item for the driver, or the member has misbehaved.

What is signed must be signed by the line's own peer, for this run, for its purpose and for the plan that it names.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.leading.evidence import carried_evidence
from coordinator.leading.orders import open_orders
from coordinator.leading.ports import Inbound, Line, Observed, Renewed, Spoken
from coordinator.rounds.events import DigestKnown, Heard
from protos import limits
from protos.messages import (
    Body,
    Commitment,
    Evaluation,
    ExchangeReport,
    Heartbeat,
    Hello,
    Leave,
    MemberMessage,
    Missing,
    PeerId,
    Promise,
    Record,
    Records,
    Refusal,
    Results,
    Signed,
    StateDigest,
    Vote,
)
from protos.orders import OpenedOrder
from protos.records import open_record
from protos.sealer import open_signed
from protos.signing import SignatureError
from protos.wire import WireError, decode_member_frame, decode_terse

NOBODY = PeerId("")


class Misbehaved(ValueError):
    """A member said what nobody may say: its line is closed with this reason. `code` is a Goodbye's."""

    def __init__(self, reason: str, code: str = "protocol") -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True, slots=True)
class Greeting:
    """A checked Hello."""

    hello: Hello
    record: Record


def open_hello(frame: bytes, *, run: PeerId, peer: PeerId, observer: PeerId | None) -> Greeting:
    """The first frame of a line. `observer` is the only peer that may say that it is the observer."""
    message = _decode(frame)
    if not isinstance(message, Hello):
        raise Misbehaved(f"a line begins with hello, not with {type(message).__name__.lower()}")
    if message.protocol != limits.PROTOCOL:
        raise Misbehaved(
            f"protocol {message.protocol} is not spoken here, protocol {limits.PROTOCOL} is: "
            f"{'update the node' if message.protocol < limits.PROTOCOL else 'the coordinator needs an update'}",
            code="refused",
        )
    if message.observer and peer != observer:
        raise Misbehaved("this peer is not the run's observer", code="refused")
    if message.holds_state and not (message.head and message.digest):
        raise Misbehaved("a state is held, but neither its head nor its digest is said")
    return Greeting(message, _record(message.record, run=run, peer=peer))


def open_frame(frame: bytes, line: Line, *, run: PeerId, observer: bool, coordinator: PeerId = NOBODY) -> list[Inbound]:
    """A later frame. `observer`: whether the line is the observer's; `coordinator` may sign orders beside the run key.

    Raises Misbehaved.
    """
    message = _decode(frame)
    peer = line.peer
    match message:
        case Hello():
            raise Misbehaved("hello is said once")
        case Signed(envelope):
            return [Spoken(line, _signed(envelope, run=run, peer=peer, coordinator=coordinator))]
        case Heartbeat() | Missing() | Refusal():
            return [Spoken(line, Heard(peer, message, b""))]
        case ExchangeReport():
            return [Observed(line, message)]
        case Evaluation():
            if not observer:
                raise Misbehaved("only the observer evaluates")
            return [Observed(line, message)]
        case StateDigest(body_hash, _, digest):
            if not observer:
                raise Misbehaved("only the observer computes digests for the coordinator")
            return [Spoken(line, DigestKnown(body_hash, digest))]
        case Records(records):
            if len(records) > 1:
                raise Misbehaved("a member sends its own record alone")
            return [Renewed(line, _record(raw, run=run, peer=peer), raw) for raw in records]
        case _:
            raise Misbehaved(f"a {type(message).__name__.lower()} travels as its envelope")


def _decode(frame: bytes) -> MemberMessage | Signed:
    try:
        return decode_member_frame(frame)
    except WireError as error:
        raise Misbehaved(str(error)) from None


def _record(raw: bytes, *, run: PeerId, peer: PeerId) -> Record:
    try:
        return open_record(raw, run=run, peer=peer)
    except (SignatureError, WireError) as error:
        raise Misbehaved(f"record: {error}") from None


def _signed(raw: bytes, *, run: PeerId, peer: PeerId, coordinator: PeerId) -> Heard:
    try:
        message = open_signed(raw, run, signer=peer).message
        body: Body | None = None
        orders: tuple[OpenedOrder, ...] = ()
        evidence, fault = None, ""
        if isinstance(message, Promise | Leave) and message.proposal is not None:
            body = decode_terse(Body, message.proposal.body)
            orders = open_orders(body, run, coordinator)
            evidence, fault = carried_evidence(message.proposal, body.leader, run)
    except (SignatureError, WireError) as error:
        raise Misbehaved(str(error)) from None
    if not isinstance(message, Commitment | Results | Vote | Promise | Leave):
        raise Misbehaved(f"members send no {type(message).__name__.lower()} to the leader")
    return Heard(peer, message, raw, body, orders, evidence, fault)
