"""How long a stand-in's turn lasts: as long as a round may take it, and no longer for all that it says.

Each member judges by its own clock. Nobody's promise or vote depends on it, only whom they are given to.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.rounds import policy
from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.voting import LEADER_SLACK
from protos.messages import PeerId
from protos.runspec import DeadlineSpec

TRIES = 2.0
"""A turn lasts for so many attempts that take all the time that they may, from the first one on."""
FRUITLESS_MOST = 4
"""So many rounds in a row that count nobody end a turn, though they are commits."""


@dataclass(slots=True)
class Turn:
    """One stand-in's turn."""

    since: Instant
    attempt_at: Instant | None = None  # when its first attempt under the present head was heard of
    n_fruitless: int = 0


class Turns:
    """The turns of those who stand in, since the run's tokens have grown last.

    Silence does not end a turn: else who falls silent now and then would hold the others off for ever.
    """

    def __init__(self, deadlines: DeadlineSpec, now: Instant) -> None:
        self._deadlines = deadlines
        self._turns: dict[PeerId, Turn] = {}
        self._head, self._tokens = b"", -1
        self.head_at = self.head_since = now
        self._ready_at: Instant | None = None  # when this member had made all its steps

    def amend(self, deadlines: DeadlineSpec) -> None:
        """Other deadlines are in force, for turns that have begun too."""
        self._deadlines = deadlines

    def attempted(self, leader: PeerId, now: Instant) -> None:
        """A word of an attempt of a stand-in's has come: training is over for it."""
        turn = self._turns.setdefault(leader, Turn(now))
        if turn.attempt_at is None:
            turn.attempt_at = now

    def watch(self, holder: PeerId | None, ledger: Ledger, ready: bool, now: Instant) -> None:
        """Whose turn it is, at which head, and whether this member has made all its steps."""
        if ledger.head != self._head:
            if ledger.tokens != self._tokens:
                self._turns.clear()
            elif holder is not None and (turn := self._turns.get(holder)) is not None:
                turn.n_fruitless += 1
            for turn in self._turns.values():
                turn.since, turn.attempt_at = now, None
            self._head, self._tokens, self._ready_at = ledger.head, ledger.tokens, None
            self.head_at = self.head_since = now
        if ready and self._ready_at is None:
            self._ready_at = now
        if holder is not None and holder not in self._turns:
            self._turns[holder] = Turn(now)

    def bound_to(self, number: int, now: Instant) -> None:
        """This member has promised a number: so it has had the head for as long as stand-ins need to get there, though
        it may have restarted since. Else all who are bound to it would refuse what passes it, for as long again."""
        needed_s = (number / 2 - policy.NUMBERS_AT_ONCE) / policy.NUMBERS_PER_S
        self.head_since = min(self.head_since, Instant(now - max(0.0, needed_s)))

    def over(self, holder: PeerId) -> None:
        """Its next turn is a new one."""
        self._turns.pop(holder, None)

    def ends_at(self, holder: PeerId, ledger: Ledger) -> Instant | None:
        """When its turn is over unless tokens are committed before; None: it is not, while the run stands still.

        Before its first attempt it is given as long again as this member took to train, since a round's training ends
        soon after its median member has: where a majority of voters see it late by that, it is. Who still trains
        itself waits for as long as training may last, and so does everyone where nothing else ends it.
        """
        turn = self._turns.get(holder)
        if turn is None or ledger.paused:
            return None
        if turn.n_fruitless >= FRUITLESS_MOST:
            return turn.since
        limits = self._deadlines
        grace_s = limits.stand_in_s + 2 * limits.heartbeat_timeout_s  # members find it, and those who are gone are seen
        if turn.attempt_at is not None:
            attempt_s = LEADER_SLACK * (limits.commitment_s + limits.exchange_s + 2 * limits.vote_s)
            return Instant(turn.attempt_at + TRIES * attempt_s + grace_s)
        trained_at = turn.since + limits.train_limit_s  # as its leader reckons, which may have come late in the round
        if self._ready_at is not None and limits.deadline_k > 0:
            trained_at = min(trained_at, 2 * self._ready_at - self.head_at)
        return Instant(max(turn.since, trained_at) + grace_s)
