"""The operator's orders as a leader keeps them: until a commit carries them, and what they make of its round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from coordinator.rounds.events import Close, Effect, Instant, Ordered, Say
from coordinator.rounds.ledger import Ledger, revision_after
from coordinator.rounds.orders import Orders, order_faults
from coordinator.rounds.state import RoundState
from protos import limits
from protos.messages import Body, Goodbye, Proposal, Standing
from protos.orders import Kind, OpenedOrder

AT_ONCE = frozenset({Kind.PAUSE, Kind.RESUME, Kind.ROLLBACK, Kind.EVICT})
"""What is obeyed by an empty commit at once, where the round is still training; an end that is due now, too."""


class Ordering(RoundState):
    """What a leader does about orders. They reach the coordinator by its operator, and anyone else by the chain."""

    def _ordered(self, event: Ordered) -> list[Effect]:
        """Keep an order until a commit carries it; one that can't be obeyed is refused, and said."""
        opened = event.order
        number = opened.order.number
        if event.target is not None:
            self._targets[event.target.head] = event.target
        if number <= self.ledger.n_orders:
            self._given[number] = opened
            return []  # carried already
        if any(each.order.number == number for each in self._pending):
            return []  # given again
        return self._judge((*self._pending, opened))

    def _give_again(self) -> list[Effect]:
        """Another branch is followed, whose commits lack orders that the one which was given up has carried."""
        lacking = [each for number, each in self._given.items() if number > self.ledger.n_orders]
        waiting = {each.order.number for each in self._pending}
        again = [each for each in lacking if each.order.number not in waiting]
        told = [Say(f"order {each.order.number} ({each.order.kind}) waits again for a commit") for each in again]
        return [*told, *self._judge((*self._pending, *again))] if again else []

    def _judge(self, pending: Iterable[OpenedOrder]) -> list[Effect]:
        self._pending, refused = self._sound(sorted(pending, key=lambda each: each.order.number))
        self._given.update({each.order.number: each for each in self._pending})
        return [Say(f"order {each.order.number} is refused: {why}") for each, why in refused]

    def _sound(self, pending: Iterable[OpenedOrder]) -> tuple[list[OpenedOrder], list[tuple[OpenedOrder, str]]]:
        """Those that can be obeyed one after the other, and why the others can't."""
        ledger, specs = self.ledger, dict(self.specs)
        sound: list[OpenedOrder] = []
        refused: list[tuple[OpenedOrder, str]] = []
        for each in pending:
            faults = order_faults([each], ledger, specs)
            if not faults and each.order.kind == Kind.ROLLBACK and each.order.spec not in self._targets:
                faults = [f"the books after round {each.order.round} are not here"]
            if faults:
                refused.append((each, faults[0]))
                continue
            sound.append(each)
            ledger = _counted(ledger, each)
            if each.spec is not None:
                specs[each.spec.revision] = each.spec
        return sound, refused

    def _carried(self, *, empty: bool) -> Orders:
        """What the next body carries: a rollback goes alone and in an empty one, others before it come first."""
        given: list[OpenedOrder] = []
        for each in self._pending[: limits.ORDERS]:
            if each.order.kind == Kind.ROLLBACK:
                if empty and not given:
                    given = [each]
                break
            given.append(each)
        return self._with_needs(tuple(given))

    def _with_needs(self, given: tuple[OpenedOrder, ...]) -> Orders:
        """Orders with the books and revisions that they need, as far as they are here."""
        rollback = next((each for each in given if each.order.kind == Kind.ROLLBACK), None)
        return Orders(given, self._targets.get(rollback.order.spec) if rollback else None, self.specs)

    def _due(self) -> str:
        """Why an empty commit is made at once, for an order that waits for nobody's training; empty: nothing is due."""
        if not self._pending:
            return ""
        first = self._pending[0].order
        ends = any(each.order.kind == Kind.END and each.order.round <= self.ledger.round for each in self._pending)
        if self.ledger.paused or ends or any(Kind(each.order.kind) in AT_ONCE for each in self._pending):
            return f"by the operator's order {first.number}: {first.kind}"
        return ""

    def _learn_orders(self, given: Iterable[OpenedOrder]) -> None:
        """A commit's orders and the revisions that they bring are known from now on; who gave others is told."""
        given = tuple(given)
        self.specs.update({each.spec.revision: each.spec for each in given if each.spec is not None})
        for each in given:
            self._given.setdefault(each.order.number, each)  # they wait again should its branch be given up
        last, carried = max((each.order.number for each in given), default=0), [each.order for each in given]
        gone = [each for each in self._pending if each.order.number <= last and each.order not in carried]
        self._unsound += [(each, "the chain goes on with another one") for each in gone]

    def _obey(self) -> None:
        """The head is another one: its RunSpec is in force, and what it has carried waits no more."""
        ledger = self.ledger
        if (spec := self.specs.get(ledger.spec_revision)) is not None and spec.revision != self.spec.revision:
            self.spec = spec
            self.members.amend(spec.deadlines)
            self._seating.amend(spec)
        if self._was_paused and not ledger.paused:
            self.members.resume()
        self._was_paused = ledger.paused
        self._pending, unsound = self._sound(each for each in self._pending if each.order.number > ledger.n_orders)
        self._unsound += unsound

    def _lacks_spec(self) -> str:
        """What a leader waits for: the revision in force, or the one under which the next round's seats are made."""
        ledger, wanted = self.ledger, self.ledger.spec_revision
        if wanted == self.spec.revision and ledger.next_revision and ledger.next_revision not in self.specs:
            wanted = revision_after(ledger, ())  # no amendment waits: none is sound after one that is not known
        return "" if wanted == self.spec.revision else f"revision {wanted} of the RunSpec, which is not known here"

    def _put_out(self, body: Body, now: Instant) -> list[Effect]:
        """Whom a commit has banned loses its line at once; and orders that it leaves no place for are said."""
        unsound, self._unsound = self._unsound, []
        effects: list[Effect] = [
            Say(f"order {each.order.number} ({each.order.kind}) can't be obeyed any more: {why}")
            for each, why in unsound
        ]
        for change in body.standing:
            member = self.members.get(change.peer)
            if change.standing is not Standing.BANNED or member is None:
                continue
            told = "this peer has been evicted from the run" + (f": {change.reason}" if change.reason else "")
            effects += [Close(change.peer, Goodbye("refused", told)), Say(f"{change.peer[-6:]} is evicted")]
            self.members.disconnected(change.peer, now)
            member.story.append(told)
        return effects

    def _orders_of(self, proposal: Proposal) -> Orders:
        return self._with_needs(self._body_orders.get(proposal.body, ()))


def _counted(ledger: Ledger, each: OpenedOrder) -> Ledger:
    """The ledger as far as the next order's number and revision are judged by it."""
    revision = each.spec.revision if each.spec is not None else ledger.newest_revision
    return replace(ledger, n_orders=each.order.number, next_revision=revision)
