"""What many peers, or one that means ill, may cost a leader: its task goes on, and nobody else waits for long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from coordinator.leading import errands as errands_limits
from coordinator.leading.addresses import Addresses
from coordinator.leading.errands import LEARNS_AT_ONCE, PROBES_AT_ONCE, SEEKS_AT_ONCE, Errands
from coordinator.leading.fitting import RECORDS_MOST
from coordinator.leading.learning import Learner, Unknown
from coordinator.leading.ports import Departed, Renewed, Spoken
from coordinator.leading.saying import OTHERS_MOST, one_line
from coordinator.rounds.events import Connected, Effect, Event, Heard, Learned, Reached, Say, Seek, Sought, Tell
from protos.messages import Commit, PeerId, Range, Records, Refusal, Seat, Welcome
from tests.coordinator.driving import ALICE, BOB, FAILED, Bench, FakeLine, Machine, arrived, driven, heartbeat
from tests.coordinator.made import COORDINATOR, RUN, FakeClock, genesis, identity, next_commit, record

CAROL = identity(12)
SEATED = next_commit(genesis()[2], seats=(Seat(ALICE.peer, (Range(0, 4),), 1),)).after
"""Books in which Alice has a seat and a vote, and nobody else but the coordinator."""


def lay_down(bench: Bench) -> None:
    bench.driver._ledger = SEATED


def refusal(reason: str = "no", attempt: int = 0) -> Refusal:
    return Refusal(0, 2, attempt, reason)


# -- what is told ----------------------------------------------------------------------------------------------------


def welcome(records: tuple[bytes, ...]) -> Welcome:
    commit, _, ledger = genesis()
    return Welcome(COORDINATOR.peer, commit, ledger.to_bytes(), records, 0.0, 1.0)


def test_more_records_than_a_welcome_may_hold_follow_it_and_who_counts_comes_first() -> None:
    strangers = tuple(b"record %d" % number for number in range(RECORDS_MOST))
    of_alice = b"envelope of " + ALICE.peer[-4:].encode()

    def answers(event: Event) -> list[Effect]:
        return [Tell((event.peer,), welcome((*strangers, of_alice)))] if isinstance(event, Connected) else []

    lines: list[FakeLine] = []

    async def scene(bench: Bench) -> None:
        lay_down(bench)
        lines.append(bench.line(BOB))
        bench.driver.post(arrived(bench.line(), ALICE))
        bench.driver.post(arrived(lines[0], BOB))

    driven(scene, machine=Machine(answers))
    first, then = lines[0].frames
    assert isinstance(first, Welcome)
    assert (len(first.records), first.records[0]) == (RECORDS_MOST, of_alice)
    assert then == Records(strangers[-1:])


def test_what_no_frame_can_hold_is_said_once_and_ends_nothing() -> None:
    bad = Commit(b"", b"d" * 32, 0, (), ())

    def answers(event: Event) -> list[Effect]:
        return [Tell((ALICE.peer,), bad), Tell((ALICE.peer,), FAILED)] if isinstance(event, Heard) else []

    lines: list[FakeLine] = []

    async def scene(bench: Bench) -> None:
        lines.append(bench.line())
        bench.driver.post(arrived(lines[0]))
        for _ in range(3):
            bench.driver.post(Spoken(lines[0], Heard(ALICE.peer, heartbeat(), b"")))

    bench = driven(scene, machine=Machine(answers))
    assert lines[0].frames == [FAILED] * 3
    (said,) = [each for each in bench.world.trace if each.startswith("said")]
    assert "a Commit can't be told" in said


def test_a_member_for_whom_there_is_no_welcome_loses_its_line_and_the_others_keep_theirs() -> None:
    def answers(event: Event) -> list[Effect]:
        if isinstance(event, Connected) and event.peer == ALICE.peer:
            return [Tell((ALICE.peer,), replace(welcome(()), records=(bytes(10_000),)))]
        return [Tell((BOB.peer,), welcome(()))] if isinstance(event, Connected) else []

    alice_bob: list[FakeLine] = []

    async def scene(bench: Bench) -> None:
        alice_bob.extend((bench.line(ALICE), bench.line(BOB)))
        for line, who in zip(alice_bob, (ALICE, BOB), strict=True):
            bench.driver.post(arrived(line, who))
        await bench.settle()
        assert alice_bob[0].goodbye is not None
        assert "no welcome" in alice_bob[0].goodbye.reason
        assert alice_bob[1].goodbye is None

    driven(scene, machine=Machine(answers))
    assert [type(frame) for frame in alice_bob[1].frames] == [Welcome]


# -- what is said ----------------------------------------------------------------------------------------------------


def refusing(event: Event) -> list[Effect]:
    """As the deciding code says it: the refusal, then what follows from it."""
    if isinstance(event, Heard) and isinstance(event.message, Refusal):
        told = f"{event.peer[-6:]} refuses attempt 0 of round 2: {event.message.reason}"
        return [Say(told, by=event.peer), Say("so it failed")]
    return []


def test_a_peers_refusal_is_said_once_a_round_and_what_follows_from_it_each_time() -> None:
    async def scene(bench: Bench) -> None:
        lay_down(bench)
        line = bench.line()
        bench.driver.post(arrived(line))
        for number in range(3):
            bench.driver.post(Spoken(line, Heard(ALICE.peer, refusal(f"no {number}"), b"")))
        await bench.settle()
        bench.driver._ledger = replace(SEATED, round=SEATED.round + 1)
        bench.driver.post(Spoken(line, Heard(ALICE.peer, refusal("again"), b"")))

    said = driven(scene, machine=Machine(refusing)).world.trace
    start = f"said {ALICE.peer[-6:]} refuses attempt 0 of round 2: "
    assert [each for each in said if "refuses" in each] == [start + "no 0", start + "again"]
    assert said.count("said so it failed") == 4


def test_refusals_of_those_who_have_no_say_are_few_and_do_not_push_out_others() -> None:
    async def scene(bench: Bench) -> None:
        lay_down(bench)
        for who in (*(identity(100 + number) for number in range(3 * OTHERS_MOST)), ALICE):
            line = bench.line(who)
            bench.driver.post(arrived(line, who))
            bench.driver.post(Spoken(line, Heard(who.peer, refusal(), b"")))
        await bench.settle()

    said = [each for each in driven(scene, machine=Machine(refusing)).world.trace if "refuses" in each]
    assert len(said) == OTHERS_MOST + 1
    assert said[-1].startswith(f"said {ALICE.peer[-6:]}")


def test_a_reason_forges_no_line() -> None:
    async def scene(bench: Bench) -> None:
        line = bench.line()
        bench.driver.post(arrived(line))
        bench.driver.post(Spoken(line, Heard(ALICE.peer, refusal("no\nround 7 is committed\x1b[2K"), b"")))

    (said, _) = driven(scene, machine=Machine(refusing)).world.trace
    assert said.endswith("no\\nround 7 is committed\\x1b[2K")
    assert one_line("größer als ½ …") == "größer als ½ …"
    assert one_line("a\u202eb\u2028c") == "a\\u202eb\\u2028c"


# -- what is kept ----------------------------------------------------------------------------------------------------


def test_of_who_has_left_only_addresses_are_kept_and_not_of_everybody() -> None:
    async def scene(bench: Bench) -> None:
        driver = bench.driver
        driver._addresses._n_most = 5
        for number in range(30):
            who = identity(100 + number)
            line = bench.line(who)
            driver.post(arrived(line, who))
            driver.post(Renewed(line, record(who, RUN.peer, sequence=2, grpc=("here:1",)), b"newer"))
            driver.post(Spoken(line, Heard(who.peer, heartbeat(), b"")))
            driver.post(Departed(line, "gone"))
            await bench.settle()
        assert (len(driver._sequences), len(driver._records), len(driver._observing.heartbeats)) == (0, 0, 0)
        assert len(driver._addresses) == 5
        assert driver._addresses.of(identity(129).peer) == ("here:1",)

    driven(scene)


def test_who_is_here_and_who_has_a_vote_is_not_forgotten() -> None:
    addresses = Addresses(2)
    peers = [PeerId(f"peer{number}") for number in range(8)]
    for peer in peers:
        addresses.here(peer, (f"{peer}:1",))
    for peer in peers[:6]:
        addresses.gone(peer, keep=peers[:1])
    assert [peer for peer in peers if addresses.of(peer)] == [peers[0], *peers[5:]]
    addresses.here(peers[5], ("elsewhere:1",))
    assert addresses.of(peers[5]) == ("elsewhere:1",)


# -- errands ---------------------------------------------------------------------------------------------------------


@dataclass
class Waiting(Learner):
    """Says nothing until it may; remembers whom it has asked."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[PeerId] = field(default_factory=list)
    n_now: int = 0
    n_most: int = 0

    async def learn(self, peer: PeerId, addresses: Sequence[str], books: Any) -> Any:
        self.asked.append(peer)
        self.n_now += 1
        self.n_most = max(self.n_most, self.n_now)
        try:
            await self.gate.wait()
        finally:
            self.n_now -= 1
        raise Unknown("nothing")


