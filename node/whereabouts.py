"""Where the others are: their own signed address records, from the leader's relaying or from the DHT."""

from __future__ import annotations

from collections.abc import Iterable

from node.ports import PeerFailed, Records
from protos.messages import PeerId, Record
from protos.records import fresher, open_record
from protos.signing import SignatureError
from protos.wire import WireError


class Whereabouts:
    """The freshest record of each peer that this node has come across."""

    def __init__(self, run: PeerId, records: Records) -> None:
        self._run, self._records = run, records
        self._known: dict[PeerId, Record] = {}
        self._sealed: dict[PeerId, bytes] = {}  # the records that came relayed, as their owners signed them

    def learn(self, envelopes: Iterable[bytes]) -> None:
        """Take in relayed records; one that its owner has not signed is passed over."""
        for envelope in envelopes:
            try:
                record = open_record(envelope, run=self._run)
            except (SignatureError, WireError):
                continue
            self._take(record)
            if self._known[record.peer] is record:
                self._sealed[record.peer] = envelope

    def know(self, peer: PeerId, grpc: tuple[str, ...]) -> None:
        """Take in addresses that somebody verified has told; the peer's own word, once there is one, stands over it."""
        known = self._known.get(peer)
        if known is None or known.sequence == 0:
            self._known[peer] = Record(peer, 0, grpc, (), 0, 0, b"")

    def of(self, peer: PeerId) -> Record | None:
        return self._known.get(peer)

    def all(self) -> list[Record]:
        """What is known of all peers, in peer order."""
        return [self._known[peer] for peer in sorted(self._known)]

    def envelopes(self) -> tuple[bytes, ...]:
        """The relayed records of all who can be connected to, in peer order."""
        return tuple(self._sealed[record.peer] for record in self.reachable() if record.peer in self._sealed)

    def reachable(self) -> list[Record]:
        """Records of all known peers that can be connected to, in peer order."""
        return [record for record in self.all() if record.grpc]

    async def addresses(self, peer: PeerId, *, min_sequence: int = 0) -> tuple[str, ...]:
        """Where a peer can be connected to. Raises PeerFailed if neither the leader nor the DHT has told.

        Where nothing as fresh as `min_sequence` is known, the DHT is asked, and the freshest record that there is will
        do: the peer may have published its newest one elsewhere, and mostly its addresses are still the same.
        """
        record = self._known.get(peer)
        if record is None or record.sequence < min_sequence:
            found = await self._records.find(peer, record.sequence + 1 if record else 0)
            if found is not None:
                self._take(found)
                record = self._known[peer]
        if record is None:
            raise PeerFailed(peer, "no address record, neither from the leader nor in the DHT")
        if not record.grpc:
            raise PeerFailed(peer, "it only dials out")
        return record.grpc

    def _take(self, record: Record) -> None:
        known = self._known.get(record.peer)
        if known is None or fresher(record, known):
            self._known[record.peer] = record
