"""Where the coordinator and its observer are, and whom that makes a donor."""

from __future__ import annotations

import asyncio

from node.errors import Unreachable
from node.landmarks import FOUND_AT_ONCE, Landmarks
from node.whereabouts import Whereabouts
from protos.messages import Addresses, PeerId, Record
from protos.records import seal_record
from protos.signing import Identity
from tests.fakes.records import FakeTable

RUN, ME, OBSERVER, MEMBER = (Identity.from_private_bytes(bytes([n]) * 32) for n in (1, 2, 3, 4))
COORDINATOR = PeerId("coordinator")
NOBODY = PeerId("")


class Coordinator:
    """Says where it is when it is asked."""

    def __init__(self, *answers: Addresses | None) -> None:
        self.answers, self.n_asked = list(answers), 0

    async def ask(self) -> Addresses:
        self.n_asked += 1
        answer = self.answers.pop(0)
        if answer is None:
            raise Unreachable("the coordinator", [])
        return answer


def told(sequence: int, grpc: str, observer: PeerId = NOBODY, observer_grpc: tuple[str, ...] = ()) -> Addresses:
    return Addresses(sequence, (grpc,), (), observer, observer_grpc)


def made(first: Addresses, *later: Addresses | None) -> tuple[Landmarks, Whereabouts, Coordinator, FakeTable]:
    table, coordinator = FakeTable(RUN.peer), Coordinator(*later)
    whereabouts = Whereabouts(RUN.peer, table.join(ME))
    return Landmarks(ME.peer, COORDINATOR, first, coordinator.ask, whereabouts), whereabouts, coordinator, table


def sealed(of: Identity, grpc: str) -> bytes:
    return seal_record(of, RUN.peer, Record(of.peer, 1, (grpc,), (), 0, 0, b""))


def test_the_first_line_goes_where_admission_told_and_later_ones_ask() -> None:
    landmarks, _, coordinator, _ = made(told(1, "first:1"), told(2, "second:1"), None)

    async def main() -> None:
        assert await landmarks.leader() == (COORDINATOR, ("first:1",))
        assert coordinator.n_asked == 0
        assert await landmarks.leader() == (COORDINATOR, ("second:1",))
        assert await landmarks.leader() == (COORDINATOR, ("second:1",)), "nobody answered: what was known does"

    asyncio.run(main())


def test_the_observer_is_the_first_donor_and_this_node_is_none() -> None:
    landmarks, whereabouts, _, _ = made(told(1, "c:1", OBSERVER.peer, ("observer:1",)))
    whereabouts.learn([sealed(MEMBER, "member:1"), sealed(ME, "me:1")])
    assert landmarks.donors() == [(OBSERVER.peer, ("observer:1",)), (MEMBER.peer, ("member:1",))]


def test_without_a_donor_the_coordinator_is_asked_for_the_observer() -> None:
    landmarks, _, coordinator, table = made(told(1, "c:1"), told(2, "c:1", OBSERVER.peer, ("observer:1",)))
    assert asyncio.run(landmarks.find_donors([MEMBER.peer])) == [(OBSERVER.peer, ("observer:1",))]
    assert (coordinator.n_asked, table.asked) == (1, [])
    asyncio.run(landmarks.find_donors([MEMBER.peer]))
    assert coordinator.n_asked == 1, "one is known"


def test_with_the_coordinator_away_members_are_looked_for_in_the_dht() -> None:
    landmarks, _, _, table = made(told(1, "c:1"), None)
    table.write(MEMBER.peer, sealed(MEMBER, "member:1"))
    strangers = [PeerId(f"stranger {number}") for number in range(2 * FOUND_AT_ONCE)]
    members = [ME.peer, MEMBER.peer, *strangers]
    assert asyncio.run(landmarks.find_donors(members)) == [(MEMBER.peer, ("member:1",))]
    assert ME.peer not in table.asked
    assert len(table.asked) < FOUND_AT_ONCE
