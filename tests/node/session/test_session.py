"""A member's session by scripts: what it does about its leader, its trainer and its own work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import pytest

from aggregation import exchange as ex
from coordinator.rounds import leases, proposing
from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger, fold
from coordinator.rounds.proposing import Evidence
from coordinator.rounds.voter import Voter
from node.session import events as ev
from node.session.machine import Session
from protos.hashes import body_hash, commit_hash
from protos.limits import TEXT
from protos.messages import (
    Body,
    Commit,
    Commitment,
    Goodbye,
    Heartbeat,
    Leave,
    MemberState,
    Outcome,
    PeerId,
    Prepare,
    Promise,
    Proposal,
    Propose,
    Refusal,
    Signed,
    StateDigest,
    Vote,
    Welcome,
)
from protos.runspec import WorkSpec
from tests.coordinator.rounds.cases import (
    COORDINATOR,
    NO_HASH,
    PEERS,
    REGISTRY,
    SPEC,
    beginning,
    body_of,
    empty_body,
    evidence_of,
    seated,
)
from tests.fakes.sealer import FakeSealer
from tests.sim.member import digest_after
from tests.sim.options import sim_spec

ME = PEERS[0]
LEDGER = seated(3)
T = TypeVar("T")


def events_of(evidence: Evidence) -> tuple[ev.Planned, ev.Dealt]:
    plan_envelope = REGISTRY.seal(COORDINATOR, evidence.plan)
    deal_envelope = REGISTRY.seal(COORDINATOR, evidence.deal)
    planned = ev.Planned(evidence.plan, evidence.plan_hash, plan_envelope)
    return planned, ev.Dealt(evidence.deal, deal_envelope, evidence.commitments)


def proposed(body: Body, evidence: Evidence | None, attempt: int = 0, leader: PeerId = COORDINATOR) -> ev.Proposed:
    proposal = Proposal(
        body=REGISTRY.encode(body),
        plan=REGISTRY.seal(COORDINATOR, evidence.plan) if evidence else b"",
        deal=REGISTRY.seal(COORDINATOR, evidence.deal) if evidence else b"",
        results=(),
        result_hashes=proposing.result_hashes(evidence, SPEC) if evidence else (),
    )
    ask = Propose(body.epoch, body.round, attempt, leader, 10.0, proposal, (PEERS[1], PEERS[2]))
    hash_ = body_hash(proposal.body)
    if evidence is None:
        return ev.Proposed(ask, body, hash_, None, b"", None, {}, {})
    return ev.Proposed(
        ask, body, hash_, evidence.plan, evidence.plan_hash, evidence.deal, evidence.commitments, evidence.results
    )


def committed(
    body: Body, ledger: Ledger, *, voters: tuple[PeerId, ...] = (PEERS[1], PEERS[2]), digest: bytes = b""
) -> ev.CommitHeard:
    raw = REGISTRY.encode(body)
    hash_ = body_hash(raw)
    digest = digest or digest_after(hash_, body, ledger.digest)
    votes = [(peer, Vote(body.epoch, body.round, 0, COORDINATOR, hash_, digest)) for peer in voters]
    commit = Commit(raw, digest, 0, tuple(REGISTRY.seal(peer, vote) for peer, vote in votes), (NO_HASH,) * 3)
    return ev.CommitHeard(commit, body, commit_hash(raw, digest), tuple(votes))


class Script:
    """A member, spoken to by hand."""

    def __init__(
        self, ledger: Ledger | None = LEDGER, *, me: PeerId = ME, voter: Voter | None = None, **more: Any
    ) -> None:
        self.me = me
        self.at = 0.0
        self.spec = more.pop("spec", SPEC)
        self.session = Session(
            me, self.spec, FakeSealer(REGISTRY, me), coordinator=COORDINATOR, voter=voter or Voter(me, None),
            ledger=ledger, now=Instant(0.0), **more,
        )  # fmt: skip
        self.did: list[ev.Effect] = []
        self.now_did: list[ev.Effect] = []

    def handle(self, event: ev.Event) -> list[ev.Effect]:
        self.now_did = self.session.handle(event, Instant(self.at))
        self.did += self.now_did
        wake = self.session.next_wake(Instant(self.at))
        assert wake > self.at if isinstance(event, ev.Woke) else wake >= self.at
        return self.now_did

    def wait(self, seconds: float) -> list[ev.Effect]:
        end, did = self.at + seconds, list[ev.Effect]()
        while (wake := self.session.next_wake(Instant(self.at))) <= end:
            self.at = wake
            did += self.handle(ev.Woke())
        self.at = end
        return did

    def effects(self, kind: type[T], did: list[ev.Effect] | None = None) -> list[T]:
        return [effect for effect in (self.now_did if did is None else did) if isinstance(effect, kind)]

    def told(self, kind: type[T], did: list[ev.Effect] | None = None) -> list[T]:
        """What the leader was told of a kind."""
        found: list[T] = []
        for effect in self.effects(ev.TellLeader, did):
            message: object = effect.message
            if isinstance(message, Signed):
                signer, message = REGISTRY.open(message.envelope)
                assert signer == self.me
            if isinstance(message, kind):
                found.append(message)
        return found

    def state(self) -> MemberState:
        return self.session.state()

    # -- whole steps ------------------------------------------------------------------------------------------

    def line_up(self, ledger: Ledger | None = None, body: Body | None = None) -> list[ev.Effect]:
        """The leader's head is that of a ledger; the commit is made up where nobody looks at it."""
        ledger = ledger or LEDGER
        body = body or empty_body(beginning(), PEERS[:3])
        commit = Commit(REGISTRY.encode(body), ledger.digest, 0, (), ())
        welcome = Welcome(COORDINATOR, commit, ledger.to_bytes(), (), 0.0, 1.0)
        return self.handle(ev.LineUp(welcome, body, ledger, ()))

    def train(self, steps: int = 4) -> None:
        """Online, and so many steps into the round."""
        self.handle(ev.TrainerUp())
        self.line_up()
        self.handle(ev.DataReady(2))
        if steps:
            self.handle(ev.Progressed(2, steps, 8 * steps, 1.0, 8.0, 0.0))

    def encode(self, evidence: Evidence) -> None:
        """The trainer's answer, as the evidence has it committed to."""
        mine = evidence.commitments[self.me]
        self.handle(
            ev.Encoded(2, mine.steps, mine.tokens, mine.used, mine.sum_lr, mine.inner_loss, mine.root, mine.norms)
        )  # fmt: skip

    def commit(self, evidence: Evidence) -> None:
        """Planned, encoded and committed to."""
        self.handle(events_of(evidence)[0])
        self.encode(evidence)

    def verify(self, event: ev.Proposed | ev.CommitHeard) -> bytes:
        """The driver's answer to a Verify."""
        assert self.session.ledger is not None
        hash_ = event.body_hash if isinstance(event, ev.Proposed) else body_hash(event.commit.body)
        digest = digest_after(hash_, event.body, self.session.ledger.digest)
        self.handle(ev.Verified(hash_, digest))
        return digest


