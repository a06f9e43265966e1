"""The leader's state in the round after its head: its members, its attempt, and what stands in their way."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.rounds import policy
from coordinator.rounds.attempt import Attempt, Phase
from coordinator.rounds.events import Effect, Instant, Sealer, Tell
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.members import Members
from coordinator.rounds.roll import Roll
from coordinator.rounds.voter import Voter
from protos.messages import AttemptFailed, Body, Commit, Leave, PeerId, Proposal, Records, Seat
from protos.runspec import RunSpec

RELAY_EVERY_S = 1.0
"""Address records of newcomers are passed on together: each by itself to everyone would be a storm."""
FAILED_KEPT = 100
"""Failed attempts of a round that its commit tells of: the last ones."""


class InvariantBroken(AssertionError):
    """A fault of ours: the machine is in a state that can't be."""


class RoundState:
    """What a leader keeps for the round after its head.

    Args:
        me: this leader's peer id; the coordinator's, or a stand-in's.
        spec: the run's RunSpec.
        ledger: the folded ledger at the head, with head and digest.
        commit: the head's commit.
        sealer: encodes and signs with this leader's key.
        now: the present.
        coordinator: the coordinator's peer id.
        opened: the highest attempt number that this leader has used in the round after the head, from its journal.
        voter: this leader's own voter, with its record from the journal.
        voter_body: the opened body of that record's proposal, if it has one.
        epoch: an epoch that this leader has opened after the head, from its journal; the head's own if it opened none.
        relay: whether members' address records are passed on to the others.
    """

    def __init__(
        self,
        me: PeerId,
        spec: RunSpec,
        ledger: Ledger,
        commit: Commit,
        sealer: Sealer,
        *,
        now: Instant,
        coordinator: PeerId,
        opened: int = -1,
        voter: Voter,
        voter_body: Body | None = None,
        epoch: int = 0,
        relay: bool = True,
    ) -> None:
        self.me, self.spec, self.ledger, self.commit = me, spec, ledger, commit
        self._sealer, self._coordinator, self._relay = sealer, coordinator, relay
        self._voter = voter
        self.members = Members(spec.deadlines, now)
        self.phase = Phase.TRAIN
        self._ledger_bytes = ledger.to_bytes()
        if epoch > ledger.epoch:
            self.ledger = ledger.in_epoch(epoch, coordinator)
        self._quorum_lost_at: Instant | None = None
        self._seats: dict[PeerId, Seat] = {seat.peer: seat for seat in ledger.seats}
        self._attempt: Attempt | None = None
        self._first_number = 0 if me == coordinator else 1  # number 0 is the coordinator's, who needs no promises
        self._next_number = max(opened + 1, self._first_number)
        self._round_began_at = now
        self._retry_at = now
        self._n_retries = 0
        self._failed: list[AttemptFailed] = []
        self._left: dict[PeerId, tuple[Leave, bytes]] = {}
        self._bodies: dict[bytes, Body] = {}  # opened bodies of this round's proposals, by their bytes
        if voter.record is not None:
            self._know(voter.record.proposal, voter_body)
        self._digests: dict[bytes, bytes] = {}
        self._out_senders: set[PeerId] = set()
        self._out_reducers: set[PeerId] = set()
        self._unable: set[PeerId] = set()  # reducers that can't combine what they have been sent
        self._news: dict[PeerId, bytes] = {}  # address records that the others have not been told of
        self._relay_at = now
        self._wakes_at: Instant | None = None  # the last answer of next_wake
        self._paused = False
        self._awaited: PeerId | None = None
        self._waiting: Callable[[Instant], str] = lambda _: ""
        self._ended = ""

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._waiting = lambda _: ""

    def _wait(self, for_what: str) -> list[Effect] | None:
        self._waiting = lambda _: for_what
        return None

    def _begin_round(self, now: Instant) -> None:
        """The head is another one: what concerned the round before is over."""
        self._ledger_bytes = self.ledger.to_bytes()
        self._seats = {seat.peer: seat for seat in self.ledger.seats}
        self._attempt, self._next_number, self._n_retries = None, self._first_number, 0
        self._round_began_at = self._retry_at = now
        self._failed, self._left, self._digests, self._bodies = [], {}, {}, {}
        self._out_senders, self._out_reducers, self._unable = set(), set(), set()
        self._awaited = self._quorum_lost_at = None
        self._voter.moved()
        self.members.next_round(now)
        self._enter(Phase.TRAIN)

    # -- the members -------------------------------------------------------------------------------------------

    def _roll(self, now: Instant) -> Roll:
        return Roll(self.members, self.ledger, self._seats, self._left, self._out_senders, self.spec.work.h, now)

    def _train_ends_at(self) -> Instant:
        return Instant(self._round_began_at + self.spec.deadlines.train_limit_s)

    def _members_here(self) -> tuple[PeerId, ...]:
        return tuple(member.peer for member in self.members if member.connected)

    def _voters_here(self) -> tuple[PeerId, ...]:
        return tuple(m.peer for m in self.members if m.connected and m.peer in self.ledger.voters)

    def _is_lost(self, attempt: Attempt, peer: PeerId, now: Instant) -> bool:
        """Whether a planned member can't do its part any more."""
        gone = peer in self._left or peer in attempt.declined or not self.members.expected(peer, now)
        return gone or self._lost_progress(attempt, peer)

    def _lost_progress(self, attempt: Attempt, peer: PeerId) -> bool:
        """Whether a planned sender has lost what it trained since it was planned."""
        member = self.members.get(peer)
        return member is not None and member.n_lost > attempt.losses.get(peer, member.n_lost)

    # -- numbers and leaves ------------------------------------------------------------------------------------

    def _left_for(self, attempt: Attempt) -> set[PeerId]:
        """Whose LEAVE takes weight out of an attempt's quorum: not if its sender promised not to heed the attempt."""
        return {peer for peer, (leave, _) in self._left.items() if policy.heeds(leave, attempt.number, self.me)}

    def _pass_number(self, number: int) -> None:
        """A voter is bound to this number: the next attempt must pass it. One far from the last is not believed."""
        if number < self._next_number + 10**6:
            self._next_number = max(self._next_number, number + 1)

    # -- small things -----------------------------------------------------------------------------------------

    def _relay_news(self, now: Instant) -> list[Effect]:
        """Pass on the address records that have come since the last time."""
        if not self._news:
            return []
        records, self._news = tuple(self._news.values()), {}
        self._relay_at = Instant(now + RELAY_EVERY_S)
        return [Tell(self._members_here(), Records(records))]

    def _know(self, proposal: Proposal | None, body: Body | None) -> None:
        if proposal is None:
            return
        if body is None:
            raise InvariantBroken("a proposal came without its opened body")
        self._bodies[proposal.body] = body

    def _running(self) -> Attempt:
        if self._attempt is None:
            raise InvariantBroken(f"phase {self.phase} without an attempt")
        return self._attempt
