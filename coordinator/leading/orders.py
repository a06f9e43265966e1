"""Opens the orders that a body carries: none is seen by the deciding code whose signature doesn't hold."""

from __future__ import annotations

from protos.messages import Body, PeerId
from protos.orders import OpenedOrder, OrderError, open_order
from protos.signing import SignatureError


def open_orders(body: Body, run: PeerId, coordinator: PeerId) -> tuple[OpenedOrder, ...]:
    """In the body's order. Raises SignatureError for one that nobody who may has signed."""
    try:
        return tuple(open_order(raw, run=run, coordinator=coordinator) for raw in body.orders)
    except OrderError as error:
        raise SignatureError(f"an order: {error}") from error