EVIDENCE = evidence_of(LEDGER, 3)
BODY = body_of(LEDGER, EVIDENCE)


# -- training --------------------------------------------------------------------------------------------------------


def test_a_seated_member_fetches_its_data_and_trains() -> None:
    script = Script()
    assert script.state() is MemberState.WAITING
    script.handle(ev.TrainerUp())
    assert script.effects(ev.LoadAnchor) == []  # whether its state is the head's nobody has said yet
    script.line_up()
    seat = LEDGER.seat_of(ME)
    assert seat is not None
    assert script.effects(ev.FetchData) == [ev.FetchData(2, seat.ranges)]
    assert script.effects(ev.LoadAnchor) == [ev.LoadAnchor(2, 0, False)]
    assert script.state() is MemberState.TRAINING
    assert script.session.view().waiting_for == "training data"
    assert script.handle(ev.DataReady(2)) == [ev.StartTraining(2, seat.ranges, 4)]
    script.handle(ev.Progressed(2, 3, 24, 1.5, 8.0, 1.0))
    assert (script.session.view().step, script.session.view().inner_loss) == (3, 1.5)
    script.handle(ev.Progressed(2, 4, 32, 1.5, 8.0, 0.0))
    assert script.state() is MemberState.READY
    assert [beat.state for beat in script.told(Heartbeat)] == [MemberState.READY]  # said at once


def test_without_a_seat_it_waits_for_one() -> None:
    script = Script(me=PEERS[9])
    script.handle(ev.TrainerUp())
    script.line_up()
    assert script.effects(ev.FetchData) == []
    assert script.state() is MemberState.WAITING
    assert script.session.view().waiting_for == "a seat in the next round"


def test_a_dead_trainer_starts_the_round_again() -> None:
    script = Script()
    script.train(2)
    script.handle(ev.TrainerDown("killed"))
    assert [beat.step for beat in script.told(Heartbeat, script.wait(1.0))] == [0]
    script.handle(ev.TrainerUp())
    assert [type(effect) for effect in script.now_did] == [ev.LoadAnchor, ev.StartTraining]


