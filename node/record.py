"""This node's own address record: where others reach it, and what state it holds."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from coordinator.rounds.ledger import Ledger
from node.config import NodeOptions
from protos import limits
from protos.messages import PeerId, Record
from protos.records import seal_record
from protos.signing import Identity


class OwnRecord:
    """Makes the record anew when something in it has changed.

    Args:
        grpc: HOST:PORT at which this node serves.
        dht: gives its multiaddresses now.
        held: gives the ledger of the state that it holds, if any.
        run_time_s: the run's clock. Sequence numbers follow it, so that a restart goes on above the last one.
    """

    def __init__(
        self,
        identity: Identity,
        run: PeerId,
        grpc: tuple[str, ...],
        *,
        dht: Callable[[], tuple[str, ...]],
        held: Callable[[], Ledger | None],
        run_time_s: Callable[[], float],
    ) -> None:
        self._identity, self._run, self._grpc = identity, run, grpc
        self._dht, self._held, self._run_time_s = dht, held, run_time_s
        self._last: Record | None = None

    def now(self) -> Record:
        held, last = self._held(), self._last
        record = Record(
            peer=self._identity.peer,
            sequence=last.sequence if last else 0,
            grpc=self._grpc,
            dht=self._dht(),
            epoch=held.epoch if held else 0,
            round=held.round if held else 0,
            head=held.head if held else b"",
        )
        if last is None or record != last:
            self._last = record = replace(record, sequence=max(record.sequence + 1, int(self._run_time_s() * 1000)))
        return record

    def sealed(self) -> bytes:
        return seal_record(self._identity, self._run, self.now())


def advertised(options: NodeOptions, port: int) -> tuple[str, ...]:
    """HOST:PORT that others are told of this node's listener; nothing for one that only dials out."""
    given = [_split(each) for each in options.advertise.split(",")] if options.advertise else []
    ports = dict(given)
    return tuple(
        f"{f'[{host}]' if ':' in host else host}:{ports.get(host) or port}" for host in advertised_hosts(options)
    )


def advertised_hosts(options: NodeOptions) -> tuple[str, ...]:
    """The hosts that others are told: as given, or this machine's addresses on the ways to the coordinator.

    None where those are this machine's own loopback and the coordinator is elsewhere: nobody could connect to it.
    """
    if options.advertise:
        return tuple(_split(each)[0] for each in options.advertise.split(","))
    host = options.listen.rpartition(":")[0].strip("[]")
    if host in ("0.0.0.0", "::", ""):
        ways = dict.fromkeys(way for address in options.invite.hosts for way in _ways_to(address))
        if leading_out := tuple(way for way in ways if not is_loopback(way)):
            return leading_out[: limits.ADDRESSES]
        host = next(iter(ways), "127.0.0.1")
    if is_loopback(host) and not all(_is_here(address) for address in options.invite.hosts):
        return ()
    return (host,)


def is_loopback(host: str) -> bool:
    """Whether a host, as it is written, means the machine that reads it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_here(address: str) -> bool:
    """Whether HOST:PORT of an invite leads to this machine by its loopback."""
    return is_loopback(address.rpartition(":")[0].strip("[]"))


def _split(advertise: str) -> tuple[str, str]:
    """Host and port of HOST, HOST:PORT, [HOST] or [HOST]:PORT, each empty where it is not given."""
    host, colon, port = advertise.rpartition(":")
    if not colon or advertise.endswith("]"):
        return advertise.strip("[]"), ""
    return host.strip("[]"), port


def _ways_to(address: str) -> list[str]:
    """This machine's addresses on the routes to HOST:PORT, by IPv4 and by IPv6; nothing is sent."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    except OSError:
        return []
    ways: list[str] = []
    for family, kind, _, _, target in found:
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(target)
            ways.append(str(probe.getsockname()[0]))
    return ways
