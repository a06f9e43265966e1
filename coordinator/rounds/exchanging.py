"""The exchange of an attempt as its leader goes through it: whose rows and results are there, and who is at fault."""

from __future__ import annotations

from collections.abc import Collection

from coordinator.rounds import policy, proposing
from coordinator.rounds.attempt import Attempt
from coordinator.rounds.events import (
    Effect,
    Instant,
)
from coordinator.rounds.members import Member, listed, named
from coordinator.rounds.state import InvariantBroken
from coordinator.rounds.voting import Voting, because
from protos.messages import (
    PeerId,
)


class Exchanging(Voting):
    """The moves of a leader while rows and results travel."""

    # EXCHANGE: senders stream, reducers combine and sign results. Of a chunk's replicas only one need be left; where a
    # sender dies before enough of them have its rows, the attempt fails.

    def _exchange(self, now: Instant) -> list[Effect] | None:
        attempt = self._running()
        awaited = [peer for peer in attempt.reducers if peer not in attempt.results]
        lost = {peer for peer in (*attempt.included, *attempt.reducers) if self._is_lost(attempt, peer, now)}
        silent = [peer for peer in awaited if peer not in lost and peer not in attempt.claims]
        if lost and attempt.is_stuck(lost | (attempt.claims.keys() - attempt.results.keys())):
            return self._lost(attempt, lost, now)
        # A sender that gives its rows to one reducer alone has that one decide: not before enough of them agree.
        disputed = not attempt.is_agreed() and any(attempt.claims.get(peer) for peer in awaited)
        covered = attempt.is_covered() and not disputed
        if not awaited or (covered and not silent) or self._need_no_more(attempt, silent, now):
            return self._reduced(attempt, now)
        if lost & set(attempt.included):
            return self._lost(attempt, lost, now)
        if silent and now < attempt.deadline_at:
            return self._wait(f"results of {named(awaited)}")
        if covered:
            return self._reduced(attempt, now)
        self._unable |= {peer for peer in awaited if attempt.claims.get(peer) == set()}
        if self._none_is_able(self._could_reduce(now)):
            return self._propose_new(None, self._why_unable(), now)
        senders, reducers = policy.blame({peer: attempt.claims.get(peer, set()) for peer in awaited})
        # Who neither has results nor says whose rows are missing is itself at fault.
        reducers |= {peer for peer in awaited if not attempt.claims.get(peer)}
        self._out_senders |= senders
        self._out_reducers |= reducers
        return self._fail(f"rows or results did not come in time; without {named(senders | reducers)} next", now)

    def _lost(self, attempt: Attempt, lost: Collection[PeerId], now: Instant) -> list[Effect]:
        """Go on without whom the exchange has lost; who is here and refuses the deal would refuse the next one too."""
        outbid = attempt.outbid > attempt.number  # by another leader: it would do its part in a higher number
        unwilling = set() if outbid else {peer for peer in lost if peer in attempt.declined}
        self._out_senders |= unwilling
        self._out_reducers |= unwilling
        return self._fail(f"lost {named(lost)}{because(attempt.declined)}", now)

    def _need_no_more(self, attempt: Attempt, silent: Collection[PeerId], now: Instant) -> bool:
        """Whether enough replicas agree, and the others are not here or have had a little longer."""
        if not attempt.is_agreed():
            return False
        if attempt.enough_at is None:
            attempt.enough_at = now
        late = now >= attempt.enough_at + self.spec.deadlines.gone_grace_s
        return late or not any(self.members.fresh(peer, now) for peer in silent)

    def _reduced(self, attempt: Attempt, now: Instant) -> list[Effect]:
        evidence = attempt.evidence()
        if evidence is None:
            raise InvariantBroken("an exchange without a deal")
        if faults := proposing.evidence_faults(evidence, self.ledger, self.spec):
            accused = {peer for peer in attempt.results if any(peer in fault for fault in faults)}
            self._out_reducers |= proposing.dissenters(evidence) & accused or accused or set(attempt.results)
            return self._fail(listed(faults, "; "), now)
        return self._propose_new(evidence, "", now)

    def _could_reduce(self, now: Instant) -> list[Member]:
        """Contributors and observers that can be reached and hold the state, blamed or not."""
        observers = [m for m in self.members if m.observer and self.members.holds(m.peer, self.ledger, now)]
        return [m for m in (*self._roll(now).contributors(), *observers) if m.reachable]

    def _none_is_able(self, reducers: Collection[Member]) -> bool:
        """Whether all of those who could reduce have said that they can't: another attempt would end like this one."""
        return bool(reducers) and all(member.peer in self._unable for member in reducers)

    def _why_unable(self) -> str:
        return f"nobody who could reduce is able to combine the contributions: {named(self._unable)}"
