"""The leader's machine by scripts: what it says in each phase to what it hears."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import pytest

from coordinator.rounds.attempt import Phase
from coordinator.rounds.events import (
    Close,
    Committed,
    Connected,
    DigestKnown,
    Disconnected,
    Effect,
    Ended,
    Event,
    Heard,
    Instant,
    Opened,
    PauseAsked,
    Persist,
    Probe,
    Reached,
    RecordChanged,
    Say,
    Tell,
    Woke,
)
from coordinator.rounds.ledger import Ledger
from coordinator.rounds.machine import Rounds
from coordinator.rounds.phases import LEADER_SLACK, RETRY_FIRST_S, RETRY_MAX_S
from coordinator.rounds.state import InvariantBroken
from coordinator.rounds.voter import Voter
from protos.hashes import body_hash, plan_hash
from protos.messages import (
    AttemptFailed,
    Body,
    Commit,
    Commitment,
    Deal,
    Goodbye,
    Heartbeat,
    Hello,
    Lack,
    Leave,
    MemberState,
    Missing,
    Outcome,
    PeerId,
    Plan,
    Prepare,
    Promise,
    Proposal,
    Propose,
    Record,
    Records,
    Refusal,
    Results,
    Signed,
    Vote,
    Welcome,
)
from protos.runspec import MembershipSpec, RunSpec, WorkSpec
from tests.coordinator.rounds.cases import (
    COORDINATOR,
    NO_HASH,
    PEERS,
    SPEC,
    beginning,
    commitment,
    evidence_of,
    results_of,
    seated,
)
from tests.fakes.sealer import FakeSealer, Registry
from tests.sim.options import sim_spec

OBSERVER = PEERS[30]
T = TypeVar("T")
DIGEST = bytes([7]) * 32


class Script:
    """A leader, spoken to by hand. Everything it does is in `did`, the last event's part in `now_did`."""

    def __init__(
        self,
        ledger: Ledger,
        spec: RunSpec = SPEC,
        *,
        me: PeerId = COORDINATOR,
        registry: Registry | None = None,
        **more: Any,
    ) -> None:
        self.registry = registry or Registry()
        self.spec, self.me = spec, me
        self.at = 0.0
        commit = Commit(b"body", ledger.digest, 0, (), ())
        voter = more.pop("voter", None) or Voter(me, None)
        self.rounds = Rounds(
            me, spec, ledger, commit, FakeSealer(self.registry, me), now=Instant(0.0), coordinator=COORDINATOR,
            voter=voter, relay=more.pop("relay", False), **more,
        )  # fmt: skip
        self.did: list[Effect] = []
        self.now_did: list[Effect] = []

    # -- saying -----------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Effect]:
        self.now_did = self.rounds.handle(event, Instant(self.at))
        self.rounds.check()
        wake = self.rounds.next_wake(Instant(self.at))
        assert wake is None or wake > self.at
        self.did += self.now_did
        return self.now_did

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass as a driver does: woken at each instant that the machine names. All that it did meanwhile."""
        end, did = self.at + seconds, list[Effect]()
        while (wake := self.rounds.next_wake(Instant(self.at))) is not None and wake <= end:
            self.at = wake
            did += self.handle(Woke())
        self.at = end
        return did

    def connect(self, *peers: PeerId, holds: bool = True, grpc: tuple[str, ...] = ("here:1",)) -> None:
        head = self.rounds.ledger.head
        for peer in peers:
            hello = Hello(1, peer.encode(), 0, 0, head, NO_HASH, holds, peer == OBSERVER, "", 0)
            self.handle(Connected(peer, hello, Record(peer, 1, grpc, (), 0, 0, NO_HASH)))
            if grpc:
                self.handle(Reached(peer, True))

    def beat(self, peer: PeerId, state: MemberState, step: int = 0, **changes: Any) -> list[Effect]:
        ledger = self.rounds.ledger
        heartbeat = Heartbeat(
            0, changes.pop("round", ledger.round + 1), changes.pop("head", ledger.head), NO_HASH, state, step, 0, 1.0,
            1.0, 0.0, 0, 0,
        )  # fmt: skip
        return self.handle(Heard(peer, replace(heartbeat, **changes), b""))

    def ready(self, *peers: PeerId) -> None:
        for peer in peers:
            self.beat(peer, MemberState.READY, self.spec.work.h)

    def keep_alive(self, *peers: PeerId) -> None:
        """Heartbeats that change nothing."""
        for peer in peers:
            member = self.rounds.members.get(peer)
            assert member is not None
            self.beat(peer, member.state, member.step)

    def say(self, peer: PeerId, message: Any) -> list[Effect]:
        signed = isinstance(message, Commitment | Results | Vote | Promise | Leave)
        body = None
        if isinstance(message, Promise | Leave) and message.proposal is not None:
            body = self.registry.decode(Body, message.proposal.body)
        return self.handle(Heard(peer, message, self.registry.seal(peer, message) if signed else b"", body))

    # -- hearing ----------------------------------------------------------------------------------------------

    def told(self, kind: type[T], did: list[Effect] | None = None) -> list[tuple[tuple[PeerId, ...], T]]:
        """Messages of a kind among what was done, with whom they were for."""
        found: list[tuple[tuple[PeerId, ...], T]] = []
        for effect in self.now_did if did is None else did:
            if isinstance(effect, Tell):
                message: object = effect.message
                if isinstance(message, Signed):
                    _, message = self.registry.open(message.envelope)
                if isinstance(message, kind):
                    found.append((effect.peers, message))
        return found

    def last(self, kind: type[T]) -> T:
        return self.told(kind, self.did)[-1][1]

    def effects(self, kind: type[T], did: list[Effect] | None = None) -> list[T]:
        return [effect for effect in (self.now_did if did is None else did) if isinstance(effect, kind)]

    def phase(self) -> Phase:
        return self.rounds.phase

    @property
    def waiting_for(self) -> str:
        return self.rounds.view(Instant(self.at)).waiting_for

    # -- whole steps ------------------------------------------------------------------------------------------

    def commit_to_plan(self, *peers: PeerId, **changes: Any) -> None:
        plan = self.last(Plan)
        hash_ = plan_hash(self.registry.encode(plan))
        for peer in peers:
            self.say(peer, commitment(self.rounds.ledger, peer, hash_, self.spec, **changes))

    def results(self) -> dict[PeerId, Results]:
        """What the reducers of the current attempt would report."""
        attempt = self.rounds._attempt
        assert attempt is not None
        evidence = attempt.evidence()
        assert evidence is not None
        return results_of(evidence, self.spec)

    def reduce(self) -> None:
        for peer, results in self.results().items():
            self.say(peer, results)

    def vote(self, *peers: PeerId, digest: bytes = DIGEST) -> None:
        propose = self.last(Propose)
        hash_ = body_hash(propose.proposal.body)
        for peer in peers:
            self.say(peer, Vote(propose.epoch, propose.round, propose.attempt, propose.leader, hash_, digest))

    def promise(self, peer: PeerId, voted: int = -1, proposal: Proposal | None = None) -> None:
        asked = self.last(Prepare)
        self.say(
            peer,
            Promise(
                asked.epoch, asked.round, asked.attempt, asked.leader, self.rounds.ledger.head, voted, proposal
            ),
        )  # fmt: skip


def training(n: int, spec: RunSpec = SPEC, *, observer: bool = True, **more: Any) -> Script:
    """Round 2: n members have seats and are here."""
    script = Script(seated(n, spec), spec, **more)
    script.connect(*PEERS[:n], *([OBSERVER] if observer else []))
    for peer in PEERS[:n]:
        script.beat(peer, MemberState.TRAINING, 1)
    return script


def exchanging(n: int, **more: Any) -> Script:
    script = training(n, **more)
    script.ready(*PEERS[:n])
    script.commit_to_plan(*PEERS[:n])
    assert script.phase() is Phase.EXCHANGE
    return script


def voting(n: int, **more: Any) -> Script:
    script = exchanging(n, **more)
    script.reduce()
    assert script.phase() is Phase.VOTE
    return script


# -- a round ---------------------------------------------------------------------------------------------------------


def test_the_first_round_gives_seats_to_who_holds_the_state() -> None:
    spec = sim_spec(n_chunks=3)
    script = Script(beginning(), spec)
    assert script.handle(Woke()) == []
    assert script.waiting_for == "members that hold the state: 0 of 1"
    script.connect(PEERS[0], holds=False)
    assert script.phase() is Phase.TRAIN
    script.beat(PEERS[0], MemberState.WAITING)
    opened, *rest = script.now_did
    assert opened == Persist(Opened(0, 1, 0))
    assert isinstance(rest[0], Persist)
    assert isinstance(rest[0].entry, Proposal)
    (committed,) = script.effects(Committed)
    assert (committed.body.outcome, committed.body.reason) == (Outcome.EMPTY, "seats for who holds the state")
    assert [seat.peer for seat in committed.body.seats] == [PEERS[0]]
    assert script.told(Commit)[0][0] == (PEERS[0],)
    assert script.rounds.ledger.voters == (PEERS[0], COORDINATOR)


def test_a_whole_round() -> None:
    script = training(3)
    assert script.phase() is Phase.TRAIN
    assert script.waiting_for == "training: peer00, peer01, peer02, the slowest at step 1 of 4"
    script.ready(PEERS[0], PEERS[2])
    assert script.waiting_for == "training: peer01, the slowest at step 1 of 4"
    script.ready(PEERS[1])
    assert script.effects(Persist)[0].entry == Opened(0, 2, 0)
    ((told, plan),) = script.told(Plan)
    assert told == tuple(PEERS[:3])  # three can be reached: the observer need not reduce
    assert [(member.peer, member.reducer, member.sender) for member in plan.members] == [
        (peer, True, True) for peer in PEERS[:3]
    ]
    script.commit_to_plan(*PEERS[:2])
    assert script.waiting_for == "commitments of peer02"
    script.commit_to_plan(PEERS[2])
    ((told, deal),) = script.told(Deal)
    assert told == tuple(PEERS[:3])
    assert deal.excluded == ()
    script.reduce()
    persisted = [effect.entry for effect in script.effects(Persist)]
    ((told, propose),) = script.told(Propose)
    assert persisted == [propose.proposal]
    assert told == (*PEERS[:3], OBSERVER)
    assert set(propose.holders) == {*PEERS[:3], OBSERVER}
    script.vote(PEERS[0])
    assert script.phase() is Phase.VOTE
    script.vote(PEERS[2])
    (committed,) = script.effects(Committed)
    assert script.effects(Tell)[0].message is committed.commit
    assert script.now_did.index(committed) == 0  # on disk before it is told
    assert (committed.body.round, committed.commit.digest, len(committed.commit.votes)) == (2, DIGEST, 2)
    assert script.rounds.ledger.head == committed.commit_hash
    assert script.phase() is Phase.TRAIN
    assert script.rounds.view(Instant(0.0)).n_committed == 1


def test_the_coordinator_votes_with_the_observers_digest() -> None:
    script = voting(2)
    propose = script.last(Propose)
    hash_ = body_hash(propose.proposal.body)
    script.handle(DigestKnown(bytes(32), DIGEST))
    assert script.effects(Persist) == []
    script.handle(DigestKnown(hash_, DIGEST))
    (record,) = [effect.entry for effect in script.effects(Persist)]
    assert isinstance(record, Promise)
    assert (record.voted_attempt, record.proposal) == (0, propose.proposal)
    assert script.phase() is Phase.VOTE
    script.vote(PEERS[1])
    (committed,) = script.effects(Committed)
    assert len(committed.commit.votes) == 2


def test_votes_on_different_digests_are_not_added_up() -> None:
    script = voting(3)
    script.vote(PEERS[0])
    script.vote(PEERS[1], digest=NO_HASH)
    assert script.phase() is Phase.VOTE
    script.vote(PEERS[2])
    assert script.effects(Committed)[0].commit.digest == DIGEST


@pytest.mark.parametrize(
    "changes", [{"attempt": 1}, {"round": 3}, {"epoch": 1}, {"leader": PEERS[9]}, {"body_hash": NO_HASH}]
)
def test_votes_for_something_else_do_not_count(changes: dict[str, Any]) -> None:
    script = voting(1)
    propose = script.last(Propose)
    vote = Vote(0, 2, 0, COORDINATOR, body_hash(propose.proposal.body), DIGEST)
    script.say(PEERS[0], replace(vote, **changes))
    assert script.phase() is Phase.VOTE
    script.say(PEERS[0], vote)
    assert script.effects(Committed)


def test_strangers_and_doubles_count_nothing() -> None:
    script = training(3)
    script.ready(*PEERS[:3])
    script.connect(PEERS[5])
    script.commit_to_plan(PEERS[5])
    script.commit_to_plan(PEERS[0], PEERS[0], PEERS[1])
    assert script.phase() is Phase.COMMITMENT
    script.commit_to_plan(PEERS[0], steps=1)  # another word on the same plan
    script.commit_to_plan(PEERS[2])
    evidence = script.rounds._attempt.evidence() if script.rounds._attempt else None
    assert evidence is not None
    assert sorted(evidence.commitments) == PEERS[:3]
    assert evidence.commitments[PEERS[0]].steps == 4


# -- the training phase ----------------------------------------------------------------------------------------------


def test_at_the_limit_who_has_steps_contributes_them() -> None:
    script = training(2, sim_spec(n_chunks=3))
    limit_s = script.spec.deadlines.train_limit_s
    script.ready(PEERS[0])
    while script.at < limit_s - 2.0:
        script.wait(1.0)
        script.keep_alive(*PEERS[:2], OBSERVER)
    assert script.phase() is Phase.TRAIN
    script.wait(3.0)
    assert script.phase() is Phase.COMMITMENT
    assert [member.peer for member in script.last(Plan).members if member.sender] == PEERS[:2]


def test_who_made_no_step_is_not_planned() -> None:
    script = training(2, sim_spec(n_chunks=3))
    script.beat(PEERS[1], MemberState.TRAINING, 0)
    script.ready(PEERS[0])
    assert script.phase() is Phase.COMMITMENT  # it fell from step 1 to 0: nobody waits for it
    assert [member.peer for member in script.last(Plan).members if member.sender] == [PEERS[0]]


@pytest.mark.parametrize("state", [MemberState.JOINING, MemberState.PAUSED])
def test_nobody_waits_for_the_idle(state: MemberState) -> None:
    script = training(2)
    script.ready(PEERS[0])
    assert script.phase() is Phase.TRAIN
    script.beat(PEERS[1], state, 1)
    assert script.phase() is Phase.COMMITMENT


def test_a_broken_line_is_waited_for_a_moment() -> None:
    script = training(2)
    script.handle(Disconnected(PEERS[1], "reset"))
    script.ready(PEERS[0])
    assert script.phase() is Phase.TRAIN
    script.wait(script.spec.deadlines.gone_grace_s + 0.1)
    assert script.phase() is Phase.COMMITMENT


def test_a_silent_member_is_given_up_at_the_timeout() -> None:
    script = training(2)
    script.ready(PEERS[0])
    for _ in range(14):
        script.wait(1.0)
        script.keep_alive(PEERS[0], OBSERVER)
    assert script.phase() is Phase.TRAIN
    script.wait(1.1)
    assert script.phase() is Phase.COMMITMENT


def test_without_voters_for_a_quorum_nothing_is_opened() -> None:
    script = training(3)
    for peer in PEERS[1:3]:
        script.handle(Disconnected(peer, "gone"))
    script.ready(PEERS[0])
    script.wait(10.0)
    assert script.phase() is Phase.TRAIN
    assert script.waiting_for == "voters for a quorum: peer01, peer02"
    script.connect(PEERS[1])
    script.beat(PEERS[1], MemberState.READY, 4)
    assert script.phase() is Phase.COMMITMENT


def test_the_operators_pause_holds_the_next_attempt() -> None:
    script = training(1)
    script.handle(PauseAsked(True))
    script.ready(PEERS[0])
    assert script.phase() is Phase.TRAIN
    assert "operator" in script.waiting_for
    script.handle(PauseAsked(False))
    assert script.phase() is Phase.COMMITMENT


def test_below_the_minimum_a_newcomer_ends_the_round_with_seats() -> None:
    script = training(2, sim_spec(n_chunks=3, membership=MembershipSpec(min_contributors=2)))
    script.handle(Disconnected(PEERS[1], "gone"))
    script.ready(PEERS[0])
    script.wait(4.0)
    assert script.waiting_for == "contributors: 1 of 2"
    script.connect(PEERS[5])
    assert script.phase() is Phase.VOTE
    body = script.registry.decode(Body, script.last(Propose).proposal.body)
    assert (body.outcome, body.reason) == (Outcome.EMPTY, "1 of 2 contributors: seats for who came since")
    assert [seat.peer for seat in body.seats] == [PEERS[0], PEERS[5]]


def test_a_heartbeat_of_the_same_stage_decides_nothing() -> None:
    script = training(3)
    script.beat(PEERS[0], MemberState.TRAINING, 2)
    assert script.now_did == []
    script.at = script.spec.deadlines.train_limit_s + 1  # even if a wake is due: that is the wake's matter
    assert script.beat(PEERS[0], MemberState.TRAINING, 3) == []


# -- failing and trying again ----------------------------------------------------------------------------------------


def test_a_death_in_the_exchange_fails_the_attempt_and_the_next_asks_for_promises() -> None:
    script = exchanging(3)
    script.handle(Disconnected(PEERS[2], "reset"))
    did = script.wait(3.1)
    ((told, failed),) = script.told(AttemptFailed, did)
    assert told == (*PEERS[:2], OBSERVER)
    assert failed == AttemptFailed(0, 2, 0, "lost peer02")
    did += script.wait(RETRY_FIRST_S)
    assert script.phase() is Phase.PREPARE
    entries = [effect.entry for effect in script.effects(Persist, did)]
    assert entries[0] == Opened(0, 2, 1)
    assert isinstance(entries[1], Promise)  # the coordinator's own
    assert script.told(Prepare, did) == [((PEERS[0], PEERS[1]), Prepare(0, 2, 1, COORDINATOR))]
    script.promise(PEERS[0])
    assert script.phase() is Phase.PREPARE
    script.promise(PEERS[1])
    assert script.phase() is Phase.COMMITMENT
    assert [member.peer for member in script.last(Plan).members if member.sender] == PEERS[:2]


def test_a_dead_sender_only_misses_its_commitment() -> None:
    script = training(3)
    script.ready(*PEERS[:3])
    script.commit_to_plan(*PEERS[:2])
    script.handle(Disconnected(PEERS[2], "reset"))
    script.wait(3.1)
    assert script.phase() is Phase.EXCHANGE
    script.reduce()
    body = script.registry.decode(Body, script.last(Propose).proposal.body)
    assert [(entry.counted, entry.reason) for entry in body.members] == [
        (True, ""), (True, ""), (False, "no commitment in time"),
    ]  # fmt: skip


def test_who_died_after_its_commitment_is_not_dealt_in() -> None:
    script = training(3)
    script.ready(*PEERS[:3])
    script.commit_to_plan(PEERS[2])
    script.handle(Disconnected(PEERS[2], "reset"))
    script.wait(3.1)
    script.commit_to_plan(*PEERS[:2])
    assert script.phase() is Phase.EXCHANGE
    assert len(script.last(Deal).commitments) == 2


def test_who_came_back_without_its_contribution_is_lost_at_once() -> None:
    script = exchanging(3)
    script.handle(Disconnected(PEERS[1], "reset"))
    script.connect(PEERS[1])
    script.beat(PEERS[1], MemberState.TRAINING, 0)
    assert script.told(AttemptFailed)[0][1].reason == "lost peer01"


def test_who_comes_back_is_told_where_the_attempt_is() -> None:
    script = exchanging(3)
    before = len(script.did)
    script.handle(Disconnected(PEERS[1], "reset"))
    script.connect(PEERS[1])
    again = [message for _, message in script.told(object, script.did[before:])]
    assert [type(message) for message in again] == [Welcome, Plan, Deal]
    before = len(script.did)
    script.connect(PEERS[5])  # not of this plan
    assert [type(message) for _, message in script.told(object, script.did[before:])] == [Welcome]


def test_who_caught_up_is_told_where_the_attempt_is() -> None:
    script = training(3)
    script.connect(PEERS[4], holds=False)
    script.ready(*PEERS[:3])
    script.commit_to_plan(*PEERS[:3])
    script.reduce()
    script.beat(PEERS[4], MemberState.WAITING)
    assert [type(message) for _, message in script.told(object)] == [Propose]


def test_at_the_deadline_claims_decide_who_is_left_out() -> None:
    script = exchanging(3)
    plan = plan_hash(script.registry.encode(script.last(Plan)))
    results = script.results()
    for reducer in results:
        if reducer != PEERS[2]:
            lacks = tuple(Lack(item.chunk, PEERS[2]) for item in results[reducer].results)
            script.say(reducer, Missing(plan, lacks))
    if PEERS[2] in results:
        script.say(PEERS[2], results[PEERS[2]])
    assert script.phase() is Phase.TRAIN
    blamed = script.rounds._out_senders | script.rounds._out_reducers
    assert blamed
    assert "rows or results did not come in time" in script.last(AttemptFailed).reason


def test_who_can_not_combine_is_left_out_as_a_reducer() -> None:
    script = exchanging(3)
    plan = plan_hash(script.registry.encode(script.last(Plan)))
    unable, *others = script.results()
    script.say(unable, Missing(plan, ()))
    for peer in others:
        script.say(peer, script.results()[peer])
    assert script.rounds._out_reducers == {unable}
    assert script.rounds._out_senders == set()


def test_silence_until_the_deadline_is_the_reducers_fault() -> None:
    script = exchanging(2)
    limit_s = script.spec.deadlines.exchange_s * LEADER_SLACK
    while script.at < limit_s:
        script.wait(1.0)
        script.keep_alive(*PEERS[:2], OBSERVER)
    assert "did not come in time" in script.last(AttemptFailed).reason
    assert script.rounds._out_reducers


def test_results_that_are_none_are_the_reducers_fault() -> None:
    script = exchanging(3)
    results = script.results()
    liar, *others = results
    for peer in others:
        script.say(peer, results[peer])
    script.say(liar, replace(results[liar], set_hash=NO_HASH))
    assert script.rounds._out_reducers == {liar}
    assert "for another set" in script.last(AttemptFailed).reason


def test_blame_ends_when_there_would_be_nobody_left() -> None:
    script = exchanging(1, observer=False)
    limit_s = script.spec.deadlines.exchange_s * LEADER_SLACK + 2.0
    while script.at < limit_s:
        script.wait(1.0)
        script.keep_alive(PEERS[0])
    for _ in range(3):
        if script.phase() is Phase.PREPARE:
            script.promise(PEERS[0])
        script.wait(2.0)
        script.keep_alive(PEERS[0])
    if script.phase() is Phase.PREPARE:
        script.promise(PEERS[0])
    assert script.phase() is Phase.COMMITMENT


def test_pauses_between_attempts_double_up_to_a_limit() -> None:
    script = training(1, observer=False)
    script.handle(Reached(PEERS[0], False))
    script.ready(PEERS[0])
    gaps, last = [], script.at
    for _ in range(12):
        while script.phase() is Phase.TRAIN:
            wake = script.rounds.next_wake(Instant(script.at))
            assert wake is not None
            script.at = wake
            script.handle(Woke())
            script.keep_alive(PEERS[0])
        gaps.append(script.at - last)
        script.promise(PEERS[0])
        assert script.last(AttemptFailed).reason == "nobody who could reduce can be reached"
        last = script.at
    assert gaps[0] == pytest.approx(RETRY_FIRST_S)
    assert gaps[3] == pytest.approx(8 * RETRY_FIRST_S)
    assert max(gaps) == pytest.approx(RETRY_MAX_S, abs=1.0)


# -- who has nothing to contribute -----------------------------------------------------------------------------------


def test_who_declines_is_not_waited_for_and_may_reduce() -> None:
    script = training(2)
    script.ready(*PEERS[:2])
    script.commit_to_plan(PEERS[1])
    script.say(PEERS[0], Refusal(0, 2, 0, "Δ is not finite"))
    assert script.phase() is Phase.EXCHANGE
    assert {entry.peer for entry in script.last(Deal).bandwidths} == {*PEERS[:2], OBSERVER}


def test_when_all_decline_the_round_is_empty() -> None:
    script = training(2)
    script.ready(*PEERS[:2])
    for peer in PEERS[:2]:
        script.say(peer, Refusal(0, 2, 0, "Δ is not finite"))
    body = script.registry.decode(Body, script.last(Propose).proposal.body)
    assert body.outcome is Outcome.EMPTY
    assert body.reason.startswith("no commitment came from peer00, peer01; peer00: Δ is not finite")


def test_absurd_contributions_are_left_out_and_named() -> None:
    script = training(4)
    script.ready(*PEERS[:4])
    script.commit_to_plan(*PEERS[:3])
    script.commit_to_plan(PEERS[3], norms=(1e6,) * 3)
    (excluded,) = script.last(Deal).excluded
    assert (excluded.peer, "times the median" in excluded.reason) == (PEERS[3], True)
    assert script.phase() is Phase.EXCHANGE


def test_when_nothing_can_be_included_the_round_is_empty() -> None:
    script = training(1)
    script.ready(PEERS[0])
    script.commit_to_plan(PEERS[0], tokens=1)
    body = script.registry.decode(Body, script.last(Propose).proposal.body)
    assert body.reason == "no contributions (peer00: 1 tokens claimed for 4 batches)"
    script.vote(PEERS[0], digest=script.rounds.ledger.digest)
    assert script.rounds.ledger.round == 2


# -- numbers, promises, leaves ---------------------------------------------------------------------------------------


def test_after_a_restart_a_used_number_is_passed() -> None:
    script = training(1, opened=4)
    script.ready(PEERS[0])
    assert script.last(Prepare).attempt == 5


def test_a_stand_in_never_leads_number_zero() -> None:
    script = training(1, me=PEERS[25])
    script.ready(PEERS[0])
    assert script.last(Prepare) == Prepare(0, 2, 1, PEERS[25])


def test_what_a_promise_reports_is_proposed_again_byte_for_byte() -> None:
    first = voting(3)
    proposal = first.last(Propose).proposal
    script = training(3, opened=0, registry=first.registry)
    script.ready(*PEERS[:3])
    script.promise(PEERS[0])
    script.promise(PEERS[1], 0, proposal)
    assert script.phase() is Phase.VOTE
    propose = script.last(Propose)
    assert propose.proposal == proposal
    assert propose.attempt == 1
    script.vote(*PEERS[:2])
    (committed,) = script.effects(Committed)
    assert (committed.commit.attempt, committed.body.attempt, committed.commit.body) == (1, 0, proposal.body)


def test_of_several_the_one_signed_last_is_proposed() -> None:
    first = voting(3)
    newer = first.last(Propose).proposal
    older = replace(newer, plan=b"older")
    script = training(3, opened=1, registry=first.registry)
    script.ready(*PEERS[:3])
    script.promise(PEERS[0], 0, older)
    script.promise(PEERS[1], 1, newer)
    assert script.last(Propose).proposal == newer


def test_a_proposal_of_another_round_is_no_proposal() -> None:
    strange = Script(beginning())
    strange.connect(PEERS[0])
    proposal = strange.last(Propose).proposal
    script = training(1, opened=0, registry=strange.registry)
    script.ready(PEERS[0])
    script.promise(PEERS[0], 0, proposal)
    assert script.phase() is Phase.PREPARE


def test_a_refusal_names_a_number_that_is_passed() -> None:
    script = training(3, opened=0)
    script.ready(*PEERS[:3])
    script.say(PEERS[0], Refusal(0, 2, 7, "promised number 7"))
    assert script.phase() is Phase.PREPARE
    script.say(PEERS[1], Refusal(0, 2, 7, "promised number 7"))
    assert "promised number 7" in script.last(AttemptFailed).reason
    script.wait(RETRY_FIRST_S)
    assert script.last(Prepare).attempt == 8


def test_absurd_numbers_are_not_believed() -> None:
    script = training(3, opened=0)
    script.ready(*PEERS[:3])
    for peer in PEERS[:2]:
        script.say(peer, Refusal(0, 2, 2**50, "far away"))
    script.wait(RETRY_FIRST_S)
    assert script.last(Prepare).attempt == 2


def test_refusals_of_earlier_attempts_and_rounds_say_nothing() -> None:
    script = training(3, opened=3)
    script.ready(*PEERS[:3])
    for peer in PEERS[:3]:
        script.say(peer, Refusal(0, 2, 3, "old"))
        script.say(peer, Refusal(0, 1, 9, "older"))
    assert script.phase() is Phase.PREPARE
    script.promise(PEERS[0])
    script.promise(PEERS[1])
    assert script.phase() is Phase.COMMITMENT


def leave(script: Script, attempt: int = -1, leader: PeerId = COORDINATOR, **changes: Any) -> Leave:
    ledger = script.rounds.ledger
    return replace(Leave(0, ledger.round + 1, attempt, leader, ledger.head, -1, None), **changes)


def test_a_leave_takes_range_and_weight_out() -> None:
    script = voting(3)
    script.say(PEERS[1], leave(script))
    script.vote(PEERS[0])
    hash_ = body_hash(script.last(Propose).proposal.body)
    script.handle(DigestKnown(hash_, DIGEST))
    (committed,) = script.effects(Committed)  # 3 of 5
    kinds = {type(script.registry.open(envelope)[1]) for envelope in committed.commit.votes}
    assert kinds == {Vote, Leave}


def test_a_leave_before_the_proposal_takes_the_seat_away() -> None:
    script = training(3)
    script.say(PEERS[1], leave(script))
    script.ready(PEERS[0], PEERS[2])
    assert [member.peer for member in script.last(Plan).members if member.sender] == [PEERS[0], PEERS[2]]
    script.commit_to_plan(PEERS[0], PEERS[2])
    script.reduce()
    body = script.registry.decode(Body, script.last(Propose).proposal.body)
    assert body.voters == (PEERS[0], PEERS[2], COORDINATOR)
    assert [seat.peer for seat in body.seats] == [PEERS[0], PEERS[2]]


def test_a_leave_in_the_exchange_fails_the_attempt_at_once() -> None:
    script = exchanging(3)
    script.say(PEERS[1], leave(script))
    assert script.last(AttemptFailed).reason == "lost peer01"


def test_who_voted_and_left_has_voted() -> None:
    script = voting(3)
    script.vote(PEERS[0])
    script.say(PEERS[0], leave(script))
    script.vote(PEERS[1])
    (committed,) = script.effects(Committed)
    assert [type(script.registry.open(envelope)[1]) for envelope in committed.commit.votes] == [Vote, Vote]


def test_a_leave_counts_only_where_its_promise_allows() -> None:
    script = voting(3)
    script.say(PEERS[1], leave(script, attempt=5, leader=PEERS[25]))
    script.vote(PEERS[0])
    script.handle(DigestKnown(body_hash(script.last(Propose).proposal.body), DIGEST))
    assert not script.effects(Committed, script.did)  # 3 of 7: what was promised to another leader holds
    script.say(PEERS[2], Refusal(0, 2, 0, "no"))
    script.wait(RETRY_FIRST_S)
    assert script.last(Prepare).attempt == 6  # past what the leaver had promised
    script.promise(PEERS[0])
    assert script.phase() is not Phase.PREPARE  # 3 of 5


@pytest.mark.parametrize("changes", [{"round": 1}, {"round": 3}, {"epoch": 1}])
def test_a_leave_of_another_round_is_none(changes: dict[str, Any]) -> None:
    script = training(2)
    script.say(PEERS[0], leave(script, **changes))
    assert script.rounds._left == {}


def test_the_last_promise_tells_of_a_vote() -> None:
    first = voting(2)
    proposal = first.last(Propose).proposal
    script = training(2, opened=0, registry=first.registry)
    script.say(PEERS[0], leave(script, attempt=0, voted_attempt=0, proposal=proposal))
    script.ready(PEERS[1])
    script.promise(PEERS[1])
    assert script.last(Propose).proposal == proposal


# -- giving a vote up ------------------------------------------------------------------------------------------------


def test_a_vote_that_can_not_succeed_any_more_is_given_up_if_another_attempt_could_be_opened() -> None:
    """N = 2: one voted and died with the results. The other can't fetch them, nor can the observer."""
    script = voting(2)
    script.vote(PEERS[1])
    script.say(PEERS[0], Refusal(0, 2, 0, "results: nobody has them"))
    assert script.phase() is Phase.VOTE  # the observer may still have them
    script.say(OBSERVER, Refusal(0, 2, 0, "results: nobody has them"))
    assert script.phase() is Phase.TRAIN
    assert "the observer: results: nobody has them" in script.last(AttemptFailed).reason


