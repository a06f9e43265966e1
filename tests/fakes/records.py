"""The DHT in memory: one table for all nodes, with what a stranger may write into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from protos.messages import PeerId, Record
from protos.records import open_record, seal_record
from protos.signing import Identity, SignatureError
from protos.wire import WireError


@dataclass
class FakeTable:
    """What lies under each peer's key: envelopes, whoever wrote them."""

    run: PeerId
    envelopes: dict[PeerId, list[bytes]] = field(default_factory=dict)
    deaf: bool = False  # nothing is found, as during a partition
    asked: list[PeerId] = field(default_factory=list)  # whom somebody looked for

    def join(self, identity: Identity) -> FakeRecords:
        return FakeRecords(self, identity)

    def write(self, key: PeerId, envelope: bytes) -> None:
        self.envelopes.setdefault(key, []).append(envelope)


class FakeRecords:
    """The port `Records` on a FakeTable."""

    def __init__(self, table: FakeTable, identity: Identity) -> None:
        self._table = table
        self._identity = identity
        self._dials_out = False

    async def publish(self, record: Record) -> None:
        self._table.write(record.peer, seal_record(self._identity, self._table.run, record))

    async def find(self, peer: PeerId, min_sequence: int) -> Record | None:
        best: Record | None = None
        self._table.asked.append(peer)
        for envelope in [] if self._table.deaf else self._table.envelopes.get(peer, []):
            try:
                record = open_record(envelope, run=self._table.run, peer=peer)
            except (SignatureError, WireError):
                continue
            if record.sequence >= max(min_sequence, best.sequence if best else 0):
                best = record
        return best

    @property
    def alone(self) -> bool:
        return self._table.deaf

    async def join(self, bootstrap: Sequence[str]) -> bool:
        return not self._table.deaf

    def addresses(self) -> tuple[str, ...]:
        return () if self._dials_out else (f"/ip4/127.0.0.1/tcp/1/p2p/{self._identity.peer}",)

    async def dial_out_only(self) -> None:
        self._dials_out = True

    async def close(self) -> None:
        pass
