"""Admission: every way in, every way to be refused, and invites counted once a peer whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coordinator.admission import Admission, BadRequest, Refusal, make_token
from coordinator.authority import Authority
from coordinator.journal import Journal
from protos import limits
from protos.messages import ZERO_HASH, Operator, PeerId
from protos.signing import generate_seal_key
from tests.coordinator.made import COORDINATOR, RUN, TODAY, admit_request, csr, identity, journal, spec

ALICE, BOB, MALLORY = identity(10), identity(11), identity(12)


@dataclass
class Gate:
    admission: Admission
    operator: Operator
    journal: Journal
    authority: Authority
    allowed: set[PeerId]
    banned: set[PeerId]

    def token(self, *, uses: int = 1, valid_s: float = 100.0, signer: int = 2) -> bytes:
        return make_token(identity(signer), RUN.peer, uses=uses, valid_s=valid_s, run_time_s=0.0)[0]

    def refused(self, raw: bytes, at: float = 1.0) -> str:
        with pytest.raises(Refusal) as caught:
            self.admission.admit(raw, at)
        return caught.value.code


@pytest.fixture
def gate(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Gate]:
    mode = getattr(request, "param", "open")
    kept, _ = journal(tmp_path / "journal.sqlite")
    authority = Authority.generate(RUN.peer, TODAY)
    private, public = generate_seal_key()
    operator = Operator(RUN.peer, COORDINATOR.peer, authority.certificate_der, public)
    allowed: set[PeerId] = set()
    banned: set[PeerId] = set()
    admission = Admission(
        spec(f"membership.admission={mode}"),
        RUN.peer,
        COORDINATOR.peer,
        authority,
        private,
        kept,
        allowed=lambda: frozenset(allowed),
        banned=lambda peer: peer in banned,
        today=lambda: TODAY,
    )
    yield Gate(admission, operator, kept, authority, allowed, banned)
    kept.close()


def test_an_open_run_certifies_the_key_for_the_peer(gate: Gate) -> None:
    admitted = gate.admission.admit(admit_request(ALICE, gate.operator), 5.0)
    assert (admitted.peer, admitted.observer, admitted.response.run_time_s) == (ALICE.peer, False, 5.0)
    certificate = x509.load_der_x509_certificate(admitted.response.certificate)
    certificate.verify_directly_issued_by(x509.load_der_x509_certificate(gate.authority.certificate_der))
    (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert name.value == ALICE.peer
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [ALICE.peer]
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert {*usage} == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    assert (certificate.not_valid_after_utc - TODAY).days == 90
    assert (TODAY - certificate.not_valid_before_utc).days == 365
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_the_authority_is_older_and_lasts_longer_than_its_leaves(gate: Gate) -> None:
    own = x509.load_der_x509_certificate(gate.authority.certificate_der)
    assert (own.not_valid_after_utc - TODAY).days > 3650
    assert (TODAY - own.not_valid_before_utc).days > 365
    again = Authority.from_pem(gate.authority.key_pem, gate.authority.certificate_pem)
    assert again.certificate_der == gate.authority.certificate_der


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("run", identity(77).peer, "other_run"),
        ("peer", BOB.peer, "other_key"),
        ("protocol", 0, "version"),
        ("protocol", 99, "version"),
        ("layout_digest", b"x" * 32, "layout"),
        ("observer", True, "not_observer"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(gate: Gate, field: str, value: object, code: str) -> None:
    raw = admit_request(ALICE, gate.operator, change=lambda request: replace(request, **{field: value}))  # type: ignore[arg-type]
    assert gate.refused(raw) == code


def test_a_version_refusal_names_both_versions(gate: Gate) -> None:
    raw = admit_request(ALICE, gate.operator, change=lambda request: replace(request, protocol=7))
    with pytest.raises(Refusal, match=rf"protocol 7.*protocol {limits.PROTOCOL}"):
        gate.admission.admit(raw, 1.0)


def test_a_layout_that_is_not_computed_yet_is_no_reason(gate: Gate) -> None:
    raw = admit_request(ALICE, gate.operator, change=lambda request: replace(request, layout_digest=ZERO_HASH))
    assert gate.admission.admit(raw, 1.0).peer == ALICE.peer


def test_signed_by_another_key_is_refused(gate: Gate) -> None:
    assert gate.refused(admit_request(ALICE, gate.operator, signer=MALLORY)) == "other_key"


@pytest.mark.parametrize("raw", [b"", b"\x00" * 100, b"x" * 100_000])
def test_what_is_no_request_is_malformed(gate: Gate, raw: bytes) -> None:
    with pytest.raises(BadRequest):
        gate.admission.admit(raw, 1.0)


def test_a_changed_byte_breaks_the_signature(gate: Gate) -> None:
    raw = bytearray(admit_request(ALICE, gate.operator))
    raw[-80] ^= 1
    with pytest.raises(BadRequest):
        gate.admission.admit(bytes(raw), 1.0)


def test_certificate_requests_are_checked(gate: Gate) -> None:
    def asked(request: bytes) -> bytes:
        return admit_request(ALICE, gate.operator, change=lambda each: replace(each, csr=request))

    broken = bytearray(csr())
    broken[-1] ^= 1
    for bad in (b"x", csr(generate_private_key(SECP384R1())), bytes(broken)):
        with pytest.raises(BadRequest, match="certificate request"):
            gate.admission.admit(asked(bad), 1.0)


def test_a_banned_peer_stays_out(gate: Gate) -> None:
    gate.banned.add(ALICE.peer)
    assert gate.refused(admit_request(ALICE, gate.operator)) == "banned"


@pytest.mark.parametrize("gate", ["invite"], indirect=True)
def test_an_invite_lets_in_as_many_peers_as_it_says(gate: Gate) -> None:
    token = gate.token(uses=2)
    for who in (ALICE, BOB):
        gate.admission.admit(admit_request(who, gate.operator, token=token), 1.0)
    assert gate.refused(admit_request(MALLORY, gate.operator, token=token)) == "used_up"
    assert gate.refused(admit_request(MALLORY, gate.operator)) == "not_invited"
    assert not gate.journal.admitted(MALLORY.peer)


@pytest.mark.parametrize("gate", ["invite"], indirect=True)
def test_a_returning_peer_uses_nothing_up(gate: Gate) -> None:
    token = gate.token(uses=1)
    for at in (1.0, 2.0, 5000.0):  # also after it has expired
        assert gate.admission.admit(admit_request(ALICE, gate.operator, token=token), at).peer == ALICE.peer
    assert gate.admission.admit(admit_request(ALICE, gate.operator), 6000.0).peer == ALICE.peer
    assert gate.refused(admit_request(BOB, gate.operator, token=token), at=3.0) == "used_up"


@pytest.mark.parametrize("gate", ["invite"], indirect=True)
def test_uses_are_counted_across_restarts(gate: Gate, tmp_path: Path) -> None:
    token = gate.token(uses=1)
    gate.admission.admit(admit_request(ALICE, gate.operator, token=token), 1.0)
    again = Journal.open(tmp_path / "journal.sqlite", RUN.peer)
    again.begin_term("again")
    serial_used = again.admit(BOB.peer, "", "1", _serial(token), 1, observer=False, at_run_s=2.0)
    again.close()
    assert not serial_used


@pytest.mark.parametrize("gate", ["invite"], indirect=True)
def test_unlimited_uses(gate: Gate) -> None:
    token = gate.token(uses=0)
    for number in range(20, 25):
        gate.admission.admit(admit_request(identity(number), gate.operator, token=token), 1.0)


@pytest.mark.parametrize("gate", ["invite"], indirect=True)
def test_bad_invites(gate: Gate) -> None:
    assert gate.refused(admit_request(ALICE, gate.operator, token=gate.token(valid_s=10.0)), at=11.0) == "expired"
    assert gate.refused(admit_request(ALICE, gate.operator, token=gate.token(signer=12))) == "bad_invite"
    assert gate.refused(admit_request(ALICE, gate.operator, token=b"rubbish")) == "bad_invite"
    # sealed for another peer: what somebody else sent can't be sent again
    stolen = admit_request(ALICE, gate.operator, token=gate.token())
    assert stolen
    sealed_for_alice = admit_request(
        BOB, gate.operator, token=gate.token(), change=lambda request: replace(request, sealed_token=b"\1" * 64)
    )
    assert gate.refused(sealed_for_alice) == "bad_invite"
    assert gate.admission.admit(admit_request(ALICE, gate.operator, token=gate.token(signer=1)), 1.0)  # the run key


@pytest.mark.parametrize("gate", ["allow_list"], indirect=True)
def test_an_allow_list_is_read_each_time(gate: Gate) -> None:
    assert gate.refused(admit_request(ALICE, gate.operator)) == "not_allowed"
    gate.allowed.add(ALICE.peer)
    assert gate.admission.admit(admit_request(ALICE, gate.operator), 1.0).peer == ALICE.peer


def test_only_the_newest_observer_token_makes_an_observer(gate: Gate) -> None:
    first, first_serial = make_token(COORDINATOR, RUN.peer, uses=1, valid_s=100.0, run_time_s=0.0)
    second, second_serial = make_token(COORDINATOR, RUN.peer, uses=1, valid_s=100.0, run_time_s=0.0)
    gate.admission.expect_observer(first_serial)
    gate.admission.expect_observer(second_serial)
    assert gate.refused(admit_request(ALICE, gate.operator, token=first, observer=True)) == "not_observer"
    late = admit_request(ALICE, gate.operator, token=second, observer=True)
    assert gate.refused(late, at=101.0) == "expired"
    assert gate.admission.admit(admit_request(ALICE, gate.operator, token=second, observer=True), 1.0).observer
    assert gate.admission.observer == ALICE.peer == gate.journal.observer()
    assert gate.refused(admit_request(BOB, gate.operator, token=second, observer=True)) == "used_up"
    assert gate.refused(admit_request(BOB, gate.operator, token=gate.token(), observer=True)) == "not_observer"
    assert not gate.journal.admitted(ALICE.peer)  # being the observer is no membership


def _serial(token: bytes) -> str:
    from protos.messages import Envelope, Token
    from protos.wire import decode

    return decode(Token, decode(Envelope, token).body).serial.hex()