def test_what_is_encoded_outlives_the_trainer() -> None:
    script = Script()
    script.train()
    script.commit(EVIDENCE)
    script.handle(ev.TrainerDown("killed"))
    assert script.session.view().step == 4
    assert script.handle(ev.TrainerUp()) == []
    later = evidence_of(LEDGER, 3, attempt=1)
    script.handle(events_of(later)[0])
    assert [item.root for item in script.told(Commitment)] == [EVIDENCE.commitments[ME].root]


def test_reports_of_another_round_change_nothing() -> None:
    script = Script()
    script.train(1)
    for event in (
        ev.Progressed(1, 4, 32, 1.0, 1.0, 0.0), ev.DataReady(7), ev.EncodeFailed(1, "?"),
        ev.Encoded(1, 4, 32, (), 0.0, 0.0, NO_HASH, ()), ev.Applied(NO_HASH), ev.Exchanged(NO_HASH, ex.Expired()),
    ):  # fmt: skip
        assert script.handle(event) == []
    assert script.session.view().step == 1


@pytest.mark.parametrize("n_reasons", [1, 2])
def test_pauses_are_counted_by_their_reason(n_reasons: int) -> None:
    script = Script()
    script.train(1)
    assert script.effects(ev.PauseTraining, script.handle(ev.PauseAsked("user", True))) == [ev.PauseTraining(True)]
    assert script.state() is MemberState.PAUSED
    if n_reasons == 2:
        assert script.effects(ev.PauseTraining, script.handle(ev.PauseAsked("battery", True))) == []
        assert script.effects(ev.PauseTraining, script.handle(ev.PauseAsked("user", False))) == []
        assert script.session.view().paused_by == ("battery",)
    last = "battery" if n_reasons == 2 else "user"
    assert script.effects(ev.PauseTraining, script.handle(ev.PauseAsked(last, False))) == [ev.PauseTraining(False)]
    assert script.state() is MemberState.TRAINING


def test_a_pause_holds_the_start() -> None:
    script = Script()
    script.handle(ev.PauseAsked("user", True))
    script.train(0)
    assert script.effects(ev.StartTraining, script.did) == []
    script.handle(ev.PauseAsked("user", False))
    assert len(script.effects(ev.StartTraining)) == 1


# -- an attempt ------------------------------------------------------------------------------------------------------


def test_a_plan_has_delta_encoded_once_and_committed_to() -> None:
    script = Script()
    script.train(2)
    planned, _ = events_of(EVIDENCE)
    assert script.handle(planned)[0] == ev.Encode(2)
    assert script.state() is MemberState.READY
    assert script.handle(planned) == []
    script.encode(EVIDENCE)
    assert script.told(Commitment) == [EVIDENCE.commitments[ME]]
    script.handle(planned)  # told again on a new line
    assert script.told(Commitment) == [EVIDENCE.commitments[ME]]
    assert script.session.view().reachable is True


@pytest.mark.parametrize(
    "changes", [{"round": 3}, {"epoch": 1}, {"previous": NO_HASH}, {"run": PEERS[9]}, {"members": ()}]
)
def test_plans_of_something_else_are_ignored(changes: dict[str, Any]) -> None:
    script = Script()
    script.train()
    plan = replace(EVIDENCE.plan, **changes)
    assert script.handle(ev.Planned(plan, NO_HASH, b"")) == []


def test_who_has_no_step_says_so() -> None:
    script = Script()
    script.train(0)
    script.handle(events_of(EVIDENCE)[0])
    assert script.told(Refusal) == [Refusal(0, 2, 0, "has made no step yet")]


def test_who_can_not_encode_says_so() -> None:
    script = Script()
    script.train()
    script.handle(events_of(EVIDENCE)[0])
    script.handle(ev.EncodeFailed(2, "Δ is not finite " + "x" * 2000))
    (refusal,) = script.told(Refusal)
    assert refusal.reason.startswith("Δ is not finite")
    assert len(refusal.reason) <= TEXT
    script.handle(events_of(evidence_of(LEDGER, 3, attempt=1))[0])
    assert script.effects(ev.Encode) == [ev.Encode(2)]  # another attempt, another try


def test_a_plan_against_a_promise_is_declined_with_the_number_to_pass() -> None:
    script = Script()
    script.train()
    script.handle(ev.Prepared(Prepare(0, 2, 5, PEERS[20])))
    script.handle(events_of(EVIDENCE)[0])
    assert script.told(Refusal)[0].attempt == 5
    assert script.effects(ev.Encode) == []


