"""A member on a branch that its leader doesn't follow: it stays while that is the smaller one, and then it follows."""

from __future__ import annotations

from dataclasses import replace

from coordinator.rounds.policy import branch_key
from node.session import effects as fx
from node.session import events as ev
from tests.coordinator.rounds.cases import COORDINATOR, PEERS, after, body_of, empty_body, evidence_of
from tests.node.session.member_script import LEDGER, Script, committed


def test_a_member_that_has_strayed_follows_once_it_hears_the_books_of_a_larger_branch() -> None:
    """Nobody can ask it for its own branch, so the leader goes on; of its commits alone it takes none."""
    held = after(LEDGER, body_of(LEDGER, evidence_of(LEDGER, 3)))
    epoch = LEDGER.in_epoch(1, COORDINATOR)
    body = empty_body(epoch, PEERS[:3])
    theirs = after(epoch, body)
    script = Script(held)
    script.handle(ev.TrainerUp())
    script.line_up(theirs, body)
    assert "waiting for it to catch up" in script.effects(fx.Say)[0].text
    script.line_up(theirs, body)
    assert script.effects(fx.Say) == [], "it is said once"
    for _ in range(3):
        body = body_of(theirs, evidence_of(theirs, 3))
        heard = replace(committed(body, theirs, voters=tuple(PEERS[:3])), leader=COORDINATOR)
        script.handle(heard)
        theirs = after(theirs, body)
    assert branch_key(theirs) > branch_key(held)
    assert script.effects(fx.FetchCommits, script.did) + script.effects(fx.FetchState, script.did) == []
    script.line_up(theirs, body)
    assert script.effects(fx.FetchCommits)[0].head == held.head
    script.handle(ev.CommitsFetchFailed("nobody has any that follow it", gone=True))
    (fetched,) = script.effects(fx.FetchState)
    assert fetched.body.round == theirs.round
