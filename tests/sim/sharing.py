"""What members of a simulated world compute once for all of them."""

from __future__ import annotations

from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.proposing import Evidence
from coordinator.rounds.redealing import Lines, chunks_of, reducers_now
from node.session import effects as fx
from node.session import events as ev
from node.session.machine import Session
from protos.messages import PeerId, Proposal


def sharing_session(*, instant: bool = False) -> type[Session]:
    """A Session that shares pure results with all others: the same question about the same things has one answer.

    With `instant`, where rows take no time, who reduces nothing does nothing in an exchange, until something changes.
    """
    bodies: dict[tuple[Proposal, bool, bytes], list[str]] = {}
    deals: dict[tuple[bytes, bytes], list[str]] = {}
    folded: dict[tuple[bytes, bytes], Ledger] = {}
    lines: dict[bytes, Lines] = {}
    sets: dict[bytes, tuple[bytes, frozenset[PeerId]]] = {}

    class SharingSession(Session):
        def _body_faults(self, event: ev.Proposed, ledger: Ledger) -> list[str]:
            key = (event.propose.proposal, event.body.attempt <= event.propose.attempt, ledger.head)
            if key not in bodies:
                bodies[key] = super()._body_faults(event, ledger)
            return bodies[key]

        def _deal_faults(self, evidence: Evidence, ledger: Ledger) -> list[str]:
            key = (evidence.plan_hash, ledger.head)
            if key not in deals:
                deals[key] = super()._deal_faults(evidence, ledger)
            return deals[key]

        def _folded(self, held: Ledger, heard: ev.CommitHeard) -> Ledger:
            key = (held.head, heard.commit_hash)
            if key not in folded:
                folded[key] = super()._folded(held, heard)
            return folded[key]

        def _lines(self, evidence: Evidence) -> Lines:
            if evidence.plan_hash not in lines:
                lines[evidence.plan_hash] = super()._lines(evidence)
            return lines[evidence.plan_hash]

    class InstantSession(SharingSession):
        def _dealt(self, event: ev.Dealt, now: Instant) -> list[fx.Effect]:
            part, ledger = self._part, self.ledger
            if part is None or ledger is None or part.exchange is not None or event.deal.plan != part.planned.plan_hash:
                return super()._dealt(event, now)
            if event.envelope not in sets:
                evidence = part.evidence(event)
                shared = self._lines(evidence)
                reducers = chunks_of(reducers_now(part.planned.plan, shared, None))
                sets[event.envelope] = evidence.set_hash(), frozenset(reducers)
            set_hash, reduce_it = sets[event.envelope]
            if self.me in reduce_it:
                return super()._dealt(event, now)
            part.dealt, part.set_hash, part.lines = event, set_hash, lines[event.deal.plan]
            return []

        def _redealt(self, event: ev.Redealt, now: Instant) -> list[fx.Effect]:
            part, effects = self._part, list[fx.Effect]()
            if part is not None and part.exchange is None and part.dealt is not None:
                effects = super()._dealt(part.dealt, now)  # it may be the next in line
            return [*effects, *super()._redealt(event, now)]

    return InstantSession if instant else SharingSession
