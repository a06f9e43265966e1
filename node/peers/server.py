"""What this node serves to others over gRPC: takes rows, hands out things by hash, its state, and answers pings."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import grpc

from coordinator.leading.descriptors import connection_options
from node.errors import MachineError, PortTaken
from node.peers.flight import IN_FLIGHT_BYTES, RECEIVING_BYTES, InFlight
from node.peers.pacing import UNLIMITED, Direction, StreamPace
from node.peers.receiving import RowStream
from node.peers.transport import ACCEPTED, END, NO_PROGRESS_S, Credentials, Meter, Progress, peer_of, server_options
from node.ports import Holder, Traffic
from node.stages import Stages
from protos import limits, services, wire
from protos.bounds import as_reason
from protos.calls import Declined, OfferRequest, PingReply, PingRequest
from protos.messages import CommitsAfter, Fetch, FetchHead, PeerId
from protos.signing import SignatureError

_log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[bytes, bytes]
Method = Callable[[Context, PeerId, bytes, Progress], Awaitable[None]]

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
        up, down: how fast bytes may go out and come in, with those of this node's own calls.
        stages: where bytes, seconds and copies of what is served are counted.
        more: further services on the same port.
    """

    def __init__(
        self,
        credentials: Credentials,
        holder: Holder,
        *,
        allowed: Callable[[PeerId], str],
        no_progress_s: float = NO_PROGRESS_S,
        traffic: Traffic | None = None,
        up: Direction = UNLIMITED,
        down: Direction = UNLIMITED,
        stages: Stages | None = None,
        more: Sequence[grpc.GenericRpcHandler[bytes, bytes]] = (),
    ) -> None:
        self.traffic = traffic if traffic is not None else Traffic()
        self.receiving, self.serving = InFlight(RECEIVING_BYTES), InFlight(IN_FLIGHT_BYTES)
        self._up, self._down = up, down
        self._stages = stages if stages is not None else Stages()
        self._me = credentials.peer
        self._more = more
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
        server = grpc.aio.server(options=[*server_options(), *connection_options()])
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
                *self._more,
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
                    await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, as_reason(progress.why))
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
        asked = wire.decode(OfferRequest, meter.received(first))
        offer = self._holder.state_offer(caller, frozen=asked.frozen)
        if offer is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "holds no state")
        await self._answer(context, progress, meter, wire.encode(offer))

    async def _commits(self, context: Context, caller: PeerId, first: bytes, progress: Progress) -> None:
        meter = Meter(self.traffic)
        asked = wire.decode(CommitsAfter, meter.received(first))
        n_most = min(asked.n_most, limits.COMMITS)
        commits = await self._holder.commits_after(caller, asked.epoch, asked.round, n_most)
        await self._answer(context, progress, meter, wire.encode_commits(commits))

    # -- Exchange --------------------------------------------------------------------------------------------------

    async def _fetch_things(self, context: Context, caller: PeerId, first: bytes, progress: Progress) -> None:
        fetch = wire.decode(Fetch, first)
        meter, pace = Meter(self.traffic, exchange=fetch.kind == "result"), self._up.stream()
        meter.received(first)
        async with self._holder.serving(caller, fetch.kind) as busy:
            if busy:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, as_reason(busy))
            for hash_ in fetch.hashes:
                await self._thing(context, progress, meter, pace, hash_, self._holder.locate(caller, fetch.kind, hash_))

    async def _thing(
        self,
        context: Context,
        progress: Progress,
        meter: Meter,
        pace: StreamPace,
        hash_: bytes,
        place: tuple[str, int, int] | memoryview | None,
    ) -> None:
        if isinstance(place, memoryview):
            await self._serve(context, progress, meter, pace, FetchHead(hash_, len(place)), place)
            return
        file = None if place is None else await asyncio.to_thread(_open, place[0])
        if place is None or file is None:
            await context.write(meter.sent(wire.encode_fetch_frame(FetchHead(hash_, -1))))
            return
        try:
            _, offset, n_bytes = place
            await self._serve(context, progress, meter, pace, FetchHead(hash_, n_bytes), (file, offset))
        finally:
            os.close(file)

    async def _serve(
        self,
        context: Context,
        progress: Progress,
        meter: Meter,
        pace: StreamPace,
        head: FetchHead,
        source: memoryview | tuple[int, int],
    ) -> None:
        """Write a thing, its head with the first part, from memory or from a place in an open file."""
        most_bytes, n_bytes = min(limits.PART_BYTES, self._up.part_bytes), head.n_bytes
        if not n_bytes:
            await context.write(meter.sent(wire.encode_fetch_frame(head)))
        for start in range(0, n_bytes, most_bytes):
            size = min(most_bytes, n_bytes - start)
            taken = self.serving.take_now(size)
            if taken is None:
                with progress.ours():
                    taken = await self.serving.take(size)
            try:
                if pace.limited:
                    with progress.ours():
                        await pace.wait(size)
                with self._stages.timed(
                    "serve", size, copied_bytes=size if isinstance(source, memoryview) else 2 * size
                ):
                    if isinstance(source, memoryview):
                        data = source[start : start + size]
                    else:
                        file, offset = source
                        data = memoryview(await asyncio.to_thread(os.pread, file, size, offset + start))
                        if len(data) != size:
                            await context.abort(grpc.StatusCode.ABORTED, "the thing is gone")
                    await context.write(meter.sent(wire.encode_part(data, None if start else head)))
            finally:
                self.serving.give_back(taken)
            progress.moved()

    async def _send(self, context: Context, caller: PeerId, first: bytes, progress: Progress) -> None:
        meter = Meter(self.traffic, exchange=True)
        stream = RowStream(context, progress, meter, caller, self._holder, self.receiving, self._down.stream())
        refusal = stream.deal(first)
        if not refusal:  # else nobody sends rows for nothing: the one before the reason is read may be a megabyte
            await context.send_initial_metadata((ACCEPTED,))
        checks: set[asyncio.Task[None]] = set()
        while not refusal:
            row = await stream.head()
            if row is None:
                break
            try:
                refusal = await stream.row(row)
            except BaseException:
                stream.forget(row)
                raise
            if refusal:
                stream.forget(row)
                break
            # The row is whole: its check goes on even if the sender goes away now, so the server owns it.
            check = asyncio.create_task(stream.check(row))
            checks.add(check)
            check.add_done_callback(checks.discard)
            self._checks.add(check)
            check.add_done_callback(self._checked)
            if not stream.has_free_slot:
                with progress.ours():
                    await stream.free_slot()
        with progress.ours():
            if checks:
                await asyncio.wait(checks)
        await stream.give_receipts(all_of_them=True)
        if refusal:
            await stream.answer(Declined(as_reason(refusal)))
            # The sender cancels when it has read that. If we ended the call first, what it is writing would fail, and
            # gRPC would forget our answer over it.
            while await context.read() is not END:
                pass

    def _checked(self, check: asyncio.Task[None]) -> None:
        self._checks.discard(check)
        if not check.cancelled() and (error := check.exception()) is not None:
            _log.error("the check of a row failed", exc_info=error)


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
