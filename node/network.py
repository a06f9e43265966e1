"""Everything through which a node reaches others, up and joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields
from typing import Any

from node.addressbook import AddressBook
from node.admission import Admission, addresses_now
from node.config import NodeOptions
from node.landmarks import Landmarks
from node.outside import Outside
from node.peers.pacing import Direction, Rates
from node.ports import Peers, Records, Traffic
from node.sources import HttpSource, PeerSource
from node.stages import Stages
from node.whereabouts import Whereabouts
from protos.messages import PeerId
from protos.signing import Identity


@dataclass(frozen=True, slots=True)
class Uplink:
    """What all that goes over this node's connection has in common: its limits, and what is counted of it."""

    no_progress_s: float
    up: Direction
    down: Direction
    traffic: Traffic
    stages: Stages

    def as_options(self) -> dict[str, Any]:
        """Both ends of the tensor path take these."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True, slots=True)
class Network:
    """The ways to others."""

    uplink: Uplink
    peers: Peers
    dht: Records
    whereabouts: Whereabouts
    book: AddressBook
    landmarks: Landmarks


async def connect(
    options: NodeOptions,
    admission: Admission,
    identity: Identity,
    host: str,
    outside: Outside,
    stack: AsyncExitStack,
    *,
    no_progress_s: float,
    run_time_s: Callable[[], float],
    say: Callable[[str], None],
) -> Network:
    """Start the DHT, remember what was known of others, and have the stack close it all.

    Args:
        host: what others are told to reach this node at; empty: nobody can.
        no_progress_s: a peer that lets nothing move for so long is given up.
        run_time_s: the run's clock.
        say: takes what a contributor would want to read.

    Raises NodeError: a taken port, a helper program that doesn't start.
    """
    run, seconds = options.invite.run, outside.seconds
    uplink = Uplink(
        no_progress_s,
        Direction(Rates(options.max_up)),
        Direction(Rates(options.max_down)),
        Traffic(),
        Stages(),
    )
    peers = outside.make_peers(admission.credentials, **uplink.as_options())
    stack.push_async_callback(peers.close)
    dht = await outside.start_dht(
        identity,
        run,
        listen=options.dht,
        host=host,
        bootstrap=admission.addresses.dht,
        clock=run_time_s,
        folder=options.data,
        failed=say,
    )
    stack.push_async_callback(dht.close)
    whereabouts = Whereabouts(run, dht)
    book = AddressBook(options.data / "addresses.bin", whereabouts)
    await book.load()
    landmarks = Landmarks(
        identity.peer,
        admission.operator.coordinator,
        admission.addresses,
        lambda: addresses_now(options.invite, seconds=seconds),
        whereabouts,
    )
    return Network(uplink, peers, dht, whereabouts, book, landmarks)


def data_sources(
    options: NodeOptions, network: Network, voters: Callable[[], Sequence[PeerId]], seconds: Callable[[], float]
) -> list[PeerSource | HttpSource]:
    """Where training data is had from: other members, or else the coordinator. The observer has it all."""
    if options.observer:
        return []
    uplink, landmarks = network.uplink, network.landmarks
    return [
        PeerSource(network.peers, lambda: landmarks.find_donors(voters()), lambda: landmarks.observer, seconds),
        HttpSource(
            options.invite.hosts, seconds, down=uplink.down, traffic=uplink.traffic, no_progress_s=uplink.no_progress_s
        ),
    ]