def test_without_a_quorum_a_vote_is_waited_for_until_its_deadline() -> None:
    script = voting(1)
    script.handle(Disconnected(PEERS[0], "reset"))
    script.wait(20.0)
    assert script.phase() is Phase.VOTE
    script.connect(PEERS[0])
    assert script.told(Propose, script.did)[-1][0] == (PEERS[0],)
    script.vote(PEERS[0])
    assert script.effects(Committed)


def test_votes_end_at_their_deadline() -> None:
    script = voting(3)
    limit_s = script.spec.deadlines.vote_s * LEADER_SLACK + 1.0
    while script.at < limit_s:
        script.wait(1.0)
        script.keep_alive(*PEERS[:3], OBSERVER)
    assert script.last(AttemptFailed).reason == "no quorum of votes"


def test_dial_out_members_alone_do_not_keep_a_result() -> None:
    script = training(3, observer=True)
    for peer in PEERS[:2]:
        script.handle(Reached(peer, False))
    script.ready(*PEERS[:3])
    script.commit_to_plan(*PEERS[:3])
    script.reduce()
    script.vote(*PEERS[:2])
    assert script.phase() is Phase.VOTE  # a quorum, but nobody could fetch the results from them
    script.vote(PEERS[2])
    assert script.effects(Committed)


