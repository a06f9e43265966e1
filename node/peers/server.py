"""What this node serves to others over gRPC: takes rows, hands out things by hash, its state, and answers pings."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import grpc

from node.errors import MachineError, PortTaken
from node.peers.transport import ACCEPTED, END, NO_PROGRESS_S, Credentials, Meter, Progress, peer_of, server_options
from node.ports import Holder, Traffic
from protos import limits, services, wire
from protos.bounds import as_reason
from protos.calls import Declined, OfferRequest, PingReply, PingRequest
from protos.messages import ChunkHead, CommitsAfter, Fetch, FetchHead, Part, PeerId, Signed
from protos.signing import SignatureError

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[bytes, bytes]
Method = Callable[[Context, PeerId, bytes, Progress], Awaitable[None]]

CHECKS_AT_ONCE = 4
"""Rows of one stream whose check may be under way while the next one arrives; beyond it the sender waits."""
CALLS_AT_ONCE = 8
"""Calls that one peer may have open with us."""
STOP_S = 1.0


class NodeServer:
    """Serves the Exchange and State services over mutual TLS.

    Args:
        credentials: this node's, from admission.
        holder: what is served. What it raises is a fault of ours: it is logged, and ends that call.
        allowed: the reason why a peer may not call us, or an empty string; asked at every call.
        no_progress_s: how long a call may stand still before it is given up.
        traffic: where bytes are counted.
    """

    def __init__(
        self,
        credentials: Credentials,
        holder: Holder,
        *,
        allowed: Callable[[PeerId], str],
        no_progress_s: float = NO_PROGRESS_S,
        traffic: Traffic | None = None,
    ) -> None:
        self.traffic = traffic if traffic is not None else Traffic()
        self._me = credentials.peer
        self._holder = holder
        self._allowed = allowed
        self._no_progress_s = no_progress_s
        self._calls: Counter[PeerId] = Counter()
        self._checks: set[asyncio.Task[None]] = set()
        self._server: grpc.aio.Server | None = None
        self._tls = grpc.ssl_server_credentials(
            [(credentials.key, credentials.certificate)], credentials.ca, require_client_auth=True
        )

    async def start(self, listen: str, *, option: str = "--listen") -> int:
        """Listen at HOST:PORT (port 0: any free one) and return the port.

        Raises PortTaken or MachineError, which name the option.
        """
        await asyncio.to_thread(_check_free, listen, option)
        server = grpc.aio.server(options=server_options())
        exchange = {"Send": self._method(self._send), "FetchThings": self._method(self._fetch_things)}
        state = {
            "Offer": self._method(self._offer),
            "Commits": self._method(self._commits),
            "Ping": self._method(self._ping),
        }
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(services.EXCHANGE, exchange),
                grpc.method_handlers_generic_handler(services.STATE, state),
            )
        )
        try:
            port = server.add_secure_port(listen, self._tls)
        except RuntimeError:
            port = 0
        if port == 0:
            await server.stop(None)
            raise PortTaken(listen, option)
        await server.start()
        self._server = server
        return port

    async def stop(self) -> None:
        """End all calls and the checks that they began, and free the port."""
        if self._server is not None:
            await self._server.stop(STOP_S)
            self._server = None
        for task in self._checks:
            task.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)

    # -- every call ------------------------------------------------------------------------------------------------

    def _method(self, method: Method) -> grpc.RpcMethodHandler[bytes, bytes]:
        """Who calls, whether it may, and the limit on standing still; a unary call is a stream with one message."""

        async def handle(_: object, context: Context) -> None:
            try:
                caller = peer_of(context.auth_context())
            except SignatureError as error:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, as_reason(str(error)))
            with self._counted(caller) as n_calls:
                progress = Progress(self._no_progress_s)
                try:
                    async with progress:
                        # A caller whose first write fails is not told why: gRPC forgets the status over it.
                        first = await context.read()
                        reason = self._allowed(caller)
                        if reason:
                            await context.abort(grpc.StatusCode.PERMISSION_DENIED, as_reason(reason))
                        if n_calls > CALLS_AT_ONCE:
                            why = f"more than {CALLS_AT_ONCE} calls at once"
                            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
                        if first is END:
                            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a call without a word")
                        await method(context, caller, first, progress)
                except TimeoutError:
                    if not progress.expired:
                        raise
                    why = f"nothing moved for {self._no_progress_s:g} s"
                    await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, why)
                except wire.WireError as error:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, as_reason(str(error)))

        return grpc.stream_stream_rpc_method_handler(handle, None, None)

    @contextmanager
    def _counted(self, caller: PeerId) -> Iterator[int]:
        self._calls[caller] += 1
        try:
            yield self._calls[caller]
        finally:
            self._calls[caller] -= 1
            if not self._calls[caller]:
                del self._calls[caller]

    async def _answer(self, context: Context, progress: Progress, meter: Meter, whole: bytes) -> None:
        for part in wire.split(whole):
            await context.write(meter.sent(wire.encode(part)))
            progress.moved()

    # -- State -----------------------------------------------------------------------------------------------------

    async def _ping(self, context: Context, caller: PeerId, first: bytes, progress: Progress) -> None:
        meter = Meter(self.traffic)
        ping = wire.decode(PingRequest, meter.received(first))
        await context.write(meter.sent(wire.encode(PingReply(ping.nonce, self._me))))

    async def _offer(self, context: Context, caller: PeerId, first: bytes, progress: Progress) -> None:
        meter = Meter(self.traffic)
        wire.decode(OfferRequest, meter.received(first))
        offer = self._holder.state_offer(caller)
        if offer is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "holds no state")
        await self._answer(context, progress, meter, wire.encode(offer))

    async def _commits(self, context: Context, caller: PeerId, first: bytes, progress: Progress) -> None:
        meter = Meter(self.traffic)
        asked = wire.decode(CommitsAfter, meter.received(first))
        n_most = min(asked.n_most, limits.COMMITS)
        commits = self._holder.commits_after(caller, asked.epoch, asked.round, n_most)
        await self._answer(context, progress, meter, wire.encode_commits(commits))

    # -- Exchange --------------------------------------------------------------------------------------------------

    async def _fetch_things(self, context: Context, caller: PeerId, first: bytes, progress: Progress) -> None:
        fetch = wire.decode(Fetch, first)
        meter = Meter(self.traffic, exchange=fetch.kind == "result")
        meter.received(first)
        for hash_ in fetch.hashes:
            place = self._holder.locate(caller, fetch.kind, hash_)
            file = None if place is None else await asyncio.to_thread(_open, place[0])
            if place is None or file is None:
                await context.write(meter.sent(wire.encode_fetch_frame(FetchHead(hash_, -1))))
                continue
            try:
                _, offset, n_bytes = place
                await context.write(meter.sent(wire.encode_fetch_frame(FetchHead(hash_, n_bytes))))
                for start in range(0, n_bytes, limits.PART_BYTES):
                    size = min(limits.PART_BYTES, n_bytes - start)
                    data = await asyncio.to_thread(os.pread, file, size, offset + start)
                    if len(data) != size:
                        await context.abort(grpc.StatusCode.ABORTED, "the thing is gone")
                    await context.write(meter.sent(wire.encode_fetch_frame(Part(data))))
                    progress.moved()
            finally:
                os.close(file)

    async def _send(self, context: Context, caller: PeerId, first: bytes, progress: Progress) -> None:
        stream = _RowStream(context, progress, Meter(self.traffic, exchange=True), caller, self._holder)
        refusal = stream.deal(first)
        await context.send_initial_metadata((ACCEPTED,))
        checks: set[asyncio.Task[None]] = set()
        while not refusal:
            head = await stream.head()
            if head is None:
                break
            refusal = await stream.row(head)
            if not refusal:
                # The row is whole: its check goes on even if the sender goes away now, so the server owns it.
                check = asyncio.create_task(stream.check(head), name=f"row {head.chunk} of {caller}")
                checks.add(check)
                check.add_done_callback(checks.discard)
                self._checks.add(check)
                check.add_done_callback(self._checked)
                progress.hold()
                await stream.free_slot()
                progress.moved()
        progress.hold()
        if checks:
            await asyncio.wait(checks)
        if refusal:
            progress.moved()
            await stream.answer(Declined(as_reason(refusal)))
            # The sender cancels when it has read that. If we ended the call first, what it is writing would fail, and
            # gRPC would forget our answer over it.
            while await context.read() is not END:
                pass

    def _checked(self, check: asyncio.Task[None]) -> None:
        self._checks.discard(check)
        if not check.cancelled() and (error := check.exception()) is not None:
            _log.error("the check of %s failed", check.get_name(), exc_info=error)


class _RowStream:
    """The rows of one sender on one stream, and the answers to them."""

    def __init__(self, context: Context, progress: Progress, meter: Meter, caller: PeerId, holder: Holder) -> None:
        self.slots = asyncio.Semaphore(CHECKS_AT_ONCE)
        self._context = context
        self._progress = progress
        self._meter = meter
        self._caller = caller
        self._holder = holder
        self._writing = asyncio.Lock()

    def deal(self, first: bytes) -> str:
        """Take the first frame; the reason why no rows are taken, or an empty string."""
        frame = wire.decode_chunk_frame(self._meter.received(first))
        if not isinstance(frame, Signed):
            return "the first frame is not the deal"
        return self._holder.admit_deal(self._caller, frame.envelope)

    async def head(self) -> ChunkHead | None:
        """The next row's head; None when the sender has no more."""
        frame = await self._frame()
        if frame is None or isinstance(frame, ChunkHead):
            return frame
        raise wire.WireError(f"{type(frame).__name__} where a chunk's head is needed")

    async def row(self, head: ChunkHead) -> str:
        """Take a row's parts; the reason why it is refused, or an empty string once it is whole."""
        reason = self._holder.admit_row(self._caller, head)
        if reason:
            return reason
        offset = 0
        try:
            while offset < head.n_bytes:
                part = await self._frame()
                if not isinstance(part, Part) or not part.data:
                    return f"chunk {head.chunk} is too short: {offset} of {head.n_bytes} bytes"
                if offset + len(part.data) > head.n_bytes:
                    return f"chunk {head.chunk} is too long: more than {head.n_bytes} bytes"
                await self._holder.row_part(self._caller, head, offset, part.data)
                offset += len(part.data)
        finally:
            if offset < head.n_bytes:
                self._holder.row_broken(self._caller, head)
        return ""

    async def free_slot(self) -> None:
        """Wait until fewer checks are under way than may be."""
        async with self.slots:
            pass

    async def check(self, head: ChunkHead) -> None:
        async with self.slots:
            verdict = await self._holder.row_done(self._caller, head)
        await self.answer(Signed(verdict) if isinstance(verdict, bytes) else Declined(as_reason(verdict)))

    async def answer(self, message: Signed | Declined) -> None:
        """Send an answer, if the sender is still there."""
        frame = self._meter.sent(wire.encode_receipt_frame(message))
        async with self._writing:
            if not self._context.done():
                with suppress(grpc.aio.BaseError):  # it went away just now
                    await self._context.write(frame)

    async def _frame(self) -> ChunkHead | Part | Signed | None:
        raw = await self._context.read()
        if raw is END:
            return None
        self._progress.moved()
        return wire.decode_chunk_frame(self._meter.received(raw))


def _open(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # it was replaced just now
        return None


def _check_free(listen: str, option: str) -> None:
    """gRPC is content if it gets one of the addresses of a name, and says nothing of why it got none: try them all."""
    host, colon, port = listen.rpartition(":")
    remedy = f"give {option} HOST:PORT, an address of this machine and a port from 1024 to 65535 (0: any free one)"
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise MachineError(f"can't listen at {listen!r}", remedy)
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise MachineError(f"can't listen at {listen}: {error.strerror or error}", remedy) from error
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise PortTaken(listen, option) from error
                raise MachineError(f"can't listen at {listen}: {error.strerror or error}", remedy) from error
