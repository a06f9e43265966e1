"""Where the others are: the freshest of what their owners signed, from the leader or from the DHT."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from node.ports import PeerFailed
from node.whereabouts import Whereabouts
from protos.messages import Record
from protos.records import seal_record
from protos.signing import Identity
from tests.fakes.records import FakeTable

RUN, ME, OTHER, THIRD = (Identity.from_private_bytes(bytes([n]) * 32) for n in (1, 2, 3, 4))
T = TypeVar("T")


def record(of: Identity = OTHER, sequence: int = 1, grpc: tuple[str, ...] = ("a:1",)) -> Record:
    return Record(of.peer, sequence, grpc, (), 0, 0, b"")


def relayed(*records: Record, by: Identity = OTHER) -> list[bytes]:
    return [seal_record(by, RUN.peer, each) for each in records]


def made(*published: Record, by: Identity = OTHER) -> tuple[Whereabouts, FakeTable]:
    table = FakeTable(RUN.peer)
    for each in published:
        table.write(each.peer, seal_record(by, RUN.peer, each))
    return Whereabouts(RUN.peer, table.join(ME)), table


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def test_the_freshest_relayed_record_counts_whatever_the_order() -> None:
    here, table = made()
    here.learn(relayed(record(sequence=2, grpc=("new:1",)), record(sequence=1, grpc=("old:1",))))
    assert run(here.addresses(OTHER.peer)) == ("new:1",)
    assert table.asked == []


def test_what_its_owner_has_not_signed_is_passed_over() -> None:
    here, _ = made()
    forged = seal_record(THIRD, RUN.peer, record(THIRD))
    elsewhere = seal_record(OTHER, THIRD.peer, record())
    here.learn([forged[:-1] + b"\0", elsewhere, b"", b"nonsense"])
    assert here.all() == []


def test_an_unknown_peer_is_looked_for_in_the_dht() -> None:
    here, table = made(record(sequence=3, grpc=("b:2",)))
    assert run(here.addresses(OTHER.peer, min_sequence=1)) == ("b:2",)
    assert table.asked == [OTHER.peer]
    assert run(here.addresses(OTHER.peer, min_sequence=3)) == ("b:2",)
    assert table.asked == [OTHER.peer], "it is known now"


def test_a_stale_record_is_looked_up_again() -> None:
    here, _ = made(record(sequence=9, grpc=("moved:1",)))
    here.learn(relayed(record(sequence=4, grpc=("old:1",))))
    assert run(here.addresses(OTHER.peer, min_sequence=8)) == ("moved:1",)


def test_the_freshest_there_is_does_where_nothing_as_fresh_is_found() -> None:
    here, table = made(record(sequence=5, grpc=("b:2",)))
    assert run(here.addresses(OTHER.peer, min_sequence=8)) == ("b:2",)
    table.deaf = True
    assert run(here.addresses(OTHER.peer, min_sequence=8)) == ("b:2",)
    assert len(table.asked) == 2


def test_who_is_nowhere_or_only_dials_out_can_not_be_connected_to() -> None:
    here, _ = made(record(THIRD, grpc=()), by=THIRD)
    with pytest.raises(PeerFailed, match="neither from the leader nor in the DHT"):
        run(here.addresses(OTHER.peer))
    with pytest.raises(PeerFailed, match="only dials out"):
        run(here.addresses(THIRD.peer))
    assert here.reachable() == []


def test_a_peers_own_word_stands_over_what_others_told() -> None:
    here, _ = made()
    here.know(OTHER.peer, ("told:1",))
    here.know(OTHER.peer, ("told-later:1",))
    assert run(here.addresses(OTHER.peer)) == ("told-later:1",)
    here.learn(relayed(record(sequence=1, grpc=("own:1",))))
    here.know(OTHER.peer, ("told-again:1",))
    assert run(here.addresses(OTHER.peer)) == ("own:1",)
