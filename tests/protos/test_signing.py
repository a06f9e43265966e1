"""Keys, peer ids, envelopes, and sealing to a key."""

from __future__ import annotations

import copy
import pickle

import base58
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.messages import Envelope, PeerId
from protos.signing import (
    Identity,
    Purpose,
    SignatureError,
    generate_seal_key,
    peer_id_of,
    public_key_of,
    purpose_of,
    seal,
    seal_to,
    unseal,
    unseal_from,
)
from protos.wire import WireError, decode, encode

ADA, BOB, RUN = (Identity.from_private_bytes(bytes([i]) * 32) for i in (1, 2, 3))
PLAN = b"\x77" * 32

# -- keys and peer ids ---------------------------------------------------------------------------------------------


@given(st.binary(min_size=32, max_size=32))
def test_a_peer_id_is_libp2ps_and_holds_the_key(public: bytes) -> None:
    peer = peer_id_of(public)
    assert peer == base58.b58encode(b"\x00\x24\x08\x01\x12\x20" + public).decode()
    assert peer.startswith("12D3KooW")
    assert public_key_of(peer) == public


def test_a_peer_id_known_from_libp2p() -> None:
    # The Ed25519 test vector of libp2p's peer id specification.
    private = bytes.fromhex(
        "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
        "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    )
    identity = Identity.from_private_bytes(private[4:36])
    assert identity.libp2p_private_key() == private
    assert identity.peer == base58.b58encode(bytes.fromhex("002408011220") + private[36:]).decode()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12D3Koo",
        ADA.peer[:-1],
        ADA.peer + "1",
        ADA.peer + ADA.peer,
        " " + ADA.peer[1:],
        ADA.peer[:-1] + "0",
        ADA.peer[:-1] + "é",
        "1" * 52,
        "z" * 52,
        "1" + "z" * 51,
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        base58.b58encode(b"\x00\x24\x08\x02\x12\x20" + bytes(32)).decode(),  # a secp256k1 key
        base58.b58encode(b"\x00\x25\x08\x01\x12\x20" + bytes(33)).decode(),
    ],
)
def test_what_is_no_peer_id_holds_no_key(text: str) -> None:
    with pytest.raises(SignatureError, match="no peer id"):
        public_key_of(text)


@given(st.text("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz", min_size=51, max_size=53))
def test_only_the_canonical_form_of_a_peer_id_is_one(text: str) -> None:
    try:
        public = public_key_of(text)
    except SignatureError:
        return
    assert peer_id_of(public) == text


def test_a_key_comes_back_from_bytes_and_pem() -> None:
    fresh = Identity.generate()
    assert Identity.from_private_bytes(fresh.private_bytes).peer == fresh.peer
    assert Identity.from_pem(fresh.to_pem()).private_bytes == fresh.private_bytes
    assert fresh.peer != Identity.generate().peer


def test_the_libp2p_form_is_seed_and_public_key() -> None:
    raw = ADA.libp2p_private_key()
    assert raw == b"\x08\x01\x12\x40" + ADA.private_bytes + public_key_of(ADA.peer)


def test_sign_is_plain_ed25519() -> None:
    Ed25519PublicKey.from_public_bytes(public_key_of(ADA.peer)).verify(ADA.sign(b"data"), b"data")


@pytest.mark.parametrize("raw", [b"", bytes(31), bytes(33), bytes(64)])
def test_a_key_of_another_length_is_refused(raw: bytes) -> None:
    with pytest.raises(SignatureError, match="32 bytes"):
        Identity.from_private_bytes(raw)
    with pytest.raises(SignatureError, match="32 bytes"):
        peer_id_of(raw)


