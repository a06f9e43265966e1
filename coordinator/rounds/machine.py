"""The leader's rounds: who trains, until when, and what counts.

Mutated only by `handle`; owns no clock, socket or source of chance. `Phases` moves on after every event as long as
there is something to do.
"""

from __future__ import annotations

from typing import assert_never

from coordinator.rounds import policy, work
from coordinator.rounds.attempt import Attempt, Phase
from coordinator.rounds.events import (
    Branched,
    Connected,
    DigestKnown,
    Disconnected,
    Effect,
    Event,
    Heard,
    Instant,
    Learned,
    Ordered,
    Probe,
    Reached,
    RecordChanged,
    Say,
    Sought,
    StepDown,
    Tell,
    View,
    Woke,
)
from coordinator.rounds.learning import Learning
from coordinator.rounds.members import Member
from coordinator.rounds.state import InvariantBroken
from coordinator.rounds.voter import ABSTAINS
from protos.messages import (
    Commitment,
    Heartbeat,
    Inquiry,
    Leave,
    MemberState,
    Missing,
    PeerId,
    Prepare,
    Promise,
    Refusal,
    Results,
    Signed,
    Vote,
)

OUTBID_MOST = 3
"""So many attempts of a round end because a member names a higher number. Who goes on with that is left out instead."""

JOINS_TIMES = 4
"""So many times as long is a member that joins left alone before it is told the books again."""


