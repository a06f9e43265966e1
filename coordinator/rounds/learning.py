"""A leader that was away: it follows the chain that went on without it before it leads, and steps down when told."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.rounds.attempt import Phase
from coordinator.rounds.branches import books_after, is_larger, verified
from coordinator.rounds.events import (
    Branched,
    Committed,
    Effect,
    Ended,
    Instant,
    Learn,
    Learned,
    Orphaned,
    Say,
    Tell,
)
from coordinator.rounds.ledger import Ledger, LedgerError
from coordinator.rounds.members import named
from coordinator.rounds.phases import Phases
from coordinator.rounds.promising import SEEK_S
from coordinator.rounds.voter import Voter
from protos.messages import PeerId, Vote, Welcome

LEARN_AGAIN_S = 2.0
LEARN_MOST_S = 20.0
"""So long a leader waits for commits that a member has named before it goes on without: the member may lie."""
AWAITED_MOST = 3
"""Who has named commits so often, and nothing came of it, is asked for them but not waited for."""


class Learning(Phases):
    """The moves of a leader that finds the chain ahead of it, or on another branch."""

    def _train(self, now: Instant) -> list[Effect] | None:
        if self._stepping_down:
            self._ended = self._stepping_down
            self._enter(Phase.ENDED)
            return [Say(f"stops leading: {self._ended}"), Ended(self._ended)]
        if self._ahead and self._ahead_since is not None and now < self._ahead_since + LEARN_MOST_S:
            return self._wait(f"the commits after round {self.ledger.round}, which {named(self._ahead)} have")
        return super()._train(now)

    def _wakes(self, now: Instant) -> Iterator[Instant]:
        yield from super()._wakes(now)
        if self.phase is Phase.TRAIN:
            if self._ahead_since is not None:
                yield Instant(self._ahead_since + LEARN_MOST_S)
            if self._seeking_since is not None:
                yield Instant(self._seeking_since + SEEK_S)

    def _end(self, now: Instant) -> list[Effect] | None:
        return None if self._stepping_down else super()._end(now)

    def _welcome(self, records: tuple[bytes, ...], now: Instant) -> Welcome:
        """What a line begins with. On one that is open it says by the books which branch is followed here."""
        if not self._signed_head:
            self._sign_head(now, ())
        beat_s = self.spec.deadlines.heartbeat_s
        return Welcome(self.me, self.commit, self._ledger_bytes, records, 0.0, beat_s, self._signed_head)

    def _is_ahead(self, epoch: int, round_: int, tokens: int) -> bool:
        """Whether a member that holds the state after this round has commits that this leader lacks."""
        head = self._head_books()
        if epoch <= head.epoch and round_ <= head.round:
            return tokens > head.tokens  # another branch: what extends ours has no fewer tokens than its past
        return epoch >= head.epoch or tokens > head.tokens

    def _note_ahead(
        self, peer: PeerId, head: bytes, epoch: int, round_: int, tokens: int, now: Instant
    ) -> list[Effect]:
        """Ask a member for what it has and this leader lacks; again after a while as long as it says so."""
        if head == self.ledger.head or not head or not self._is_ahead(epoch, round_, tokens):
            self._ahead.pop(peer, None)
            if not self._ahead:
                self._ahead_since = None
            return []
        asked_at = self._ahead.get(peer)
        if asked_at is not None and now < asked_at + LEARN_AGAIN_S:
            return []
        self._ahead[peer] = now
        n_awaited = self._n_awaited.get(peer, 0)
        if self._ahead_since is None and self._awaited_heads.get(peer) != head and n_awaited < AWAITED_MOST:
            self._ahead_since, self._n_awaited[peer] = now, n_awaited + 1
        self._awaited_heads[peer] = head
        return [Learn(peer)]

    def _head_books(self) -> Ledger:
        """The books after the head as its own commit left them: without an epoch that was opened since."""
        if not self._epoch_opened:
            return self.ledger
        return Ledger.from_bytes(self._ledger_bytes).at(self.ledger.head, self.ledger.digest)

    def _learned(self, told: Learned, now: Instant) -> list[Effect]:
        books = self._head_books()
        if told.body.previous != books.head:
            return []  # known already, or of another branch
        try:
            after = books_after(books, told, self._coordinator)
        except LedgerError as error:
            return [Say(f"refused a commit that was told: {error}")]
        return [
            *self._follow(told, after, now),
            Say(f"round {told.body.round} was committed without this leader, by {told.body.leader[-6:]}'s attempt"),
        ]

    def _branched(self, event: Branched, now: Instant) -> list[Effect]:
        """Follow another branch, if it is the larger one as far as it holds."""
        chain = verified(event.fork, event.chain, self._coordinator)
        mine = self._head_books()
        if not chain or not is_larger(chain[-1][1], mine):
            return []
        n_lost = mine.round - event.fork.round
        told = (
            f"another branch has {chain[-1][1].tokens} tokens, this one {mine.tokens}: the {n_lost} rounds after round "
            f"{event.fork.round} are orphaned, and what they leased and credited is returned"
        )
        self.ledger, self.commit = event.fork, event.commit
        if self.me == self._coordinator:
            self._signed_head, self._epoch_known_at = b"", now  # its last one is of the branch that is given up
        effects: list[Effect] = [Say(told), Orphaned(event.fork)]
        for step, after in chain:
            effects += self._follow(step, after, now)
        # Commits alone lead nobody away from the branch that was given up: that takes the books of this one.
        astray = tuple(member.peer for member in self.members if member.connected and member.head != self.ledger.head)
        if astray:
            effects.append(Tell(astray, self._welcome((), now)))
        return [*effects, *self._give_again()]

    def _follow(self, told: Learned, after: Ledger, now: Instant) -> list[Effect]:
        """Take over a commit that holds. Where this leader had a hand in it and does not know of it, it has lost its
        memory of that time: it abstains until the next commit, and uses no number without promises."""
        forgot = any(
            peer == self.me or (isinstance(item, Vote) and item.leader == self.me) for peer, item in told.signed
        )
        self.commit, self.ledger = told.commit, after
        self._n_awaited.clear()
        self._learn_orders(told.orders)
        if told.target is not None:
            self._targets[told.target.head] = told.target
        counted = [entry.peer for entry in told.body.members if entry.counted]
        self._seating.round_over(told.body.round, {}, counted)
        self._begin_round(now)
        self._next_number = max(self._next_number, 1)
        if forgot and self._voter is not None:
            self._voter = Voter(self.me, self._voter.record, lost=True, signed=self._voter.signed)
        here = self._members_here()
        for member in self.members:
            if member.connected:
                member.told_head_at = now
        committed = Committed(told.commit, told.body, told.commit_hash, (), told.orders, told.target)
        return [committed, Tell(here, told.commit), *self._put_out(told.body, now)]
