"""First contact: from an invite to verified spec, addresses, and a certificate; again, without the coordinator.

Everything is verified from the run id in the invite: the run key signs RunSpec and operator, the coordinator's key that
it names signs the addresses, and the CA certificate that it names vouches for everybody else.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from coordinator.rounds import policy
from node.errors import LocalStateError, MachineError, Refused, Unreachable
from node.files import replace_file, writing
from node.peers.transport import Credentials
from node.racing import NoneWillDo, first_of
from protos import limits, wire
from protos.bounds import as_reason
from protos.invite import Invite
from protos.messages import ZERO_HASH, Addresses, AdmitRequest, AdmitResponse, Operator, PeerId, RunInfo
from protos.runspec import RunSpec, SpecError
from protos.signing import Identity, Purpose, SignatureError, seal, seal_to, unseal

CERTIFICATE_FILE, TLS_KEY_FILE, CA_FILE = "certificate.pem", "certificate.key", "ca.pem"
RUN_FILE = "run.bin"
ANSWER_BYTES = 2 * limits.SPEC_BYTES + limits.ADDRESSES_BYTES + limits.CERTIFICATE_BYTES
CONNECT_S = 5.0
ANSWER_S = 15.0
RENEW_BEFORE = datetime.timedelta(days=30)

TOKEN_CONTEXT = b"barnraise.v1.admit"


@dataclass(frozen=True, slots=True)
class Admission:
    """What a node needs to take part.

    `run_offset_s` added to this process's monotonic clock gives the run's clock; None if the coordinator was not there
    to tell. `fresh` says whether it was.
    """

    spec: RunSpec
    spec_envelope: bytes
    operator: Operator
    addresses: Addresses
    credentials: Credentials
    run_offset_s: float | None
    fresh: bool


async def admit(
    invite: Invite,
    identity: Identity,
    folder: Path,
    *,
    seconds: Callable[[], float],
    name: str = "",
    observer: bool = False,
    layout_digest: bytes = ZERO_HASH,
    connect_s: float = CONNECT_S,
    today: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
) -> Admission:
    """Ask the coordinator to be let in; if it is away, come back with what an earlier admission left in the folder.

    Args:
        seconds: the monotonic clock.
        layout_digest: of the model as this node builds it, if it has already.

    Raises Refused if the run won't have us, Unreachable if nobody answers and nothing usable is in the folder,
    LocalStateError or MachineError for the folder.
    """
    known = await asyncio.to_thread(_recall, invite, identity, folder, today())
    try:
        answer = await _first_answer(invite, seconds, connect_s)
    except Unreachable:
        if known is not None:
            return known
        raise
    host, info, verified = answer.host, answer.info, answer.verified
    if known is not None and known.spec.revision > verified.spec.revision:  # whoever answers is behind, or lies
        verified = replace(verified, spec=known.spec, spec_envelope=known.spec_envelope)
        info = replace(info, spec=known.spec_envelope)
    mine = known.credentials if known is not None and known.credentials.ca == _ca_pem(verified.operator) else None
    if mine is None or _valid_until(mine) - today() < RENEW_BEFORE:
        tls_key = ec.generate_private_key(ec.SECP256R1())
        request = _request(invite, identity, verified.operator, tls_key, name, observer, layout_digest)
        try:
            response = await _ask(host, request, connect_s)
            mine = _credentials(response, identity.peer, verified.operator, tls_key)
        except (Refused, Unreachable):
            if mine is None:
                raise  # else the old certificate still does, and whether we are welcome the leader will say
    await asyncio.to_thread(_remember, folder, info, mine)
    return verified.admission(mine, answer.run_offset_s, fresh=True)


async def revision_now(
    invite: Invite, revision: int, *, seconds: Callable[[], float], connect_s: float = CONNECT_S
) -> tuple[bytes, RunSpec]:
    """A revision of the RunSpec, as its envelope and opened. Raises Unreachable or Refused."""
    answer = await _first_answer(invite, seconds, connect_s, revision)
    if answer.verified.spec.revision != revision:
        raise Unreachable("the coordinator", [f"it tells revision {answer.verified.spec.revision} instead"])
    return answer.info.spec, answer.verified.spec


async def addresses_now(invite: Invite, *, seconds: Callable[[], float], connect_s: float = CONNECT_S) -> Addresses:
    """Where the coordinator and its observer are now. Raises Unreachable or Refused."""
    return (await _first_answer(invite, seconds, connect_s)).verified.addresses


# -- what the run says -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Verified:
    spec: RunSpec
    spec_envelope: bytes
    operator: Operator
    addresses: Addresses

    def admission(self, credentials: Credentials, offset_s: float | None, *, fresh: bool) -> Admission:
        return Admission(self.spec, self.spec_envelope, self.operator, self.addresses, credentials, offset_s, fresh)


def _verify(info: RunInfo, invite: Invite) -> _Verified:
    """Raises Refused where what was said doesn't hold for the invite's run."""
    try:
        operator = wire.decode(
            Operator, unseal(info.operator, purpose=Purpose.OPERATOR, run=invite.run, signer=invite.run).body
        )
        spec = unseal(
            info.spec, purpose=Purpose.RUNSPEC, run=invite.run, signer=invite.run, max_bytes=2 * limits.SPEC_BYTES
        )
        addresses = wire.decode(
            Addresses,
            unseal(info.addresses, purpose=Purpose.ADDRESSES, run=invite.run, signer=operator.coordinator).body,
        )
        parsed = RunSpec.from_bytes(spec.body)
        if why := policy.unknown(parsed):
            raise SpecError(why)
        if operator.run != invite.run:
            raise SignatureError(f"the operator's certificate is for run {operator.run}")
        _ca_pem(operator)
    except SpecError as error:
        raise Refused(
            f"this version can't read the run's settings ({error})",
            "install the version of Barnraise that the run uses",
        ) from error
    except (SignatureError, wire.WireError, ValueError) as error:
        raise Refused(
            f"what answers is not run {invite.run} ({error})", "ask the operator for a current invite"
        ) from error
    if limits.PROTOCOL != info.protocol:
        older = limits.PROTOCOL < info.protocol
        raise Refused(
            f"this node speaks protocol {limits.PROTOCOL}, the run protocol {info.protocol}",
            "update Barnraise" if older else "install the version of Barnraise that the run uses",
        )
    return _Verified(parsed, info.spec, operator, addresses)


def _ca_pem(operator: Operator) -> bytes:
    return x509.load_der_x509_certificate(operator.ca_certificate).public_bytes(serialization.Encoding.PEM)


# -- asking ------------------------------------------------------------------------------------------------------------


def _session(connect_s: float) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S, sock_connect=connect_s))


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a host of the invite says of the run, found to be the run's own word."""

    host: str
    info: RunInfo
    verified: _Verified
    run_offset_s: float