def test_a_lower_attempt_is_declined_while_a_higher_one_runs() -> None:
    script = Script(me=PEERS[1], voter=Voter(PEERS[1], None))
    script.train()
    script.handle(events_of(evidence_of(LEDGER, 3, attempt=4, leader=PEERS[20]))[0])
    script.handle(events_of(evidence_of(LEDGER, 3, attempt=2))[0])
    assert script.told(Refusal) == [Refusal(0, 2, 4, "takes part in attempt 4 already")]


def test_a_deal_begins_the_exchange_and_its_effects_are_the_drivers() -> None:
    script = Script()
    script.train()
    script.commit(EVIDENCE)
    _, dealt = events_of(EVIDENCE)
    began = script.handle(dealt)
    assert isinstance(began[0], ev.BeginExchange)
    assert began[0].plan_hash == EVIDENCE.plan_hash
    sends = [effect.effect for effect in script.effects(ev.InExchange)]
    assert sends
    assert all(isinstance(send, ex.SendRows) for send in sends)
    assert script.state() is MemberState.EXCHANGING
    mine = [chunk for chunk, line in enumerate(proposing.lines_of(EVIDENCE, SPEC)) if line[0] == ME]
    for chunk in mine:
        for sender in PEERS[:3]:
            assert script.session.admit_row(EVIDENCE.plan_hash, sender, chunk, 10**9) != ""
    assert script.session.admit_row(NO_HASH, PEERS[1], 0, 1) == "not of the current attempt"
    assert script.handle(dealt) == []  # told again, nothing to report yet


def test_when_time_is_over_what_is_missing_is_said_once() -> None:
    script = Script()
    script.train()
    script.commit(EVIDENCE)
    script.handle(events_of(EVIDENCE)[1])
    did = script.wait(EVIDENCE.plan.exchange_s - 0.5)
    assert script.effects(ev.InExchange, did) == []
    did = script.wait(1.0)
    mine = [chunk for chunk, line in enumerate(proposing.lines_of(EVIDENCE, SPEC)) if line[0] == ME]
    missing = [effect.effect for effect in script.effects(ev.InExchange, did)]
    lacks = tuple((chunk, sender) for chunk in mine for sender in PEERS[:3])
    assert missing == ([ex.ReportMissing(lacks)] if mine else [])
    assert script.effects(ev.InExchange, script.wait(20.0)) == []


def test_a_deal_that_the_policy_does_not_give_is_declined() -> None:
    script = Script()
    script.train()
    script.commit(EVIDENCE)
    _, dealt = events_of(EVIDENCE)
    script.handle(replace(dealt, deal=replace(dealt.deal, bandwidths=())))
    (refusal,) = script.told(Refusal)
    assert "not planned ones" in refusal.reason
    assert script.effects(ev.BeginExchange) == []


def test_a_failed_attempt_ends_its_exchange_and_keeps_delta() -> None:
    script = Script()
    script.train()
    script.commit(EVIDENCE)
    script.handle(events_of(EVIDENCE)[1])
    script.handle(ev.AttemptOver(0, 2, 0, "lost somebody"))
    assert script.effects(ev.EndExchange) == [ev.EndExchange(EVIDENCE.plan_hash)]
    assert script.state() is MemberState.READY
    assert script.session.ledger == LEDGER
    assert script.handle(ev.AttemptOver(0, 1, 0, "old")) == []
    script.handle(events_of(evidence_of(LEDGER, 3, attempt=1))[0])
    assert script.effects(ev.Encode) == []
    assert len(script.told(Commitment)) == 1


def test_a_newer_plan_ends_the_older_exchange() -> None:
    script = Script()
    script.train()
    script.commit(EVIDENCE)
    script.handle(events_of(EVIDENCE)[1])
    script.handle(events_of(evidence_of(LEDGER, 3, attempt=1))[0])
    assert script.effects(ev.EndExchange) == [ev.EndExchange(EVIDENCE.plan_hash)]


# -- votes -----------------------------------------------------------------------------------------------------------


def test_a_vote_is_on_disk_before_it_is_sent_and_only_when_all_is_held() -> None:
    script = Script()
    script.train()
    event = proposed(BODY, EVIDENCE)
    (verify,) = script.effects(ev.Verify, script.handle(event))
    assert verify.result_hashes == event.propose.proposal.result_hashes
    assert verify.reducers == proposing.lines_of(EVIDENCE, SPEC)
    assert verify.holders == (PEERS[1], PEERS[2])
    assert script.told(Vote, script.did) == []
    assert script.state() is MemberState.VOTING
    digest = script.verify(event)
    (record,) = script.effects(ev.Persist)
    (vote,) = script.told(Vote)
    assert vote == Vote(0, 2, 0, COORDINATOR, event.body_hash, digest)
    assert isinstance(record.entry, Promise)
    assert (record.entry.voted_attempt, record.entry.proposal) == (0, event.propose.proposal)
    assert script.now_did.index(record) < script.now_did.index(script.effects(ev.TellLeader)[0])
    script.handle(event)  # told again on a new line
    assert script.told(Vote) == [vote]
    assert script.effects(ev.Verify) == []


