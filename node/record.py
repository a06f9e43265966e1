"""This node's own address record: where others reach it, and what state it holds."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace

from coordinator.rounds.ledger import Ledger
from node.config import NodeOptions
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
    """HOST:PORT that others are told: as given, or this machine's address on the way to the coordinator."""
    given_host, given_port = _split(options.advertise)
    host = given_host or options.listen.rpartition(":")[0].strip("[]")
    if host in ("0.0.0.0", "::", ""):
        host = _route_to(options.invite.hosts[0])
    return (f"{f'[{host}]' if ':' in host else host}:{given_port or port}",)


def _split(advertise: str) -> tuple[str, str]:
    """Host and port of HOST, HOST:PORT, [HOST] or [HOST]:PORT, each empty where it is not given."""
    host, colon, port = advertise.rpartition(":")
    if not colon or advertise.endswith("]"):
        return advertise.strip("[]"), ""
    return host.strip("[]"), port


def _route_to(address: str) -> str:
    """This machine's address on the route to HOST:PORT; nothing is sent."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
