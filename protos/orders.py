"""Orders: what the operator may order, who may sign it, and what an order's fields must hold for its kind."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from protos import limits
from protos.messages import Order, PeerId
from protos.runspec import RunSpec, SpecError
from protos.signing import Identity, Purpose, SignatureError, public_key_of, seal, unseal
from protos.wire import WireError, decode, encode

COMMIT_HASH_BYTES = 32


class Kind(StrEnum):
    """What an order says. `spec` and `round` of the message mean what is said here."""

    PAUSE = "pause"  # nobody trains until a resume
    RESUME = "resume"  # after a pause, or an end that is still to come; with `peer`: this peer may come back
    END = "end"  # after `round`, 0: now
    AMEND = "amend"  # `spec`: envelope of the next RunSpec, in force from `round` on, 0: as soon as may be
    ROLLBACK = "rollback"  # back to the state after `round`, whose commit has the hash that `spec` is
    EVICT = "evict"  # `peer` has no seat, no vote and no say any more


BY_COORDINATOR = frozenset({Kind.PAUSE, Kind.RESUME, Kind.EVICT})
"""What the coordinator's own key may order: all that can be taken back. The rest needs the run key."""


class OrderError(ValueError):
    """An order that can't be: says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class OpenedOrder:
    """An order whose signature holds, by somebody who may give it, and whose fields fit its kind.

    `spec` is an amendment's RunSpec, validated by itself.
    """

    envelope: bytes
    order: Order
    signer: PeerId
    spec: RunSpec | None


def seal_order(identity: Identity, order: Order) -> bytes:
    """The envelope of an order. Raises OrderError where its fields don't fit, WireError where it is too long."""
    kind = _kind(order)
    if identity.peer != order.run and kind not in BY_COORDINATOR:
        raise OrderError(f"{kind} is ordered by the run key alone")
    _check(order, kind)
    return seal(identity, Purpose.ORDER, order.run, encode(order))


def open_order(raw: bytes, *, run: PeerId, coordinator: PeerId) -> OpenedOrder:
    """An order of this run, verified; whether it can be obeyed is the books' matter.

    Raises OrderError.
    """
    try:
        envelope = unseal(raw, purpose=Purpose.ORDER, run=run, max_bytes=limits.ORDER_BYTES)
        order = decode(Order, envelope.body)
    except (SignatureError, WireError) as error:
        raise OrderError(str(error)) from error
    if order.run != run:
        raise OrderError(f"the order is for run {order.run}")
    kind = _kind(order)
    if envelope.signer != run and not (envelope.signer == coordinator and kind in BY_COORDINATOR):
        raise OrderError(f"{envelope.signer} may not order {kind}")
    return OpenedOrder(raw, order, envelope.signer, _check(order, kind))


def seal_spec(identity: Identity, spec: RunSpec) -> bytes:
    """The envelope of a RunSpec, by the run key."""
    return seal(identity, Purpose.RUNSPEC, identity.peer, spec.to_bytes())


def open_spec(raw: bytes, run: PeerId) -> RunSpec:
    """A RunSpec that the run key has signed. Raises OrderError."""
    try:
        return RunSpec.from_bytes(unseal(raw, purpose=Purpose.RUNSPEC, run=run, signer=run).body)
    except (SignatureError, SpecError) as error:
        raise OrderError(f"the RunSpec: {error}") from error


def _kind(order: Order) -> Kind:
    try:
        return Kind(order.kind)
    except ValueError:
        raise OrderError(f"{order.kind!r} is no order of this version") from None


def _check(order: Order, kind: Kind) -> RunSpec | None:
    """What the kind asks of the fields; an amendment's RunSpec. Raises OrderError."""
    if order.number < 1:
        raise OrderError("orders are numbered from 1 on")
    if order.peer and kind not in (Kind.EVICT, Kind.RESUME):
        raise OrderError(f"{kind} names no peer")
    if order.round and kind not in (Kind.END, Kind.AMEND, Kind.ROLLBACK):
        raise OrderError(f"{kind} names no round")
    if kind is Kind.EVICT or order.peer:
        try:
            public_key_of(order.peer)
        except SignatureError as error:
            raise OrderError(str(error)) from error
    match kind:
        case Kind.AMEND:
            return open_spec(order.spec, order.run)
        case Kind.ROLLBACK:
            if len(order.spec) != COMMIT_HASH_BYTES:
                raise OrderError("rollback names the hash of the commit to go back to")
        case _:
            if order.spec:
                raise OrderError(f"{kind} carries no RunSpec")
    return None