# -- lines -----------------------------------------------------------------------------------------------------------


def test_a_lagging_member_is_told_the_head_again() -> None:
    script = training(2)
    while not script.told(Commit):
        script.wait(1.0)
        script.beat(PEERS[1], MemberState.TRAINING, 1, head=NO_HASH, round=1)
    assert script.at == pytest.approx(script.spec.deadlines.heartbeat_timeout_s, abs=1.0)
    script.beat(PEERS[1], MemberState.APPLYING, 0, head=NO_HASH, round=1)
    script.wait(16.0)
    assert not script.told(Commit, script.beat(PEERS[1], MemberState.APPLYING, 0, head=NO_HASH, round=1))


def test_addresses_are_passed_on_together() -> None:
    script = training(3, relay=True)
    flushed = script.told(Records, script.did)
    assert len(flushed) == 1  # the first at once, the others wait for each other
    assert flushed[0][1].records == (PEERS[0].encode(),)
    did = script.wait(1.1)
    ((peers, records),) = script.told(Records, did)
    assert set(records.records) == {PEERS[1].encode(), PEERS[2].encode(), OBSERVER.encode()}
    assert set(peers) == {*PEERS[:3], OBSERVER}
    (welcome,) = [message for peers, message in script.told(Welcome, script.did) if peers == (OBSERVER,)]
    assert set(welcome.records) == {peer.encode() for peer in (*PEERS[:3], OBSERVER)}