class _NoAnswer(Exception):
    """Why a host won't do: a few words, or the run's refusal."""

    def __init__(self, why: str, refusal: Refused | None = None) -> None:
        super().__init__(why)
        self.refusal = refusal


async def _first_answer(invite: Invite, seconds: Callable[[], float], connect_s: float, revision: int = 0) -> _Answer:
    """What the first host says that answers for the run; each is asked a moment after the one before.

    Raises Refused where one that answers is not the run's or not for this version, and none does better; Unreachable
    with what each host did.
    """
    async with _session(connect_s) as session:

        async def ask(host: str) -> _Answer:
            return await _answer_of(session, host, invite, seconds, connect_s, revision)

        outcome = await first_of(list(dict.fromkeys(invite.hosts)), ask, _NoAnswer)
    if not isinstance(outcome, NoneWillDo):
        return outcome
    for failure in outcome.failures.values():
        if failure.refusal is not None:
            raise failure.refusal
    raise Unreachable(
        "the coordinator",
        [f"{host}: {failure}" for host, failure in outcome.failures.items()],
        "check the invite's addresses and the network, and try again later: while the coordinator is away the run goes "
        "on, but only it lets newcomers in",
    )


async def _answer_of(
    session: aiohttp.ClientSession,
    host: str,
    invite: Invite,
    seconds: Callable[[], float],
    connect_s: float,
    revision: int,
) -> _Answer:
    """Raises _NoAnswer."""
    asked_at = seconds()
    about = f"?revision={revision}" if revision else ""
    try:
        async with session.get(f"http://{host}/v1/run{about}", allow_redirects=False) as response:
            raw = await _body(response)
        if response.status != 200:
            raise _NoAnswer(_reason(response.status, raw))
        info = wire.decode(RunInfo, raw)
        # The clock was read somewhere between our question and the answer: half of that is the best guess.
        offset_s = info.run_time_s - (asked_at + seconds()) / 2
        return _Answer(host, info, _verify(info, invite), offset_s)
    except wire.WireError as error:
        raise _NoAnswer("it answers, but is no coordinator") from error
    except Refused as error:
        raise _NoAnswer(error.cause, error) from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise _NoAnswer(_diagnosis(error, connect_s)) from error