def pem_of(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@pytest.mark.parametrize(
    ("pem", "why"),
    [
        (b"", "no private key in PEM"),
        (b"\x00\xff", "no private key in PEM"),
        (ADA.to_pem()[:60], "no private key in PEM"),
        (ADA.libp2p_private_key(), "no private key in PEM"),
        (pem_of(ec.generate_private_key(ec.SECP256R1())), "of type EC"),
        (
            load_pem_private_key(ADA.to_pem(), None).private_bytes(
                Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
            ),
            "encrypted",
        ),
    ],
    ids=["empty", "binary", "cut off", "libp2p", "P-256", "encrypted"],
)
def test_a_pem_without_our_key_says_what_is_needed(pem: bytes, why: str) -> None:
    with pytest.raises(SignatureError, match=f"{why}.*Ed25519 key"):
        Identity.from_pem(pem)


def test_a_private_key_is_neither_shown_nor_pickled() -> None:
    assert repr(ADA) == f"Identity({ADA.peer})"
    for attempt in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="private key"):
            attempt(ADA)


# -- envelopes -----------------------------------------------------------------------------------------------------


def test_purposes_are_lower_case() -> None:
    assert all(purpose.value == purpose.name.lower() for purpose in Purpose)
    assert len(Purpose) == 20


@given(st.sampled_from(Purpose), st.binary(max_size=200), st.sampled_from([b"", PLAN]))
@settings(max_examples=30)
def test_an_envelope_opens_for_what_it_was_sealed_for(purpose: Purpose, body: bytes, plan: bytes) -> None:
    raw = seal(ADA, purpose, RUN.peer, body, plan)
    envelope = unseal(raw, purpose=purpose, run=RUN.peer)
    assert (envelope.signer, envelope.body, envelope.plan) == (ADA.peer, body, plan)
    assert unseal(raw, purpose=purpose, run=RUN.peer, plan=plan, signer=ADA.peer) == envelope
    assert purpose_of(raw) is purpose


RAW = seal(ADA, Purpose.VOTE, RUN.peer, b"aye", PLAN)


def refused(raw: bytes, why: str, *, purpose: Purpose = Purpose.VOTE, run: PeerId = RUN.peer) -> None:
    with pytest.raises(SignatureError, match=why):
        unseal(raw, purpose=purpose, run=run)


def test_another_purpose_or_run_is_refused() -> None:
    refused(RAW, "for 'vote', where one for 'promise'", purpose=Purpose.PROMISE)
    refused(RAW, "doesn't hold for these bytes in run", run=BOB.peer)


def test_another_plan_or_signer_than_asked_for_is_refused() -> None:
    with pytest.raises(SignatureError, match="belongs to plan 777777777777…, not to 000000000000…"):
        unseal(RAW, purpose=Purpose.VOTE, run=RUN.peer, plan=bytes(32))
    with pytest.raises(SignatureError, match="belongs to plan 777777777777…, not to none"):
        unseal(RAW, purpose=Purpose.VOTE, run=RUN.peer, plan=b"")
    with pytest.raises(SignatureError, match=f"signed by {ADA.peer}, not by {BOB.peer}"):
        unseal(RAW, purpose=Purpose.VOTE, run=RUN.peer, signer=BOB.peer)


def changed(raw: bytes = RAW, **values: object) -> bytes:
    old = decode(Envelope, raw)
    fields: dict[str, object] = {name: getattr(old, name) for name in Envelope.__slots__} | values
    return encode(Envelope(**fields))  # type: ignore[arg-type]


def test_every_part_of_an_envelope_is_covered() -> None:
    refused(changed(body=b"nay"), "doesn't hold")
    refused(changed(plan=bytes(32)), "doesn't hold")
    refused(changed(plan=b""), "doesn't hold")
    refused(changed(signer=BOB.peer), "doesn't hold")
    refused(changed(signature=bytes(64)), "doesn't hold")
    refused(changed(purpose="promise"), "doesn't hold", purpose=Purpose.PROMISE)
    assert unseal(changed(), purpose=Purpose.VOTE, run=RUN.peer).body == b"aye"


def test_bytes_do_not_move_from_plan_to_body() -> None:
    raw = seal(ADA, Purpose.VOTE, RUN.peer, PLAN + b"aye", b"")
    refused(changed(raw, plan=PLAN, body=b"aye"), "doesn't hold")


