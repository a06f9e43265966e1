"""The leader's lines over gRPC with mutual TLS: one stream a member, opened by the member, checked frame by frame.

The peer is who its certificate says; the run's CA signs certificates for admitted peers alone. Frames are taken as
bytes, so that nothing is parsed before its size is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

import grpc
import grpc.aio

from coordinator.leading.descriptors import connection_options
from coordinator.leading.lines import MemberLine
from coordinator.leading.opening import NOBODY, Misbehaved, open_frame, open_hello
from coordinator.leading.ports import Arrived, Clock, Departed, Inbound, Inbox
from coordinator.leading.saying import one_line
from coordinator.leading.streams import Streams
from protos import limits
from protos.messages import Goodbye, PeerId
from protos.services import LEADER
from protos.signing import SignatureError, public_key_of

HELLO_S = 20.0
GOODBYE_S = 2.0
BEAT_S = 2.0
SILENCE_S = 60.0
ASIDE_BYTES = 2**16
"""Larger frames are opened in a thread."""
LINES_MOST = limits.MEMBERS + 64
HELLOS = "this peer says hello too often; it may in a moment"
OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),  # or a second server would share the port in silence
    ("grpc.max_concurrent_streams", 8),  # of one connection: a member needs one
    ("grpc.max_receive_message_length", limits.FRAME_BYTES),
    ("grpc.max_send_message_length", limits.FRAME_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),  # members ping to keep NATs open: never a reason to close
    ("grpc.http2.max_pings_without_data", 0),
]

_log = logging.getLogger(__name__)


class Tls(Protocol):
    """This end's key and certificate and the run's CA, in PEM."""

    @property
    def key(self) -> bytes: ...

    @property
    def certificate(self) -> bytes: ...

    @property
    def authority(self) -> bytes: ...


class PortError(OSError):
    """The address can't be listened on."""


