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

from node.peers.pacing import PART_S, RATE_LEAST_BYTES_S
from node.ports import PeerBusy, PeerFailed, Traffic
from protos import limits
from protos.bounds import as_reason
from protos.messages import PeerId
from protos.signing import SignatureError, public_key_of

__all__ = [
    "ACCEPTED",
    "END",
    "LEAST_PART_BYTES",
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
LEAST_PART_BYTES = int(PART_S * RATE_LEAST_BYTES_S)
"""What comes must come at no less than this in each `no_progress_s`; 4.3 KiB/s with 30 s.

It is a part of the slowest line that may be set: each part of an honest peer but a thing's last one has as much, so
that one whose slow line is shared by many streams is only held to be there in time with its next part.
"""
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

    What comes in parts has to come at a least rate as well, or a byte now and then would hold us for ever: n bytes may
    take limit_s · (1 + n / least_bytes). Time that was saved is not: what came fast buys nothing for later.

    Whatever moves only notes when, and the timer looks at that when it rings: thousands of messages a second move.

    Args:
        limit_s: how long nothing may move.
        least_bytes: so many buy the whole limit again.
    """

    __slots__ = (
        "_began_at",
        "_cancelling",
        "_expired",
        "_handle",
        "_is_late",
        "_least_bytes",
        "_limit_s",
        "_loop",
        "_moved_at",
        "_n_bytes",
        "_n_ours",
        "_ours",
        "_ours_at",
        "_task",
        "_why",
    )

    def __init__(self, limit_s: float, least_bytes: int = LEAST_PART_BYTES) -> None:
        self._limit_s, self._least_bytes = limit_s, least_bytes
        self._n_bytes = 0  # that came since then:
        self._began_at = 0.0  # put off by what was ours
        self._moved_at = 0.0
        self._n_ours, self._ours_at = 0, 0.0
        self._is_late = False  # the timer rang while it was we who were busy
        self._ours = _Ours(self)
        self._expired = False
        self._why = ""

    async def __aenter__(self) -> Progress:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a time limit is for a task")
        self._task, self._loop, self._cancelling = task, asyncio.get_running_loop(), task.cancelling()
        self.moved()
        self._handle = self._loop.call_at(self._moved_at + self._limit_s, self._ring)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.cancel()
        self._is_late = False
        # As asyncio.timeout does: whoever else has cancelled the task meanwhile goes before.
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    @property
    def expired(self) -> bool:
        return self._expired

    @property
    def why(self) -> str:
        """What was wrong with the peer, once the limit was exceeded."""
        return self._why

    def moved(self) -> None:
        """Something of ours was taken, or something of theirs is whole: all the time again."""
        self._began_at = self._moved_at = self._loop.time()
        self._n_bytes = 0

    def came(self, n_bytes: int) -> None:
        """So many bytes of something came, of its own: what is wrapped around them (padding, say) buys nothing."""
        self._n_bytes += n_bytes
        self._moved_at = self._loop.time()

    def ours(self) -> _Ours:
        """Stop the clock within the block, where it is we who are busy; with several such, until the last one ends."""
        return self._ours

    def begin_ours(self) -> None:
        if not self._n_ours:
            self._ours_at = self._loop.time()
        self._n_ours += 1

    def end_ours(self) -> None:
        self._n_ours -= 1
        if self._n_ours:
            return
        now = self._loop.time()
        ours_s = now - self._ours_at
        if ours_s >= self._limit_s:
            self.moved()  # a peer that we kept waiting for so long may have lost its pace
        else:  # no more than was lost: a trickle that makes us busy with each byte is one
            self._began_at = min(now, self._began_at + ours_s)
            self._moved_at = now
        if self._is_late:
            self._is_late = False
            self._handle = self._loop.call_at(now, self._ring)

    def _ring(self) -> None:
        if self._n_ours:
            self._is_late = True
            return
        now = self._loop.time()
        due_at = self._moved_at + self._limit_s
        bought_s = self._limit_s * self._n_bytes / self._least_bytes
        if self._began_at + self._limit_s + bought_s < due_at:
            due_at = self._began_at + self._limit_s + bought_s
        elif due_at > now:
            self._began_at, self._n_bytes = self._moved_at, 0
        if due_at > now:
            self._handle = self._loop.call_at(due_at, self._ring)
            return
        self._expired = True
        self._why = f"nothing moved for {self._limit_s:g} s"
        if self._n_bytes and now < self._moved_at + self._limit_s:
            self._why = f"too slow: it sent {self._n_bytes} bytes in {now - self._began_at:.3g} s"
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
