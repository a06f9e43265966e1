"""The operator's orders at the coordinator: checked, journalled before anything follows from them, given to the leader.

Whoever hands an order over has signed it, wherever that was; nothing is signed in here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordinator.folder import Founded, RunFolder
from coordinator.journal import Journal
from coordinator.rounds.events import Ordered
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.orders import order_faults
from protos.messages import PeerId
from protos.orders import Kind, OpenedOrder, OrderError, open_order
from protos.runspec import RunSpec


class Refused(ValueError):
    """An order that the run can't obey: says why, and what would do."""


@dataclass(frozen=True, slots=True)
class Revisions:
    """The revisions of the RunSpec that were ever ordered, with their envelopes."""

    specs: dict[int, RunSpec]
    envelopes: dict[int, bytes]

    def add(self, order: OpenedOrder) -> None:
        if order.spec is not None:
            self.specs[order.spec.revision] = order.spec
            self.envelopes[order.spec.revision] = order.order.spec


def revisions_of(founded: Founded, orders: list[OpenedOrder]) -> Revisions:
    """Those of the folder and of these orders."""
    first = founded.spec
    revisions = Revisions({first.revision: first}, {first.revision: founded.spec_envelope})
    for order in orders:
        revisions.add(order)
    return revisions


def read_orders(journal: Journal, run: PeerId, coordinator: PeerId) -> list[OpenedOrder]:
    """All orders that were ever given here, or that a commit has brought; what nobody may give is passed over."""
    found: list[OpenedOrder] = []
    for envelope in journal.orders():
        try:
            found.append(open_order(envelope, run=run, coordinator=coordinator))
        except OrderError:
            continue
    return found


def waiting(orders: list[OpenedOrder], ledger: Ledger, journal: Journal) -> list[Ordered]:
    """What no commit has carried yet, as the leader takes it."""
    pending = {each.order.number: each for each in orders if each.order.number > ledger.n_orders}
    return [Ordered(pending[number], target_of(pending[number], journal)) for number in sorted(pending)]


def target_of(order: OpenedOrder, journal: Journal) -> Ledger | None:
    """The books that a rollback goes back to; None for another order, and where the chain holds no such commit."""
    if order.order.kind != Kind.ROLLBACK:
        return None
    past = journal.at(order.order.spec)
    return past.books if past is not None else None


def held_rounds(folder: RunFolder) -> dict[int, str]:
    """The rounds whose state the observer holds, with the first digits of their commits' hashes."""
    found: dict[int, str] = {}
    for path in _states(folder.observer / "state"):
        round_, _, head = path.name.removeprefix("frozen-").partition("-")
        if round_.isdigit() and len(head) == 8:
            found[int(round_)] = head
    return dict(sorted(found.items()))


def _states(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []


class Desk:
    """Takes orders in for a run that is served.

    Args:
        given: those that were taken in before: a branch that is given up may have carried some that its heir lacks.
        books: the folded ledger at the head.
        write: does work in the thread that writes the journal.
        give: hands an order to the leader.
    """

    def __init__(
        self,
        folder: RunFolder,
        founded: Founded,
        journal: Journal,
        revisions: Revisions,
        given: list[Ordered],
        *,
        books: Callable[[], Ledger],
        write: Callable[[Callable[[], None]], Any],
        give: Callable[[Ordered], None],
        run_time_s: Callable[[], float],
    ) -> None:
        self._folder, self._founded, self._journal = folder, founded, journal
        self.revisions = revisions
        self._given_orders = {each.order.order.number: each.order for each in given}
        self._books, self._write, self._give, self._run_time_s = books, write, give, run_time_s
        self._one_at_a_time = asyncio.Lock()

    def waiting(self) -> list[OpenedOrder]:
        """What no commit has carried yet, by number."""
        obeyed = self._books().n_orders
        return [self._given_orders[number] for number in sorted(self._given_orders) if number > obeyed]

    def next_number(self) -> int:
        return max([self._books().n_orders, *self._given_orders]) + 1

    def carried(self, orders: Iterable[OpenedOrder]) -> None:
        """A commit carries these orders: what was never given here is known from now on, as after a restart."""
        for each in orders:
            self.revisions.add(each)
            self._given_orders.setdefault(each.order.number, each)

    def spec(self) -> RunSpec:
        """The RunSpec in force."""
        return self.revisions.specs.get(self._books().spec_revision, self._founded.spec)

    def spec_envelope(self, revision: int = 0) -> bytes | None:
        """The RunSpec of this revision, 0: of the one in force; None if there is none."""
        return self.revisions.envelopes.get(revision or self._books().spec_revision)

    def status(self) -> dict[str, Any]:
        """What is shown of orders."""
        books = self._books()
        return {
            "paused": books.paused,
            "ends_after": books.ends_after,
            "n_orders": books.n_orders,
            "next_order": self.next_number(),
            "orders_waiting": [
                {"number": each.order.number, "kind": each.order.kind, "reason": each.order.reason}
                for each in self.waiting()
            ],
            "spec_revision": books.spec_revision,
            "next_revision": {"revision": books.next_revision, "from": books.next_from}
            if books.next_revision
            else None,
            "newest_revision": max(self.revisions.specs),
            "rollbacks": books.rollbacks,
        }

    async def take(self, envelope: bytes) -> OpenedOrder:
        """Take an order in: when this returns it is journalled and given to the leader. Raises Refused."""
        async with self._one_at_a_time:
            try:
                order = open_order(envelope, run=self._founded.run, coordinator=self._founded.operator.coordinator)
            except OrderError as error:
                raise Refused(str(error)) from error
            number = order.order.number
            if number < self.next_number():
                raise Refused(f"order {number} has been given before: sign it as number {self.next_number()}")
            faults = order_faults([order], self._expected(), self.revisions.specs)
            if faults:
                raise Refused(faults[0])
            target = await asyncio.to_thread(target_of, order, self._journal)
            if order.order.kind == Kind.ROLLBACK:
                await asyncio.to_thread(self._check_rollback, order, target)
            kind, at_run_s = order.order.kind, self._run_time_s()
            await self._write(lambda: self._journal.order(kind, envelope, at_run_s))
            self.revisions.add(order)
            self._given_orders[number] = order
            self._give(Ordered(order, target))
            return order

    def _expected(self) -> Ledger:
        """The books as far as the next order is judged by them, once those that wait are obeyed."""
        return replace(self._books(), n_orders=self.next_number() - 1, next_revision=max(self.revisions.specs))

    def _check_rollback(self, order: OpenedOrder, target: Ledger | None) -> None:
        held = held_rounds(self._folder)
        available = ", ".join(str(round_) for round_ in held) or "none"
        round_ = order.order.round
        if held.get(round_) != order.order.spec.hex()[:8]:
            raise Refused(f"the observer doesn't hold the state after round {round_}; it holds those of: {available}")
        if target is None:
            raise Refused(f"round {round_} with commit {order.order.spec.hex()[:12]} is not in this run's ledger")
