"""DHT records: one owner's addresses and held state, signed by that owner, below a kilobyte."""

from __future__ import annotations

from protos import limits
from protos.messages import PeerId, Record
from protos.signing import Identity, Purpose, SignatureError, seal, unseal
from protos.wire import WireError, decode, encode


def dht_key(run: PeerId, peer: PeerId) -> str:
    """Where in the DHT the record of a peer of a run is."""
    return f"barnraise/v1/{run}/peer/{peer}"


def seal_record(identity: Identity, run: PeerId, record: Record) -> bytes:
    """The envelope to publish.

    Raises WireError where it would exceed `limits.RECORD_BYTES` (too many or too long addresses), SignatureError for
    another peer's record.
    """
    if record.peer != identity.peer:
        raise SignatureError(f"{identity.peer} can't sign the record of {record.peer}")
    raw = seal(identity, Purpose.RECORD, run, encode(record))
    if len(raw) > limits.RECORD_BYTES:
        raise WireError(f"Record: {len(raw)} bytes with its envelope exceed the limit of {limits.RECORD_BYTES}")
    return raw


def open_record(raw: bytes, *, run: PeerId, peer: PeerId | None = None) -> Record:
    """The record of this peer (None: of whoever signed it), signed by itself for this run.

    Raises SignatureError or WireError.
    """
    envelope = unseal(raw, purpose=Purpose.RECORD, run=run, signer=peer, max_bytes=limits.RECORD_BYTES)
    record = decode(Record, envelope.body)
    if record.peer != envelope.signer:
        raise SignatureError(f"{peer} signed a record that names {record.peer}")
    return record


def fresher(a: Record, b: Record) -> bool:
    """Whether `a` replaces `b`: the higher sequence number of one owner. Raises ValueError for two owners."""
    if a.peer != b.peer:
        raise ValueError(f"records of two peers, {a.peer} and {b.peer}, have no order")
    return a.sequence > b.sequence
