"""Admission to a run: what an invite leads to, what is refused, and coming back without the coordinator."""

from __future__ import annotations

import asyncio
import datetime
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from node.admission import CERTIFICATE_FILE, TLS_KEY_FILE, TOKEN_CONTEXT
from node.errors import LocalStateError, NodeError, Refused, Unreachable
from protos import limits, wire
from protos.invite import Invite
from protos.messages import AdmitRequest, AdmitResponse, RunInfo
from protos.signing import Identity, Purpose, seal, unseal, unseal_from
from tests.fakes.certificates import Authority
from tests.node.contact import ME, TODAY, Coordinator, ask, closed, coordinator, folder, join, joined
from tests.node.runs import make_run

__all__ = ["closed", "coordinator", "folder"]  # fixtures


def test_an_invite_leads_to_spec_addresses_and_a_certificate(coordinator: Coordinator, folder: Path) -> None:
    admission = asyncio.run(joined(coordinator, folder, name="ada"))
    assert admission.spec == coordinator.spec
    assert admission.operator == coordinator.operator
    assert admission.addresses == coordinator.addresses
    assert admission.credentials.peer == ME.peer
    assert admission.credentials.ca == coordinator.authority.pem
    assert admission.run_offset_s == pytest.approx(1134.5)
    assert admission.fresh
    (request,) = coordinator.requests
    assert (request.peer, request.name, request.observer, request.sealed_token) == (ME.peer, "ada", False, b"")
    assert stat.S_IMODE((folder / TLS_KEY_FILE).stat().st_mode) == 0o600


def test_a_token_is_sealed_to_the_run_and_to_this_peer(coordinator: Coordinator, folder: Path) -> None:
    async def main() -> None:
        async with coordinator.serving() as host:
            await ask(Invite(coordinator.run, (host,), b"the token"), folder, observer=True)

    asyncio.run(main())
    (request,) = coordinator.requests
    assert request.observer
    assert b"the token" not in request.sealed_token
    context = b"\0".join((TOKEN_CONTEXT, coordinator.run.encode(), ME.peer.encode()))
    assert unseal_from(coordinator.seal_private, request.sealed_token, context=context) == b"the token"


def test_the_context_of_a_token_is_the_coordinators() -> None:
    from coordinator.admission import token_context

    run = Identity.from_private_bytes(b"r" * 32).peer
    assert token_context(run, ME.peer) == b"\0".join((TOKEN_CONTEXT, run.encode(), ME.peer.encode()))


def test_a_returning_node_needs_no_coordinator(coordinator: Coordinator, folder: Path, closed: str) -> None:
    first = asyncio.run(joined(coordinator, folder))
    again = join(Invite(coordinator.run, (closed,)), folder)
    assert again.credentials == first.credentials
    assert again.spec == first.spec
    assert again.addresses == first.addresses
    assert again.run_offset_s is None
    assert not again.fresh


def test_a_returning_node_keeps_its_certificate_and_takes_what_is_new(
    coordinator: Coordinator, folder: Path, closed: str
) -> None:
    first = asyncio.run(joined(coordinator, folder))
    coordinator.sequence = 9
    again = asyncio.run(joined(coordinator, folder))
    assert len(coordinator.requests) == 1
    assert again.credentials == first.credentials
    assert again.addresses.sequence == 9
    assert join(Invite(coordinator.run, (closed,)), folder).addresses.sequence == 9


def test_a_certificate_near_its_end_is_renewed_and_used_up_if_it_can_not_be(
    coordinator: Coordinator, folder: Path, closed: str
) -> None:
    coordinator.valid_for = datetime.timedelta(days=10)
    first = asyncio.run(joined(coordinator, folder))
    coordinator.refusal = (403, "the invite is used up")
    assert asyncio.run(joined(coordinator, folder)).credentials == first.credentials
    coordinator.refusal = None
    coordinator.valid_for = datetime.timedelta(days=90)
    renewed = asyncio.run(joined(coordinator, folder))
    assert renewed.credentials.certificate != first.credentials.certificate
    assert len(coordinator.requests) == 2
    later = TODAY + datetime.timedelta(days=91)
    with pytest.raises(Unreachable):
        join(Invite(coordinator.run, (closed,)), folder, today=lambda: later)


@pytest.mark.parametrize("file", [CERTIFICATE_FILE, TLS_KEY_FILE, "ca.pem", "run.bin"])
@pytest.mark.parametrize("damage", [b"", b"nonsense"])
def test_a_damaged_file_of_an_earlier_admission_is_asked_for_anew(
    coordinator: Coordinator, folder: Path, file: str, damage: bytes
) -> None:
    asyncio.run(joined(coordinator, folder))
    (folder / file).write_bytes(damage)
    assert asyncio.run(joined(coordinator, folder)).credentials.peer == ME.peer
    assert len(coordinator.requests) == 2


def test_a_folder_of_another_run_is_refused(coordinator: Coordinator, folder: Path, tmp_path: Path) -> None:
    asyncio.run(joined(coordinator, folder))
    (tmp_path / "other").mkdir()
    other = Coordinator(tmp_path / "other")
    with pytest.raises(LocalStateError, match=r"another run.*--data"):
        asyncio.run(joined(other, folder))


def test_a_refusal_says_what_the_coordinator_says(coordinator: Coordinator, folder: Path) -> None:
    coordinator.refusal = (403, "this run is by invitation;\n ask for one")
    with pytest.raises(Refused, match=r"by invitation; ask for one\b") as error:
        asyncio.run(joined(coordinator, folder))
    assert error.value.exit_code == 5
    assert os.listdir(folder) == []
    coordinator.refusal = (503, "busy")
    with pytest.raises(Unreachable, match="busy"):
        asyncio.run(joined(coordinator, folder))


