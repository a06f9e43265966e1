"""How a member that is behind comes to the newest commit: along the chain by results, or by a whole state.

Results are a byte a parameter and round, a state is eight. Who was away for no more rounds than results are kept asks
for the commits since, weighs each one's votes by the books before it, and applies one after the other: each step is as
whole as that of any round, so a crash in between only means to go on from there. All others fetch a state, which may be
some rounds old too, and go on in the same way.
"""

from __future__ import annotations

from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger
from node.session import effects as fx
from node.session import events as ev
from node.session.effects import Effect
from node.session.obeying import Obeying
from protos.messages import Outcome
from protos.runspec import KeepSpec

REFETCH_FIRST_S = 1.0
REFETCH_MAX_S = 30.0
COMMITS_PER_RESULT = 4
COMMITS_LEAST = 64
AHEAD_KEPT = 1024
REFUSED_MAX = 3
"""So often are others' commits refused before the state is fetched: anybody can hand them over without their votes."""


def commits_kept(keep: KeepSpec) -> int:
    """How many commits a node keeps for others: empty rounds cost no results, so they go back further than these."""
    return max(COMMITS_LEAST, COMMITS_PER_RESULT * keep.results)


class CatchingUp(Obeying):
    """A member's way to the newest commit."""

    def _note_ahead(self, heard: ev.CommitHeard) -> None:
        """Keep a commit until it is its turn, by the head that it extends."""
        held = self.ledger
        if held is not None and heard.body.round > held.round:
            self._ahead[heard.body.previous] = heard
            while len(self._ahead) > AHEAD_KEPT:
                del self._ahead[next(iter(self._ahead))]

    def _next_commit(self, held: Ledger, newest: ev.CommitHeard) -> ev.CommitHeard | None:
        """The commit that extends the held state on the way to the newest one, if it is known."""
        if newest.body.previous == held.head:
            return newest
        return self._ahead.get(held.head)

    def _behind(self) -> bool:
        """Whether more than the next commit is missing."""
        newest, held = self._newest, self.ledger
        if newest is None or held is None:
            return False
        return self._asking is not None or newest.body.round > held.round + 1

    def _is_moving(self) -> bool:
        """Whether it is on its way to another state already, or waits before it tries again."""
        working = self._fetching or self._asking or self._applying or self._commit
        return bool(working) or self._refetch_at is not None

    def _approach(self, held: Ledger | None, newest: ev.CommitHeard) -> list[Effect]:
        """The next commit is not known: ask for those since, or fetch a state."""
        if held is None or held.head == self._unreplayable:
            return self._fetch(newest)
        n_rounds = newest.body.round - held.round
        if n_rounds > commits_kept(self.spec.keep):
            told = f"was away for {n_rounds} rounds, too many to follow by their results: fetching the state"
            return [fx.Say(told), *self._fetch(newest)]
        self._asking = fx.FetchCommits(held.epoch, held.round, held.head, newest, self._n_refused)
        return [*self._drop_part(), self._asking]

    def _took_commits(self, event: ev.CommitsFetched) -> list[Effect]:
        """Take in the commits since; the caller follows them."""
        asked, held, self._asking = self._asking, self.ledger, None
        if asked is None or held is None or held.head != asked.head:
            return []
        if not event.commits or event.commits[0].body.previous != held.head:
            self._unreplayable = held.head
            return []
        n_results = sum(heard.body.outcome is Outcome.COMMITTED for heard in event.commits)
        if n_results > self.spec.keep.results:
            self._unreplayable = held.head
            return [fx.Say(f"missed {n_results} rounds, of which not all results are kept: fetching the state")]
        for heard in event.commits:
            self._note_ahead(heard)
        first, last = event.commits[0].body.round, event.commits[-1].body.round
        return [fx.Say(f"following rounds {first} to {last} by their results")] if last > first else []

    def _lacked_commits(self, reason: str, gone: bool, now: Instant) -> list[Effect]:
        """Nobody gave the commits since: they are asked for again, unless nobody has them."""
        asked, held, self._asking = self._asking, self.ledger, None
        if asked is None or held is None or held.head != asked.head:
            return []
        if gone:
            self._unreplayable = held.head
            return [fx.Say(f"can't follow the rounds since {held.round} by their results: {reason}")]
        return self._again("the commits since", reason, now)

    def _refused_commit(self, heard: ev.CommitHeard, fault: str) -> list[Effect]:
        """A commit does not hold. From the leader it is waited for anew; others are asked for theirs a few times."""
        if heard is self._newest:
            self._newest = None
        elif self.ledger is not None:
            self._ahead.clear()
            self._n_refused += 1
            if self._n_refused >= REFUSED_MAX:
                self._unreplayable = self.ledger.head
        return [fx.Say(f"refused a commit of round {heard.body.round}: {fault}")]

    def _fetch(self, heard: ev.CommitHeard) -> list[Effect]:
        """Fetch a state that leads to the newest commit, in place of applying this one."""
        held, newest = self.ledger, self._newest or heard
        anew = held is not None and held.round >= heard.body.round
        if held is None or anew:
            newer_than = -1
        elif heard.body.previous == held.head:  # its results are not to be had, or lead elsewhere here
            newer_than = heard.body.round - 1
        else:
            newer_than = held.round
        self._commit = self._after = self._asking = None
        self._ahead.clear()
        self._fetching = fx.FetchState(newest.commit, newest.body, newer_than, anew)
        return [*self._drop_part(), self._fetching]

    def _fetch_failed(self, reason: str, now: Instant) -> list[Effect]:
        self._fetching = None
        return self._again("the state", reason, now)

    def _again(self, what: str, reason: str, now: Instant) -> list[Effect]:
        pause_s = min(REFETCH_FIRST_S * 2.0 ** min(self._n_refetches, 10), REFETCH_MAX_S)
        self._n_refetches += 1
        self._fetch_problem = reason
        self._refetch_at = Instant(now + pause_s)
        return [fx.Say(f"could not fetch {what}: {reason}; trying again in {pause_s:g} s")]

    def _caught_up_to(self, ledger: Ledger) -> None:
        """Another state is held: what was known of the way to it is over."""
        self._n_refetches, self._n_refused, self._fetch_problem, self._unreplayable = 0, 0, "", b""
        self._ahead = {head: heard for head, heard in self._ahead.items() if heard.body.round > ledger.round}