def test_the_same_body_in_a_later_attempt_is_not_verified_again() -> None:
    script = Script()
    script.train()
    script.handle(proposed(BODY, EVIDENCE))
    script.verify(proposed(BODY, EVIDENCE))
    script.handle(ev.Prepared(Prepare(0, 2, 3, PEERS[20])))
    (promise,) = script.told(Promise)
    assert (promise.voted_attempt, promise.proposal) == (0, proposed(BODY, EVIDENCE).propose.proposal)
    script.handle(proposed(BODY, EVIDENCE, 3, PEERS[20]))
    assert script.effects(ev.Verify) == []
    assert [vote.attempt for vote in script.told(Vote)] == [3]


def test_another_body_takes_the_candidates_place() -> None:
    script = Script()
    script.train()
    first = proposed(BODY, EVIDENCE)
    script.handle(first)
    script.verify(first)
    second = proposed(body_of(LEDGER, EVIDENCE, seats=PEERS[:2]), EVIDENCE, 1, PEERS[20])
    script.handle(second)
    assert len(script.effects(ev.Verify)) == 1
    script.verify(second)
    assert [vote.body_hash for vote in script.told(Vote)] == [second.body_hash]
    script.handle(committed(BODY, LEDGER))  # the first one after all: its candidate may be gone
    assert len(script.effects(ev.Verify)) == 1


def test_a_wrong_body_is_refused_with_its_faults() -> None:
    script = Script()
    script.train()
    script.handle(proposed(replace(BODY, clip_factor=0.5, h=9), EVIDENCE))
    (refusal,) = script.told(Refusal)
    assert "clip_factor is not what" in refusal.reason
    assert script.effects(ev.Verify) == []


def test_who_has_no_vote_checks_all_the_same() -> None:
    script = Script(me=PEERS[9])
    script.line_up()
    event = proposed(BODY, EVIDENCE)
    assert len(script.effects(ev.Verify, script.handle(event))) == 1
    script.verify(event)
    assert script.told(Vote) == []
    script.handle(proposed(replace(BODY, h=9), EVIDENCE))
    assert script.told(Refusal) == []


def test_a_proposal_of_a_round_to_come_waits_for_the_state() -> None:
    script = Script()
    script.train()
    later = replace(BODY, round=3)
    assert script.handle(proposed(later, EVIDENCE)) == []


def test_a_proposal_of_a_round_that_is_over_is_refused_with_the_head() -> None:
    script = Script()
    script.train()
    script.handle(proposed(replace(BODY, round=1), EVIDENCE))
    assert script.told(Refusal)[0].reason == "my head is round 1 of epoch 0"


def test_results_that_nobody_has_are_a_refusal() -> None:
    script = Script()
    script.train()
    event = proposed(BODY, EVIDENCE)
    script.handle(event)
    script.handle(ev.VerifyFailed(event.body_hash, "nobody has them"))
    assert script.told(Refusal) == [Refusal(0, 2, 0, "results: nobody has them")]
    assert script.state() is MemberState.READY
    script.handle(event)
    assert len(script.effects(ev.Verify)) == 1


def test_the_observer_tells_digests_and_why_it_has_none() -> None:
    script = Script(me=PEERS[30], observer=True)
    script.line_up()
    assert script.effects(ev.FetchData, script.did) == []
    event = proposed(BODY, EVIDENCE)
    script.handle(event)
    digest = script.verify(event)
    assert script.told(StateDigest) == [StateDigest(event.body_hash, 0, digest)]
    assert script.handle(ev.Prepared(Prepare(0, 2, 1, PEERS[20]))) == []
    other = proposed(body_of(LEDGER, EVIDENCE, seats=PEERS[:2]), EVIDENCE, 1)
    script.handle(other)
    script.handle(ev.VerifyFailed(other.body_hash, "nobody has them"))
    assert script.told(Refusal)[0].reason == "results: nobody has them"


def test_promises_are_on_disk_before_they_are_sent() -> None:
    script = Script()
    script.line_up()
    did = script.handle(ev.Prepared(Prepare(0, 2, 3, PEERS[20])))
    assert isinstance(did[0], ev.Persist)
    assert isinstance(did[1], ev.TellLeader)
    script.handle(ev.Prepared(Prepare(0, 2, 2, PEERS[21])))
    assert script.told(Refusal)[0].attempt == 3
    assert script.effects(ev.Persist) == []


