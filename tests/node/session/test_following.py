"""A member's session by scripts: how it follows the chain of commits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.rounds import leases
from coordinator.rounds.events import Instant
from coordinator.rounds.ledger import Ledger, fold
from node.session import effects as fx
from node.session import events as ev
from node.session.reasons import KINDS_MOST, Reasons, kind_of
from protos.hashes import body_hash
from protos.messages import (
    MemberState,
    Vote,
    Welcome,
)
from tests.coordinator.rounds.cases import (
    COORDINATOR,
    NO_HASH,
    PEERS,
    body_of,
    empty_body,
    evidence_of,
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

# -- following the chain ---------------------------------------------------------------------------------------------


def test_a_commit_is_verified_applied_and_begins_the_next_round() -> None:
    script = Script()
    script.train()
    script.commit(EVIDENCE)
    heard = committed(BODY, LEDGER)
    (verify,) = script.effects(fx.Verify, script.handle(heard))
    assert set(verify.holders) == {PEERS[1], PEERS[2]}
    assert script.state() is MemberState.APPLYING
    assert script.session.ledger == LEDGER
    script.verify(heard)
    (apply,) = script.effects(fx.Apply)
    assert (apply.commit, apply.commit_hash, apply.ledger.head) == (heard.commit, heard.commit_hash, heard.commit_hash)
    assert script.session.ledger == LEDGER  # not before it is on disk
    script.handle(ev.Applied(heard.commit_hash))
    assert script.session.ledger == apply.ledger
    assert script.effects(fx.FetchData)[0].round == 3
    assert script.effects(fx.LoadAnchor) == [fx.LoadAnchor(3, 4, False)]
    assert script.session.view().accepted == 1
    assert script.state() is MemberState.TRAINING


def test_what_was_voted_on_is_applied_without_verifying_again() -> None:
    script = Script()
    script.train()
    event = proposed(BODY, EVIDENCE)
    script.handle(event)
    script.verify(event)
    script.handle(committed(BODY, LEDGER))
    assert script.effects(fx.Verify) == []
    assert len(script.effects(fx.Apply)) == 1


def test_a_commit_while_its_proposal_is_being_verified() -> None:
    script = Script()
    script.train()
    event = proposed(BODY, EVIDENCE)
    script.handle(event)
    heard = committed(BODY, LEDGER)
    assert script.effects(fx.Verify, script.handle(heard)) == []
    script.verify(event)
    assert len(script.effects(fx.Apply)) == 1
    assert script.told(Vote) == []  # it is decided


def test_a_commit_without_a_quorum_is_refused() -> None:
    script = Script()
    script.train()
    script.handle(committed(BODY, LEDGER, voters=(PEERS[1],)))
    assert "no quorum" in script.effects(fx.Say)[0].text
    assert script.effects(fx.Verify) == []
    script.handle(committed(BODY, LEDGER))
    assert len(script.effects(fx.Verify)) == 1


@pytest.mark.parametrize("changes", [{"ledger_hash": NO_HASH}, {"voters": ()}, {"returned": leases.normalise(())}])
def test_a_commit_that_does_not_extend_the_books_is_refused(changes: dict[str, Any]) -> None:
    script = Script()
    script.train()
    body = replace(BODY, **changes)
    script.handle(committed(body, LEDGER))
    if body == BODY:
        assert len(script.effects(fx.Verify)) == 1
    else:
        assert "refused a commit of round 2" in script.effects(fx.Say)[0].text


def test_another_digest_than_the_commits_means_fetching() -> None:
    script = Script()
    script.train()
    script.handle(committed(BODY, LEDGER, digest=bytes([5]) * 32))
    script.verify(committed(BODY, LEDGER))
    assert "my digest" in script.effects(fx.Say)[0].text
    assert len(script.effects(fx.FetchState)) == 1
    assert script.session.ledger == LEDGER
    assert script.state() is MemberState.JOINING


def test_results_that_can_not_be_fetched_mean_fetching_the_state() -> None:
    script = Script()
    script.train()
    heard = committed(BODY, LEDGER)
    script.handle(heard)
    script.handle(ev.VerifyFailed(body_hash(heard.commit.body), "gone"))
    assert [(fetch.commit, fetch.newer_than) for fetch in script.effects(fx.FetchState)] == [
        (heard.commit, LEDGER.round)
    ]


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
    assert len(script.effects(fx.Verify)) == 1
    script.verify(second)
    script.handle(ev.Applied(second.commit_hash))
    assert script.session.ledger is not None
    assert script.session.ledger.head == second.commit_hash


def test_a_gap_that_nobody_can_fill_means_fetching_the_newest_state() -> None:
    (_, _), (second, after_second), (third, after_third) = chain_of(3)
    script = Script()
    script.train()
    script.handle(second)
    (asked,) = script.effects(fx.FetchCommits)
    assert (asked.head, asked.newest) == (LEDGER.head, second)
    script.handle(ev.CommitsFetchFailed("nobody has them", gone=True))
    assert [fetch.commit for fetch in script.effects(fx.FetchState)] == [second.commit]
    script.handle(third)
    assert script.effects(fx.FetchState) == []
    script.handle(ev.StateFetched(after_second))
    assert len(script.effects(fx.Verify)) == 1  # the third extends it
    script.handle(ev.VerifyFailed(body_hash(third.commit.body), "gone"))
    script.handle(ev.StateFetched(after_third))
    assert script.session.ledger == after_third
    assert script.effects(fx.FetchData)[0].round == 5


def test_failing_to_fetch_is_tried_again_with_growing_pauses() -> None:
    script = Script(None)
    assert script.state() is MemberState.JOINING
    script.line_up()
    assert len(script.effects(fx.FetchState)) == 1
    pauses = []
    for _ in range(8):
        script.handle(ev.StateFetchFailed("no donor"))
        began = script.at
        while not script.effects(fx.FetchState):
            script.at = script.session.next_wake(Instant(script.at))
            script.handle(ev.Woke())
        pauses.append(script.at - began)
    assert pauses[:3] == [1.0, 2.0, 4.0]
    assert max(pauses) == 30.0
    assert "no donor" in script.session.view().waiting_for
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


def past_an_empty_round() -> tuple[ev.CommitHeard, Ledger]:
    """A commit after an empty round that was missed, and the books after it."""
    skipped = empty_body(LEDGER, PEERS[:3])
    between = fold(LEDGER, skipped).at(committed(skipped, LEDGER).commit_hash, LEDGER.digest)
    body = body_of(between, evidence_of(between, 3))
    heard = committed(body, between)
    head = fold(between, body).at(heard.commit_hash, heard.commit.digest)
    return heard, head


def test_a_state_that_only_empty_rounds_passed_by_needs_no_donor() -> None:
    """The head's commit starts from the very bytes that are held: its results are enough."""
    heard, head = past_an_empty_round()
    script = Script()
    welcome = Welcome(COORDINATOR, heard.commit, head.to_bytes(), (), 0.0, 1.0)
    script.handle(ev.LineUp(welcome, heard.body, head, heard.signed))
    assert script.effects(fx.FetchState) == []
    script.verify(heard)
    assert script.effects(fx.Apply)[0].ledger == head
    script.handle(ev.Applied(heard.commit_hash))
    assert script.session.ledger == head


