"""Words that differ within an exchange: claims that rows of the living have not come, and replicas that disagree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.rounds import exchanging as exchanging_of
from coordinator.rounds.attempt import Phase
from protos.messages import Moved, PeerId, Redeal
from tests.coordinator.rounds.cases import NO_HASH, PEERS
from tests.coordinator.rounds.leader_script import Script, exchanging
from tests.coordinator.rounds.mishaps import ONCE, TWICE, counted, dealt, missing, proposed

# -- claims about the living ------------------------------------------------------------------------------------------


def claimed(script: Script, reducer: PeerId, sender: PeerId) -> int:
    """A reducer says that a sender's row of its first chunk has not come."""
    chunk = dealt(script)[reducer][0]
    script.say(reducer, missing(script, (chunk, sender)))
    return chunk


def all_but(script: Script, *reducers: PeerId) -> None:
    for peer, results in script.results().items():
        if peer not in reducers:
            script.say(peer, results)


def test_a_claim_takes_the_chunk_from_the_reducer_and_the_sender_stays() -> None:
    script = exchanging(4, spec=ONCE)
    reducer = next(peer for peer, chunks in dealt(script).items() if len(chunks) > 1)
    all_but(script, reducer)
    sender = next(peer for peer in PEERS[:4] if peer != reducer)
    chunk = claimed(script, reducer, sender)
    redeal = script.last(Redeal)
    assert redeal.moved == (Moved(chunk, reducer),)
    assert (redeal.excluded, redeal.lost) == ((), ())
    assert chunk not in dealt(script)[reducer]
    assert script.rounds._out_reducers == {reducer}
    script.reduce()
    assert counted(proposed(script)) == set(PEERS[:4])


def test_whom_two_reducers_lack_in_turn_is_out() -> None:
    script = exchanging(4, spec=ONCE)
    first = next(peer for peer, chunks in dealt(script).items() if len(chunks) > 1)
    sender = next(peer for peer in PEERS[:4] if peer != first)
    all_but(script, first)
    chunk = claimed(script, first, sender)
    second = script.rounds._attempt.reducing[chunk][0]  # type: ignore[union-attr]
    all_but(script, second)
    script.say(second, missing(script, (chunk, sender)))
    redeal = script.last(Redeal)
    assert [(entry.peer, "have not come to" in entry.reason) for entry in redeal.excluded] == [(sender, True)]
    assert script.rounds._out_reducers == set()  # the first one has said the truth
    assert script.rounds._out_senders == {sender}
    script.reduce()
    assert counted(proposed(script)) == set(PEERS[:4]) - {sender}


def test_a_claim_waits_a_little_for_others_to_say_the_same() -> None:
    script = exchanging(4, spec=ONCE)
    sender, *others = PEERS[:4]
    for peer in others[:2]:
        script.say(peer, missing(script, *((chunk, sender) for chunk in dealt(script)[peer])))
    assert script.told(Redeal, script.did) == []
    assert f"lacks chunk {dealt(script)[others[0]][0]} of {sender[-6:]}" in script.waiting_for or (
        len(dealt(script)[others[0]]) > 1
    )
    script.wait(script.spec.deadlines.gone_grace_s + 0.1)
    assert [entry.peer for entry in script.last(Redeal).excluded] == [sender]
    assert script.last(Redeal).lost == ()


def test_who_lacks_everything_reduces_no_more() -> None:
    script = exchanging(4, spec=ONCE)
    deaf = PEERS[2]
    all_but(script, deaf)
    senders = [peer for peer in PEERS[:4] if peer != deaf]
    script.say(deaf, missing(script, *((c, s) for c in dealt(script)[deaf] for s in senders)))
    assert (script.last(Redeal).lost, script.last(Redeal).excluded) == ((deaf,), ())
    script.reduce()
    assert counted(proposed(script)) == set(PEERS[:4])


# -- replicas that differ ----------------------------------------------------------------------------------------------


def lying(script: Script, peer: PeerId) -> None:
    results = script.results()[peer]
    first, *rest = results.results
    script.say(peer, replace(results, results=(replace(first, hash=NO_HASH), *rest)))


def test_where_two_replicas_differ_the_next_in_line_decide() -> None:
    script = exchanging(6, spec=TWICE)
    liar = next(peer for peer, chunks in dealt(script).items() if chunks)
    chunk = dealt(script)[liar][0]
    honest = next(p for p in script.rounds._attempt.reducing[chunk] if p != liar)  # type: ignore[union-attr]
    lying(script, liar)
    all_but(script, liar)
    redeal = script.last(Redeal)
    assert redeal.moved == tuple(sorted([Moved(chunk, liar), Moved(chunk, honest)], key=lambda m: m.reducer))
    assert redeal.lost == ()
    script.reduce()
    assert script.last(Redeal).lost == (liar,)
    assert script.rounds._out_reducers == {liar}
    script.reduce()
    body = proposed(script)
    assert liar not in {entry.peer for entry in body.reducers}
    assert counted(body) == set(PEERS[:6])


def test_replicas_that_differ_on_more_chunks_than_a_redeal_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanging_of, "LACKS", 2)
    script = exchanging(6, spec=TWICE)
    liar = max(dealt(script), key=lambda peer: len(dealt(script)[peer]))
    assert len(dealt(script)[liar]) > 1

    def report() -> None:
        for peer, results in sorted(script.results().items(), key=lambda item: item[0] == liar):
            lies = tuple(replace(each, hash=NO_HASH) for each in results.results)
            script.say(peer, replace(results, results=lies) if peer == liar else results)

    report()
    assert len(script.last(Redeal).moved) == 2
    for _ in range(4):
        if script.phase() is Phase.EXCHANGE:
            report()
    assert script.rounds._out_reducers == {liar}
    assert liar not in {entry.peer for entry in proposed(script).reducers}


def test_results_that_are_longer_than_any_contribution_are_not_proposed() -> None:
    script = exchanging(4, spec=ONCE)
    liar = next(iter(dealt(script)))
    results = script.results()
    too_long = tuple(replace(result, norm_sq=1e9) for result in results[liar].results)
    for peer in results:
        script.say(peer, replace(results[peer], results=too_long) if peer == liar else results[peer])
    assert script.last(Redeal).lost == (liar,)
    script.reduce()
    assert liar not in {entry.peer for entry in proposed(script).reducers}
