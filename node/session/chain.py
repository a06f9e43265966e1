"""How a member follows the chain of commits: towards the newest one that it knows of, one whole state at a time.

The outer state changes in one place only, `_applied`, after a commit that extends it; nothing else that happens to an
exchange can touch it.
"""

from __future__ import annotations

from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger, LedgerError, fold
from coordinator.rounds.voter import certificate_faults
from node.session import events as ev
from node.session.events import Effect
from node.session.part import CombinedHere
from node.session.working import Working
from protos import hashes
from protos.messages import Body, Leave, Outcome, PeerId, Signed, Vote

REFETCH_FIRST_S = 1.0
REFETCH_MAX_S = 30.0


class Chain(Working):
    """A member's moves along the chain."""

    def _line_up(self, event: ev.LineUp, now: Instant) -> list[Effect]:
        self._line, self._line_problem, self._line_changed_at = True, "", now
        self._lost_round = max(self._lost_round, event.ledger.round + 1)
        self._newest = ev.CommitHeard(event.welcome.commit, event.body, event.ledger.head, event.signed)
        self._newest_ledger = event.ledger
        left: list[Effect] = []
        record = self._voter.record
        if self.ledger is not None and self._voter.has_left(self.ledger) and isinstance(record, Leave):
            left = [
                ev.TellLeader(Signed(self._sealer.seal(record)))
            ]  # or the round would wait for a vote that it lacks
        return [*left, *self._follow(now)]

    def _heard_commit(self, event: ev.CommitHeard, now: Instant) -> list[Effect]:
        known = self._newest.body.round if self._newest else -1
        if event.body.round > known:
            self._newest, self._newest_ledger = event, None
        return self._follow(now)

    def _follow(self, now: Instant) -> list[Effect]:
        """Move towards the newest commit that is known: apply it if it extends the held state, else fetch."""
        newest = self._newest
        if newest is None or self._fetching or self._applying or self._refetch_at is not None or self._commit:
            return []
        commit, body = newest.commit, newest.body
        held = self.ledger
        if held is not None and held.head == newest.commit_hash:
            return self._begin_round() if self._training is None else self._train()
        if held is not None and held.round >= body.round:
            return [
                ev.Say(f"the leader's head is round {body.round}, mine is {held.round}: waiting for it to catch up")
            ]
        if held is None or body.previous != held.head:
            if held is None or body.anchor_digest != held.digest or self._newest_ledger is None:
                return self._fetch(newest)
            # Only empty rounds lie between: the held state is the one that this commit starts from.
            self._commit, self._after = newest, self._newest_ledger
            return self._apply_or_verify()
        hash_ = hashes.body_hash(commit.body)
        # An epoch that the coordinator opened after the held state: its first commit is the coordinator's alone.
        books = held if body.epoch <= held.epoch else held.in_epoch(body.epoch, self._coordinator)
        fault = certificate_faults(newest.signed, hash_, commit.digest, commit.attempt, books, self._coordinator)
        try:
            after = self._folded(held, newest)
        except LedgerError as error:
            fault = fault or str(error)
        if fault:
            self._newest = None
            return [ev.Say(f"refused a commit of round {body.round}: {fault}")]
        self._commit, self._after = newest, after
        return self._apply_or_verify()

    def _folded(self, held: Ledger, heard: ev.CommitHeard) -> Ledger:
        """The books after a commit. Raises LedgerError."""
        folded = fold(held, heard.body)
        if folded.hash() != heard.body.ledger_hash:
            raise LedgerError("the books after it are not those that it names")
        return folded.at(heard.commit_hash, heard.commit.digest)

    def _fetch(self, heard: ev.CommitHeard) -> list[Effect]:
        self._commit = self._after = None
        self._fetching = ev.FetchState(heard.commit, heard.body)
        return [*self._drop_part(), self._fetching]

    def _apply_or_verify(self) -> list[Effect]:
        heard, after = self._commit, self._after
        if heard is None or after is None or self._applying:
            return []
        hash_ = hashes.body_hash(heard.commit.body)
        if self._candidate is None or self._candidate[0] != hash_:
            if self._verifying == hash_:
                return []
            self._verifying = hash_
            return [ev.Verify(heard.body, hash_, heard.commit.result_hashes, (), self._holders(heard))]
        if self._candidate[1] != heard.commit.digest:
            self._candidate = None
            told = f"my digest after round {heard.body.round} is not the commit's: fetching the state again"
            return [ev.Say(told), *self._fetch(heard)]
        self._applying = True
        return [*self._drop_part(), ev.Apply(heard.commit, heard.body, heard.commit_hash, after)]

    def _holders(self, heard: ev.CommitHeard) -> tuple[PeerId, ...]:
        """Who may hold a commit's results: its reducers, who signed that it holds them all, and who voted at all."""
        signers = [peer for peer, item in heard.signed if isinstance(item, Vote)]
        named = dict.fromkeys([*(entry.peer for entry in heard.body.reducers), *signers, *heard.body.voters])
        return tuple(peer for peer in named if peer not in (self._coordinator, self.me))

    def _applied(self, hash_: bytes, now: Instant) -> list[Effect]:
        heard, after = self._commit, self._after
        if heard is None or after is None or heard.commit_hash != hash_:
            return []
        self.ledger = after
        self._commit, self._after, self._applying = None, None, False
        mine = next((entry for entry in heard.body.members if entry.peer == self.me), None)
        effects: list[Effect] = []
        if mine is not None and mine.counted:
            self._accepted += 1
        elif mine is not None:
            self._rejected[mine.reason] = self._rejected.get(mine.reason, 0) + 1
            effects.append(ev.Say(f"round {heard.body.round} did not count this node: {mine.reason}"))
        elif heard.body.outcome is Outcome.COMMITTED and self._training is not None:
            reason = "not planned"
            self._rejected[reason] = self._rejected.get(reason, 0) + 1
        effects += self._said_empty(heard.body)
        effects += self._moved()
        if self._rounds is not None and self._accepted >= self._rounds:
            return [*effects, *self._leave(f"done: {self._accepted} rounds")]
        return [*effects, *self._follow(now)]

    def _said_empty(self, body: Body) -> list[Effect]:
        """That a round took nothing in is said to who trained for it; not again while the reason stays the same."""
        kind = body.reason.partition(" (")[0]  # without its particulars
        if body.outcome is not Outcome.EMPTY:
            self._empty_said = ""
        elif self._training is not None and kind != self._empty_said:
            self._empty_said = kind
            return [ev.Say(f"round {body.round} is empty: {body.reason}")]
        return []

    def _moved(self) -> list[Effect]:
        """The held state is another one: what concerned the round before is over, the next round begins."""
        self._training = self._proposed = None
        self._verifying = self._candidate = None
        self._combined = CombinedHere()
        if self.ledger is not None and self.ledger.round >= self._lost_round:
            self._voter.moved()
        return [*self._drop_part(), *self._begin_round()]

    def _fetched(self, ledger: Ledger, now: Instant) -> list[Effect]:
        self._fetching, self._n_refetches, self._fetch_problem = None, 0, ""
        self._commit, self._after, self._applying = None, None, False
        self.ledger = ledger
        return [*self._moved(), *self._follow(now)]

    def _fetch_failed(self, reason: str, now: Instant) -> list[Effect]:
        self._fetching = None
        pause_s = min(REFETCH_FIRST_S * 2.0 ** min(self._n_refetches, 10), REFETCH_MAX_S)
        self._n_refetches += 1
        self._fetch_problem = reason
        self._refetch_at = Instant(now + pause_s)
        return [ev.Say(f"could not fetch the state: {reason}; trying again in {pause_s:g} s")]
