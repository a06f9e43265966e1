"""What the operator's orders make of a member: pauses, the RunSpec in force, and states that the run goes back to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from coordinator.rounds.ledger import Ledger, LedgerError, fold, rollback_of
from coordinator.rounds.orders import Orders
from node.session import effects as fx
from node.session import events as ev
from node.session.effects import Effect
from node.session.working import Working
from protos.orders import OpenedOrder
from protos.runspec import RunSpec

OPERATOR = "operator"
"""Who has paused this member, where the run is paused."""


class Obeying(Working):
    """What a member does about the orders that commits carry."""

    def _obey(self) -> list[Effect]:
        """The held books say whether the run is paused, and which revision of the RunSpec is in force."""
        ledger = self.ledger
        if ledger is None:
            return []
        effects: list[Effect] = []
        if ledger.paused != (OPERATOR in self._paused_by):
            effects.append(
                fx.Say("the operator has paused the run" if ledger.paused else "the operator resumes the run")
            )
            effects += self._pause(OPERATOR, ledger.paused)
        spec = self.specs.get(ledger.spec_revision)
        if spec is not None and spec.revision != self.spec.revision:
            self.spec = spec
            self._succession.amend(spec.deadlines)
            effects += [fx.Amended(spec), fx.Say(f"revision {spec.revision} of the run's settings is in force")]
        return effects

    def _lacks_spec(self) -> bool:
        """Whether the settings in force are not known here: nothing can be trained or judged by them."""
        return self.ledger is not None and self.ledger.spec_revision != self.spec.revision

    def _unknown_revisions(self) -> list[int]:
        """The revisions of the RunSpec that are in force or to come, and not known here.

        Who came by a state, or past the commit that carried an amendment, has not heard what it brings.
        """
        ledger = self.ledger
        wanted = (ledger.spec_revision, ledger.next_revision) if ledger is not None else ()
        return [revision for revision in wanted if revision and revision not in self.specs]

    def _ask_for_specs(self) -> list[Effect]:
        """Fetch what is not known, each once: whoever fetches it tries until it has come."""
        asked = [revision for revision in self._unknown_revisions() if revision not in self._asked_revisions]
        self._asked_revisions.update(asked)
        return [fx.FetchSpec(revision) for revision in asked]

    def _spec_known(self, spec: RunSpec) -> list[Effect]:
        """A revision has come that was asked for: one that is in force, or is to be later."""
        lacked = self._lacks_spec()
        self.specs[spec.revision] = spec
        self._asked_revisions.discard(spec.revision)
        return [*self._obey(), *(self._begin_round() if lacked and self._training is None else [])]

    def _learn_orders(self, orders: Iterable[OpenedOrder]) -> list[Effect]:
        """Keep the revisions that a commit's orders bring."""
        effects: list[Effect] = []
        for each in orders:
            if each.spec is not None and each.spec.revision not in self.specs:
                self.specs[each.spec.revision] = each.spec
                effects.append(fx.KeepSpec(each.order.spec, each.spec.revision))
        return effects

    def _orders_of(self, event: ev.Proposed | ev.CommitHeard) -> Orders:
        """A body's orders with what they need, as far as it is here."""
        rollback = rollback_of(event.orders)
        target = self._targets.get(rollback.order.spec) if rollback is not None else None
        return Orders(event.orders, target, self.specs)

    def _restore_for(self, event: ev.Proposed) -> list[Effect] | None:
        """What a rollback's proposal needs before it is judged: the state to go back to. None if it needs nothing."""
        rollback = rollback_of(event.orders)
        if rollback is None or rollback.order.spec in self._targets:
            return None
        if self._restoring is not None and self._restoring.body_hash == event.body_hash:
            self._restoring = event  # told again
            return []
        self._restoring = event
        return [fx.Restore(rollback.order.spec, rollback.order.round, event.body_hash)]

    @property
    def targets(self) -> Mapping[bytes, Ledger]:
        """The books of states that were restored in this round, to go back to, by their heads."""
        return self._targets

    def _goes_back(self, heard: ev.CommitHeard) -> bool:
        """Whether a commit leads back to a state that does not stand beside the held one: it is fetched like any."""
        orders = self._orders_of(heard)
        return orders.rollback is not None and orders.target is None

    def _restored(self, event: ev.Restored) -> None:
        """The state to go back to stands beside the current one."""
        self._targets[event.ledger.head] = event.ledger
        self._candidate = (event.body_hash, event.ledger.digest)

    def _folded(self, held: Ledger, heard: ev.CommitHeard) -> Ledger:
        """The books after a commit. Raises LedgerError."""
        folded = fold(held, heard.body, heard.orders, self._orders_of(heard).target)
        if folded.hash() != heard.body.ledger_hash:
            raise LedgerError("the books after it are not those that it names")
        return folded.at(heard.commit_hash, heard.commit.digest)
