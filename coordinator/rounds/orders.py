"""Whether orders can be obeyed after a ledger, and what they make of a round: judged alike by leaders and voters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.rounds import policy
from coordinator.rounds.ledger import Ledger, revision_after, rollback_of
from protos.messages import PeerId, Standing, StandingChange
from protos.orders import Kind, OpenedOrder
from protos.runspec import RunSpec, amendment_faults

NUMBERS_AHEAD_MOST = 1000
"""An order may pass over numbers of orders that were never given, but not use numbers up."""


@dataclass(frozen=True, slots=True)
class Orders:
    """The orders of one body, with what they need.

    Args:
        given: in the order of their numbers.
        target: the books at the commit that a rollback among them goes back to.
        specs: the revisions of the RunSpec that are known, beside those that the orders bring.
    """

    given: tuple[OpenedOrder, ...] = ()
    target: Ledger | None = None
    specs: Mapping[int, RunSpec] = field(default_factory=dict)

    @property
    def envelopes(self) -> tuple[bytes, ...]:
        return tuple(each.envelope for each in self.given)

    @property
    def rollback(self) -> OpenedOrder | None:
        return rollback_of(self.given)

    def keeps_leases(self, ledger: Ledger) -> bool:
        """Whether members may go on from what they have trained: neither the state nor the RunSpec is another one."""
        return self.rollback is None and revision_after(ledger, self.given) == ledger.spec_revision

    def known(self) -> dict[int, RunSpec]:
        """All revisions, those that the orders bring included."""
        return {**self.specs, **{each.spec.revision: each.spec for each in self.given if each.spec is not None}}

    def banned(self, ledger: Ledger) -> set[PeerId]:
        """Who is banned once these orders are obeyed after the ledger."""
        changed = {change.peer: change.standing for change in self.standing()}
        now = {**ledger.standing, **changed}
        return {peer for peer, standing in now.items() if standing is Standing.BANNED}

    def standing(self) -> tuple[StandingChange, ...]:
        """What the orders make of peers' standing, by peer."""
        changes: dict[PeerId, StandingChange] = {}
        for each in self.given:
            order = each.order
            if order.kind == Kind.EVICT:
                changes[order.peer] = StandingChange(order.peer, Standing.BANNED, order.reason)
            elif order.kind == Kind.RESUME and order.peer:
                changes[order.peer] = StandingChange(order.peer, Standing.NEWCOMER, order.reason)
        return tuple(changes[peer] for peer in sorted(changes))


NONE = Orders()


def spec_after(ledger: Ledger, orders: Orders, spec: RunSpec) -> RunSpec:
    """The RunSpec in force after the next body, if it carries these orders; `spec` is in force before.

    Raises ValueError where it isn't known, LedgerError for an old order.
    """
    revision = revision_after(ledger, orders.given)
    if revision == ledger.spec_revision:
        return spec
    known = orders.known().get(revision)
    if known is None:
        raise ValueError(f"revision {revision} of the RunSpec is not known here")
    return known


def order_faults(given: Sequence[OpenedOrder], ledger: Ledger, specs: Mapping[int, RunSpec]) -> list[str]:
    """Why these orders can't be obeyed in the round after the ledger; nothing, if they can.

    Args:
        specs: the revisions of the RunSpec that are known; without the newest one no amendment can be judged.
    """
    number, revision, known = ledger.n_orders, ledger.newest_revision, dict(specs)
    for each in given:
        order, kind = each.order, Kind(each.order.kind)
        if order.run != ledger.run:
            return [f"order {order.number} is for another run"]
        if order.number <= number:
            return [f"order {order.number} is an old one: order {number} has been obeyed"]
        if order.number > number + NUMBERS_AHEAD_MOST:
            return [f"order {order.number} is too far ahead of order {number}"]
        number = order.number
        if kind is Kind.AMEND:
            if why := _amendment_fault(each, known.get(revision), revision):
                return [f"order {number}: {why}"]
            if each.spec is not None:
                revision = each.spec.revision
                known[revision] = each.spec
        if kind is Kind.ROLLBACK:
            if len(given) > 1:
                return [f"order {number}: a rollback goes alone"]
            if order.round > ledger.round:
                return [f"order {number}: round {order.round} is still to come"]
        if kind in (Kind.EVICT, Kind.RESUME) and order.peer == ledger.voters[-1]:
            return [f"order {number}: the coordinator can't be evicted"]
    return []


def _amendment_fault(amendment: OpenedOrder, before: RunSpec | None, revision: int) -> str:
    if amendment.spec is None:
        return "an amendment without a RunSpec"
    if before is None:
        return f"revision {revision} of the RunSpec, which it amends, is not known here"
    if faults := amendment_faults(before, amendment.spec):
        return "; ".join(faults[:3])
    return policy.unknown(amendment.spec)
