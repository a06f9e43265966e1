"""The plan of an attempt, and the deal of the commitments that come: who sends, who reduces, who is out."""

from __future__ import annotations

from coordinator.rounds import policy
from coordinator.rounds.attempt import Phase, deal_for, plan_for
from coordinator.rounds.events import (
    Effect,
    Instant,
    Say,
    Tell,
)
from coordinator.rounds.exchanging import Exchanging
from coordinator.rounds.members import listed, named
from coordinator.rounds.state import InvariantBroken
from coordinator.rounds.voting import LEADER_SLACK, PROBE_EVERY_S, REASON_MOST, because
from protos.hashes import plan_hash
from protos.messages import (
    Signed,
)


class Dealing(Exchanging):
    """The moves of a leader from a plan to a deal."""

    # COMMITMENT: the plan is out; each sender signs what it will send.

    def _form(self, now: Instant) -> list[Effect]:
        attempt, roll = self._running(), self._roll(now)
        if attempt.empty:
            return self._propose_new(None, attempt.empty, now)
        senders = roll.contributors()
        if len(senders) < self.spec.membership.min_contributors:
            return self._fail(f"only {len(senders)} contributors are left", now)
        able = self._could_reduce(now)
        reducers = [m for m in able if m.peer not in self._out_reducers]
        n_members = sum(1 for m in reducers if not m.observer)
        reserves = [m.peer for m in reducers if m.observer and n_members >= policy.REACHABLE_ENOUGH]
        if not reducers:
            if self._none_is_able(able):
                return self._propose_new(None, self._why_unable(), now)
            self._out_reducers = set(self._unable)  # blamed or not, there is nobody else
            return [*self._fail("nobody who could reduce can be reached", now), *self._probe_again(now, PROBE_EVERY_S)]
        attempt.plan = plan_for(
            self.ledger,
            self.spec,
            attempt=attempt.number,
            leader=self.me,
            senders={m.peer: m.record.sequence for m in senders},
            reducers={m.peer: m.record.sequence for m in reducers},
            reserves=reserves,
        )
        attempt.losses = {member.peer: member.n_lost for member in senders}
        attempt.outbid = -1
        try:
            attempt.plan_hash = plan_hash(self._sealer.encode(attempt.plan))
            attempt.plan_envelope = self._sealer.seal(attempt.plan)
        except ValueError as error:
            return self._fail(f"its plan can't be told: {error}", now)
        attempt.deadline_at = Instant(now + self.spec.deadlines.commitment_s * LEADER_SLACK)
        self._enter(Phase.COMMITMENT)
        alone, self._observer_alone = self._observer_alone, not n_members
        told: list[Effect] = []
        if self._observer_alone and not alone:
            told.append(Say("no member can be reached: the observer reduces every chunk, until one can"))
        return [*told, *self._relay_news(now), Tell(attempt.members(), Signed(attempt.plan_envelope))]

    def _commitment(self, now: Instant) -> list[Effect] | None:
        attempt = self._running()
        if attempt.outbid > attempt.number:
            return self._fail(f"number {attempt.outbid} has been promised{because(attempt.declined)}", now)
        missing = [peer for peer in attempt.losses if peer not in attempt.commitments]
        if now < attempt.deadline_at and any(not self._is_lost(attempt, peer, now) for peer in missing):
            return self._wait(f"commitments of {named(missing)}")
        if now >= attempt.deadline_at:
            self._uncommitted |= {peer for peer in missing if not self._is_lost(attempt, peer, now)}
        for peer in [peer for peer in attempt.commitments if self._is_lost(attempt, peer, now)]:
            del attempt.commitments[peer]
        if not attempt.commitments:
            reason = f"no commitment came from {named(attempt.losses)}{because(attempt.declined)}"
            if all(peer in attempt.declined and not self._lost_progress(attempt, peer) for peer in attempt.losses):
                return self._propose_new(None, reason[:REASON_MOST], now)  # they start again from the anchor
            return self._fail(reason, now)
        # Who has nothing to contribute may still reduce.
        planned = [member.peer for member in (attempt.plan.members if attempt.plan else ()) if member.reducer]
        reducers = [peer for peer in planned if peer not in self._left and self.members.expected(peer, now)]
        if not reducers:
            return self._fail("nobody who could reduce is left", now)
        deal_for(attempt, self.ledger, self.spec, reducers)
        if attempt.deal is None:
            raise InvariantBroken("nothing was dealt")
        included = {peer: attempt.commitments[peer][0] for peer in attempt.included}
        if reason := policy.refused(self.spec, included, attempt.deal.excluded):
            whose = listed([f"{entry.peer[-6:]}: {entry.reason}" for entry in attempt.deal.excluded], "; ")
            reason = f"{reason} ({whose})" if attempt.deal.excluded else reason
            return self._propose_new(None, reason[:REASON_MOST], now)
        attempt.declined.clear()
        try:
            attempt.deal_envelope = self._sealer.seal(attempt.deal)
        except ValueError as error:
            return self._fail(f"its deal can't be told: {error}", now)
        attempt.deadline_at = Instant(now + self.spec.deadlines.exchange_s * LEADER_SLACK)
        self._enter(Phase.EXCHANGE)
        everyone = tuple(sorted({*attempt.commitments, *reducers}))
        return [Tell(everyone, Signed(attempt.deal_envelope))]
