"""The run's certificate authority: ECDSA P-256 certificates that bind a TLS key to a peer id.

gRPC's TLS refuses certificates that are a few minutes early or late on a contributor's clock, so a leaf is valid from a
year back for 90 days ahead, and the authority from before that for ten years.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protos import limits
from protos.messages import PeerId

BACK = datetime.timedelta(days=365)
LEAF_AHEAD = datetime.timedelta(days=90)
AUTHORITY_AHEAD = datetime.timedelta(days=3653)


class CertificateError(ValueError):
    """A key, a certificate or a request that can't be used: says why."""


@dataclass(frozen=True, slots=True)
class Tls:
    """What one end of a mutual TLS connection needs, in PEM; the private key is kept out of sight."""

    key: bytes
    certificate: bytes
    authority: bytes

    def __repr__(self) -> str:
        return "Tls(…)"


class Authority:
    """A run's CA: its key and its own certificate."""

    def __init__(self, key: EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate

    @classmethod
    def generate(cls, run: PeerId, now: datetime.datetime) -> Authority:
        key = generate_private_key(SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, run)])
        usage = x509.KeyUsage(
            digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * BACK)
            .not_valid_after(now + AUTHORITY_AHEAD)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, SHA256())
        )
        return cls(key, certificate)

    @classmethod
    def from_pem(cls, key_pem: bytes, certificate_pem: bytes) -> Authority:
        """Raises CertificateError for anything but a P-256 key and its certificate."""
        try:
            key = load_pem_private_key(key_pem, password=None)
            certificate = x509.load_pem_x509_certificate(certificate_pem)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise CertificateError(f"no key or no certificate in PEM: {error}") from error
        if not isinstance(key, EllipticCurvePrivateKey) or not _same_key(key, certificate):
            raise CertificateError("the key and the certificate of the authority don't belong together")
        return cls(key, certificate)

    @property
    def key_pem(self) -> bytes:
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def certificate_pem(self) -> bytes:
        return self._certificate.public_bytes(Encoding.PEM)

    @property
    def certificate_der(self) -> bytes:
        return self._certificate.public_bytes(Encoding.DER)

    def issue(self, csr_der: bytes, peer: PeerId, now: datetime.datetime) -> tuple[bytes, str]:
        """A certificate (DER) for the key of a certificate request, in the name of this peer; and its serial in hex.

        What else the request asks for is ignored. Raises CertificateError unless it is a P-256 key's own request.
        """
        certificate = self._certify(_requested_key(csr_der), peer, now)
        return certificate.public_bytes(Encoding.DER), f"{certificate.serial_number:x}"

    def issue_own(self, peer: PeerId, now: datetime.datetime) -> Tls:
        """A fresh key with its certificate, for this process."""
        key = generate_private_key(SECP256R1())
        certificate = self._certify(key.public_key(), peer, now)
        return Tls(
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
            certificate.public_bytes(Encoding.PEM),
            self.certificate_pem,
        )

    def _certify(self, key: EllipticCurvePublicKey, peer: PeerId, now: datetime.datetime) -> x509.Certificate:
        usage = x509.KeyUsage(
            digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=False, crl_sign=False, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        roles = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, peer)]))
            .issuer_name(self._certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - BACK)
            .not_valid_after(now + LEAF_AHEAD)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(roles, critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(peer)]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, SHA256())
        )


def _requested_key(csr_der: bytes) -> EllipticCurvePublicKey:
    if len(csr_der) > limits.CERTIFICATE_BYTES:
        raise CertificateError(f"a certificate request of {len(csr_der)} bytes; at most {limits.CERTIFICATE_BYTES}")
    try:
        request = x509.load_der_x509_csr(csr_der)
        key = request.public_key()
        holds = request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature) as error:
        raise CertificateError("no certificate request in DER") from error
    if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP256R1):
        raise CertificateError("the certificate request is not for an ECDSA P-256 key")
    if not holds:
        raise CertificateError("the certificate request is not signed by the key that it is for")
    return key


def _same_key(key: EllipticCurvePrivateKey, certificate: x509.Certificate) -> bool:
    def spki(public: EllipticCurvePublicKey) -> bytes:
        return public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)

    public = certificate.public_key()
    return isinstance(public, EllipticCurvePublicKey) and spki(public) == spki(key.public_key())
