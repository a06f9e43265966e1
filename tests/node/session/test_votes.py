"""A member's session by scripts: what it promises, checks and signs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from aggregation import exchange as ex
from aggregation.codec import frame_bytes
from coordinator.rounds import proposing
from coordinator.rounds.proposing import Evidence
from coordinator.rounds.voter import Voter
from node.session import effects as fx
from node.session import events as ev
from protos.messages import (
    MemberState,
    PeerId,
    Prepare,
    Promise,
    Refusal,
    StateDigest,
    Vote,
)
from tests.coordinator.rounds.cases import (
    COORDINATOR,
    NO_HASH,
    PEERS,
    SPEC,
    body_of,
    evidence_of,
)
from tests.node.session.member_script import (
    BODY,
    EVIDENCE,
    LEDGER,
    ME,
    Script,
    committed,
    events_of,
    follow,
    proposed,
)

ROW_BYTES = frame_bytes(SPEC.codec.name, SPEC.codec.chunk_values, SPEC.codec.block)

# -- votes -----------------------------------------------------------------------------------------------------------


def test_a_vote_is_on_disk_before_it_is_sent_and_only_when_all_is_held() -> None:
    script = Script()
    script.train()
    event = proposed(BODY, EVIDENCE)
    (verify,) = script.effects(fx.Verify, script.handle(event))
    assert verify.result_hashes == event.propose.proposal.result_hashes
    assert verify.plan_hash == event.plan_hash
    assert verify.reducers == proposing.lines_of(EVIDENCE, SPEC)
    assert verify.holders == (PEERS[1], PEERS[2])
    assert script.told(Vote, script.did) == []
    assert script.state() is MemberState.VOTING
    digest = script.verify(event)
    (record,) = script.effects(fx.Persist)
    (vote,) = script.told(Vote)
    assert vote == Vote(0, 2, 0, COORDINATOR, event.body_hash, digest)
    assert isinstance(record.entry, Promise)
    assert (record.entry.voted_attempt, record.entry.proposal) == (0, event.propose.proposal)
    assert script.now_did.index(record) < script.now_did.index(script.effects(fx.TellLeader)[0])
    script.handle(event)  # told again on a new line
    assert script.told(Vote) == [vote]
    assert script.effects(fx.Verify) == []


def test_the_same_body_in_a_later_attempt_is_not_verified_again() -> None:
    script = Script()
    script.train()
    script.handle(proposed(BODY, EVIDENCE))
    script.verify(proposed(BODY, EVIDENCE))
    script.leaders_fall_silent()
    script.handle(ev.Prepared(Prepare(0, 2, 3, PEERS[20])))
    (promise,) = script.told(Promise)
    assert (promise.voted_attempt, promise.proposal) == (0, proposed(BODY, EVIDENCE).propose.proposal)
    script.handle(proposed(BODY, EVIDENCE, 3, PEERS[20]))
    assert script.effects(fx.Verify) == []
    assert [vote.attempt for vote in script.told(Vote)] == [3]


def test_another_body_takes_the_candidates_place() -> None:
    script = Script()
    script.train()
    first = proposed(BODY, EVIDENCE)
    script.handle(first)
    script.verify(first)
    script.leaders_fall_silent()
    second = proposed(body_of(LEDGER, EVIDENCE, seats=PEERS[:2]), EVIDENCE, 1, PEERS[20])
    script.handle(second)
    assert len(script.effects(fx.Verify)) == 1
    script.verify(second)
    assert [vote.body_hash for vote in script.told(Vote)] == [second.body_hash]
    script.handle(committed(BODY, LEDGER))  # the first one after all: its candidate may be gone
    assert len(script.effects(fx.Verify)) == 1


def test_a_wrong_body_is_refused_with_its_faults() -> None:
    script = Script()
    script.train()
    script.handle(proposed(replace(BODY, clip_factor=0.5, h=9), EVIDENCE))
    (refusal,) = script.told(Refusal)
    assert "clip_factor is not what" in refusal.reason
    assert script.effects(fx.Verify) == []


def test_who_has_no_vote_checks_all_the_same() -> None:
    script = Script(me=PEERS[9])
    script.line_up()
    event = proposed(BODY, EVIDENCE)
    assert len(script.effects(fx.Verify, script.handle(event))) == 1
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
    assert len(script.effects(fx.Verify)) == 1


def test_the_observer_tells_digests_and_why_it_has_none() -> None:
    script = Script(me=PEERS[30], observer=True)
    script.line_up()
    assert script.effects(fx.FetchData, script.did) == []
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
    script.leaders_fall_silent()
    did = script.handle(ev.Prepared(Prepare(0, 2, 3, PEERS[20])))
    assert isinstance(did[0], fx.Persist)
    assert isinstance(did[1], fx.TellLeader)
    script.handle(ev.Prepared(Prepare(0, 2, 2, PEERS[21])))
    assert script.told(Refusal)[0].attempt == 3
    assert script.effects(fx.Persist) == []


def test_who_lost_its_record_abstains_until_a_commit_is_applied() -> None:
    script = Script(voter=Voter(ME, None, lost=True))
    script.train()
    script.handle(proposed(BODY, EVIDENCE))
    assert "abstains" in script.told(Refusal)[0].reason
    follow(script, committed(BODY, LEDGER))
    ledger = script.session.ledger
    assert ledger is not None
    script.leaders_fall_silent()
    script.handle(ev.Prepared(Prepare(0, 3, 1, PEERS[20])))
    assert len(script.told(Promise)) == 1


def test_who_lost_its_record_abstains_up_to_the_newest_round_that_any_leader_names() -> None:
    """It may have voted there: that it does not follow that leader says nothing of what it has signed."""
    script = Script(voter=Voter(ME, None, lost=True))
    script.train()
    other = replace(LEDGER, round=7, head=bytes([9]) * 32)
    script.session._why_stay = lambda *_: "it is not followed"  # type: ignore[method-assign]
    script.line_up(other)
    del script.session._why_stay
    follow(script, committed(BODY, LEDGER))
    script.leaders_fall_silent()
    script.handle(ev.Prepared(Prepare(0, 3, 1, PEERS[20])))
    assert script.told(Promise) == []


# -- results that are not what their reducers signed ---------------------------------------------------------------


def exchanging(evidence: Evidence) -> Script:
    """In the exchange of this evidence's plan, as a sender and a reducer."""
    script = Script()
    script.train()
    script.commit(evidence)
    script.handle(events_of(evidence)[1])
    assert script.state() is MemberState.EXCHANGING
    return script