async def _ask(host: str, request: bytes, connect_s: float) -> AdmitResponse:
    try:
        async with (
            _session(connect_s) as session,
            session.post(f"http://{host}/v1/admit", data=request, allow_redirects=False) as response,
        ):
            raw = await _body(response)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise Unreachable("the coordinator", [f"{host}: {_diagnosis(error, connect_s)}"]) from error
    match response.status:
        case 200:
            pass
        case 400 | 403 | 404 | 413:
            raise Refused(f"the run refused this node: {_reason(response.status, raw)}", "ask the run's operator")
        case _:
            raise Unreachable("the coordinator", [f"{host}: {_reason(response.status, raw)}"])
    try:
        return wire.decode(AdmitResponse, raw)
    except wire.WireError as error:
        raise Unreachable("the coordinator", [f"{host}: its answer makes no sense ({error})"]) from error


async def _body(response: aiohttp.ClientResponse) -> bytes:
    raw = await response.content.read(ANSWER_BYTES + 1)
    while len(raw) <= ANSWER_BYTES and (more := await response.content.read(ANSWER_BYTES + 1 - len(raw))):
        raw += more
    if len(raw) > ANSWER_BYTES:
        raise aiohttp.ClientPayloadError(f"an answer of more than {ANSWER_BYTES} bytes")
    return raw


def _reason(status: int, raw: bytes) -> str:
    """What an error answer says: the reason of the coordinator's JSON, or the beginning of any other text."""
    try:
        reason = json.loads(raw)["reason"]
    except (ValueError, KeyError, TypeError, RecursionError):
        reason = raw[:200].decode("utf-8", "replace")
    return as_reason(" ".join(str(reason).split())) or f"it answered {status}"


def _diagnosis(error: Exception, connect_s: float) -> str:
    match error:
        case aiohttp.ClientConnectorDNSError():
            return "name not found"
        case aiohttp.ConnectionTimeoutError():
            return f"no answer in {connect_s:g} s"
        case TimeoutError():
            return f"no answer in {ANSWER_S:g} s"
        case aiohttp.ClientConnectorError():
            cause = error.os_error
            if isinstance(cause, ConnectionRefusedError):
                return "connection refused"
            if isinstance(cause, socket.gaierror):
                return "name not found"
            return cause.strerror or str(cause)
        case aiohttp.ClientResponseError() | aiohttp.ClientPayloadError() | aiohttp.ServerDisconnectedError():
            return "it answers, but not with HTTP as a coordinator does"
        case _:
            return as_reason(str(error)) or type(error).__name__


# -- the certificate ---------------------------------------------------------------------------------------------------


