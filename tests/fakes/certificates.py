"""A small certificate authority like a run's: issues what admission would."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from node.peers.transport import Credentials
from protos.messages import PeerId

_BEFORE = datetime.timedelta(days=365)
_AHEAD = datetime.timedelta(days=90)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@dataclass
class Authority:
    """`issue` gives a peer's credentials, `sign` a certificate for its request."""

    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    def __post_init__(self) -> None:
        now = datetime.datetime.now(datetime.UTC)
        self.certificate = (
            x509.CertificateBuilder(_name("test run"), _name("test run"), self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _BEFORE)
            .not_valid_after(now + _AHEAD)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self.key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.DER)

    def certify(
        self, peer: str, public: ec.EllipticCurvePublicKey, *, valid_for: datetime.timedelta = _AHEAD
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder(self.certificate.subject, _name(peer), public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _BEFORE)
            .not_valid_after(now + valid_for)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(peer)]), critical=False)
            .sign(self.key, hashes.SHA256())
        )

    def sign(self, csr: bytes, peer: PeerId, *, valid_for: datetime.timedelta = _AHEAD) -> bytes:
        """The DER certificate for a DER request."""
        request = x509.load_der_x509_csr(csr)
        public = request.public_key()
        if not isinstance(public, ec.EllipticCurvePublicKey) or not request.is_signature_valid:
            raise ValueError("a request that no authority would sign")
        return self.certify(peer, public, valid_for=valid_for).public_bytes(serialization.Encoding.DER)

    def issue(self, peer: str, *, valid_for: datetime.timedelta = _AHEAD) -> Credentials:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self.certify(peer, key.public_key(), valid_for=valid_for)
        return Credentials(certificate.public_bytes(serialization.Encoding.PEM), _pem(key), self.pem)