def test_a_signer_without_a_key_is_refused() -> None:
    refused(changed(signer="ADA"), "'ADA' is no peer id")


def test_a_signature_over_the_bare_body_is_refused() -> None:
    refused(changed(signature=ADA.sign(b"aye")), "doesn't hold")


@given(at=st.integers(0, len(RAW) - 1), bit=st.integers(0, 7))
@settings(max_examples=60)
def test_a_flipped_bit_is_refused_or_changes_nothing(at: int, bit: int) -> None:
    damaged = bytearray(RAW)
    damaged[at] ^= 1 << bit
    with pytest.raises(SignatureError):
        unseal(bytes(damaged), purpose=Purpose.VOTE, run=RUN.peer)


@given(st.binary(max_size=200))
@settings(max_examples=30)
def test_any_bytes_give_a_signature_error(raw: bytes) -> None:
    refused(raw, ".")
    with pytest.raises(SignatureError):
        purpose_of(raw)


def test_size_comes_first() -> None:
    with pytest.raises(SignatureError, match=f"of {len(RAW)} bytes exceeds the limit of {len(RAW) - 1}"):
        unseal(RAW, purpose=Purpose.VOTE, run=RUN.peer, max_bytes=len(RAW) - 1)
    with pytest.raises(SignatureError, match="exceeds the limit of 10"):
        purpose_of(RAW, max_bytes=10)


def test_an_unknown_purpose_is_named() -> None:
    with pytest.raises(SignatureError, match="an unknown purpose, 'dance'"):
        purpose_of(changed(purpose="dance"))


def test_a_plan_is_a_hash_or_nothing() -> None:
    with pytest.raises(WireError, match=r"Envelope\.plan: 3 bytes"):
        seal(ADA, Purpose.VOTE, RUN.peer, b"aye", b"abc")


# -- sealing to a key ----------------------------------------------------------------------------------------------

PRIVATE, PUBLIC = generate_seal_key()


@given(st.binary(max_size=100), st.binary(max_size=40))
@settings(max_examples=20)
def test_what_is_sealed_to_a_key_opens_with_it(plaintext: bytes, context: bytes) -> None:
    sealed = seal_to(PUBLIC, plaintext, context=context)
    assert len(sealed) == len(plaintext) + 48
    assert unseal_from(PRIVATE, sealed, context=context) == plaintext
    with pytest.raises(SignatureError, match="can't be opened"):
        unseal_from(PRIVATE, sealed, context=context + b"x")


def test_sealing_twice_gives_two_texts() -> None:
    assert seal_to(PUBLIC, b"token", context=b"") != seal_to(PUBLIC, b"token", context=b"")


def test_another_key_opens_nothing() -> None:
    sealed = seal_to(PUBLIC, b"token", context=b"")
    other, _ = generate_seal_key()
    with pytest.raises(SignatureError, match="can't be opened"):
        unseal_from(other, sealed, context=b"")


@pytest.mark.parametrize("at", [0, 31, 32, 40, -1])
def test_damaged_sealed_bytes_open_to_nothing(at: int) -> None:
    sealed = bytearray(seal_to(PUBLIC, b"a token", context=b""))
    sealed[at] ^= 1
    with pytest.raises(SignatureError):
        unseal_from(PRIVATE, bytes(sealed), context=b"")


def test_sealed_bytes_and_keys_of_wrong_form_are_refused() -> None:
    with pytest.raises(SignatureError, match="47 sealed bytes are too few"):
        unseal_from(PRIVATE, bytes(47), context=b"")
    with pytest.raises(SignatureError, match="gives no secret"):
        unseal_from(PRIVATE, bytes(48), context=b"")  # a point of small order
    with pytest.raises(SignatureError, match="gives no secret"):
        seal_to(bytes(32), b"token", context=b"")
    with pytest.raises(SignatureError, match="X25519 public key has 32 bytes, not 31"):
        seal_to(PUBLIC[:31], b"token", context=b"")
    with pytest.raises(SignatureError, match="X25519 private key has 32 bytes, not 0"):
        unseal_from(b"", bytes(60), context=b"")