def _request(
    invite: Invite,
    identity: Identity,
    operator: Operator,
    tls_key: ec.EllipticCurvePrivateKey,
    name: str,
    observer: bool,
    layout_digest: bytes,
) -> bytes:
    """The signed request: the identity key vouches for the certificate request, and the token is for the run alone."""
    csr = (
        x509.CertificateSigningRequestBuilder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.peer)]))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(identity.peer)]), critical=False)
        .sign(tls_key, hashes.SHA256())
        .public_bytes(serialization.Encoding.DER)
    )
    sealed = b""
    if invite.token:
        context = b"\0".join((TOKEN_CONTEXT, invite.run.encode(), identity.peer.encode()))
        sealed = seal_to(operator.seal_key, invite.token, context=context)
    request = AdmitRequest(
        invite.run, identity.peer, csr, limits.PROTOCOL, layout_digest, sealed, os.urandom(16), name, observer
    )
    return seal(identity, Purpose.ADMIT, invite.run, wire.encode(request))


def _credentials(
    response: AdmitResponse, peer: PeerId, operator: Operator, tls_key: ec.EllipticCurvePrivateKey
) -> Credentials:
    key_pem = tls_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        certificate = x509.load_der_x509_certificate(response.certificate)
        credentials = Credentials(certificate.public_bytes(serialization.Encoding.PEM), key_pem, _ca_pem(operator))
        _check(credentials, peer)
    except (ValueError, InvalidSignature) as error:
        raise Refused(
            f"the certificate that the coordinator issued is no good ({error})", "tell the operator"
        ) from error
    return credentials


def _check(credentials: Credentials, peer: PeerId) -> None:
    """Raises ValueError or InvalidSignature unless the certificate is this peer's, for this key, by this CA."""
    certificate = x509.load_pem_x509_certificate(credentials.certificate)
    authority = x509.load_pem_x509_certificate(credentials.ca)
    key = serialization.load_pem_private_key(credentials.key, password=None)
    if credentials.peer != peer:
        raise ValueError(f"it names {credentials.peer}")
    if certificate.public_key() != key.public_key():
        raise ValueError("it is for another key")
    certificate.verify_directly_issued_by(authority)


def _valid_until(credentials: Credentials) -> datetime.datetime:
    return x509.load_pem_x509_certificate(credentials.certificate).not_valid_after_utc


# -- the folder --------------------------------------------------------------------------------------------------------


def _remember(folder: Path, info: RunInfo, credentials: Credentials) -> None:
    with writing(folder, "the run's certificate", 4096):
        key = folder / TLS_KEY_FILE
        if not key.exists() or key.read_bytes() != credentials.key:
            # A certificate without its key is asked for anew, so the order of these does not matter.
            key.unlink(missing_ok=True)
            replace_file(key, credentials.key, private=True)
        replace_file(folder / CERTIFICATE_FILE, credentials.certificate)
        replace_file(folder / CA_FILE, credentials.ca)
        replace_file(folder / RUN_FILE, wire.encode(info))


def _recall(invite: Invite, identity: Identity, folder: Path, today: datetime.datetime) -> Admission | None:
    """What an earlier admission left, if it still holds for this run and key; None if anything of it is missing.

    Raises LocalStateError where the folder is another run's.
    """
    try:
        info = wire.decode(RunInfo, (folder / RUN_FILE).read_bytes())
        credentials = Credentials(
            (folder / CERTIFICATE_FILE).read_bytes(),
            (folder / TLS_KEY_FILE).read_bytes(),
            (folder / CA_FILE).read_bytes(),
        )
    except (FileNotFoundError, wire.WireError):
        return None
    except OSError as error:
        raise MachineError(f"{folder} can't be read: {error.strerror or error}", "check its permissions") from error
    try:
        unseal(info.operator, purpose=Purpose.OPERATOR, run=invite.run, signer=invite.run)
    except SignatureError as error:
        raise LocalStateError(
            f"the data folder {folder} belongs to another run than the invite", "choose another folder with --data"
        ) from error
    try:
        verified = _verify(info, invite)
        _check(credentials, identity.peer)
        if credentials.ca != _ca_pem(verified.operator) or _valid_until(credentials) <= today:
            return None
    except (Refused, ValueError, TypeError, InvalidSignature):  # of an older version, or damaged: ask anew
        return None
    return verified.admission(credentials, None, fresh=False)
