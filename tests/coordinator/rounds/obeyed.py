"""Bodies that carry orders, as a leader makes them, and the books after them."""

from __future__ import annotations

from typing import Any

from coordinator.rounds.ledger import Ledger, fold
from coordinator.rounds.orders import Orders
from coordinator.rounds.proposing import build_body
from protos.messages import Body
from protos.orders import Kind, OpenedOrder
from tests.coordinator.rounds.cases import COORDINATOR, PEERS, SPEC, after, at_head, body_of, evidence_of, seated
from tests.coordinator.rounds.ordered import ordered

SPECS = {SPEC.revision: SPEC}
LEDGER = seated(3)
PAUSE, RESUME = ordered(1, Kind.PAUSE), ordered(2, Kind.RESUME)


def carrying(ledger: Ledger, *given: OpenedOrder, n: int = 3, **more: Any) -> tuple[Body, Orders]:
    """An empty body with these orders, as a leader makes it."""
    orders = Orders(given, more.pop("target", None), more.pop("specs", SPECS))
    body = build_body(
        ledger, more.pop("spec", SPEC), COORDINATOR, attempt=0, leader=COORDINATOR, evidence=None, reason="by order",
        seated=more.pop("seated", PEERS[:n]), left=(), orders=orders,
    )  # fmt: skip
    return body, orders


def obeyed(ledger: Ledger, *given: OpenedOrder, **more: Any) -> Ledger:
    body, orders = carrying(ledger, *given, **more)
    folded = fold(ledger, body, orders.given, orders.target)
    assert folded.hash() == body.ledger_hash
    return at_head(folded, f"{given}")


def gone_on(ledger: Ledger, n: int = 3) -> Ledger:
    """A committed round more."""
    return after(ledger, body_of(ledger, evidence_of(ledger, n)))
