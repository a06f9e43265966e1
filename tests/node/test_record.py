"""This node's own record: a new number for news only, and the address that others are told."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import NoReturn

import pytest

from coordinator.rounds.ledger import Ledger, genesis
from node.config import NodeOptions
from node.record import OwnRecord, advertised
from protos.invite import Invite
from protos.records import open_record
from protos.signing import Identity

RUN, ME = (Identity.from_private_bytes(bytes([n]) * 32) for n in (1, 2))


class Node:
    """What a record is made of."""

    def __init__(self) -> None:
        self.ledger: Ledger | None = None
        self.dht: tuple[str, ...] = ()
        self.run_time_s = 5.0
        self.own = OwnRecord(
            ME, RUN.peer, ("a:1",), dht=lambda: self.dht, held=lambda: self.ledger, run_time_s=lambda: self.run_time_s
        )


def test_what_has_not_changed_keeps_its_number() -> None:
    node = Node()
    first = node.own.now()
    node.run_time_s += 60
    assert node.own.now() == first
    assert open_record(node.own.sealed(), run=RUN.peer, peer=ME.peer) == first


def test_what_has_changed_gets_a_higher_one_that_follows_the_runs_clock() -> None:
    node = Node()
    first = node.own.now()
    assert (first.sequence, first.epoch, first.round, first.head) == (5000, 0, 0, b"")
    node.ledger = genesis(RUN.peer, ME.peer).at(b"h" * 32, b"d" * 32)
    second = node.own.now()
    assert (second.sequence, second.head) == (5001, b"h" * 32), "the clock stands still, the number doesn't"
    node.run_time_s, node.dht = 9.0, ("/ip4/127.0.0.1/tcp/1",)
    third = node.own.now()
    assert (third.sequence, third.dht) == (9000, node.dht)
    node.run_time_s, node.ledger = 1.0, None
    assert node.own.now().sequence == 9001, "nor does it go back"


@pytest.mark.parametrize(
    ("advertise", "listen", "told"),
    [
        ("", "192.0.2.7:0", "192.0.2.7:4711"),
        ("", "[2001:db8::7]:0", "[2001:db8::7]:4711"),
        ("node.example", "0.0.0.0:0", "node.example:4711"),
        ("node.example:99", "0.0.0.0:0", "node.example:99"),
        ("[2001:db8::7]:99", "0.0.0.0:0", "[2001:db8::7]:99"),
        ("[2001:db8::7]", "0.0.0.0:0", "[2001:db8::7]:4711"),
        ("", "0.0.0.0:0", "127.0.0.1:4711"),
    ],
)
def test_others_are_told_what_was_given_or_how_this_machine_reaches_the_coordinator(
    advertise: str, listen: str, told: str
) -> None:
    options = NodeOptions(
        invite=Invite(RUN.peer, ("127.0.0.1:8470",)), data=Path(), threads=1, listen=listen, advertise=advertise
    )
    assert advertised(options, 4711) == (told,)


def test_loopback_is_told_to_nobody_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object, **__: object) -> NoReturn:
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", lost)
    options = NodeOptions(invite=Invite(RUN.peer, ("nowhere.invalid:1",)), data=Path(), threads=1)
    assert advertised(options, 1) == (), "the node only dials out"
    given = NodeOptions(invite=options.invite, data=Path(), threads=1, listen="127.0.0.1:0")
    assert advertised(given, 1) == (), "whatever it listens at"


def test_of_several_ways_to_the_coordinator_the_first_that_leads_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"name.invalid": "127.0.1.1", "192.0.2.9": "192.0.2.4"}

    class Probe:
        def __init__(self, *_: object) -> None:
            self.host = ""

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def connect(self, target: tuple[str, int]) -> None:
            self.host = ways[target[0]]

        def getsockname(self) -> tuple[str, int]:
            return self.host, 1

    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, type: [(2, type, 0, "", (host, port))])
    monkeypatch.setattr(socket, "socket", Probe)
    options = NodeOptions(invite=Invite(RUN.peer, ("name.invalid:1", "192.0.2.9:1")), data=Path(), threads=1)
    assert advertised(options, 7) == ("192.0.2.4:7",)