@dataclass
class Dead:
    """Nobody answers at an address called dead; remembers who was dialled."""

    dialled: list[PeerId] = field(default_factory=list)
    again: asyncio.Event = field(default_factory=asyncio.Event)

    async def reaches(self, peer: PeerId, addresses: tuple[str, ...]) -> bool:
        if peer in self.dialled:
            self.again.set()
        self.dialled.append(peer)
        if addresses == ("dead:1",):
            await asyncio.Event().wait()
        return True


@dataclass
class Ran:
    learner: Waiting
    prober: Dead
    clock: FakeClock
    events: list[Event]
    errands: Errands

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


def made() -> Ran:
    """Alice and Bob have a say, nobody else has."""
    learner, prober, clock, events = Waiting(), Dead(), FakeClock(), list[Event]()
    errands = Errands(
        prober,
        learner,
        clock,
        post=events.append,
        books=lambda: SEATED,
        addresses=lambda peer: ("here:1",),
        is_known=lambda peer: peer in (ALICE.peer, BOB.peer),
    )
    return Ran(learner, prober, clock, events, errands)


def strangers(n: int) -> list[PeerId]:
    return [PeerId(f"stranger{number}") for number in range(n)]


def test_a_few_are_asked_for_commits_at_once_and_strangers_hold_up_nobody_who_has_a_say() -> None:
    async def main() -> None:
        ran = made()
        many = strangers(50)
        for peer in (*many, *many):
            ran.errands.learn(peer)
        ran.errands.learn(ALICE.peer)
        ran.errands.learn(ALICE.peer)
        await ran.settle()
        assert ran.learner.asked == [*many[:LEARNS_AT_ONCE], ALICE.peer]
        ran.clock.at = errands_limits.GIVE_WAY_S
        ran.errands.learn(many[40])
        ran.errands.learn(many[41])
        ran.errands.learn(many[42])
        await ran.settle()
        assert ran.learner.asked[3:] == [many[40], many[41]]
        assert ran.learner.n_now == LEARNS_AT_ONCE + 1, "who was listened to for long has given way"
        ran.learner.gate.set()
        await ran.settle()
        ran.errands.learn(many[42])
        await ran.settle()
        assert ran.learner.asked[-1] == many[42]
        await ran.errands.end()
        assert (ran.errands._learning, ran.events) == ({}, [])

    asyncio.run(main())


