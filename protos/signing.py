"""Who said it: peer ids, signed envelopes over exact bytes, and sealing to a key.

A signature covers purpose, run, plan and body, so bytes signed for one use can't serve another, in another run or in
another attempt. What is verified is always the body as it came; nothing here encodes a message again.
"""

from __future__ import annotations

import struct
from enum import StrEnum, auto
from functools import lru_cache
from typing import NoReturn

from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from protos import limits
from protos.messages import Envelope, PeerId
from protos.wire import WireError, decode, encode

_U64 = struct.Struct("<Q")
_DOMAIN = b"barnraise.v1.envelope"
_SEAL_DOMAIN = b"barnraise.v1.seal"

# libp2p: PublicKey{Type: Ed25519, Data: 32 bytes} and PrivateKey{Type: Ed25519, Data: seed and public key} as protobuf;
# a peer id is the multihash (code 0: the bytes themselves, 36 of them) of the former.
# https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
_PUBLIC_PREFIX = bytes((0x08, 0x01, 0x12, 32))
_PRIVATE_PREFIX = bytes((0x08, 0x01, 0x12, 64))
_MULTIHASH_PREFIX = bytes((0x00, 36)) + _PUBLIC_PREFIX
_PEER_ID_BYTES = len(_MULTIHASH_PREFIX) + 32
_PEER_ID_CHARS = 52

_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_BASE58_VALUES = {character: value for value, character in enumerate(_BASE58)}

_SEALED_EXTRA = 32 + 16  # ephemeral public key, tag
_NONCE = bytes(12)  # one key seals one thing


class SignatureError(ValueError):
    """A signature, key or sealed thing that is not what it should be; the text says why."""


class Purpose(StrEnum):
    """What an envelope is for; signed with it."""

    RUNSPEC = auto()
    OPERATOR = auto()
    ADDRESSES = auto()
    ADMIT = auto()
    TOKEN = auto()
    RECORD = auto()
    GENESIS = auto()
    PLAN = auto()
    COMMITMENT = auto()
    DEAL = auto()
    RECEIPT = auto()
    RESULTS = auto()
    PROPOSE = auto()
    VOTE = auto()
    PREPARE = auto()
    PROMISE = auto()
    LEAVE = auto()
    REDEAL = auto()
    HEAD = auto()
    ORDER = auto()


# -- keys ----------------------------------------------------------------------------------------------------------


class Identity:
    """An Ed25519 key: a peer's libp2p identity and what it signs with. Its repr shows the peer id alone."""

    __slots__ = ("_key", "peer")

    peer: PeerId

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.peer = peer_id_of(self._public_bytes)

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_private_bytes(cls, raw: bytes) -> Identity:
        """From the 32 bytes of the seed. Raises SignatureError for another length."""
        return cls(Ed25519PrivateKey.from_private_bytes(_of_32(raw, "an Ed25519 private key")))

    @classmethod
    def from_pem(cls, pem: bytes) -> Identity:
        """From PKCS8 in PEM, unencrypted. Raises SignatureError for anything else."""
        try:
            key = load_pem_private_key(pem, password=None)
        except TypeError:
            raise SignatureError("the private key is encrypted; an unencrypted Ed25519 key in PEM is needed") from None
        except (ValueError, UnsupportedAlgorithm):
            raise SignatureError("no private key in PEM; an unencrypted Ed25519 key (PKCS8) is needed") from None
        if not isinstance(key, Ed25519PrivateKey):
            kind = type(key).__name__.removesuffix("PrivateKey").strip("_")
            raise SignatureError(f"the private key is of type {kind}; an Ed25519 key is needed")
        return cls(key)

    def to_pem(self) -> bytes:
        """PKCS8 in PEM, unencrypted."""
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def private_bytes(self) -> bytes:
        """The 32 bytes of the seed."""
        return self._key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())

    @property
    def _public_bytes(self) -> bytes:
        return self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    def libp2p_private_key(self) -> bytes:
        """The key as libp2p's protobuf PrivateKey: what the identity file of a libp2p daemon holds."""
        return _PRIVATE_PREFIX + self.private_bytes + self._public_bytes

    def sign(self, data: bytes) -> bytes:
        """64 bytes over the data as it is; `seal` adds what keeps uses apart."""
        return self._key.sign(data)

    def __repr__(self) -> str:
        return f"Identity({self.peer})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Identity is not pickled: it holds a private key")