class LineServicer:
    """Serves the lines of one run to whoever leads here: the coordinator, or a node that may stand in for it.

    Args:
        leads: gives the inbox of the leader here, or the reason why nobody leads.
        observer: gives the peer that may be the observer, at this moment.
        coordinator: who may sign orders beside the run key.
        beat_s: a line on which nothing is said for so long carries a sign of life; as it is now, for it may change.
        silence_s: a member that says nothing for so long has lost its line; as it is now.
    """

    def __init__(
        self,
        run: PeerId,
        leads: Callable[[], Inbox | str],
        clock: Clock,
        *,
        observer: Callable[[], PeerId | None],
        coordinator: PeerId = NOBODY,
        beat_s: Callable[[], float] = lambda: BEAT_S,
        silence_s: Callable[[], float] = lambda: SILENCE_S,
    ) -> None:
        self._run, self._coordinator = run, coordinator
        self._leads = leads
        self._clock = clock
        self._observer = observer
        self._beat_s, self._silence_s = beat_s, silence_s
        self._streams = Streams()

    def handler(self) -> grpc.GenericRpcHandler[bytes, bytes]:
        """For a gRPC server with mutual TLS."""
        method = grpc.stream_stream_rpc_method_handler(self._line)
        return grpc.method_handlers_generic_handler(LEADER, {"Line": method})

    # -- one line --------------------------------------------------------------------------------------------------

    async def _line(self, _requests: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        peer = _peer_of(context)
        if peer is None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the certificate names no peer id")
            return
        line = MemberLine(peer, self._clock.now())
        self._streams.opened(line)
        try:
            await self._serve(line, context)
        finally:
            self._streams.ended(line)

    async def _serve(self, line: MemberLine, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        peer = line.peer
        try:
            first = await _first(line, context)
            if line.dropped:
                await context.abort(grpc.StatusCode.ABORTED, line.dropped)
            if not isinstance(first, bytes):
                return
            if not self._streams.may_greet(peer, self._clock.now()):
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, HELLOS)
            observer = self._observer()
            greeting = open_hello(first, run=self._run, peer=peer, observer=observer)
        except (Misbehaved, TimeoutError) as error:
            reason = str(error) or f"no hello within {HELLO_S:.0f} s"
            code = error.code if isinstance(error, Misbehaved) else "protocol"
            _log.info("line of %s refused: %s", peer[-6:], one_line(reason))
            line.close(Goodbye(code, reason))
            await _within(GOODBYE_S, self._write(line, context))
            return
        inbox = self._leads()
        if isinstance(inbox, str):
            line.close(Goodbye("shutdown", inbox))
            await _within(GOODBYE_S, self._write(line, context))
            return
        self._streams.greeted(line)
        inbox.post(Arrived(line, greeting.hello, greeting.record, greeting.hello.record))
        reason = "ended by us"
        try:
            reason = await self._talk(line, context, inbox, is_observer=greeting.hello.observer)
        finally:
            inbox.post(Departed(line, line.dropped or reason))

    async def _talk(
        self, line: MemberLine, context: grpc.aio.ServicerContext[bytes, bytes], inbox: Inbox, *, is_observer: bool
    ) -> str:
        """Read and write until either ends; why it ended."""
        reader = asyncio.create_task(self._read(line, context, inbox, is_observer=is_observer), name="line reader")
        writer = asyncio.create_task(self._write(line, context), name="line writer")
        dropped = asyncio.create_task(line.wait_dropped(), name="line dropped")
        try:
            await asyncio.wait((reader, writer, dropped), return_when=asyncio.FIRST_COMPLETED)
            if line.dropped:
                return line.dropped
            if not reader.done():
                return "closed by us"
            reason = reader.result()
            if reason:  # a goodbye is queued
                await _within(GOODBYE_S, asyncio.shield(writer))
            return reason or "closed by the member"
        finally:
            for task in (reader, writer, dropped):
                task.cancel()
            await asyncio.gather(reader, writer, dropped, return_exceptions=True)

    async def _read(
        self, line: MemberLine, context: grpc.aio.ServicerContext[bytes, bytes], inbox: Inbox, *, is_observer: bool
    ) -> str:
        """Until the member ends the stream (gives an empty reason) or misbehaves (a goodbye is queued)."""
        while True:
            await inbox.room()
            silence_s = self._silence_s()
            try:
                async with asyncio.timeout(silence_s):
                    frame = await context.read()
            except TimeoutError:
                return f"no heartbeat in {silence_s:g} s"
            except (grpc.aio.BaseError, grpc.RpcError) as error:
                return f"broken off: {error}"
            if not isinstance(frame, bytes):
                return ""
            try:
                if not line.accepts(len(frame), self._clock.now()):
                    raise Misbehaved("says more than a member may say")
                items = await self._opened(frame, line, is_observer=is_observer)
            except Misbehaved as error:
                _log.warning("line of %s closed: %s", line.peer[-6:], one_line(str(error)))
                line.close(Goodbye(error.code, str(error)))
                return str(error)
            for item in items:
                inbox.post(item)

    async def _opened(self, frame: bytes, line: MemberLine, *, is_observer: bool) -> list[Inbound]:
        """What is in a frame. A promise may report thousands of signatures, and the others are heard meanwhile."""
        opener = partial(open_frame, run=self._run, observer=is_observer, coordinator=self._coordinator)
        return await asyncio.to_thread(opener, frame, line) if len(frame) > ASIDE_BYTES else opener(frame, line)

    async def _write(self, line: MemberLine, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        while (frame := await line.next_frame(self._beat_s())) is not None:
            try:
                await context.write(frame)
            except (grpc.aio.BaseError, grpc.RpcError):
                return


class Service:
    """Serves the lines of one run on a port of their own, and puts what comes into an inbox.

    Args:
        observer: gives the peer that may be the observer, at this moment.
        coordinator, beat_s, silence_s: as `LineServicer` takes them.
    """

    def __init__(
        self,
        run: PeerId,
        tls: Tls,
        inbox: Inbox,
        clock: Clock,
        *,
        observer: Callable[[], PeerId | None],
        coordinator: PeerId = NOBODY,
        beat_s: Callable[[], float] = lambda: BEAT_S,
        silence_s: Callable[[], float] = lambda: SILENCE_S,
    ) -> None:
        self._lines = LineServicer(
            run,
            lambda: inbox,
            clock,
            observer=observer,
            coordinator=coordinator,
            beat_s=beat_s,
            silence_s=silence_s,
        )
        self._credentials = grpc.ssl_server_credentials(
            [(tls.key, tls.certificate)], root_certificates=tls.authority, require_client_auth=True
        )
        self._server: grpc.aio.Server | None = None

    async def start(self, address: str) -> int:
        """Listen on HOST:PORT; gives the port (0 asks for a free one). Raises PortError."""
        server = grpc.aio.server(options=[*OPTIONS, *connection_options()], maximum_concurrent_rpcs=LINES_MOST)
        server.add_generic_rpc_handlers((self._lines.handler(),))
        try:
            port = server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise PortError(f"{address} can't be listened on") from error
        if port == 0:
            raise PortError(f"{address} can't be listened on")
        await server.start()
        self._server = server
        return int(port)

    async def stop(self, grace_s: float) -> None:
        """End all lines, those with a goodbye queued within `grace_s`."""
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None


async def _first(line: MemberLine, context: grpc.aio.ServicerContext[bytes, bytes]) -> object:
    """The first frame, or what gRPC gives where there is none; None where the line was dropped meanwhile.

    Raises TimeoutError.
    """
    read, dropped = asyncio.ensure_future(context.read()), asyncio.create_task(line.wait_dropped())
    try:
        async with asyncio.timeout(HELLO_S):
            await asyncio.wait((read, dropped), return_when=asyncio.FIRST_COMPLETED)
        return None if line.dropped else read.result()
    finally:
        for task in (read, dropped):
            task.cancel()
        await asyncio.gather(read, dropped, return_exceptions=True)


async def _within(limit_s: float, work: Awaitable[object]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await work


def _peer_of(context: grpc.aio.ServicerContext[bytes, bytes]) -> PeerId | None:
    names = list(context.auth_context().get("x509_common_name", ()))
    if len(names) != 1:
        return None
    name = names[0].decode("ascii", errors="replace")
    try:
        public_key_of(name)
    except SignatureError:
        return None
    return PeerId(name)
