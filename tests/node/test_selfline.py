"""A stand-in's line to itself: its session's words reach its rounds, whatever orders they carry."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from coordinator.leading.ports import Arrived, Inbound, Spoken
from coordinator.rounds.events import Heard
from node.selfline import SelfOpener
from protos import limits, wire
from protos.messages import Order, PeerId, Promise, Proposal, Record, Signed
from protos.orders import Kind, seal_order
from protos.records import seal_record
from protos.sealer import KeySealer
from protos.signing import Identity
from tests.coordinator.made import COORDINATOR, RUN, genesis, next_commit
from tests.node.test_leaderline import HELLO

ME = Identity.from_private_bytes(bytes([9]) * 32)


class Inbox:
    def __init__(self) -> None:
        self.items: list[Inbound] = []

    def post(self, item: Inbound) -> None:
        self.items.append(item)

    async def room(self) -> None: ...


def test_a_promise_hands_over_a_proposal_with_the_coordinators_order() -> None:
    """The coordinator proposed a pause, one voted for it, the coordinator died, and that one stands in."""
    pause = seal_order(COORDINATOR, Order(RUN.peer, 1, str(Kind.PAUSE), PeerId(""), 0, b"", ""))
    body = replace(next_commit(genesis()[2]).body, orders=(pause,))
    promise = Promise(0, 1, 1, ME.peer, bytes(32), 0, Proposal(wire.encode(body), b"", b"", (), ()))
    record = seal_record(ME, RUN.peer, Record(ME.peer, 1, (), (), 0, 0, bytes(32)))
    inbox = Inbox()

    async def main() -> None:
        opener = SelfOpener(RUN.peer, ME.peer, lambda: inbox, lambda: 1.0, lambda: 0.0, coordinator=COORDINATOR.peer)
        line = await opener.open_line(ME.peer, ())
        await line.send(replace(HELLO, protocol=limits.PROTOCOL, record=record))
        await line.send(Signed(KeySealer(ME, RUN.peer).seal(promise)))
        await line.close()

    asyncio.run(main())
    arrived, spoken, _ = inbox.items
    assert isinstance(arrived, Arrived)
    assert isinstance(spoken, Spoken)
    assert isinstance(spoken.event, Heard)
    assert (spoken.event.message, [each.envelope for each in spoken.event.orders]) == (promise, [pause])
