"""A member's session by scripts: what it promises, checks and signs."""

from __future__ import annotations

from dataclasses import replace

from coordinator.rounds import proposing
from coordinator.rounds.voter import Voter
from node.session import events as ev
from protos.messages import (
    MemberState,
    Prepare,
    Promise,
    Refusal,
    StateDigest,
    Vote,
)
from tests.coordinator.rounds.cases import (
    COORDINATOR,
    PEERS,
    SPEC,
    body_of,
)
from tests.node.session.member_script import (
    BODY,
    EVIDENCE,
    LEDGER,
    ME,
    Script,
    committed,
    follow,
    proposed,
)

# -- votes -----------------------------------------------------------------------------------------------------------


def test_a_vote_is_on_disk_before_it_is_sent_and_only_when_all_is_held() -> None:
    script = Script()
    script.train()
    event = proposed(BODY, EVIDENCE)
    (verify,) = script.effects(ev.Verify, script.handle(event))
    assert verify.result_hashes == event.propose.proposal.result_hashes
    assert verify.plan_hash == event.plan_hash
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
