"""The leader's state in the round after its head: its members, its attempt, and what stands in their way."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from coordinator.rounds import policy, work
from coordinator.rounds.attempt import Attempt, Phase
from coordinator.rounds.events import Effect, Instant, Sealer, Tell
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.members import Members
from coordinator.rounds.roll import Roll
from coordinator.rounds.seating import Seating
from coordinator.rounds.voter import ATTEMPTS_MAX, Voter
from protos.messages import AttemptFailed, Body, Commit, Leave, PeerId, Proposal, Records, Seat
from protos.orders import OpenedOrder
from protos.runspec import RunSpec

RELAY_EVERY_S = 1.0
"""Address records of newcomers are passed on together: each by itself to everyone would be a storm."""
LEAVES_BYTES = 4 * 2**20
"""What the LEAVE envelopes of a certificate may take together: beside them its body, and the books and records of a
Welcome, must fit a message."""
NUMBERS_KEPT = 2048
"""Rounds of which used numbers are remembered, and the newest epoch's: half as many when there are more."""
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
        numbers: the highest number that it has used in each (epoch, round), for rounds that it may come to again.
        voter: this leader's own voter, with its record from the journal; None for a stand-in, whose vote its
            own session gives over a line, like any other's.
        voter_body: the opened body of that record's proposal, if it has one.
        voter_orders: the opened orders of that body.
        specs: further revisions of the RunSpec that are known; `spec` is the one in force.
        targets: books that a rollback might go back to, as far as they are known, by their heads.
        epoch: an epoch that this leader has opened after the head, from its journal; the head's own if it opened none.
        head_since: when the head came to this process, if that was before now.
        relay: whether members' address records are passed on to the others.
        signed_head: the newest head that the coordinator has signed, as it is passed on; the coordinator signs its own.
        fresh_epoch: by how much the number of an epoch that it opens is above all others, drawn at its start, so that
            it is none of a time which this leader doesn't remember; 0: nothing was drawn, and the next number is taken.
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
        numbers: Mapping[tuple[int, int], int] | None = None,
        voter: Voter | None,
        voter_body: Body | None = None,
        voter_orders: tuple[OpenedOrder, ...] = (),
        specs: Mapping[int, RunSpec] | None = None,
        targets: Mapping[bytes, Ledger] | None = None,
        epoch: int = 0,
        head_since: Instant | None = None,
        relay: bool = True,
        signed_head: bytes = b"",
        fresh_epoch: int = 0,
    ) -> None:
        self.me, self.spec, self.ledger, self.commit = me, spec, ledger, commit
        self._sealer, self._coordinator, self._relay = sealer, coordinator, relay
        self._voter = voter
        self.members = Members(spec.deadlines, now)
        self.phase = Phase.TRAIN
        self._ledger_bytes = ledger.to_bytes()
        self._epoch_opened = epoch > ledger.epoch  # an epoch after the head's, by this leader
        if self._epoch_opened:
            self.ledger = ledger.in_epoch(epoch, coordinator)
        self._quorum_lost_at: Instant | None = None
        self._abstaining: set[PeerId] = (
            set()
        )  # voters that have said on their line that they sign nothing in this round
        self._abstained: set[PeerId] = set()  # and those who said so on an earlier one, and have signed nothing since
        self._seats: dict[PeerId, Seat] = {seat.peer: seat for seat in ledger.seats}
        self._attempt: Attempt | None = None
        self._first_number = 0 if me == coordinator else 1  # number 0 is the coordinator's, who needs no promises
        self._next_number = max(opened + 1, self._first_number)
        self._head_since = now if head_since is None else head_since
        self._n_outbid: dict[PeerId, int] = {}  # attempts of this round that each has ended by naming a higher number
        self._n_untrue: dict[PeerId, int] = {}  # how often each has refused a number above the one that it had named
        self._named: dict[PeerId, int] = {}  # the highest number that each voter has named in this round
        self._used = dict(numbers or {})  # numbers by epoch and round: none may be used again, whatever came between
        self._round_began_at = now
        self._retry_at = now
        self._probed_at = Instant(-math.inf)  # when those who can't be reached were tried again
        self._n_retries = 0
        self._failed: list[AttemptFailed] = []
        self._left: dict[PeerId, tuple[Leave, bytes]] = {}
        self._weightless: set[PeerId] = set()  # those of them whose LEAVE takes no weight out of a quorum
        self._leaving: dict[PeerId, tuple[Leave, bytes]] = {}  # who will not be there in the next round
        self._bodies: dict[bytes, Body] = {}  # opened bodies of this round's proposals, by their bytes
        self._body_orders: dict[bytes, tuple[OpenedOrder, ...]] = {}  # and their orders
        self._unhad: set[bytes] = set()  # those whose results could not be had, or which too many won't have
        self._proposed_here: set[bytes] = set()  # those that this leader has proposed, by their bytes
        self._judged: dict[tuple[type, int, int, Proposal | None], str] = {}  # what is wrong with the last few reports
        self._told_of: set[PeerId] = set()  # who has reported a proposal in this round that nobody can have signed
        self.specs: dict[int, RunSpec] = {spec.revision: spec, **(specs or {})}
        self._pending: list[OpenedOrder] = []  # orders that no commit carries yet, by their numbers
        self._given: dict[int, OpenedOrder] = {}  # all that the operator has given here and that could be obeyed
        self._unsound: list[tuple[OpenedOrder, str]] = []  # orders that can't be obeyed any more, and have to be said
        self._targets: dict[bytes, Ledger] = dict(targets or {})  # books to go back to, by their heads
        self._was_paused = ledger.paused
        if voter is not None and voter.record is not None:
            self._know(voter.record.proposal, voter_body, voter_orders)
        self._signed_head, self._fresh_epoch = signed_head, fresh_epoch
        self._epoch_known_at = now  # since when this process knows the head's epoch
        self._stepping_down = ""  # why this stand-in ends after the attempt
        self._ahead: dict[PeerId, Instant] = {}  # who has named commits that are not here, and when it was asked last
        self._ahead_since: Instant | None = None
        self._awaited_heads: dict[PeerId, bytes] = {}  # what each of them named: it is waited for once
        self._n_awaited: dict[PeerId, int] = {}  # how often each was waited for since something was learned
        self._seeking_since: Instant | None = None
        self._sought = False  # whether everybody known was asked for newer commits since the quorum was lost
        self._digests: dict[bytes, bytes] = {}
        self._out_senders: set[PeerId] = set()
        self._out_reducers: set[PeerId] = set()
        self._observer_alone = False  # whether no member could be reached to reduce, in the last plan
        self._unable: set[PeerId] = set()  # reducers that can't combine what they have been sent
        self._news: dict[PeerId, bytes] = {}  # address records that the others have not been told of
        self._relay_at = now
        self._wakes_at: Instant | None = None  # the last answer of next_wake
        self._awaited: PeerId | None = None
        self._cut_at = Instant(math.inf)  # when training ends without waiting for the slowest, as reckoned last
        self._reckoned_at: Instant | None = None
        self._announced = False  # whether anybody has announced anything since
        self._cut = False  # training has ended so in this round
        self._uncommitted: set[PeerId] = set()  # planned senders that were here and gave no commitment in time
        self._seating = Seating()
        self._seats_told_in: tuple[int, int] | None = None
        self._n_empty = 0  # rounds in a row that were empty
        self._why_not: dict[PeerId, str] = {}  # why who holds the state has no seat in this round
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
        if len(self._used) > NUMBERS_KEPT:
            newest, since = max(self._used), self.ledger.round - NUMBERS_KEPT // 2
            self._used = {key: number for key, number in self._used.items() if key[1] > since or key == newest}
        self._attempt, self._next_number, self._n_retries = None, self._unused_number(), 0
        self._round_began_at = self._retry_at = self._head_since = now
        here = (self.ledger.epoch, self.ledger.round + 1)
        leaving, self._leaving = self._leaving, {}
        self._left = {peer: kept for peer, kept in leaving.items() if (kept[0].epoch, kept[0].round) == here}
        self._weightless = set()
        self._failed, self._digests, self._bodies, self._body_orders = [], {}, {}, {}
        self._unhad, self._n_outbid, self._n_untrue, self._named = set(), {}, {}, {}
        self._proposed_here, self._told_of, self._judged = set(), set(), {}
        self._out_senders, self._out_reducers, self._unable = set(), set(), set()
        self._awaited = self._quorum_lost_at = None
        self._abstaining, self._abstained = set(), set()
        self._cut_at, self._reckoned_at, self._announced, self._cut = Instant(math.inf), None, False, False
        self._uncommitted = set()
        self._sought, self._seeking_since, self._epoch_opened = False, None, False
        self._ahead, self._ahead_since = {}, None
        if self._voter is not None:
            self._voter.moved()
        self.members.next_round(now)
        for peer in [peer for peer in self._awaited_heads if self.members.get(peer) is None]:
            del self._awaited_heads[peer]
            self._n_awaited.pop(peer, None)
        self._obey()
        self._enter(Phase.TRAIN)

    def _obey(self) -> None:
        """What the new head's books say of orders holds from now on."""

    # -- the members -------------------------------------------------------------------------------------------

    def _roll(self, now: Instant) -> Roll:
        enough, began_at = work.steps_min(self.spec), self._round_began_at
        return Roll(self.members, self.ledger, self._seats, self._left, self._out_senders, enough, began_at, now)

    def _lacking_voters(self, now: Instant, *, empty: bool) -> list[PeerId]:
        """The voters that are missing for a quorum; none when enough are here and can vote.

        `empty`: on a round without contributions, for which this leader's own vote needs nobody's digest.
        """
        return self._lacking_without(self._abstaining, now, empty=empty)

    def _lacking_without(self, unable: Collection[PeerId], now: Instant, *, empty: bool) -> list[PeerId]:
        """`_lacking_voters`, where these can't vote."""
        roll, out = self._roll(now), self._left_for(None)
        lacking = roll.lacking_voters(None, self._coordinator, unable, out)
        if lacking and self._voter is not None and not self._voter.abstains and (empty or self._can_vote(now)):
            return roll.lacking_voters(self.me, self._coordinator, unable, out)
        return lacking

    def _can_vote(self, now: Instant) -> bool:
        """Whether this leader's own vote on contributions may come: an observer is there to compute the digest."""
        return any(member.observer and self.members.expected(member.peer, now) for member in self.members)

    def _train_ends_at(self) -> Instant:
        return Instant(self._round_began_at + self.spec.deadlines.train_limit_s)

    def _choose_seats(self, now: Instant, counted: Collection[PeerId]) -> work.Works:
        """Whom this leader would seat in the next round, and for what.

        `counted` are those whom this one counts; it is empty if there are none.
        """
        holders = [member for member in self._roll(now).holders() if member.peer not in self._left]
        failures = self._failures(now, counted)
        choice = self._seating.choose(holders, self.ledger, failures, self.spec, now, empty=not counted)
        self._why_not = choice.why_not
        return choice.works

    def _failures(self, now: Instant, counted: Collection[PeerId]) -> dict[PeerId, str]:
        """Who of the seated has failed in this round and how; who merely was slow has not."""
        found: dict[PeerId, str] = {}
        for peer in self._seats:
            member = self.members.get(peer)
            if peer in self._left:
                continue
            if peer in self._out_senders and peer not in counted:
                found[peer] = "its contribution could not be had"
            elif peer in self._out_reducers - self._unable:
                found[peer] = "its results could not be had, or are not what its rows give"
            elif peer in self._uncommitted and peer not in counted:
                found[peer] = "it gave no commitment in time"
            elif counted and peer not in counted and member is not None and member.n_gone:
                found[peer] = "its line was lost in the middle of the round"
            elif counted and peer not in counted and member is not None and not self.members.fresh(peer, now):
                found[peer] = "it was not heard of any more"
        return found

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

    def _left_for(self, attempt: Attempt | None) -> set[PeerId]:
        """Whose LEAVE takes weight out of an attempt's quorum: not if its sender promised not to heed the attempt.

        Each stands in the commit's certificate, and may carry a proposal: the shortest ones count, as far as there is
        room. Who else has left is merely absent, which is always safe. None: of an attempt that is still to come.
        """
        found: set[PeerId] = set()
        n_bytes = 0
        leaves = [(len(raw), peer, leave) for peer, (leave, raw) in self._left.items() if peer in self.ledger.voters]
        for length, peer, leave in sorted(leaves, key=lambda each: each[:2]):
            if peer in self._weightless or (attempt is not None and not policy.heeds(leave, attempt.number, self.me)):
                continue
            n_bytes += length
            if n_bytes > LEAVES_BYTES:
                break
            found.add(peer)
        return found

    def _unused_number(self) -> int:
        """The first number of the round after the head that this leader has never used."""
        return max(self._first_number, self._used.get((self.ledger.epoch, self.ledger.round + 1), -1) + 1)

    def _pass_number(self, number: int, most: int) -> None:
        """A voter is bound to this number: the next attempt must pass it, as far as it is believed."""
        if number < ATTEMPTS_MAX:
            self._next_number = max(self._next_number, min(number + 1, most))

    def _believed(self, now: Instant) -> int:
        """Up to which number one voter is believed, who may lie: no further than every voter follows."""
        return policy.numbers_most(now - self._head_since)

    # -- small things -----------------------------------------------------------------------------------------

    def _relay_news(self, now: Instant) -> list[Effect]:
        """Pass on the address records that have come since the last time."""
        if not self._news:
            return []
        records, self._news = tuple(self._news.values()), {}
        self._relay_at = Instant(now + RELAY_EVERY_S)
        return [Tell(self._members_here(), Records(records))]

    def _know(self, proposal: Proposal | None, body: Body | None, orders: tuple[OpenedOrder, ...] = ()) -> None:
        if proposal is None:
            return
        if body is None:
            raise InvariantBroken("a proposal came without its opened body")
        self._bodies[proposal.body], self._body_orders[proposal.body] = body, orders

    def _is_mine(self, voter: PeerId) -> bool:
        """Whether this leader gives a voter's vote itself; a stand-in's comes over a line, like any other's."""
        return voter == self.me and self._voter is not None

    def _running(self) -> Attempt:
        if self._attempt is None:
            raise InvariantBroken(f"phase {self.phase} without an attempt")
        return self._attempt