def test_who_lost_its_record_abstains_until_a_commit_is_applied() -> None:
    script = Script(voter=Voter(ME, None, lost=True))
    script.train()
    script.handle(proposed(BODY, EVIDENCE))
    assert "abstains" in script.told(Refusal)[0].reason
    follow(script, committed(BODY, LEDGER))
    ledger = script.session.ledger
    assert ledger is not None
    script.handle(ev.Prepared(Prepare(0, 3, 1, PEERS[20])))
    assert len(script.told(Promise)) == 1


# -- following the chain ---------------------------------------------------------------------------------------------


def follow(script: Script, heard: ev.CommitHeard) -> None:
    """A commit as the driver and the leader bring it about."""
    script.handle(heard)
    if script.effects(ev.Verify):
        script.verify(heard)
    script.handle(ev.Applied(heard.commit_hash))


def test_a_commit_is_verified_applied_and_begins_the_next_round() -> None:
    script = Script()
    script.train()
    script.commit(EVIDENCE)
    heard = committed(BODY, LEDGER)
    (verify,) = script.effects(ev.Verify, script.handle(heard))
    assert set(verify.holders) == {PEERS[1], PEERS[2]}
    assert script.state() is MemberState.APPLYING
    assert script.session.ledger == LEDGER
    script.verify(heard)
    (apply,) = script.effects(ev.Apply)
    assert (apply.commit, apply.commit_hash, apply.ledger.head) == (heard.commit, heard.commit_hash, heard.commit_hash)
    assert script.session.ledger == LEDGER  # not before it is on disk
    script.handle(ev.Applied(heard.commit_hash))
    assert script.session.ledger == apply.ledger
    assert script.effects(ev.FetchData)[0].round == 3
    assert script.effects(ev.LoadAnchor) == [ev.LoadAnchor(3, 4, False)]
    assert script.session.view().accepted == 1
    assert script.state() is MemberState.TRAINING


def test_what_was_voted_on_is_applied_without_verifying_again() -> None:
    script = Script()
    script.train()
    event = proposed(BODY, EVIDENCE)
    script.handle(event)
    script.verify(event)
    script.handle(committed(BODY, LEDGER))
    assert script.effects(ev.Verify) == []
    assert len(script.effects(ev.Apply)) == 1


def test_a_commit_while_its_proposal_is_being_verified() -> None:
    script = Script()
    script.train()
    event = proposed(BODY, EVIDENCE)
    script.handle(event)
    heard = committed(BODY, LEDGER)
    assert script.effects(ev.Verify, script.handle(heard)) == []
    script.verify(event)
    assert len(script.effects(ev.Apply)) == 1
    assert script.told(Vote) == []  # it is decided


def test_a_commit_without_a_quorum_is_refused() -> None:
    script = Script()
    script.train()
    script.handle(committed(BODY, LEDGER, voters=(PEERS[1],)))
    assert "no quorum" in script.effects(ev.Say)[0].text
    assert script.effects(ev.Verify) == []
    script.handle(committed(BODY, LEDGER))
    assert len(script.effects(ev.Verify)) == 1


@pytest.mark.parametrize("changes", [{"ledger_hash": NO_HASH}, {"voters": ()}, {"returned": leases.normalise(())}])
def test_a_commit_that_does_not_extend_the_books_is_refused(changes: dict[str, Any]) -> None:
    script = Script()
    script.train()
    body = replace(BODY, **changes)
    script.handle(committed(body, LEDGER))
    if body == BODY:
        assert len(script.effects(ev.Verify)) == 1
    else:
        assert "refused a commit of round 2" in script.effects(ev.Say)[0].text


def test_another_digest_than_the_commits_means_fetching() -> None:
    script = Script()
    script.train()
    script.handle(committed(BODY, LEDGER, digest=bytes([5]) * 32))
    script.verify(committed(BODY, LEDGER))
    assert "my digest" in script.effects(ev.Say)[0].text
    assert len(script.effects(ev.FetchState)) == 1
    assert script.session.ledger == LEDGER
    assert script.state() is MemberState.JOINING


def test_results_that_can_not_be_fetched_mean_fetching_the_state() -> None:
    script = Script()
    script.train()
    heard = committed(BODY, LEDGER)
    script.handle(heard)
    script.handle(ev.VerifyFailed(body_hash(heard.commit.body), "gone"))
    assert script.effects(ev.FetchState) == [ev.FetchState(heard.commit, heard.body)]


