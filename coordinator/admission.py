"""Who may join: checks a request, counts invites, and certifies the peer's TLS key.

Runs in the journal's thread: what is counted is on disk before an answer leaves.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.authority import Authority, CertificateError
from coordinator.journal import Journal
from protos import limits
from protos.messages import ZERO_HASH, AdmitRequest, AdmitResponse, PeerId, Token
from protos.runspec import RunSpec
from protos.signing import Identity, Purpose, SignatureError, seal, unseal, unseal_from
from protos.wire import WireError, decode, encode

TOKEN_CONTEXT = b"barnraise.v1.admit"
"""What a token is sealed for, with the run id and the peer's after it."""


class Refusal(Exception):
    """The run doesn't let this peer in. `code` is for programs, the text for people; asking again won't help."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class BadRequest(Exception):
    """Bytes that are no request for admission."""


def token_context(run: PeerId, peer: PeerId) -> bytes:
    """The context in which a peer seals its token to the run's seal key: nobody else can use what it sends."""
    return b"\0".join((TOKEN_CONTEXT, run.encode(), peer.encode()))


def make_token(signer: Identity, run: PeerId, *, uses: int, valid_s: float, run_time_s: float) -> tuple[bytes, bytes]:
    """A fresh invite token's envelope, and its serial."""
    serial = secrets.token_bytes(16)
    token = Token(run, serial, uses, valid_s, run_time_s)
    return seal(signer, Purpose.TOKEN, run, encode(token)), serial


@dataclass(frozen=True, slots=True)
class Admitted:
    peer: PeerId
    name: str
    observer: bool
    response: AdmitResponse


class Admission:
    """Decides on requests; one at a time.

    Args:
        allowed: gives the peers of an allow-list run, read anew each time.
        banned: whether the run has banned a peer.
        today: the calendar's time, for certificates.
    """

    def __init__(
        self,
        spec: RunSpec,
        run: PeerId,
        coordinator: PeerId,
        authority: Authority,
        seal_private: bytes,
        journal: Journal,
        *,
        allowed: Callable[[], frozenset[PeerId]],
        banned: Callable[[PeerId], bool],
        today: Callable[[], datetime.datetime],
    ) -> None:
        self._spec = spec
        self._run = run
        self._coordinator = coordinator
        self._authority = authority
        self._seal_private = seal_private
        self._journal = journal
        self._allowed = allowed
        self._banned = banned
        self._today = today
        self._observer_serial = b""
        self.observer = journal.observer()
        """The peer that is the run's observer."""

    def expect_observer(self, serial: bytes) -> None:
        """From now on the token of this serial, and no earlier one, lets the observer in."""
        self._observer_serial = serial

    def admit(self, raw: bytes, run_time_s: float) -> Admitted:
        """Raises Refusal or BadRequest."""
        request = self._opened(raw)
        self._check_version(request)
        if self._banned(request.peer):
            raise Refusal("banned", "this peer is banned from the run")
        token = self._token(request)
        if request.observer:
            if token is None or not secrets.compare_digest(token.serial, self._observer_serial):
                raise Refusal("not_observer", "only the coordinator's own observer may join without a seat")
        else:
            self._check_layout(request)
        needs_token = self._check_mode(request, token, run_time_s)
        try:
            certificate, serial = self._authority.issue(request.csr, request.peer, self._today())
        except CertificateError as error:
            raise BadRequest(str(error)) from error
        counted = token if token is not None and (needs_token or request.observer) else None
        recorded = self._journal.admit(
            request.peer,
            request.name,
            serial,
            counted.serial.hex() if counted else "",
            counted.uses if counted else 0,
            observer=request.observer,
            at_run_s=run_time_s,
        )
        if not recorded:
            raise Refusal("used_up", "the invite has been used up")
        if request.observer:
            self.observer = request.peer
        return Admitted(request.peer, request.name, request.observer, AdmitResponse(certificate, run_time_s))

    def _opened(self, raw: bytes) -> AdmitRequest:
        try:
            envelope = unseal(raw, purpose=Purpose.ADMIT, run=self._run, max_bytes=limits.ADMIT_BYTES)
            request = decode(AdmitRequest, envelope.body)
        except (SignatureError, WireError) as error:
            raise BadRequest(str(error)) from error
        if request.run != self._run:
            raise Refusal("other_run", f"this is run {self._run}, not {request.run}")
        if request.peer != envelope.signer:
            raise Refusal("other_key", "the request is not signed by the peer that it is for")
        return request

    def _check_version(self, request: AdmitRequest) -> None:
        wanted = self._spec.protocol
        if request.protocol != wanted:
            older = request.protocol < wanted
            raise Refusal(
                "version",
                f"this node speaks protocol {request.protocol}, the run protocol {wanted}: "
                + ("update Barnraise" if older else "install the version of Barnraise that the run uses"),
            )

    def _check_layout(self, request: AdmitRequest) -> None:
        """All zeros: the node has not computed it yet."""
        wanted = self._spec.model.layout_digest
        if request.layout_digest not in (b"", ZERO_HASH) and request.layout_digest.hex() != wanted:
            raise Refusal(
                "layout",
                f"the model as this node builds it has layout {request.layout_digest.hex()[:12]}, the run's is "
                f"{wanted[:12]}: the versions of Barnraise or transformers differ",
            )

    def _token(self, request: AdmitRequest) -> Token | None:
        if not request.sealed_token:
            return None
        try:
            envelope = unseal_from(
                self._seal_private, request.sealed_token, context=token_context(self._run, request.peer)
            )
            opened = unseal(envelope, purpose=Purpose.TOKEN, run=self._run, max_bytes=limits.TOKEN_BYTES)
            token = decode(Token, opened.body)
        except (SignatureError, WireError) as error:
            raise Refusal("bad_invite", f"the invite's token can't be used: {error}") from error
        if opened.signer not in (self._run, self._coordinator) or token.run != self._run:
            raise Refusal("bad_invite", "the invite's token was not made by this run's operator")
        return token

    def _check_mode(self, request: AdmitRequest, token: Token | None, run_time_s: float) -> bool:
        """Whether a token is what lets the peer in; raises Refusal where nothing does."""
        if request.observer:
            self._check_expiry(token, run_time_s)
            return False
        match self._spec.membership.admission:
            case "open":
                return False
            case "allow_list":
                if request.peer not in self._allowed():
                    raise Refusal("not_allowed", f"{request.peer} is not on the run's allow-list")
                return False
            case "invite":
                if self._journal.admitted(request.peer):
                    return False  # it comes back; its invite has been counted
                if token is None:
                    raise Refusal("not_invited", "this run is by invitation, and there is no token in the invite")
                self._check_expiry(token, run_time_s)
                return True

    def _check_expiry(self, token: Token | None, run_time_s: float) -> None:
        if token is not None and run_time_s > token.issued_run_time_s + token.valid_s:
            raise Refusal("expired", "the invite has expired")
