"""Several that reduce the same chunks: who is waited for, and who is left out."""

from __future__ import annotations

from dataclasses import replace

from coordinator.rounds.attempt import Phase
from coordinator.rounds.events import Disconnected
from protos.hashes import plan_hash
from protos.messages import Body, Lack, Missing, PeerId, Plan, Propose, Redeal, Refusal
from tests.coordinator.rounds.cases import NO_HASH, PEERS
from tests.coordinator.rounds.leader_script import OBSERVER, Script, exchanging
from tests.coordinator.rounds.mishaps import answer, unable


def reducers_of(script: Script) -> list[tuple[PeerId, int]]:
    body = script.registry.decode(Body, script.last(Propose).proposal.body)
    return [(entry.peer, entry.n_chunks) for entry in body.reducers]


def test_everyone_reduces_everything_and_is_waited_for() -> None:
    script = exchanging(3)
    results = script.results()
    assert {len(item.results) for item in results.values()} == {3}
    script.say(PEERS[0], results[PEERS[0]])
    script.say(PEERS[1], results[PEERS[1]])
    assert script.waiting_for == "results of peer13"
    script.say(PEERS[2], results[PEERS[2]])
    assert reducers_of(script) == [(peer, 3) for peer in PEERS[:3]]


def test_a_replica_that_can_not_combine_is_in_nobodys_way() -> None:
    script = exchanging(3)
    unable(script, PEERS[0])
    script.say(PEERS[1], script.results()[PEERS[1]])
    assert script.phase() is Phase.EXCHANGE
    script.say(PEERS[2], script.results()[PEERS[2]])
    assert reducers_of(script) == [(PEERS[1], 3), (PEERS[2], 3)]


def test_a_broken_line_is_not_waited_for_once_enough_replicas_agree() -> None:
    script = exchanging(4)
    for peer in PEERS[:2]:  # f + 1: one of them is honest
        script.say(peer, script.results()[peer])
    script.say(PEERS[2], script.results()[PEERS[2]])
    assert script.phase() is Phase.EXCHANGE
    script.handle(Disconnected(PEERS[3], "reset"))
    assert reducers_of(script) == [(peer, 3) for peer in PEERS[:3]]


def test_a_single_word_waits_for_who_may_come_back() -> None:
    script = exchanging(3)
    script.say(PEERS[0], script.results()[PEERS[0]])
    unable(script, PEERS[1])
    script.handle(Disconnected(PEERS[2], "reset"))
    assert script.phase() is Phase.EXCHANGE
    script.wait(script.spec.deadlines.gone_grace_s + 0.1)
    assert script.last(Redeal).lost == (PEERS[1], PEERS[2])
    script.reduce()  # a single word would not do while there is a reserve
    assert reducers_of(script) == [(PEERS[0], 3), (OBSERVER, 3)]


def test_a_slow_replica_is_waited_for_only_a_little_once_enough_agree() -> None:
    script = exchanging(3)
    for peer in PEERS[:2]:
        script.say(peer, script.results()[peer])
    script.wait(script.spec.deadlines.gone_grace_s - 0.1)
    assert script.phase() is Phase.EXCHANGE
    script.wait(0.2)
    assert reducers_of(script) == [(peer, 3) for peer in PEERS[:2]]


def test_a_sender_that_dies_before_enough_have_its_rows_is_out_on_all_chunks() -> None:
    script = exchanging(3)
    script.say(PEERS[0], script.results()[PEERS[0]])
    script.handle(Disconnected(PEERS[2], "reset"))
    script.wait(script.spec.deadlines.gone_grace_s + 0.1)
    assert script.waiting_for == "word of peer12 on the rows of peer13, gone"
    script.say(PEERS[1], answer(script, PEERS[2]))
    redeal = script.last(Redeal)
    assert [out.peer for out in redeal.excluded] == [PEERS[2]]
    assert (redeal.number, redeal.set_number) == (1, 1)
    script.reduce()
    body = script.registry.decode(Body, script.last(Propose).proposal.body)
    assert [(entry.counted, entry.reason) for entry in body.members] == [
        (True, ""), (True, ""), (False, "lost in the exchange: gone before all its rows were with peer12"),
    ]  # fmt: skip
    assert body.attempt == 0


def test_a_replica_that_differs_from_the_others_is_left_out() -> None:
    script = exchanging(3)
    results = script.results()
    first, *rest = results[PEERS[1]].results
    script.say(PEERS[0], results[PEERS[0]])
    script.say(PEERS[1], replace(results[PEERS[1]], results=(replace(first, hash=NO_HASH), *rest)))
    script.say(PEERS[2], results[PEERS[2]])
    assert script.last(Redeal).lost == (PEERS[1],)
    assert script.rounds._out_reducers == {PEERS[1]}
    assert reducers_of(script) == [(PEERS[0], 3), (PEERS[2], 3)]


def test_who_gives_its_rows_to_itself_alone_does_not_decide_alone() -> None:
    """Of its own reduction there would be one word only, while the others have said whose rows they lack."""
    script = exchanging(4)
    plan = plan_hash(script.registry.encode(script.last(Plan)))
    script.say(PEERS[3], script.results()[PEERS[3]])
    for peer in PEERS[:3]:
        assert script.phase() is Phase.EXCHANGE
        script.say(peer, Missing(plan, tuple(Lack(chunk, PEERS[3]) for chunk in range(3))))
    assert script.told(Propose, script.did) == []
    assert [out.peer for out in script.last(Redeal).excluded] == [PEERS[3]]
    assert (script.rounds._out_senders, script.rounds._out_reducers) == ({PEERS[3]}, set())


def test_whom_one_reducer_can_not_hear_is_in_nobodys_way() -> None:
    script = exchanging(4)
    plan = plan_hash(script.registry.encode(script.last(Plan)))
    script.say(PEERS[0], Missing(plan, (Lack(0, PEERS[3]),)))
    for peer in PEERS[1:4]:
        script.say(peer, script.results()[peer])
    assert reducers_of(script) == [(peer, 3) for peer in PEERS[1:4]]


def test_who_refuses_the_deal_is_left_out() -> None:
    script = exchanging(4)
    script.say(PEERS[1], Refusal(0, 2, 0, "the excluded are not those that the gate gives"))
    for peer in (PEERS[0], *PEERS[2:4]):
        script.say(peer, answer(script, PEERS[1]))
    assert [out.peer for out in script.last(Redeal).excluded] == [PEERS[1]]
    assert script.last(Redeal).lost == (PEERS[1],)
    for peer in (PEERS[0], *PEERS[2:4]):
        script.say(peer, script.results()[peer])
    assert reducers_of(script) == [(peer, 3) for peer in (PEERS[0], *PEERS[2:4])]


def test_results_that_are_none_are_the_reducers_fault() -> None:
    script = exchanging(3)
    results = script.results()
    liar, *others = results
    for peer in others:
        script.say(peer, results[peer])
    script.say(liar, replace(results[liar], set_hash=NO_HASH))
    assert script.rounds._out_reducers == {liar}
    assert reducers_of(script) == [(peer, 3) for peer in others]