def chain_of(n: int) -> list[tuple[ev.CommitHeard, Ledger]]:
    """So many rounds after LEDGER."""
    ledger, chain = LEDGER, list[tuple[ev.CommitHeard, Ledger]]()
    for _ in range(n):
        body = body_of(ledger, evidence_of(ledger, 3))
        heard = committed(body, ledger)
        ledger = fold(ledger, body).at(heard.commit_hash, heard.commit.digest)
        chain.append((heard, ledger))
    return chain


def test_commits_that_come_while_one_is_applied_are_caught_up() -> None:
    (first, _), (second, _) = chain_of(2)
    script = Script()
    script.train()
    script.handle(first)
    script.handle(second)
    script.verify(first)
    script.handle(ev.Applied(first.commit_hash))
    assert len(script.effects(ev.Verify)) == 1
    script.verify(second)
    script.handle(ev.Applied(second.commit_hash))
    assert script.session.ledger is not None
    assert script.session.ledger.head == second.commit_hash


def test_a_gap_means_fetching_the_newest_state() -> None:
    (_, _), (second, after_second), (third, after_third) = chain_of(3)
    script = Script()
    script.train()
    script.handle(second)
    assert script.effects(ev.FetchState) == [ev.FetchState(second.commit, second.body)]
    script.handle(third)
    assert script.effects(ev.FetchState) == []
    script.handle(ev.StateFetched(after_second))
    assert len(script.effects(ev.Verify)) == 1  # the third extends it
    script.handle(ev.VerifyFailed(body_hash(third.commit.body), "gone"))
    script.handle(ev.StateFetched(after_third))
    assert script.session.ledger == after_third
    assert script.effects(ev.FetchData)[0].round == 5


def test_failing_to_fetch_is_tried_again_with_growing_pauses() -> None:
    script = Script(None)
    assert script.state() is MemberState.JOINING
    script.line_up()
    assert len(script.effects(ev.FetchState)) == 1
    pauses = []
    for _ in range(8):
        script.handle(ev.StateFetchFailed("no donor"))
        began = script.at
        while not script.effects(ev.FetchState):
            script.at = script.session.next_wake(Instant(script.at))
            script.handle(ev.Woke())
        pauses.append(script.at - began)
    assert pauses[:3] == [1.0, 2.0, 4.0]
    assert max(pauses) == 30.0
    script.handle(ev.StateFetched(LEDGER))
    assert script.session.ledger == LEDGER


def test_a_newcomer_that_fetched_the_head_waits_for_a_seat_and_takes_it() -> None:
    script = Script(None, me=PEERS[9])
    script.handle(ev.TrainerUp())
    script.line_up()
    script.handle(ev.StateFetched(LEDGER))
    assert script.state() is MemberState.WAITING
    body = body_of(LEDGER, EVIDENCE, seats=[*PEERS[:3], PEERS[9]])
    follow(script, committed(body, LEDGER))
    assert script.state() is MemberState.TRAINING


def test_a_state_that_only_empty_rounds_passed_by_needs_no_donor() -> None:
    """The head's commit starts from the very bytes that are held: its results are enough."""
    skipped = empty_body(LEDGER, PEERS[:3])
    between = fold(LEDGER, skipped).at(committed(skipped, LEDGER).commit_hash, LEDGER.digest)
    body = body_of(between, evidence_of(between, 3))
    heard = committed(body, between)
    head = fold(between, body).at(heard.commit_hash, heard.commit.digest)
    script = Script()
    welcome = Welcome(COORDINATOR, heard.commit, head.to_bytes(), (), 0.0, 1.0)
    script.handle(ev.LineUp(welcome, body, head, heard.signed))
    assert script.effects(ev.FetchState) == []
    script.verify(heard)
    assert script.effects(ev.Apply)[0].ledger == head
    script.handle(ev.Applied(heard.commit_hash))
    assert script.session.ledger == head


def test_a_leader_that_is_behind_is_waited_for() -> None:
    (first, after_first) = chain_of(1)[0]
    script = Script(after_first)
    script.handle(ev.TrainerUp())
    script.line_up(LEDGER)
    assert "waiting for it to catch up" in script.effects(ev.Say)[0].text
    assert script.effects(ev.FetchState) == []
    assert script.session.ledger == after_first
    assert first.body.round == 2


def test_what_a_commit_says_of_this_node_is_counted() -> None:
    script = Script()
    script.train()
    evidence = evidence_of(LEDGER, 3, peer00=None)
    follow(script, committed(body_of(LEDGER, evidence), LEDGER))
    view = script.session.view()
    assert (view.accepted, view.rejected) == (0, {"no commitment in time": 1})
    assert "did not count this node: no commitment in time" in script.effects(ev.Say, script.did)[-1].text


