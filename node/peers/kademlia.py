"""hivemind's Kademlia node made fit for strangers and for a process that is not its own; only here is it imported.

It keeps owners' records alone, and the newest of each, asserts nothing about what others answer, takes the run's clock,
and leaves logging as it was.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from importlib.resources import as_file, files
from typing import Any

from protos import limits, wire
from protos.messages import Envelope, PeerId
from protos.records import dht_key, open_record

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what it imports and we don't use
    import hivemind.dht.node
    import hivemind.dht.protocol
    import hivemind.dht.routing
    import hivemind.p2p.p2p_daemon
    import hivemind.utils.timed_storage
    from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
    from hivemind.dht.node import DHTNode
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
    from hivemind.p2p import P2P, PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
    from hivemind.utils import MSGPackSerializer
    from hivemind.utils.logging import use_hivemind_log_handler
    from hivemind.utils.multiaddr import Multiaddr

__all__ = [
    "DHTID",
    "EXPIRES_S",
    "P2P",
    "Daemon",
    "Multiaddr",
    "Node",
    "OwnersOnly",
    "P2PDaemonError",
    "PeerID",
    "Storage",
    "give_clock",
]

EXPIRES_S = 600.0
CLOCK_SLACK_S = 60.0
SEQUENCES_KEPT = 2


def _tame_hivemind() -> None:
    """Undo what importing it did to logging: its messages go where ours go, and its daemon's chatter nowhere.

    And find its daemon by a way that Python has not deprecated.
    """
    use_hivemind_log_handler("nowhere")
    logging.addLevelName(logging.WARNING, "WARNING")
    logging.getLogger("hivemind").setLevel(logging.ERROR)
    hivemind.p2p.p2p_daemon.path = lambda package, name: as_file(files(package) / name)


_tame_hivemind()


def give_clock(clock: Callable[[], float]) -> None:
    """Put a clock where hivemind looks up the time; there is one for the whole process."""
    for module in (hivemind.utils.timed_storage, hivemind.dht.protocol, hivemind.dht.node, hivemind.dht.routing):
        module.get_dht_time = clock


class OwnersOnly(RecordValidatorBase):  # type: ignore[misc]
    """Lets a record in only if the owner of its key signed it, and not for longer than records live."""

    def __init__(self, run: PeerId, clock: Callable[[], float]) -> None:
        self._run = run
        self._clock = clock

    def validate(self, record: DHTRecord) -> bool:
        try:
            value = MSGPackSerializer.loads(record.value)
            if not isinstance(value, bytes) or len(value) > limits.RECORD_BYTES:
                return False
            opened = open_record(value, run=self._run, peer=wire.decode(Envelope, value).signer)
        except Exception:  # whatever msgpack makes of bytes that anybody may send
            return False
        return bool(
            record.key == DHTID.generate(dht_key(self._run, opened.peer)).to_bytes()
            and record.subkey == MSGPackSerializer.dumps(opened.sequence)
            and record.expiration_time <= self._clock() + EXPIRES_S + CLOCK_SLACK_S
        )


class Storage(DHTLocalStorage):  # type: ignore[misc]
    """Of each owner the records with the highest sequence numbers, so that replays of old ones gather nowhere."""

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        entry = self.get(key)
        kept = entry.value.data if entry is not None and isinstance(entry.value, DictionaryDHTValue) else {}
        if not isinstance(subkey, int) or (len(kept) >= SEQUENCES_KEPT and subkey < min(kept)):
            return False
        stored: bool = super().store_subkey(key, subkey, value, expiration_time)
        entry = self.get(key)
        if entry is not None and isinstance(entry.value, DictionaryDHTValue):
            for old in sorted(entry.value.data)[:-SEQUENCES_KEPT]:
                del entry.value[old]
        return stored


class Daemon(P2P):  # type: ignore[misc]
    """hivemind's handle on its daemon; one that failed to start can be collected without a word."""

    _daemon_listen_maddr = None
    _client_listen_maddr = None


class Node(DHTNode):  # type: ignore[misc]
    """One that others may name as its own neighbour: hivemind asserts that nobody does.

    A node that went over to dialling out only is still known from before, and a liar may say it of anyone.
    """

    def _filter_blacklisted(self, peer_ids: dict[DHTID, PeerID]) -> dict[DHTID, PeerID]:
        known: dict[DHTID, PeerID] = super()._filter_blacklisted(peer_ids)
        known.pop(self.node_id, None)
        return known
