"""Bytes that say nothing here: a few are skipped, more are refused in what is passed on as it came."""

from __future__ import annotations

import pytest

from protos import limits, signing, wire
from protos.messages import Body, Commitment, Envelope, Range, Vote
from protos.sealer import KeySealer, open_signed
from protos.signing import Identity, Purpose, SignatureError
from protos.wire import WireError

ME, RUN = (Identity.from_private_bytes(bytes([n]) * 32) for n in (1, 2))
PLAN = bytes([7]) * 32
COMMITMENT = Commitment(PLAN, PLAN, (1.0, 2.0), 1, 16, (Range(0, 1),), 0.1, 1.0)
FIELD = b"\xa2\x7d"  # number 2004, of bytes


def padding(n_bytes: int) -> bytes:
    """An unknown field that is so long in all."""
    for n_size in (1, 2, 3, 4):
        size = n_bytes - len(FIELD) - n_size
        encoded, left = bytearray(), size
        while left > 127:
            encoded.append(left & 127 | 128)
            left >>= 7
        encoded.append(left)
        if len(encoded) == n_size:
            return FIELD + bytes(encoded) + bytes(size)
    raise ValueError(n_bytes)


def sealed(body: bytes, around: bytes = b"") -> bytes:
    return signing.seal(ME, Purpose.COMMITMENT, RUN.peer, body, PLAN) + around


def test_a_message_of_a_newer_version_is_read() -> None:
    body = wire.encode(COMMITMENT) + padding(limits.UNKNOWN_BYTES)
    opened = open_signed(sealed(body, padding(50)), RUN.peer)
    assert opened.message == COMMITMENT
    assert opened.body == body


@pytest.mark.parametrize("n_bytes", [limits.UNKNOWN_BYTES + 1, 2**20])
def test_a_padded_body_is_refused(n_bytes: int) -> None:
    with pytest.raises(WireError, match="say nothing"):
        open_signed(sealed(wire.encode(COMMITMENT) + padding(n_bytes)), RUN.peer)


@pytest.mark.parametrize("n_bytes", [limits.ENVELOPE_EXTRA_BYTES + 1, 2**20])
def test_a_padded_envelope_is_refused(n_bytes: int) -> None:
    raw = sealed(wire.encode(COMMITMENT), padding(n_bytes))
    assert wire.decode(Envelope, raw).signer == ME.peer  # protobuf has nothing against it
    for read in (signing.purpose_of, lambda raw: open_signed(raw, RUN.peer)):
        with pytest.raises(SignatureError, match="around its body"):
            read(raw)


def test_padding_within_a_nested_message_is_refused() -> None:
    """Where lists are counted nobody looks: a range of the lease, with a long field that it doesn't have."""
    whole = wire.encode(COMMITMENT)
    used = next(at for at in range(len(whole)) if whole[at : at + 4] == b"\x2a\x02\x10\x01" or whole[at] == 0x32)
    tag, size = whole[used], whole[used + 1]
    inner = whole[used + 2 : used + 2 + size] + padding(3000)
    length = bytes([len(inner) & 127 | 128, len(inner) >> 7])
    padded = whole[:used] + bytes([tag]) + length + inner + whole[used + 2 + size :]
    assert wire.decode(Commitment, padded) == COMMITMENT
    with pytest.raises(WireError, match="say nothing"):
        wire.decode_terse(Commitment, padded)


def test_a_short_message_is_not_written_again_to_be_weighed() -> None:
    vote = Vote(0, 1, 0, ME.peer, PLAN, PLAN)
    raw = KeySealer(ME, RUN.peer).seal(vote)
    assert open_signed(raw, RUN.peer).message == vote
    with pytest.raises(WireError):
        wire.decode_terse(Body, b"\x08")


def test_a_promise_has_room_for_the_longest_proposal() -> None:
    assert limits.PROPOSE_BYTES + 4 * limits.ENVELOPE_EXTRA_BYTES < limits.MESSAGE_BYTES