def test_moments_are_started_again_after_a_long_absence() -> None:
    script = Script()
    script.train()
    far = replace(LEDGER, round=LEDGER.round + 12)
    script.handle(committed(replace(BODY, previous=NO_HASH), LEDGER))
    script.handle(ev.StateFetched(far))
    assert script.effects(ev.LoadAnchor)[0].fresh_moments is True


# -- the line, leaving -----------------------------------------------------------------------------------------------


def test_heartbeats_go_out_on_time_while_the_line_is_up() -> None:
    script = Script()
    assert script.told(Heartbeat, script.wait(3.5)) == []
    script.line_up()
    assert len(script.told(Heartbeat)) == 1
    beats = script.told(Heartbeat, script.wait(5.1))
    assert len(beats) == 5
    assert (beats[0].round, beats[0].head, beats[0].state) == (2, LEDGER.head, MemberState.TRAINING)
    script.handle(ev.LineDown("reset"))
    assert script.told(Heartbeat, script.wait(3.0)) == []
    assert script.session.view().waiting_for == "the leader: reset"
    assert script.session.view().state == "offline"


def test_a_leave_is_a_last_promise() -> None:
    script = Script()
    script.train()
    script.handle(ev.Prepared(Prepare(0, 2, 3, PEERS[20])))
    persist, tell, stop = script.handle(ev.LeaveAsked("SIGTERM"))
    leave = Leave(0, 2, 3, PEERS[20], LEDGER.head, -1, None)
    assert persist == ev.Persist(leave)
    assert isinstance(tell, ev.TellLeader)
    assert script.told(Leave) == [leave]
    assert stop == ev.Stop(0, "SIGTERM")
    assert script.handle(ev.LeaveAsked("again")) == []
    script.handle(ev.Prepared(Prepare(0, 2, 9, PEERS[20])))
    assert "has left" in script.told(Refusal)[0].reason


def test_leaving_while_a_commit_is_applied_leaves_the_round_after_it() -> None:
    script = Script()
    script.train()
    script.handle(committed(BODY, LEDGER))
    script.handle(ev.LeaveAsked("SIGTERM"))
    assert script.told(Leave)[0].round == 3


def test_who_lost_its_record_goes_without_a_word() -> None:
    script = Script(voter=Voter(ME, None, lost=True))
    script.train()
    assert script.handle(ev.LeaveAsked("SIGTERM")) == [ev.Stop(0, "SIGTERM")]


def test_a_leave_is_said_again_on_a_new_line() -> None:
    leave = Leave(0, 2, -1, PeerId(""), LEDGER.head, -1, None)
    script = Script(voter=Voter(ME, leave))
    script.handle(ev.TrainerUp())
    script.line_up()
    assert script.told(Leave) == [leave]
    assert script.effects(ev.FetchData) == []  # its seat in this round is returned
    assert script.state() is MemberState.WAITING


def test_it_leaves_after_as_many_rounds_as_it_was_asked_for() -> None:
    script = Script(rounds=1)
    script.train()
    follow(script, committed(BODY, LEDGER))
    assert script.effects(ev.Stop) == [ev.Stop(0, "done: 1 rounds")]
    assert script.told(Leave)[0].round == 3


@pytest.mark.parametrize(
    ("code", "stop"),
    [("ended", 0), ("left", 0), ("refused", 5), ("superseded", 6), ("shutdown", None), ("protocol", None)],
)
def test_goodbyes(code: str, stop: int | None) -> None:
    script = Script()
    script.train()
    script.handle(ev.SaidGoodbye(Goodbye(code, "because")))
    assert script.effects(ev.Stop) == ([] if stop is None else [ev.Stop(stop, "because")])
    observer = Script(me=PEERS[30], observer=True)
    observer.line_up()
    assert observer.effects(ev.Stop, observer.handle(ev.SaidGoodbye(Goodbye("ended", "x")))) == []


def test_after_the_end_nobody_trains() -> None:
    script = Script(spec=sim_spec(n_chunks=3, work=WorkSpec(batch_tokens=8, h=4, end_rounds=1)))
    script.train()
    follow(script, committed(BODY, LEDGER))
    assert script.effects(ev.FetchData) == []
    assert script.state() is MemberState.WAITING


def test_an_empty_round_keeps_the_digest() -> None:
    script = Script()
    script.train()
    body = empty_body(LEDGER, PEERS[:3])
    follow(script, committed(body, LEDGER))
    assert body.outcome is Outcome.EMPTY
    assert script.session.ledger is not None
    assert script.session.ledger.digest == LEDGER.digest
    assert script.session.view().rejected == {}