def by_another(kind: Purpose) -> Callable[[Coordinator], Callable[[RunInfo], RunInfo]]:
    """One of the three envelopes, signed by a stranger."""
    stranger = Identity.generate()

    def bend(coordinator: Coordinator) -> Callable[[RunInfo], RunInfo]:
        body = {
            Purpose.RUNSPEC: coordinator.spec.to_bytes(),
            Purpose.OPERATOR: wire.encode(coordinator.operator),
            Purpose.ADDRESSES: wire.encode(coordinator.addresses),
        }[kind]
        envelope = seal(stranger, kind, coordinator.run, body)
        name = {Purpose.RUNSPEC: "spec", Purpose.OPERATOR: "operator", Purpose.ADDRESSES: "addresses"}[kind]
        return lambda info: replace(info, **{name: envelope})  # type: ignore[arg-type]

    return bend


@pytest.mark.parametrize("kind", [Purpose.RUNSPEC, Purpose.OPERATOR, Purpose.ADDRESSES])
def test_what_a_stranger_signed_is_refused(coordinator: Coordinator, folder: Path, kind: Purpose) -> None:
    coordinator.bend = by_another(kind)(coordinator)
    with pytest.raises(Refused, match=f"is not run {coordinator.run}.*signed by") as error:
        asyncio.run(joined(coordinator, folder))
    assert "invite" in error.value.remedy
    assert coordinator.requests == []


def test_another_runs_coordinator_at_the_address_is_refused(coordinator: Coordinator, folder: Path) -> None:
    async def main() -> None:
        async with coordinator.serving() as host:
            await ask(Invite(Identity.generate().peer, (host,)), folder)

    with pytest.raises(Refused, match="is not run"):
        asyncio.run(main())


@pytest.mark.parametrize(("protocol", "remedy"), [(limits.PROTOCOL + 1, "update"), (0, "install the version")])
def test_another_protocol_is_refused_with_what_to_do(
    coordinator: Coordinator, folder: Path, protocol: int, remedy: str
) -> None:
    coordinator.bend = lambda info: replace(info, protocol=protocol)
    with pytest.raises(Refused, match=remedy):
        asyncio.run(joined(coordinator, folder))


def test_settings_that_this_version_can_not_read_are_refused(coordinator: Coordinator, folder: Path) -> None:
    raw = coordinator.spec.to_bytes().replace(b'{"codec"', b'{"coming_soon":1,"codec"')
    envelope = seal(coordinator.run_key, Purpose.RUNSPEC, coordinator.run, raw)
    coordinator.bend = lambda info: replace(info, spec=envelope)
    with pytest.raises(Refused, match=r"coming_soon.*install the version"):
        asyncio.run(joined(coordinator, folder))


@pytest.mark.parametrize(
    ("field", "other", "said"),
    [
        (b'"numerics_version":2', b'"numerics_version":3', "numerics_version is 3, this version computes with 2"),
        (b'"name":"default"', b'"name":"oracle"', "rule.name is 'oracle', which is no rule"),
    ],
)
def test_settings_that_this_version_can_not_compute_are_refused(
    coordinator: Coordinator, folder: Path, field: bytes, other: bytes, said: str
) -> None:
    """Else it would train, and find in the first exchange that it can neither combine nor check."""
    raw = coordinator.spec.to_bytes()
    assert field in raw
    envelope = seal(coordinator.run_key, Purpose.RUNSPEC, coordinator.run, raw.replace(field, other))
    coordinator.bend = lambda info: replace(info, spec=envelope)
    with pytest.raises(Refused, match=rf"{said}.*install the version"):
        asyncio.run(joined(coordinator, folder))


def test_older_settings_than_were_seen_do_not_replace_them(coordinator: Coordinator, folder: Path, closed: str) -> None:
    old = coordinator.spec
    coordinator.spec = make_run(coordinator.folder, revision=2)
    asyncio.run(joined(coordinator, folder))
    coordinator.spec = old
    for admission in (asyncio.run(joined(coordinator, folder)), join(Invite(coordinator.run, (closed,)), folder)):
        assert admission.spec.revision == 2


@pytest.mark.parametrize("whose", ["another peer", "another authority", "another key"])
def test_a_certificate_that_is_not_ours_is_refused(coordinator: Coordinator, folder: Path, whose: str) -> None:
    other = Authority()
    stranger = Identity.generate().peer

    def admit_wrongly(raw: bytes) -> bytes:
        request = wire.decode(AdmitRequest, unseal(raw, purpose=Purpose.ADMIT, run=coordinator.run).body)
        match whose:
            case "another peer":
                certificate = coordinator.authority.sign(request.csr, stranger)
            case "another authority":
                certificate = other.sign(request.csr, request.peer)
            case _:
                certificate = coordinator.authority.certify(request.peer, other.key.public_key()).public_bytes(
                    Encoding.DER
                )
        return wire.encode(AdmitResponse(certificate, 1.0))

    coordinator.admit = admit_wrongly  # type: ignore[method-assign]
    with pytest.raises(Refused, match="no good"):
        asyncio.run(joined(coordinator, folder))
    assert os.listdir(folder) == []


def test_all_errors_end_in_cause_and_remedy(coordinator: Coordinator, folder: Path) -> None:
    coordinator.refusal = (403, "no")
    with pytest.raises(NodeError) as error:
        asyncio.run(joined(coordinator, folder))
    assert str(error.value) == f"{error.value.cause}; {error.value.remedy}"