class Rounds(Learning):
    """Leads one round after the other: takes in events, says what should happen and when it wants to be woken."""

    # -- the three ways in ------------------------------------------------------------------------------------

    def handle(self, event: Event, now: Instant) -> list[Effect]:
        """Take in an event; what should happen, in order."""
        effects: list[Effect] = []
        match event:
            case Connected():
                effects += self._connected(event, now)
            case Disconnected(peer, reason):
                if member := self.members.disconnected(peer, now):
                    member.story.append(f"line lost: {reason}")
            case Reached(peer, reachable):
                if member := self.members.get(peer):
                    member.reachable = reachable
                    member.story.append("can be reached" if reachable else "cannot be reached: dials out only")
            case RecordChanged():
                effects += self._record_changed(event)
            case Heard(peer, Heartbeat() as heartbeat):
                told = self._heartbeat(peer, heartbeat, now)
                if told is None and (self._wakes_at is None or now < self._wakes_at):
                    return []  # nothing that a decision depends on, and no instant that it would pass over
                effects += told or []
            case Heard():
                effects += self._heard(event, now)
            case DigestKnown(hash_, digest):
                self._digests[hash_] = digest
            case Learned():
                effects += self._learned(event, now)
            case Branched():
                effects += self._branched(event, now)
            case Sought():
                self._sought = True
            case StepDown(reason):
                self._stepping_down = reason
            case Ordered():
                effects += self._ordered(event)
            case Woke():
                pass
            case _:
                assert_never(event)
        effects += self._advance(now)
        return effects + self._relay_news(now) if now >= self._relay_at else effects

    def next_wake(self, now: Instant) -> Instant | None:
        """When something changes by itself: always after now."""
        self._wakes_at = min((at for at in self._wakes(now) if at > now), default=None)
        return self._wakes_at

    def explain(self, peer: PeerId) -> list[str]:
        """A peer's story, newest last."""
        member = self.members.get(peer)
        return list(member.story) if member else []

    def view(self, now: Instant) -> View:
        return View(
            epoch=self.ledger.epoch,
            round=self.ledger.round + 1,
            phase=self.phase,
            waiting_for=self._waiting(now),
            deadline_at=self._deadline(now),
            attempt=self._attempt.number if self._attempt else -1,
            members=self.members.view(self.ledger),
            tokens=self.ledger.tokens,
            head=self.ledger.head,
            n_committed=self.ledger.n_committed,
        )

    def check(self) -> None:
        """Raise InvariantBroken unless the state is one that can be."""
        attempt = self._attempt
        in_attempt = self.phase not in (Phase.TRAIN, Phase.ENDED)
        if in_attempt != (attempt is not None):
            raise InvariantBroken(f"phase {self.phase} with attempt {attempt}")
        if self._next_number < self._first_number or len(self._seats) != len(self.ledger.seats):
            raise InvariantBroken("what is kept of the round is not its ledger's")
        if attempt is not None:
            self._check_attempt(attempt)

    def _check_attempt(self, attempt: Attempt) -> None:
        if attempt.number >= self._next_number:
            raise InvariantBroken("the attempt's number could be used again")
        if self.phase is Phase.COMMITMENT and attempt.plan is None:
            raise InvariantBroken("commitments without a plan")
        if self.phase is Phase.EXCHANGE and (attempt.deal is None or not attempt.included or not attempt.dealt):
            raise InvariantBroken("an exchange without a deal")
        if self.phase is Phase.VOTE and (attempt.proposal is None or attempt.body is None):
            raise InvariantBroken("a vote without a proposal")
        if not set(attempt.included) <= set(attempt.commitments) <= set(attempt.losses):
            raise InvariantBroken("someone is included who was not planned")
        if not set(attempt.results) <= set(attempt.dealt) <= set(attempt.members()):
            raise InvariantBroken("someone reduces who was not planned")

    # -- events -----------------------------------------------------------------------------------------------

    def _connected(self, event: Connected, now: Instant) -> list[Effect]:
        peer = event.peer
        member = self.members.connected(peer, event.hello, event.record, now)
        member.story.append("line open")
        self._abstaining.discard(peer)
        records = tuple(m.envelope for m in self.members if m.connected) if self._relay else ()
        effects: list[Effect] = [Tell((peer,), self._welcome(records, now))]
        self._pass_on(peer, member.envelope)
        if not event.record.grpc:
            member.reachable = False
        elif not member.reachable:
            effects.append(Probe(peer, event.record.grpc))
        hello = event.hello
        if hello.holds_state:
            effects += self._note_ahead(peer, hello.head, hello.epoch, hello.round, hello.tokens, now)
        return effects + self._told_again(peer)

    def _record_changed(self, event: RecordChanged) -> list[Effect]:
        member = self.members.get(event.peer)
        if member is None:
            return []
        moved = (event.record.grpc, event.record.dht) != (member.record.grpc, member.record.dht)
        member.record = event.record
        if event.envelope:
            member.envelope = event.envelope
            if moved:
                self._pass_on(event.peer, event.envelope)
        if not event.record.grpc:
            member.reachable = False
        return [Probe(event.peer, event.record.grpc)] if event.record.grpc else []

    def _pass_on(self, peer: PeerId, record: bytes) -> None:
        if self._relay:
            self._news[peer] = record

    def _told_again(self, peer: PeerId) -> list[Effect]:
        """What the attempt has told so far, for a member whose line is new or that has caught up."""
        attempt = self._attempt
        if attempt is None:
            return []
        if self.phase is Phase.PREPARE:
            if peer not in self.ledger.voters:
                return []
            prepare = Prepare(self.ledger.epoch, self.ledger.round + 1, attempt.number, self.me)
            return [Tell((peer,), Signed(self._sealer.seal(prepare)))]
        envelopes = [attempt.propose_envelope]
        if self.phase is not Phase.VOTE and peer in attempt.members():
            envelopes = [attempt.plan_envelope, attempt.deal_envelope, attempt.redeal_envelope]
        told: list[Effect] = [Tell((peer,), Signed(envelope)) for envelope in envelopes if envelope]
        if self.phase is Phase.EXCHANGE and attempt.moves.asked and peer in attempt.dealt:
            told.append(Tell((peer,), Inquiry(attempt.plan_hash, attempt.moves.asked)))
        return told

    def _heartbeat(self, peer: PeerId, heartbeat: Heartbeat, now: Instant) -> list[Effect] | None:
        """None if nothing has changed that a decision depends on."""
        known = self.members.get(peer)
        before = self._stage(known) if known is not None and self.members.fresh(peer, now) else None
        head_before = known.head if known is not None else b""
        due = known is not None and self._announce(known, heartbeat, now)
        member = self.members.heard(peer, heartbeat, self.ledger.round + 1, now)
        if member is None:
            return None
        tokens = member.hello.tokens if heartbeat.head == member.hello.head else 0
        if ahead := self._note_ahead(peer, heartbeat.head, heartbeat.epoch, heartbeat.round - 1, tokens, now):
            return ahead
        joins = member.state is MemberState.JOINING
        if member.head in (self.ledger.head, b"") or member.state is MemberState.APPLYING:
            member.astray_since = None
            if member.head == self.ledger.head != head_before:
                return self._told_again(peer)
        else:
            # Who joins with a head is on its way to this one, or to one of a branch that nobody has any more.
            again_s = self.spec.deadlines.heartbeat_timeout_s * (JOINS_TIMES if joins else 1)
            told_at = member.told_head_at if member.told_head_at is not None else now
            astray_since = member.astray_since = now if member.astray_since is None else member.astray_since
            if now >= astray_since + again_s:  # whatever was committed meanwhile
                member.told_head_at = member.astray_since = now
                return [Tell((peer,), self._welcome((), now))]
            if now >= told_at + again_s:
                member.told_head_at = now
                return [Tell((peer,), self.commit)]
        return [] if due or self._stage(member) != before else None

    def _stage(self, member: Member) -> tuple[object, ...]:
        """All of a member's progress that a decision can depend on now."""
        if self.phase in (Phase.TRAIN, Phase.ENDED):
            return member.stage(work.asked(self._seats.get(member.peer)), work.steps_min(self.spec))
        return member.n_lost, member.head

    def _heard(self, event: Heard, now: Instant) -> list[Effect]:
        peer, message, attempt = event.peer, event.message, self._attempt
        match message:
            case Heartbeat():
                raise InvariantBroken("a heartbeat is taken in by itself")
            case Leave():
                return self._leave(event, message, now)
            case Refusal():
                return self._refusal(peer, message, now)
            case Commitment(plan) if attempt is not None and plan == attempt.plan_hash:
                if self.phase is Phase.COMMITMENT and peer in attempt.losses:
                    self._heard_commitment(attempt, peer, message, event.envelope)
            case Results(plan) if attempt is not None and plan == attempt.plan_hash:
                if self.phase is Phase.EXCHANGE and peer in attempt.dealt:
                    self._heard_results(attempt, peer, message, event.envelope)
            case Missing(plan) if attempt is not None and plan == attempt.plan_hash:
                if self.phase is Phase.EXCHANGE and peer in attempt.dealt:
                    self._heard_missing(attempt, peer, message, now)
            case Promise() if attempt is not None and self._is_for(message, attempt):
                extends = message.proposal is None or self._extends(event)
                if self.phase is Phase.PREPARE and peer in self.ledger.voters and extends:
                    if peer in attempt.promises:
                        return []
                    self._signs_again(peer)
                    promise, told = self._taken(event, message)
                    attempt.promises[peer] = promise
                    attempt.refused.pop(peer, None)
                    return told
            case Vote() if attempt is not None and self._is_for(message, attempt):
                counts = peer in self.ledger.voters and message.body_hash == attempt.body_hash
                if self.phase is Phase.VOTE and counts:
                    self._signs_again(peer)
                    attempt.votes.setdefault(peer, (message, event.envelope))
                    attempt.refused.pop(peer, None)
                    attempt.rejected.discard(peer)
            case _:
                pass  # late, or of another attempt
        return []

    def _signs_again(self, peer: PeerId) -> None:
        self._abstaining.discard(peer)
        self._abstained.discard(peer)

    def _is_for(self, message: Promise | Vote, attempt: Attempt) -> bool:
        here = (self.ledger.epoch, self.ledger.round + 1, attempt.number, self.me)
        return (message.epoch, message.round, message.attempt, message.leader) == here

    def _extends(self, event: Heard) -> bool:
        """Whether the proposal that a voter reports is one that can have been signed in this round."""
        body = event.body
        here = (self.ledger.epoch, self.ledger.round + 1, self.ledger.head)
        return body is not None and (body.epoch, body.round, body.previous) == here

    def _heard_commitment(self, attempt: Attempt, peer: PeerId, commitment: Commitment, envelope: bytes) -> None:
        """Keep the first one; one with norms that are not the chunks' is not passed on to all in the deal."""
        if len(commitment.norms) == policy.grid(self.spec).n_chunks:
            attempt.commitments.setdefault(peer, (commitment, envelope))
        elif peer not in attempt.commitments:
            attempt.declined[peer] = f"it commits to {len(commitment.norms)} chunks"

    def _leave(self, event: Heard, leave: Leave, now: Instant) -> list[Effect]:
        here = self.ledger.round + 1
        if (leave.epoch, leave.round) == (self.ledger.epoch, here + 1) and leave.proposal is None:
            self._leaving.setdefault(event.peer, (leave, event.envelope))
        if (leave.epoch, leave.round) != (self.ledger.epoch, here) or event.peer in self._left:
            return []
        if leave.proposal is not None and not (event.peer in self.ledger.voters and self._extends(event)):
            return []  # who has no vote has no proposal to report
        taken, told = self._taken(event, leave)
        self._left.setdefault(event.peer, (taken, event.envelope))
        if taken.proposal != leave.proposal:
            self._weightless.add(event.peer)  # it lies: what it says goes into no certificate, however long it is
        self._pass_number(leave.attempt, self._believed(now))
        if member := self.members.get(event.peer):
            member.story.append(f"left in round {leave.round}")
        return told

    def _refusal(self, peer: PeerId, refusal: Refusal, now: Instant) -> list[Effect]:
        attempt = self._attempt
        if attempt is None or (refusal.epoch, refusal.round) != (self.ledger.epoch, self.ledger.round + 1):
            return []
        if refusal.attempt < attempt.number:
            return []  # of an earlier attempt
        member, votes = self.members.get(peer), peer in self.ledger.voters
        if votes and refusal.attempt == attempt.number and refusal.reason.startswith(ABSTAINS):
            self._abstaining.add(peer)
            self._abstained.add(peer)
        in_exchange = self.phase in (Phase.COMMITMENT, Phase.EXCHANGE)
        observes = member is not None and member.observer
        if not votes and not observes and not (in_exchange and peer in attempt.members()):
            return []  # nothing is asked of it
        if votes:
            self._pass_number(refusal.attempt, self._believed(now))
        n_outbid = self._n_outbid.get(peer, 0)
        if in_exchange and refusal.attempt > attempt.number and n_outbid < OUTBID_MOST:
            self._n_outbid[peer] = n_outbid + 1
            attempt.outbid = max(attempt.outbid, refusal.attempt)
        refused = attempt.refused if self.phase in (Phase.PREPARE, Phase.VOTE) else attempt.declined
        refused[peer] = refusal.reason
        if self.phase is Phase.VOTE and refusal.attempt == attempt.number:
            attempt.rejected.add(peer)
        if self.phase is Phase.PREPARE and refusal.attempt > attempt.number:
            self._heard_bound(attempt, peer, refusal.attempt)
        if observes and self.phase is Phase.VOTE and self.me not in attempt.votes:
            refused[self.me] = f"the observer: {refusal.reason}"  # no digest, no vote
        told = f"{peer[-6:]} refuses attempt {attempt.number} of round {self.ledger.round + 1}: {refusal.reason}"
        return [Say(told, by=peer)]
