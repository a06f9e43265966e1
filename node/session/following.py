"""The held state of a member: how it follows the chain of commits, trains on its seat, and leaves.

The outer state changes in one place only, `_applied`, after a commit that extends it; nothing else that happens to an
exchange can touch it.
"""

from __future__ import annotations

from coordinator.rounds import policy
from coordinator.rounds.events import Instant, Sealer
from coordinator.rounds.ledger import Ledger, LedgerError, fold
from coordinator.rounds.voter import Voter, certificate_faults
from node.session import events as ev
from node.session.events import Effect
from node.session.part import CombinedHere, Part, Training
from protos import hashes
from protos.messages import Body, Leave, Outcome, PeerId, Signed, Vote
from protos.runspec import RunSpec

MOMENTS_LAST_ROUNDS = 8
"""Inner moments older than this many rounds are started again: they belong to another place."""
REFETCH_FIRST_S = 1.0
REFETCH_MAX_S = 30.0


class Following:
    """What a member keeps of the run, and how it moves along the chain.

    Args:
        me: this member.
        spec: the run's RunSpec.
        sealer: encodes and signs with this member's key.
        coordinator: the coordinator's peer id.
        voter: this member's voter, with its record from disk.
        ledger: the books after the state on disk, or None if there is none.
        now: the present.
        observer: follow only.
        rounds: leave after so many rounds that counted this member; None: stay.
    """

    def __init__(
        self,
        me: PeerId,
        spec: RunSpec,
        sealer: Sealer,
        *,
        coordinator: PeerId,
        voter: Voter,
        ledger: Ledger | None,
        now: Instant,
        observer: bool = False,
        rounds: int | None = None,
    ) -> None:
        self.me, self.spec, self._sealer, self._coordinator = me, spec, sealer, coordinator
        self._voter, self.ledger, self._observer, self._rounds = voter, ledger, observer, rounds
        self._line = False
        self._line_changed_at = now
        self._line_problem = "not connected yet"
        self._trainer_up = False
        self._trained_round: int | None = None
        self._training: Training | None = None
        self._part: Part | None = None
        self._proposed: ev.Proposed | None = None
        self._verifying: bytes | None = None  # hash of the body
        self._candidate: tuple[bytes, bytes] | None = None  # body hash and digest of what was verified last
        self._combined = CombinedHere()
        self._commit: ev.CommitHeard | None = None  # extends the held state, not yet applied
        self._after: Ledger | None = None  # the books after that commit
        self._applying = False
        self._fetching: ev.FetchState | None = None
        self._refetch_at: Instant | None = None
        self._n_refetches = 0
        self._fetch_problem = ""  # why the state could not be fetched the last time
        self._newest: ev.CommitHeard | None = None
        self._newest_ledger: Ledger | None = None  # the books after it, where the leader has sent them
        self._lost_round = 0
        self._left = False
        self._paused_by: dict[str, None] = {}
        self._accepted = 0
        self._rejected: dict[str, int] = {}
        self._empty_said = ""

    # -- the line and the chain -------------------------------------------------------------------------------

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

    def _drop_part(self) -> list[Effect]:
        part, self._part = self._part, None
        return [ev.EndExchange(part.planned.plan_hash)] if part is not None and part.exchange is not None else []

    # -- training ---------------------------------------------------------------------------------------------

    def _begin_round(self) -> list[Effect]:
        """The held state is the head's: take the seat, if there is one."""
        ledger = self.ledger
        if ledger is None or self._observer or self._left or self._voter.has_left(ledger):
            return []
        seat = ledger.seat_of(self.me)
        round_ = ledger.round + 1
        if seat is None or policy.has_ended(ledger, self.spec):
            return []
        self._training = Training(round_)
        return [ev.FetchData(round_, seat.ranges), *self._train()]

    def _train(self) -> list[Effect]:
        """What the trainer can do next: load the anchor, then train on the seat once its data are here."""
        training, ledger = self._training, self.ledger
        if training is None or ledger is None or not self._trainer_up or training.encoded or training.encoding:
            return []
        effects: list[Effect] = []
        if not training.loaded:
            training.loaded = True
            last = self._trained_round
            fresh = last is not None and training.round - last > MOMENTS_LAST_ROUNDS
            self._trained_round = training.round
            effects.append(ev.LoadAnchor(training.round, ledger.nominal_step, fresh))
        seat = ledger.seat_of(self.me)
        if training.data_ready and not training.started and seat is not None and not self._paused_by:
            training.started = True
            effects.append(ev.StartTraining(training.round, seat.ranges, self.spec.work.h))
        return effects

    def _trainer_came(self) -> list[Effect]:
        self._trainer_up, self._trained_round = True, None
        if self._training:
            self._training.lost()
        return self._train()

    def _trainer_went(self, reason: str) -> list[Effect]:
        self._trainer_up = False
        if self._training:
            self._training.lost()
        return [ev.Say(f"the trainer stopped: {reason}")]

    def _progressed(self, event: ev.Progressed) -> list[Effect]:
        training = self._training
        if training is not None and training.round == event.round and training.started and not training.encoded:
            training.step, training.tokens = event.step, event.tokens
            training.inner_loss, training.tokens_per_s = event.inner_loss, event.tokens_per_s
            training.time_left_s = event.time_left_s
        return []

    def _pause(self, who: str, paused: bool) -> list[Effect]:
        before = bool(self._paused_by)
        if paused:
            self._paused_by[who] = None
        else:
            self._paused_by.pop(who, None)
        if bool(self._paused_by) == before:
            return []
        return [ev.PauseTraining(bool(self._paused_by)), *self._train()]

    # -- leaving ----------------------------------------------------------------------------------------------

    def _leave(self, reason: str) -> list[Effect]:
        """Say so as a last promise in the round after the newest commit that extends the held state, and stop."""
        if self._left:
            return []
        self._left = True
        effects: list[Effect] = self._drop_part()
        ledger = self._after or self.ledger
        leave = self._voter.leave(ledger) if ledger is not None and not self._observer else None
        if leave is not None:
            effects += [ev.Persist(leave), ev.TellLeader(Signed(self._sealer.seal(leave)))]
        return [*effects, ev.Stop(0, reason)]