def test_addresses_are_passed_on_before_a_plan_needs_them() -> None:
    script = training(2, relay=True)
    script.ready(*PEERS[:2])
    kinds = [type(message) for _, message in script.told(object)]
    assert kinds.index(Records) < kinds.index(Plan)


def test_a_changed_address_is_passed_on_and_tried() -> None:
    script = training(2, relay=True)
    script.wait(2.0)
    moved = Record(PEERS[0], 2, ("there:1",), (), 0, 1, NO_HASH)
    did = script.handle(RecordChanged(PEERS[0], moved, b"new"))
    assert script.effects(Probe) == [Probe(PEERS[0], ("there:1",))]
    assert script.told(Records, did)[0][1].records == (b"new",)
    script.wait(2.0)
    same = replace(moved, sequence=3, round=2)
    assert not script.told(Records, script.handle(RecordChanged(PEERS[0], same, b"newer")))


def test_who_could_not_be_reached_is_tried_again_each_round() -> None:
    script = voting(3)
    script.handle(Reached(PEERS[1], False))
    script.vote(*PEERS[:2])
    script.vote(PEERS[2])
    assert script.effects(Probe, script.did)[-1] == Probe(PEERS[1], ("here:1",))


def test_the_end_is_told_to_who_has_the_last_state() -> None:
    script = voting(1, spec=sim_spec(n_chunks=3, work=WorkSpec(batch_tokens=8, h=4, end_rounds=1)))
    script.vote(PEERS[0])
    assert script.effects(Ended)[0].reason == "the run has reached its end of 1 rounds"
    assert script.phase() is Phase.ENDED
    assert script.effects(Close) == []
    assert script.beat(PEERS[0], MemberState.APPLYING) == []
    (close,) = script.effects(Close, script.beat(PEERS[0], MemberState.WAITING))
    assert close == Close(PEERS[0], Goodbye("ended", "the run has reached its end of 1 rounds"))
    script.connect(PEERS[6], holds=False)
    assert script.effects(Close) == []


