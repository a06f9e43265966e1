"""How a member follows the chain of commits: towards the newest one that it knows of, one whole state at a time.

The outer state changes in one place only, `_applied`, after a commit that extends it; nothing else that happens to an
exchange can touch it.
"""

from __future__ import annotations

from coordinator.rounds import policy
from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger, LedgerError
from coordinator.rounds.voter import certificate_faults
from node.session import effects as fx
from node.session import events as ev
from node.session.catching_up import CatchingUp
from node.session.effects import Effect
from node.session.part import CombinedHere
from protos import hashes
from protos.messages import Body, Outcome, PeerId, Signed, Standing, Vote


class Chain(CatchingUp):
    """A member's moves along the chain."""

    def _line_up(self, event: ev.LineUp, now: Instant) -> list[Effect]:
        self._line, self._line_problem, self._line_changed_at = True, "", now
        # Whoever says it, followed or not: a lost record may be of that round, and to abstain too long is no harm.
        self._lost_round = max(self._lost_round, event.ledger.round + 1)
        leader = event.welcome.leader
        left: list[Effect] = self._signed(event.signed_head) if event.signed_head is not None else []
        if why := self._why_stay(event.ledger, leader, now):
            left += [] if leader in self._strayed else [fx.Say(why)]
            self._strayed.add(leader)
        else:
            self._strayed.discard(leader)
            self._newest = ev.CommitHeard(
                event.welcome.commit, event.body, event.ledger.head, event.signed, leader, event.orders
            )
            self._newest_ledger = event.ledger
        return [*left, *self._told_left(), *self._follow(now)]

    def _told_left(self) -> list[Effect]:
        """Who has left this round and is back says so to who leads now, or the round would wait for its vote."""
        said = self._voter.last_words(self.ledger) if self.ledger is not None else ()
        return [fx.TellLeader(Signed(self._sealer.seal(leave))) for leave in said]

    def _heard_commit(self, event: ev.CommitHeard, now: Instant) -> list[Effect]:
        known = self._newest.body.round if self._newest else -1
        held = self.ledger
        if event.leader in self._strayed and (held is None or event.body.previous != held.head):
            return []
        if self._succession.is_superseded(event.leader, now) and (held is None or event.body.previous != held.head):
            return []  # where the chain goes the coordinator says
        self._strayed.discard(event.leader)
        self._note_ahead(event)
        if event.body.round > known:
            self._newest, self._newest_ledger = event, None
        return self._follow(now)

    def _follow(self, now: Instant) -> list[Effect]:
        """Move towards the newest commit that is known: apply it if it extends the held state, else fetch."""
        newest = self._newest
        if newest is None or self._is_moving():
            return []
        commit, body = newest.commit, newest.body
        held = self.ledger
        if held is not None and held.head == newest.commit_hash:
            return self._begin_round() if self._training is None else self._train()
        if held is not None and held.round >= body.round:
            if self._newest_ledger is None or self._why_stay(self._newest_ledger, newest.leader, now):
                self._newest = None
                return []
            told = (
                f"another branch is followed from round {body.round} on: round {held.round} as it was held is orphaned"
            )
            return [fx.Say(told), *self._fetch(newest)]
        following = self._next_commit(held, newest) if held is not None else None
        if held is None or following is None:
            trusted = newest.leader == self._coordinator and self._newest_ledger is not None
            if held is None or body.anchor_digest != held.digest or not trusted:
                return self._approach(held, newest)
            # Only empty rounds lie between: the held state is the one that this commit starts from. No votes are
            # weighed, so that is for the coordinator to say.
            self._commit, self._after = newest, self._newest_ledger
            return self._apply_or_verify()
        commit, body = following.commit, following.body
        hash_ = hashes.body_hash(commit.body)
        # An epoch that the coordinator opened after the held state: its first commit is the coordinator's alone.
        books = held if body.epoch <= held.epoch else held.in_epoch(body.epoch, self._coordinator)
        fault = certificate_faults(following.signed, hash_, commit.digest, commit.attempt, books, self._coordinator)
        if not fault and self._goes_back(following):
            told = f"the run goes back, by order: fetching the state after round {body.round}"
            return [fx.Say(told), *self._fetch(newest)]
        try:
            after = self._folded(held, following)
        except LedgerError as error:
            fault = fault or str(error)
        if fault:
            again = following is not newest
            return [*self._refused_commit(following, fault), *(self._follow(now) if again else [])]
        self._commit, self._after = following, after
        return self._apply_or_verify()

    def _why_stay(self, other: Ledger, leader: PeerId, now: Instant) -> str:
        """Why a leader's head is not to be followed from the held state: it is behind, or the end of a smaller branch.

        What extends the held state has no fewer tokens and no lower epoch. Behind a head that the coordinator has
        signed nobody goes but with the coordinator, or by an order.
        """
        held = self.ledger
        if held is not None and other.head == held.head:
            return ""
        if self._succession.is_superseded(leader, now):
            return f"{leader[-6:]} leads from round {other.round}, but the coordinator can be heard: following that one"
        if held is None:
            return ""
        mine, theirs = policy.branch_key(held), policy.branch_key(other)
        if theirs[:3] == mine[:3] and other.round != held.round:
            larger = other.round > held.round
        else:
            larger = theirs > mine
        if not larger:
            return (
                f"{leader[-6:]} leads from round {other.round} of epoch {other.epoch}, mine is {held.round} of "
                f"{held.epoch}: waiting for it to catch up"
            )
        signed = self._signed_head
        behind = signed is not None and leader != self._coordinator and signed.round >= other.round
        if behind and signed is not None and signed.head != other.head and theirs[0] == mine[0]:
            return f"{leader[-6:]} leads from before round {signed.round}, which the coordinator has signed"
        return ""

    def _signed(self, event: ev.HeadSigned) -> list[Effect]:
        """Keep the coordinator's newest word on the chain, to start from and to pass on."""
        known = self._signed_head
        if known is not None and (known.epoch, known.round) >= (event.head.epoch, event.head.round):
            return []
        self._signed_head, self.signed_head = event.head, event.envelope
        return [fx.KeepHead(event.envelope)]

    def _apply_or_verify(self) -> list[Effect]:
        heard, after = self._commit, self._after
        if heard is None or after is None or self._applying:
            return []
        hash_ = hashes.body_hash(heard.commit.body)
        if self._candidate is None or self._candidate[0] != hash_:
            if self._verifying == hash_:
                return []
            self._verifying = hash_
            replay = self._proposed is None or self._proposed.body_hash != hash_
            return [fx.Verify(heard.body, hash_, heard.commit.result_hashes, (), self._holders(heard), replay=replay)]
        if self._candidate[1] != heard.commit.digest:
            self._candidate = None
            told = f"my digest after round {heard.body.round} is not the commit's: fetching the state again"
            return [fx.Say(told), *self._fetch(heard)]
        self._applying = True
        return [*self._drop_part(), fx.Apply(heard.commit, heard.body, heard.commit_hash, after)]

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
        self._caught_up_to(after)
        put_out = next((change for change in heard.body.standing if change.peer == self.me), None)
        if put_out is not None and put_out.standing is Standing.BANNED:  # said here too: the line may close without it
            why = f": {put_out.reason}" if put_out.reason else ""
            return [*self._moved(), fx.Stop(5, f"this peer has been evicted from the run{why}")]
        mine = next((entry for entry in heard.body.members if entry.peer == self.me), None)
        effects: list[Effect] = []
        if mine is not None and mine.counted:
            self._accepted += 1
        elif mine is not None:
            self._rejected.note(mine.reason)
            effects.append(fx.Say(f"round {heard.body.round} did not count this node: {mine.reason}"))
        elif heard.body.outcome is Outcome.COMMITTED and self._training is not None:
            self._rejected.note("not planned")
            if n := self._training.step:
                why = f" (paused by {', '.join(self._paused_by)})" if self._paused_by else ""
                text = f"round {heard.body.round} went on without this node{why}: its {n} steps are dropped"
                effects.append(fx.Say(text))
        effects += self._said_empty(heard.body)
        effects += self._learn_orders(heard.orders)
        effects += self._moved()
        if self._rounds is not None and self._accepted >= self._rounds:
            return [*effects, *self._leave(f"done: {self._accepted} rounds", now)]
        return [*effects, *self._follow(now)]

    def _said_empty(self, body: Body) -> list[Effect]:
        """That a round took nothing in is said to who trained for it; not again while the reason stays the same."""
        kind = body.reason.partition(" (")[0]  # without its particulars
        if body.outcome is not Outcome.EMPTY:
            self._empty_said = ""
        elif self._training is not None and kind != self._empty_said:
            self._empty_said = kind
            return [fx.Say(f"round {body.round} is empty: {body.reason}")]
        return []

    def _moved(self) -> list[Effect]:
        """The held state is another one: what concerned the round before is over, the next round begins."""
        self._before = self._training or self._before
        self._training = self._proposed = self._restoring = None
        self._verifying = self._candidate = None
        self._targets = {}
        self._combined = CombinedHere()
        if self.ledger is not None and self.ledger.round >= self._lost_round:
            self._voter.moved()
        begun = [] if self._behind() else self._begin_round()
        return [*self._drop_part(), *self._obey(), *([] if self._left else self._told_left()), *begun]

    def _fetched(self, ledger: Ledger, now: Instant) -> list[Effect]:
        self._fetching = self._commit = self._after = None
        self._applying = False
        self.ledger = ledger
        self._caught_up_to(ledger)
        return [*self._moved(), *self._follow(now)]

    def _commits_fetched(self, event: ev.CommitsFetched, now: Instant) -> list[Effect]:
        return [*self._took_commits(event), *self._follow(now)]

    def _commits_lacking(self, event: ev.CommitsFetchFailed, now: Instant) -> list[Effect]:
        return [*self._lacked_commits(event.reason, event.gone, now), *self._follow(now)]