def peer_id_of(public: bytes) -> PeerId:
    """The libp2p peer id of an Ed25519 public key (32 bytes): base58 of the identity multihash, "12D3Koo…"."""
    raw = _MULTIHASH_PREFIX + _of_32(public, "an Ed25519 public key")
    value = int.from_bytes(raw)
    digits: list[str] = []
    while value:
        value, digit = divmod(value, 58)
        digits.append(_BASE58[digit])
    return PeerId("1" + "".join(reversed(digits)))  # the "1" is the leading zero byte


def public_key_of(peer: str) -> bytes:
    """The 32 bytes of the Ed25519 public key that a peer id holds. Raises SignatureError for any other string."""
    if len(peer) != _PEER_ID_CHARS or not peer.startswith("1"):
        raise _no_peer_id(peer)
    value = 0
    for character in peer[1:]:
        digit = _BASE58_VALUES.get(character)
        if digit is None:
            raise _no_peer_id(peer)
        value = value * 58 + digit
    if value.bit_length() > 8 * _PEER_ID_BYTES:
        raise _no_peer_id(peer)
    raw = value.to_bytes(_PEER_ID_BYTES)
    if not raw.startswith(_MULTIHASH_PREFIX):
        raise _no_peer_id(peer)
    return raw[len(_MULTIHASH_PREFIX) :]


@lru_cache(maxsize=1024)
def _verifying_key(peer: str) -> Ed25519PublicKey:
    """The same few peers sign thousands of receipts in a round."""
    return Ed25519PublicKey.from_public_bytes(public_key_of(peer))


def _no_peer_id(peer: str) -> SignatureError:
    return SignatureError(f"{peer[:60]!a} is no peer id of an Ed25519 key (52 characters, 12D3Koo…)")


def _of_32(raw: bytes, what: str) -> bytes:
    if len(raw) != 32:
        raise SignatureError(f"{what} has 32 bytes, not {len(raw)}")
    return raw


# -- envelopes -----------------------------------------------------------------------------------------------------


def seal(identity: Identity, purpose: Purpose, run: PeerId, body: bytes, plan: bytes = b"") -> bytes:
    """The wire bytes of an Envelope around exactly these body bytes.

    Args:
        plan: the plan hash of the attempt, where the message belongs to one.

    Raises WireError where the envelope would exceed a limit.
    """
    signature = identity.sign(_signed_bytes(purpose, run, plan, body))
    return encode(Envelope(purpose.value, identity.peer, plan, body, signature))


def unseal(
    raw: bytes,
    *,
    purpose: Purpose,
    run: PeerId,
    plan: bytes | None = None,
    signer: PeerId | None = None,
    max_bytes: int = limits.MESSAGE_BYTES,
) -> Envelope:
    """The envelope, verified: signed for this purpose and run by the key of its `signer`.

    Args:
        plan: the plan hash that it must carry; None takes any, and the reader looks at the envelope's.
        signer: who must have signed; None takes anyone, and the reader looks at the envelope's.

    Raises SignatureError, which says what doesn't hold.
    """
    envelope = _open(raw, max_bytes)
    if envelope.purpose != purpose.value:
        raise SignatureError(f"an envelope for {envelope.purpose!r}, where one for {purpose.value!r} is needed")
    if signer is not None and envelope.signer != signer:
        raise SignatureError(f"{purpose.value} is signed by {envelope.signer}, not by {signer}")
    if plan is not None and envelope.plan != plan:
        raise SignatureError(
            f"{purpose.value} of {envelope.signer} belongs to plan {_short(envelope.plan)}, not to {_short(plan)}"
        )
    key = _verifying_key(envelope.signer)
    try:
        key.verify(envelope.signature, _signed_bytes(purpose, run, envelope.plan, envelope.body))
    except InvalidSignature:
        raise SignatureError(
            f"the signature of {envelope.signer} on {purpose.value} doesn't hold for these bytes in run {run}"
        ) from None
    return envelope