def test_that_only_empty_rounds_passed_by_is_for_the_coordinator_to_say() -> None:
    """A stand-in may have made it all up: votes are weighed, from the held state on."""
    heard, head = past_an_empty_round()
    script = Script()
    script.handle(ev.LineUp(Welcome(PEERS[1], heard.commit, head.to_bytes(), (), 0.0, 1.0), heard.body, head, ()))
    assert script.effects(fx.Apply) + script.effects(fx.Verify) == []
    (asked,) = script.effects(fx.FetchCommits)
    assert (asked.head, asked.newest.commit_hash) == (LEDGER.head, heard.commit_hash)


def test_a_leader_that_is_behind_is_waited_for() -> None:
    (first, after_first) = chain_of(1)[0]
    script = Script(after_first)
    script.handle(ev.TrainerUp())
    script.line_up(LEDGER)
    assert "waiting for it to catch up" in script.effects(fx.Say)[0].text
    assert script.effects(fx.FetchState) == []
    assert script.session.ledger == after_first
    assert first.body.round == 2


def test_what_a_commit_says_of_this_node_is_counted() -> None:
    script = Script()
    script.train()
    evidence = evidence_of(LEDGER, 3, peer11=None)
    follow(script, committed(body_of(LEDGER, evidence), LEDGER))
    view = script.session.view()
    assert (view.accepted, view.rejected) == (0, {"no commitment in time": 1})
    assert "did not count this node: no commitment in time" in script.effects(fx.Say, script.did)[-1].text


