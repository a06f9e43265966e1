"""DHT records: signed by their owner, small, ordered by their sequence."""

from __future__ import annotations

import dataclasses

import pytest

from protos import limits
from protos.messages import Record
from protos.records import dht_key, fresher, open_record, seal_record
from protos.signing import Identity, Purpose, SignatureError, seal
from protos.wire import WireError, encode

ADA, BOB, RUN, OTHER_RUN = (Identity.from_private_bytes(bytes([i]) * 32) for i in (1, 2, 3, 4))
RECORD = Record(ADA.peer, 7, ("10.0.0.1:4000",), ("/ip4/10.0.0.1/tcp/4001",), 0, 12, b"\x05" * 32)


def test_a_record_comes_back() -> None:
    raw = seal_record(ADA, RUN.peer, RECORD)
    assert len(raw) <= limits.RECORD_BYTES
    assert open_record(raw, run=RUN.peer, peer=ADA.peer) == RECORD


def test_a_record_of_another_run_or_peer_is_refused() -> None:
    raw = seal_record(ADA, RUN.peer, RECORD)
    with pytest.raises(SignatureError, match="in run"):
        open_record(raw, run=OTHER_RUN.peer, peer=ADA.peer)
    with pytest.raises(SignatureError, match=f"not by {BOB.peer}"):
        open_record(raw, run=RUN.peer, peer=BOB.peer)


def test_nobody_signs_for_another() -> None:
    with pytest.raises(SignatureError, match="can't sign the record of"):
        seal_record(BOB, RUN.peer, RECORD)
    forged = seal(BOB, Purpose.RECORD, RUN.peer, encode(RECORD))
    with pytest.raises(SignatureError, match="names"):
        open_record(forged, run=RUN.peer, peer=BOB.peer)
    with pytest.raises(SignatureError, match="signed by"):
        open_record(forged, run=RUN.peer, peer=ADA.peer)


def test_another_purpose_is_no_record() -> None:
    raw = seal(ADA, Purpose.VOTE, RUN.peer, encode(RECORD))
    with pytest.raises(SignatureError, match="'record' is needed"):
        open_record(raw, run=RUN.peer, peer=ADA.peer)


def test_a_signed_body_that_is_no_record_is_refused() -> None:
    raw = seal(ADA, Purpose.RECORD, RUN.peer, b"\x08")
    with pytest.raises(WireError, match=r"^Record"):
        open_record(raw, run=RUN.peer, peer=ADA.peer)


def test_a_record_is_small() -> None:
    large = dataclasses.replace(RECORD, grpc=("a" * 290,) * 2, dht=("b" * 290,))
    with pytest.raises(WireError, match="with its envelope exceed the limit of 1024"):
        seal_record(ADA, RUN.peer, large)
    with pytest.raises(SignatureError, match="exceeds the limit of 1024"):
        open_record(bytes(1025), run=RUN.peer, peer=ADA.peer)


def test_the_higher_sequence_is_fresher() -> None:
    newer = dataclasses.replace(RECORD, sequence=8)
    assert fresher(newer, RECORD)
    assert not fresher(RECORD, newer)
    assert not fresher(RECORD, dataclasses.replace(RECORD, grpc=()))
    with pytest.raises(ValueError, match="have no order"):
        fresher(RECORD, dataclasses.replace(RECORD, peer=BOB.peer))


def test_each_peer_of_each_run_has_its_own_key() -> None:
    keys = {dht_key(run.peer, peer.peer) for run in (RUN, OTHER_RUN) for peer in (ADA, BOB)}
    assert len(keys) == 4
