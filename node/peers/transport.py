"""What both ends of a gRPC connection between nodes share: credentials, options, counting, limits, diagnoses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType

import grpc
from cryptography.x509 import load_pem_x509_certificate
from cryptography.x509.oid import NameOID
from grpc.aio import EOF as END  # type: ignore[attr-defined]

from node.ports import PeerBusy, PeerFailed, Traffic
from protos import limits
from protos.bounds import as_reason
from protos.messages import PeerId
from protos.signing import SignatureError, public_key_of

__all__ = [
    "ACCEPTED",
    "END",
    "Credentials",
    "IdentityMismatch",
    "Meter",
    "Progress",
    "channel_options",
    "diagnosis",
    "failure",
    "failure_of",
    "open_call",
    "peer_of",
    "server_options",
]

KEEPALIVE_S = 20.0
KEEPALIVE_TIMEOUT_S = 10.0
"""A connection whose other end doesn't acknowledge a ping in this time is broken."""
NO_PROGRESS_S = 30.0
ACCEPTED = ("barnraise-accepted", "1")
"""Initial metadata by which a reducer lets a sender's rows come; who gets none waits for the reason why not.

A sender that goes on writing to a call that was refused is not told why: gRPC forgets the status over the failed write.
"""

# Both ends ping alike, and a server tolerates twice the pings that a client of ours sends.
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", limits.FRAME_BYTES),
    ("grpc.max_receive_message_length", limits.FRAME_BYTES),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


class IdentityMismatch(PeerFailed):
    """Something with a valid certificate answers at the address, but it is another peer."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What proves this node in TLS, all PEM: its certificate (chain), the P-256 key, and the run's CA."""

    certificate: bytes
    key: bytes
    ca: bytes

    @property
    def peer(self) -> PeerId:
        """Whom the certificate names. Raises SignatureError for one that is damaged or names no peer."""
        try:
            names = load_pem_x509_certificate(self.certificate).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        except ValueError as error:
            raise SignatureError(f"no certificate in PEM: {error}") from None
        return peer_of({"x509_common_name": [str(name.value).encode() for name in names]})

    def __repr__(self) -> str:
        return "Credentials(…)"


def channel_options(peer: PeerId) -> list[tuple[str, str | int]]:
    """Those of a channel on which only `peer` will do: TLS compares the name in its certificate."""
    return [
        *_OPTIONS,
        ("grpc.ssl_target_name_override", peer),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
    ]


def server_options() -> list[tuple[str, str | int]]:
    """Those of a server: without `so_reuseport` a taken port is an error instead of a shared port."""
    return [
        *_OPTIONS,
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_S * 500)),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def open_call(channel: grpc.aio.Channel, method: str) -> grpc.aio.StreamStreamCall[bytes, bytes]:
    """A call that carries bytes both ways; a method with one message is the same on the wire.

    Raises UsageError on a channel that was closed.
    """
    call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(method, None, None)()  # type: ignore[call-arg]
    return call


def peer_of(auth_context: Mapping[str, Iterable[bytes]]) -> PeerId:
    """The peer whose certificate a connection was made with. Raises SignatureError for a name that is no peer id."""
    names = list(auth_context.get("x509_common_name", ()))
    if len(names) != 1:
        raise SignatureError(f"a certificate with {len(names)} names")
    name = names[0].decode("ascii", "replace")
    public_key_of(name)
    return PeerId(name)


class Meter:
    """Counts the messages of one call, both ways; `exchange` says in which traffic they count beside all."""

    __slots__ = ("_exchange", "_traffic")

    def __init__(self, traffic: Traffic, *, exchange: bool = False) -> None:
        self._traffic = traffic
        self._exchange = exchange

    def sent(self, raw: bytes) -> bytes:
        self._traffic.sent += len(raw)
        if self._exchange:
            self._traffic.exchange_sent += len(raw)
        return raw

    def received(self, raw: bytes) -> bytes:
        self._traffic.received += len(raw)
        if self._exchange:
            self._traffic.exchange_received += len(raw)
        return raw


class Progress:
    """A time limit that starts anew whenever something moves; leaving raises TimeoutError once it was exceeded.

    Whatever moves only notes when, and the timer looks at that when it rings: thousands of messages a second move.
    """

    __slots__ = ("_cancelling", "_expired", "_handle", "_limit_s", "_loop", "_moved_at", "_n_ours", "_ours", "_task")

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._n_ours = 0
        self._ours = _Ours(self)
        self._expired = False

    async def __aenter__(self) -> Progress:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a time limit is for a task")
        self._task, self._loop, self._cancelling = task, asyncio.get_running_loop(), task.cancelling()
        self._moved_at = self._loop.time()
        self._handle = self._loop.call_at(self._moved_at + self._limit_s, self._ring)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.cancel()
        # As asyncio.timeout does: whoever else has cancelled the task meanwhile goes before.
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    @property
    def expired(self) -> bool:
        return self._expired

    def moved(self) -> None:
        self._moved_at = self._loop.time()

    def ours(self) -> _Ours:
        """Stop the clock within the block, where it is we who are busy; with several such, until the last one ends."""
        return self._ours

    def begin_ours(self) -> None:
        self._n_ours += 1

    def end_ours(self) -> None:
        self._n_ours -= 1
        self.moved()

    def _ring(self) -> None:
        now = self._loop.time()
        due_at = (now if self._n_ours else self._moved_at) + self._limit_s
        if due_at > now:
            self._handle = self._loop.call_at(due_at, self._ring)
        else:
            self._expired = True
            self._task.cancel()


class _Ours:
    """`Progress.ours`; a class, for a generator takes several times as long, and each message enters some."""

    __slots__ = ("_progress",)

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __enter__(self) -> None:
        self._progress.begin_ours()

    def __exit__(self, *_: object) -> None:
        self._progress.end_ours()


def failure(peer: PeerId, error: grpc.aio.AioRpcError) -> PeerFailed:
    """What the end of a call says of the peer."""
    return failure_of(peer, error.code(), error.details())


def failure_of(peer: PeerId, status: grpc.StatusCode, text: str | None) -> PeerFailed:
    """As `failure`, from a call's status and details."""
    details = as_reason(text or "")
    match status:
        case grpc.StatusCode.PERMISSION_DENIED | grpc.StatusCode.FAILED_PRECONDITION:
            return PeerFailed(peer, f"refused: {details}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return PeerBusy(peer, f"busy: {details}")
        case grpc.StatusCode.UNAVAILABLE:
            return diagnosis(peer, details)
        case grpc.StatusCode.CANCELLED | grpc.StatusCode.INTERNAL:  # whatever it said is lost
            return PeerFailed(peer, "it broke off")
        case code:
            return PeerFailed(peer, f"{code.name.lower().replace('_', ' ')}: {details}")


def diagnosis(peer: PeerId, details: str) -> PeerFailed:
    """A failed connection in a contributor's words, out of gRPC's."""
    text = details.lower()
    if "hostname verification check failed" in text:
        return IdentityMismatch(peer, "identity mismatch: another peer answers there")
    for sign, words in (
        ("connection refused", "connection refused"),
        ("domain name not found", "name not found"),
        ("lookup", "name not found"),
        ("no route to host", "no route to host"),
        ("network is unreachable", "network unreachable"),
        ("certificate", "TLS failed: its certificate is not of this run, or not valid at this machine's time"),
        ("handshake", "TLS failed: it is no node of this run, or one of the two clocks is far off"),
        ("timed out", "no answer"),
        ("timeout", "no answer"),
    ):
        if sign in text:
            return PeerFailed(peer, words)
    return PeerFailed(peer, f"connection broke: {details}")