def test_reasons_that_differ_in_their_figures_count_as_one() -> None:
    script = Script()
    script.train()
    ledger = LEDGER
    for times in (3.41, 1e30, 3.6):
        body = body_of(ledger, evidence_of(ledger, 3, peer11=None))
        reason = f"norm is {times:.3g} times the median, above 3"
        mine = tuple(replace(entry, reason=reason) if entry.peer == ME else entry for entry in body.members)
        body = replace(body, members=mine)
        body = replace(body, ledger_hash=fold(ledger, body).hash())
        heard = committed(body, ledger)
        follow(script, heard)
        assert reason in script.effects(fx.Say, script.did)[-1].text, "it is said as it is"
        assert script.session.ledger is not None
        ledger = script.session.ledger
    assert script.session.view().rejected == {"norm is … times the median, above …": 3}


def test_a_leader_that_gives_another_reason_each_time_fills_no_memory() -> None:
    reasons = Reasons()
    for n in range(200):
        reasons.note(f"because {chr(0x4E00 + n)}")
    assert len(reasons.counts()) == KINDS_MOST + 1
    assert sum(reasons.counts().values()) == 200
    assert kind_of("its rows have not come to abc123 and xyz") == kind_of("its rows have not come to defghi")
    assert kind_of("too few steps") == "too few steps"


def test_why_a_round_is_empty_is_said_once_to_who_trained_for_it() -> None:
    """Where strangers are too few every round ends so, and whoever lends a machine is to know it."""
    script = Script()
    script.train()
    ledger = LEDGER
    for round_ in (2, 3, 4):
        follow(script, committed(empty_body(ledger, PEERS[:3]), ledger))
        assert script.session.ledger is not None
        assert script.session.ledger.round == round_
        ledger = script.session.ledger
    said = [effect.text for effect in script.effects(fx.Say, script.did)]
    assert said == ["round 2 is empty: seats"]


def test_moments_are_started_again_after_a_long_absence() -> None:
    script = Script()
    script.train()
    far = replace(LEDGER, round=LEDGER.round + 12).at(bytes([8]) * 32, bytes([9]) * 32)
    script.handle(committed(replace(BODY, previous=NO_HASH, round=LEDGER.round + 12), LEDGER))
    script.handle(ev.CommitsFetchFailed("nobody has them", gone=True))
    script.handle(ev.StateFetched(far))
    assert script.effects(fx.LoadAnchor)[0].fresh_moments is True


def test_a_trainer_that_comes_while_a_commit_is_applied_waits_for_the_next_round() -> None:
    script = Script()
    script.train()
    heard = committed(BODY, LEDGER)
    script.handle(heard)
    script.handle(ev.TrainerDown("killed"))
    script.verify(heard)
    assert script.effects(fx.Apply)
    script.handle(ev.TrainerUp(0, 0.0))
    assert not script.effects(fx.LoadAnchor), "the state on disk may be the next round's already"
    script.handle(ev.Applied(heard.commit_hash))
    (load,) = script.effects(fx.LoadAnchor)
    assert load.round == heard.body.round + 1
