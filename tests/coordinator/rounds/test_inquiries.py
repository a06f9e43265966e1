"""When senders that are gone are put out: all at once, and when nothing else is waited for."""

from __future__ import annotations

from protos.messages import Inquiry, PeerId, Redeal
from protos.runspec import RuleSpec
from tests.coordinator.rounds.cases import PEERS
from tests.coordinator.rounds.leader_script import OBSERVER, Script, exchanging
from tests.coordinator.rounds.mishaps import counted, dealt, dies, missing, proposed
from tests.sim.options import sim_spec


def three_reducers() -> tuple[Script, list[PeerId], list[PeerId]]:
    """An exchange with three reducers, one a chunk, and senders that reduce nothing."""
    script = exchanging(9, spec=sim_spec(n_chunks=3, rule=RuleSpec(replicas=1)))
    reducers = sorted(dealt(script))
    assert len(reducers) == 3
    return script, reducers, [peer for peer in PEERS[:9] if peer not in reducers]


def lives(script: Script, *dead: PeerId) -> None:
    script.keep_alive(*[peer for peer in (*PEERS[:9], OBSERVER) if peer not in dead])


def test_all_who_go_before_the_rows_of_the_others_are_there_are_out_at_once() -> None:
    script, reducers, senders = three_reducers()
    chunk = {peer: chunks[0] for peer, chunks in dealt(script).items()}
    for n_dead in range(1, 6):
        dies(script, senders[n_dead - 1])
        lives(script, *senders[:n_dead])
        asked = script.last(Inquiry).senders
        assert asked == tuple(sorted(senders[:n_dead]))
        for peer in reducers[:2]:  # the third waits for rows of others
            script.say(peer, missing(script, (chunk[peer], senders[n_dead - 1]), asked=asked))
        assert script.told(Redeal, script.did) == []
    script.say(reducers[2], missing(script, (chunk[reducers[2]], senders[0]), asked=asked))
    redeal = script.last(Redeal)
    assert (redeal.number, redeal.set_number) == (1, 1)
    out = {senders[0], senders[4]}  # what the first two lacked before was of earlier questions
    assert {entry.peer for entry in redeal.excluded} == out
    for peer in dealt(script):
        script.say(peer, missing(script, asked=script.last(Inquiry).senders))
    script.reduce()
    assert counted(proposed(script)) == set(PEERS[:9]) - out


def test_the_last_time_that_the_set_may_shrink_is_kept_for_all_who_go() -> None:
    """A reducer that dies takes with it who is gone; not so where the set has shrunk twice."""
    script, reducers, senders = three_reducers()
    gone: list[PeerId] = []
    for peer in reducers[:2]:
        gone.append(peer)
        dies(script, peer)
        lives(script, *gone)
        assert {entry.peer for entry in script.last(Redeal).excluded} == set(gone)
    victim = next(peer for peer in dealt(script) if peer != OBSERVER)
    dies(script, victim)
    lives(script, *gone, victim)
    assert victim in script.last(Redeal).lost
    assert {entry.peer for entry in script.last(Redeal).excluded} == set(gone)
    sender = next(peer for peer in senders if peer not in dealt(script) and peer not in (*gone, victim))
    dies(script, sender)
    lives(script, *gone, victim, sender)
    asked = script.last(Inquiry).senders
    assert asked == tuple(sorted((victim, sender)))
    for peer, chunks in dealt(script).items():
        script.say(peer, missing(script, *((chunks[0], each) for each in asked), asked=asked))
    assert {entry.peer for entry in script.last(Redeal).excluded} == {*gone, victim, sender}
    script.reduce()
    assert counted(proposed(script)) == set(PEERS[:9]) - {*gone, victim, sender}


def test_a_replica_that_does_not_answer_is_not_waited_for() -> None:
    script = exchanging(9, spec=sim_spec(n_chunks=1, rule=RuleSpec(replicas=3)))
    *answering, silent = sorted(dealt(script))
    sender = next(peer for peer in PEERS[:9] if peer not in dealt(script))
    dies(script, sender)
    lives(script, sender)
    for peer in answering:
        assert script.told(Redeal, script.did) == []
        script.say(peer, missing(script, (0, sender), asked=(sender,)))
    grace_s = script.spec.deadlines.gone_grace_s
    script.wait(grace_s - 0.1)
    assert script.told(Redeal, script.did) == []
    assert silent[-6:] in script.waiting_for
    script.wait(0.2)
    assert [entry.peer for entry in script.last(Redeal).excluded] == [sender]