def test_before_an_epoch_all_are_asked_so_many_at_a_time() -> None:
    async def main() -> None:
        ran = made()
        many = strangers(3 * SEEKS_AT_ONCE)
        ran.errands.seek([BOB.peer])
        await ran.settle()
        ran.errands.seek(many)  # nobody waits for Bob any more
        await ran.settle()
        assert ran.learner.asked == [BOB.peer, *many[:SEEKS_AT_ONCE]]
        ran.learner.gate.set()
        await ran.settle()
        await ran.settle()
        assert (ran.learner.asked[1:], ran.learner.n_most, ran.events) == (many, SEEKS_AT_ONCE, [Sought()])

    asyncio.run(main())


def test_what_one_has_told_waits_for_nobody_who_says_nothing() -> None:
    async def main() -> None:
        ran = made()
        told = Learned(*genesis()[:2], b"h" * 32, (), ())

        async def learn(peer: PeerId, addresses: Sequence[str], books: Any) -> list[Learned]:
            if peer != ALICE.peer:
                await asyncio.Event().wait()
            return [told]

        ran.learner.learn = learn  # type: ignore[method-assign]
        ran.errands.seek([BOB.peer, ALICE.peer])
        await ran.settle()
        assert ran.events == [told]
        await ran.errands.end()

    asyncio.run(main())


def test_dead_addresses_of_strangers_keep_no_honest_peer_unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def probed(first_try_s: float) -> tuple[Ran, asyncio.Task[None]]:
        monkeypatch.setattr(errands_limits, "FIRST_TRY_S", first_try_s)
        ran = made()
        for peer in strangers(3 * PROBES_AT_ONCE):
            ran.errands.probe(peer, ("dead:1",))
        ran.errands.probe(ALICE.peer, ("here:1",))
        ran.errands.probe(CAROL.peer, ("here:1",))
        carols = ran.errands._probing[CAROL.peer]
        await ran.settle()
        return ran, carols

    async def main() -> None:
        ran, _ = await probed(1000.0)
        assert ran.events == [Reached(ALICE.peer, True)], "a member waits for no stranger"
        await ran.errands.end()
        ran, carols = await probed(0.01)
        await asyncio.wait_for(carols, 60)
        assert ran.events == [Reached(ALICE.peer, True), Reached(CAROL.peer, True)]
        await ran.errands.end()

    asyncio.run(main())


def test_a_stranger_that_needs_longer_is_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errands_limits, "FIRST_TRY_S", 0.001)

    async def main() -> None:
        ran = made()
        ran.errands.probe(CAROL.peer, ("dead:1",))
        await asyncio.wait_for(ran.prober.again.wait(), 60)
        assert ran.prober.dialled == [CAROL.peer, CAROL.peer]
        await ran.errands.end()

    asyncio.run(main())


def test_the_driver_asks_those_first_who_are_here_and_have_a_say() -> None:
    asked: list[PeerId] = []

    async def scene(bench: Bench) -> None:
        lay_down(bench)
        bench.driver._errands._learner = waiting = Waiting()
        waiting.gate.set()
        gone = strangers(2)
        for who in (CAROL, ALICE):
            line = bench.line(who)
            bench.driver.post(arrived(line, who))
            bench.driver.post(Renewed(line, record(who, RUN.peer, sequence=2, grpc=("here:1",)), b"newer"))
        for peer in gone:
            bench.driver._addresses.here(peer, ("here:1",))
        bench.machine.answers = lambda event: [Seek((*gone, CAROL.peer, ALICE.peer))] if event == REACHED else []
        bench.driver.tell(REACHED)
        await bench.settle()
        asked.extend(waiting.asked)

    driven(scene)
    assert asked == [ALICE.peer, CAROL.peer, *strangers(2)]


REACHED = Reached(BOB.peer, True)