def purpose_of(raw: bytes, *, max_bytes: int = limits.MESSAGE_BYTES) -> Purpose:
    """What an envelope claims to be for, unverified: tells which `unseal` to try. Raises SignatureError."""
    envelope = _open(raw, max_bytes)
    try:
        return Purpose(envelope.purpose)
    except ValueError:
        raise SignatureError(f"an envelope for an unknown purpose, {envelope.purpose!r}") from None


def _open(raw: bytes, max_bytes: int) -> Envelope:
    if len(raw) > max_bytes:
        raise SignatureError(f"an envelope of {len(raw)} bytes exceeds the limit of {max_bytes}")
    try:
        envelope = decode(Envelope, raw)
    except WireError as error:
        raise SignatureError(f"no envelope: {error}") from None
    if (n_around := len(raw) - len(envelope.body)) > limits.ENVELOPE_EXTRA_BYTES:
        raise SignatureError(f"an envelope with {n_around} bytes around its body")
    return envelope


def _signed_bytes(purpose: Purpose, run: PeerId, plan: bytes, body: bytes) -> bytes:
    return _join(_DOMAIN, purpose.value.encode(), run.encode(), plan, body)


def _join(*parts: bytes) -> bytes:
    """Each part behind its length as u64 little-endian: no two lists of parts give the same bytes."""
    return b"".join(piece for part in parts for piece in (_U64.pack(len(part)), part))


def _short(plan: bytes) -> str:
    return plan[:6].hex() + "…" if plan else "none"


# -- sealing to a key ----------------------------------------------------------------------------------------------


def generate_seal_key() -> tuple[bytes, bytes]:
    """A fresh X25519 key: private and public, 32 bytes each."""
    key = X25519PrivateKey.generate()
    return (
        key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption()),
        key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw),
    )


def seal_to(x25519_public: bytes, plaintext: bytes, *, context: bytes) -> bytes:
    """Bytes that only the key's holder can open, and only with the same context; 48 longer than the plaintext.

    An ephemeral X25519 key, HKDF-SHA256 over the shared secret with both public keys and the context, then
    ChaCha20-Poly1305. It hides and protects, and says nothing of who sealed. Raises SignatureError for a bad key.
    """
    ephemeral = X25519PrivateKey.generate()
    ephemeral_public = ephemeral.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    cipher = _cipher(ephemeral, _of_32(x25519_public, "an X25519 public key"), ephemeral_public, x25519_public, context)
    return ephemeral_public + cipher.encrypt(_NONCE, plaintext, None)


def unseal_from(x25519_private: bytes, sealed: bytes, *, context: bytes) -> bytes:
    """What `seal_to` sealed to this key in this context. Raises SignatureError for anything else."""
    if len(sealed) < _SEALED_EXTRA:
        raise SignatureError(f"{len(sealed)} sealed bytes are too few; there are at least {_SEALED_EXTRA}")
    key = X25519PrivateKey.from_private_bytes(_of_32(x25519_private, "an X25519 private key"))
    public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    ephemeral_public = sealed[:32]
    cipher = _cipher(key, ephemeral_public, ephemeral_public, public, context)
    try:
        return cipher.decrypt(_NONCE, sealed[32:], None)
    except InvalidTag:
        raise SignatureError("what was sealed can't be opened with this key in this context") from None


def _cipher(
    private: X25519PrivateKey, other: bytes, ephemeral_public: bytes, public: bytes, context: bytes
) -> ChaCha20Poly1305:
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise SignatureError("an X25519 public key that gives no secret") from None
    info = _join(_SEAL_DOMAIN, ephemeral_public, public, context)
    return ChaCha20Poly1305(HKDF(SHA256(), 32, salt=None, info=info).derive(shared))