def test_stories_and_views() -> None:
    script = training(2)
    script.handle(Disconnected(PEERS[0], "reset by peer"))
    assert script.rounds.explain(PEERS[0]) == ["line open", "can be reached", "line lost: reset by peer"]
    assert script.rounds.explain(PEERS[9]) == []
    view = script.rounds.view(Instant(script.at))
    assert (view.round, view.phase, view.attempt, view.deadline_at) == (2, "train", -1, 600.0)
    assert [member.state for member in view.members] == ["gone", "training", "waiting"]


def test_every_refusal_is_said() -> None:
    script = voting(3)
    script.say(PEERS[0], Refusal(0, 2, 0, "I don't like it"))
    (said,) = script.effects(Say)
    assert said.text == "peer00 refuses attempt 0 of round 2: I don't like it"


def test_states_that_can_not_be_are_loud() -> None:
    script = exchanging(2)
    assert script.rounds._attempt is not None
    script.rounds._attempt.included = (PEERS[0], PEERS[9])
    with pytest.raises(InvariantBroken, match="not planned"):
        script.rounds.check()
    script = training(1)
    script.rounds.phase = Phase.VOTE
    with pytest.raises(InvariantBroken, match=r"with attempt None"):
        script.rounds.check()
    with pytest.raises(InvariantBroken):
        script.rounds.handle(Woke(), Instant(0.0))


def test_a_proposal_must_come_opened() -> None:
    script = training(1, opened=0)
    script.ready(PEERS[0])
    promise = Promise(0, 2, 1, COORDINATOR, NO_HASH, 0, Proposal(b"unopened", b"", b"", (), ()))
    script.handle(Heard(PEERS[0], promise, b"envelope", None))
    assert script.phase() is Phase.PREPARE  # not counted: nobody knows what it would be


def test_evidence_of_the_script_is_honest() -> None:
    ledger = seated(2)
    assert evidence_of(ledger, 2).included().keys() == set(PEERS[:2])