def combine(script: Script, evidence: Evidence, chunk: int) -> None:
    """All rows of a chunk come, and this member combines them to what its own report in the evidence says."""
    for sender in evidence.included():
        script.session.admit_row(evidence.plan_hash, sender, chunk, ROW_BYTES)
        for happened in (ex.RowArrived(sender, chunk), ex.RowChecked(sender, chunk, "")):
            script.handle(ev.Exchanged(evidence.plan_hash, happened))
    mine = evidence.results[ME].results[chunk]
    script.handle(ev.Exchanged(evidence.plan_hash, ex.Combined(chunk, mine.hash, mine.norm_sq)))


def said_otherwise(evidence: Evidence, chunk: int, peers: Sequence[PeerId], **changes: Any) -> Evidence:
    """Without this member's report, and with these peers' of a chunk changed."""
    results = {peer: evidence.results[peer] for peer in peers}
    for peer, item in results.items():
        listed = tuple(replace(each, **changes) if each.chunk == chunk else each for each in item.results)
        results[peer] = replace(item, results=listed)
    return replace(evidence, results=results)


@pytest.mark.parametrize("changes", [{"hash": NO_HASH}, {"norm_sq": 0.25}])
@pytest.mark.parametrize("late", [False, True])
def test_a_result_that_is_not_what_this_member_combined_has_no_vote(changes: dict[str, Any], late: bool) -> None:
    """The leader may have proposed without this reducer's word: it was slow, or was left out on purpose."""
    lie = said_otherwise(EVIDENCE, 1, PEERS[1:2], **changes)
    event = proposed(body_of(LEDGER, lie), lie)
    script = exchanging(EVIDENCE)
    if not late:
        combine(script, EVIDENCE, 1)
    script.handle(event)
    if late:
        assert len(script.effects(fx.Verify)) == 1
        combine(script, EVIDENCE, 1)
        script.verify(event)
    assert script.told(Vote, script.did) == []
    (refusal,) = script.told(Refusal)
    assert refusal.reason.endswith("the result of chunk 1 by peer12 is not what its rows give here")


def test_what_came_of_another_set_is_not_compared() -> None:
    script = exchanging(EVIDENCE)
    combine(script, EVIDENCE, 1)
    other = evidence_of(LEDGER, 3, attempt=1)
    lie = said_otherwise(other, 1, PEERS[:3], hash=NO_HASH)
    event = proposed(body_of(LEDGER, lie), lie, 1)
    script.handle(event)
    assert len(script.effects(fx.Verify)) == 1
    script.verify(event)
    assert len(script.told(Vote)) == 1


def test_a_vote_vouches_for_the_norms_and_asks_first_whose_result_it_is() -> None:
    alone = said_otherwise(EVIDENCE, 1, PEERS[2:3], norm_sq=0.25)
    script = Script()
    script.train()
    (verify,) = script.effects(fx.Verify, script.handle(proposed(body_of(LEDGER, alone), alone)))
    assert verify.norms == (0.5, 0.25, 0.5)
    assert [line[0] for line in verify.reducers] == [PEERS[2]] * 3
    assert [sorted(line) for line in verify.reducers] == [PEERS[:3]] * 3
    script = Script()
    script.train()
    script.handle(committed(BODY, LEDGER))  # a quorum vouches for these
    assert script.effects(fx.Verify)[0].norms == ()
